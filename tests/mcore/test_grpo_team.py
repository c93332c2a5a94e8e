"""examples/grpo/team.py: one torchrun a world runs ``grpo_team_cases.py``; its pieces run in this process.

The 4 ranks are 2 x tensor-parallel size 2, with sequence parallelism and recompute.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from examples.grpo import curves, team, team_flags
from examples.grpo.sources import answered, share, usable
from examples.grpo.task import Question, Retrieval
from examples.grpo.text_task import TextRetrieval
from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.data.groups import Group, Response, write_groups
from megatron_augtree.data.tokenizer import ByteTokenizer
from megatron_augtree.mcore import build, launch
from tests.distributed.launching import launch as on_ranks
from tests.mcore import grpo_team_cases as cases

SIZE = ["--prompt-tokens", "60", "--groups", "3", "--samples", "6", "--steps", "2"]
AUGTREE = ["--context-parallel-mode", "augtree"]


@dataclass
class World:
    """What all ranks found, and the folder with the figures of every run."""

    out: Path
    found: dict[str, float]

    def figures(self, name: str) -> list[dict]:
        return curves.read(str(self.out / name))


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "2 ranks x TP 2"])
def world(request, tmp_path_factory) -> World:
    out = tmp_path_factory.mktemp("team")
    output = on_ranks("../mcore/grpo_team_cases.py", request.param, out)
    assert (out / "found.json").exists(), output
    return World(out, json.loads((out / "found.json").read_text()))


def of_updates(steps: list[dict], name: str) -> list[float]:
    return [update[name] for step in steps for update in step["updates"] if name in update]


@pytest.fixture
def alone():
    yield
    build.destroy()


def training(tmp_path, *flags: str) -> team.Training:
    args, pretrained = team_flags.parse([*SIZE, *flags, "--out", str(tmp_path)])
    launch.start(args)
    return team.Training(args, pretrained, *team.prepare(args, pretrained))


# ---- real ranks


def test_every_step_updates_and_begins_where_it_sampled(world):
    steps = world.figures("augtree")
    assert [step["step"] for step in steps] == [0, 1, 2] and all(len(step["updates"]) == 4 for step in steps)
    begun = [step["updates"][0] for step in steps if "tokens" in step["updates"][0]]
    assert len(begun) > 1 and all(
        first["min/ratio"] == first["max/ratio"] == 1 and first["max/kl_to_old"] == 0 for first in begun)
    first = steps[0]["updates"][0]
    assert first["min/ratio"] == first["max/ratio"] == 1 and first["kl"] == 0  # the reference is the policy
    assert max(of_updates(steps, "max/ratio")) > 1.001 and max(of_updates(steps, "kl")) > 1e-4


def test_samples_are_dropped_from_groups_and_groups_altogether(world):
    steps = world.figures("augtree")
    full = 6 * sum(step["kept_groups"] for step in steps)
    assert sum(step["kept_groups"] for step in steps) < sum(step["groups"] for step in steps)
    assert 0 < sum(step["samples"] for step in steps) < full  # overlong ones
    assert any(step["kept_groups"] == 1 for step in steps)  # a rank and a mini-batch without a sample


def test_the_reward_curve_is_the_stock_runs(world):
    ours, stock = world.figures("augtree"), world.figures("stock")
    assert [step["reward"] for step in ours] == [step["reward"] for step in stock]
    assert len(of_updates(ours, "kl")) == len(of_updates(stock, "kl")) > 5
    for name in ("loss", "kl", "entropy", "sft_loss", "grad_norm", "clip_fraction_low", "min/ratio"):
        assert of_updates(ours, name) == pytest.approx(of_updates(stock, name), abs=1e-12), name
    assert max(curves.differences(ours, stock).values()) < 1e-12
    assert max(of_updates(ours, "rows")) < max(of_updates(stock, "rows")) / 2


def test_shadow_runs_agree(world):
    steps = world.figures("augtree")
    assert len(of_updates(steps, "shadow/gradient")) == 3  # every fourth of twelve
    assert max(of_updates(steps, "shadow/gradient") + of_updates(steps, "shadow/logprobs")) < 1e-12


def test_an_interrupted_run_continues_with_the_same_bits(world):
    def told(name):
        return [{k: v for k, v in step.items() if not k.endswith("seconds")} for step in world.figures(name)]

    def without_shadow(step):  # it starts to count anew
        return {**step, "updates": [{k: v for k, v in update.items() if not k.startswith("shadow/")}
                                    for update in step["updates"]]}

    whole, cut = ([without_shadow(step) for step in told(name)] for name in ("whole", "cut"))
    assert len(whole) == 3 and whole[2]["updates"] and whole == cut


def test_rollouts_without_a_preference_change_nothing(world):
    assert world.found["moved"] == 0


def test_supervised_samples_add_their_gradient(world):
    assert world.found["gradient"] < 1e-12  # computed un-shared on 2 ranks


def test_one_rank_learns_the_same(world, alone, tmp_path):
    steps = training(tmp_path, *AUGTREE, *cases.SIZE, *cases.RICH, "--shadow-every", "0").run()
    assert max(curves.differences(world.figures("augtree"), steps).values()) < 1e-12


# ---- one process


def test_a_group_file_is_replayed_from_the_first_weights(alone, tmp_path):
    responses = [Response((7, 8, 9 + i), (True, i != 1, True), reward=float(i == 2)) for i in range(4)]
    groups = [Group(f"g{i}", tuple(range(60, 90 + i)), tuple(responses)) for i in range(3)]
    equal = Group("equal", groups[0].prompt, tuple(replace(r, reward=1.0) for r in responses))
    path = tmp_path / "groups.jsonl.gz"
    write_groups(path, [*groups, equal])
    flags = ["--data", str(path), "--vocab-size", "44", "--groups", "4", "--sft", "1"]
    steps = training(tmp_path, *AUGTREE, *flags).run()
    assert [step["kept_groups"] for step in steps] == [3, 3] and steps[0]["reward"] == 7 / 16
    assert steps[0]["samples"] == 12 and len(steps[0]["updates"]) == 4
    assert steps[0]["updates"][0]["max/ratio"] == 1 and steps[0]["updates"][0]["kl"] == 0
    first = steps[1]["updates"][0]  # old log-probs are still those of the first weights
    assert first["max/ratio"] > 1.01 and first["kl"] > 0 and first["tokens"] == 2 * 11
    assert steps[1]["updates"][-1]["sft_loss"] < steps[0]["updates"][0]["sft_loss"]


def test_bf16_begins_with_a_ratio_of_one(alone, tmp_path):
    steps = training(tmp_path, *AUGTREE, "--dtype", "bfloat16", "--use-distributed-optimizer").run()
    played = [step["updates"] for step in steps if step["updates"]]
    assert played and all(updates[0]["max/ratio"] == updates[0]["min/ratio"] == 1 for updates in played)
    assert all(math.isfinite(update["grad_norm"]) for updates in played for update in updates)


def test_figures_that_are_missing_are_not_made_up(alone, tmp_path):
    training(tmp_path / "a", *AUGTREE, "--save", str(tmp_path / "ck"), "--steps", "1").policy.save(1)
    with pytest.raises(InputError, match="FileNotFoundError.*; the checkpoint has 1"):
        team.read_figures(str(tmp_path), 1)
    with pytest.raises(InputError, match="(?s)other data.*seed 1; here: .*seed 2"):
        training(tmp_path / "a", *AUGTREE, "--save", str(tmp_path / "ck"), "--seed", "2")


def test_groups_lose_what_a_policy_loss_cannot_use():
    def group(*rewards):
        responses = [replace(answered([3, 4 + i]), reward=reward) for i, reward in enumerate(rewards)]
        return Group("g", (1, 2), tuple(responses))

    assert usable(group(1.0, 1.0), "mean_std") is None and usable(group(1.0), "mean") is None
    found = usable(group(1.0, 0.0), "mean")
    assert [r.advantage for r in found.responses] == [0.5, -0.5]
    only = usable(group(1.0, 0.0, 0.0), "mean", lambda tokens: tokens[-1] == 5)
    assert [r.tokens for r in only.responses] == [(3, 5)]  # with the whole group's advantage
    assert only.responses[0].advantage == pytest.approx(-1 / 3)
    assert usable(group(1.0, 0.0), "mean", lambda tokens: False) is None
    masked = replace(answered([3]), loss_mask=(False,), reward=0.0)
    assert len(usable(replace(group(1.0), responses=(*group(1.0).responses, masked)), "mean").responses) == 1


@pytest.mark.parametrize(("count", "world"), [(8, 2), (3, 4), (7, 3), (0, 2)])
def test_ranks_share_every_number_once(count, world):
    assert [n for rank in range(world) for n in share(count, rank, world)] == list(range(count))
    assert max(len(share(count, r, world)) - count // world for r in range(world)) <= 1


@pytest.mark.parametrize("changes", [
    {"max/ratio": 1.0 + 1e-7}, {"min/ratio": 0.9999999}, {"max/kl_to_old": 1e-14}, {"kl": 1e-14}])
def test_a_policy_that_moved_is_noticed(changes):
    good = {"tokens": 3.0, "min/ratio": 1.0, "max/ratio": 1.0, "max/kl_to_old": 0.0, "kl": 0.0}
    team.check_unmoved(good, with_reference=True)
    team.check_unmoved({"sft_loss": 2.0}, with_reference=True)  # no sample of the policy
    team.check_unmoved({**good, "kl": 0.5}, with_reference=False)
    with pytest.raises(AugTreeError, match="same weights differ"):
        team.check_unmoved({**good, **changes}, with_reference=True)


@pytest.mark.parametrize(("flags", "message"), [
    (["--samples", "1"], "--samples 1 \\(at least 2\\)"),
    (["--objective", "nll"], "one objective"),
    (["--data", "x", "--drop-overlong"], "do not fit a group file"),
    (["--augtree-degree", "2"], "unrecognized arguments"),
    (["--loss-preset", "grpo", "--temperature", "0"], "temperature"),
    (["--data", "missing.jsonl"], "missing.jsonl"),
])
def test_flags_are_checked_first(flags, message):
    with pytest.raises(AugTreeError, match=message):
        team.prepare(*team_flags.parse(flags))


def test_help_names_the_defaults():
    text = team_flags.parser().format_help()
    assert "--num-layers 2 --hidden-size 64" in text and "(default: 4096)" in text
    assert team_flags.parse(["--hidden-size", "32"])[0].hidden_size == 32
    assert team_flags.parse([])[0].lr == 1e-3


def test_sizes_of_the_task():
    task = Retrieval(4096, 8)
    questions = task.questions(1, 0, 20)
    assert questions == task.questions(1, 0, 20) != task.questions(1, "gold", 20)
    assert all(4096 <= len(q.prompt) <= 4608 for q in questions)
    assert task.reward(questions[0], task.gold(questions[0])) == 1 and task.is_over(task.gold(questions[0]))
    assert task.is_over([40] * 8) and not task.is_over([40] * 7) and not task.has_answered([40] * 8)
    assert task.reward(Question((1,), 3), [9] * 7 + [3]) == pytest.approx(0.3)


def test_the_task_as_text():
    tokenizer = ByteTokenizer()
    task = TextRetrieval(tokenizer, 300, 8)
    for question in task.questions(2, 1, 5):
        text = tokenizer.decode(question.prompt)
        record, _, end = text.partition("\n")
        asked = end.rpartition(" is ")[2].removesuffix(":")
        assert json.loads(record)[json.loads(asked)] == question.answer and len(question.prompt) >= 300
        assert task.reward(question, task.gold(question)) == 1 and task.is_over(task.gold(question))
        longer = tokenizer.encode(f" {question.answer}7,")
        assert task.reward(question, longer) == 0 and task.has_answered(longer)
    assert not task.is_over(tokenizer.encode(" 1")) and task.is_over((*tokenizer.encode(" 1"), 256))


def test_two_curves_in_one_picture(tmp_path, monkeypatch, capsys):
    for name, reward in (("a", 0.5), ("b", 0.25)):
        (tmp_path / name).mkdir()
        for i in range(3):
            updates = [{"grad_norm": 2.0, "loss": i}]
            found = {"step": i, "reward": reward * i, "updates": updates}
            team.write_figures(str(tmp_path / name), [found], "a")
    picture = tmp_path / "both.png"
    words = ["curves", str(tmp_path / "a"), str(tmp_path / "b"), "--png", str(picture)]
    for limit, code in (("1", 0), ("0.4", 1)):
        monkeypatch.setattr("sys.argv", [*words, "--limit", limit])
        assert curves.main() == code
    assert "reward 5.0e-01" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    monkeypatch.setattr("sys.argv", ["curves", str(tmp_path / "a"), str(tmp_path / "c")])
    assert curves.main() == 2 and "remedy: " in capsys.readouterr().err


def test_what_came_after_the_checkpoint_is_left_out(tmp_path):
    assert team.read_figures(str(tmp_path), 0) == []
    for i in range(3):
        team.write_figures(str(tmp_path), [{"step": i}], "a")
    kept = team.read_figures(str(tmp_path), 2)
    assert kept == [{"step": 0}, {"step": 1}]
    team.write_figures(str(tmp_path), kept)
    assert team.read_figures(str(tmp_path), 2) == kept
    for content, message in (("", "2 steps; the checkpoint has 3"), ("{", "JSONDecodeError")):
        with open(tmp_path / team.FIGURES, "a", encoding="utf-8") as file:
            file.write(content)
        with pytest.raises(InputError, match=message):
            team.read_figures(str(tmp_path), 3)
