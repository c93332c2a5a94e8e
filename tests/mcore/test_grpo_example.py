"""The pieces of examples/grpo: the task has the answer, rollouts are the policy's, claims can fail.

One process and short prompts. That the model learns is shown by scripts/demo.sh.
"""

import argparse
import json
import re
from dataclasses import replace

import pytest
import torch

from examples.grpo import common, report, task, train, verify
from examples.grpo.rollout import next_token_logprobs, rollouts, sample
from megatron_augtree.config import InputError
from megatron_augtree.data.groups import read_groups
from megatron_augtree.mcore import build
from scripts import unshared

SGD64 = ["--dtype", "float64", "--optimizer", "sgd", "--lr", "0.1"]


@pytest.fixture(scope="module", autouse=True)
def megatron():
    build.initialize(common.parse([]))
    yield
    build.destroy()


@pytest.fixture
def short(monkeypatch):
    """Prompts of 20 to 30 tokens."""
    monkeypatch.setattr(task, "PROMPT_TOKENS", (20, 30))


def read(prompt: tuple[int, ...]) -> int | None:
    """The value of the asked key, by a reader of its own; None where the prompt does not say one value."""
    first = task.VALUES + task.KEYS
    asked = prompt[-1] - task.VALUES
    facts = [divmod(token - first, task.VALUES) for token in prompt[:-1]]
    said = {value for key, value in facts if key == asked}
    return said.pop() if len(said) == 1 else None


def trained(steps: int, seed: int = 3) -> tuple[list[dict], list, argparse.Namespace]:
    """A few steps of the training loop."""
    args = argparse.Namespace(steps=steps, record=steps, groups=2, samples=8, seed=seed)
    run = common.Run(common.parse(["--lr", "0.02", "--dtype", "float64"]), "augtree", seed)
    curve, recorded, _ = train.train(args, run)
    return curve, recorded, args


# ---- the task


def test_a_prompt_contains_its_answer():
    questions = task.questions_of_step(1, 0, 50)
    assert all(read(q.prompt) == q.answer for q in questions)
    assert all(512 <= len(q.prompt) <= 576 and max(q.prompt) < task.VOCABULARY for q in questions)
    assert len({len(q.prompt) for q in questions}) > 10 and {q.answer for q in questions} == set(range(8))


def test_questions_depend_on_seed_and_step_only():
    one = task.questions_of_step(1, 4, 3)
    assert one == task.questions_of_step(1, 4, 3)
    assert one != task.questions_of_step(1, 5, 3) and one != task.questions_of_step(2, 4, 3)


def test_a_perfect_reader_of_shuffled_prompts_is_right_by_chance():
    questions = task.questions_of_step(1, -1, 400)
    shuffled = task.shuffle_prompts(questions)
    assert [q.answer for q in shuffled] == [q.answer for q in questions]
    assert [q.prompt[-1] for q in shuffled] == [q.prompt[-1] for q in questions]
    assert sorted(q.prompt[:-1] for q in shuffled) == sorted(q.prompt[:-1] for q in questions)
    found = [read(q.prompt) for q in shuffled]
    assert None not in found
    assert abs(sum(f == q.answer for f, q in zip(found, shuffled)) / 400 - task.CHANCE) < 0.06


@pytest.mark.parametrize(("response", "over", "expected"), [
    ((3,), True, 1.0), ((9, 3), True, 0.9), ((9, 9, 9, 3), True, 0.7), ((2,), True, 0.0), ((9, 2), True, 0.0),
    ((9, 9, 9, 9), True, 0.0), ((9, 9, 9), False, 0.0), ((8,), False, 0.0),
])
def test_responses_end_with_a_value_and_are_rewarded_for_the_answer(response, over, expected):
    assert task.is_over(response) is over
    assert task.reward(task.Question((12, 8), 3), response) == pytest.approx(expected)
    assert not task.is_over(())


# ---- rollouts


def test_old_logprobs_are_those_of_the_unshared_policy(short):
    run = common.Run(common.parse(["--dtype", "float64"]), "augtree", 3)
    groups = rollouts(run.model, task.questions_of_step(3, 0, 3), 6, seed=3, step=0)
    stock = build.build_model(common.parse(["--dtype", "float64"]), augtree=False, seed=3)
    lengths = set()
    for group in groups:
        assert len(group.responses) == 6
        for response in group.responses:
            assert [task.is_over(response.tokens[:n]) for n in range(1, len(response.tokens) + 1)] == [
                *[False] * (len(response.tokens) - 1), True]
            lengths.add(len(response.tokens))
            (expected,) = unshared.unshared_logprobs(
                stock, [unshared.response_mask(group.prompt, response.tokens)])
            assert response.old_logprobs == pytest.approx(expected.tolist(), abs=1e-12)
    assert len(lengths) > 1  # ragged


def test_samples_do_not_depend_on_which_rank_draws_them(short):
    run = common.Run(common.parse(["--dtype", "float64"]), "augtree", 5)
    prompts = [q.prompt for q in task.questions_of_step(5, 0, 3)]

    def draws(numbers):
        return [torch.Generator().manual_seed(n) for n in numbers]

    def tokens(responses):
        return [[r.tokens for r in group] for group in responses]

    together = tokens(sample(run.model, prompts, 6, draws([0, 1, 2])))
    assert tokens(sample(run.model, prompts[2:], 6, draws([2]))) == together[2:]
    assert tokens(sample(run.model, prompts[:2], 6, draws([0, 1]))) == together[:2]
    assert sample(run.model, [], 6, []) == []


def test_samples_follow_the_policys_probabilities(short):
    run = common.Run(common.parse([]), "augtree", 5)
    (question,) = task.questions_of_step(5, 0, 1)
    expected = next_token_logprobs(run.model, [question.prompt])[0].exp()
    assert float(expected.sum()) == pytest.approx(1, abs=1e-12)
    (responses,) = sample(run.model, [question.prompt], 2000, [torch.Generator().manual_seed(1)])
    found = torch.bincount(torch.tensor([r.tokens[0] for r in responses]), minlength=task.VOCABULARY) / 2000
    assert float((found - expected).abs().max()) < 0.04


# ---- training


def test_rollouts_are_one_update_behind(short):
    curve, recorded, _ = trained(3)
    assert [curve[0]["min_ratio"], curve[0]["max_ratio"]] == pytest.approx([1, 1], abs=1e-9)
    assert all(point["min_ratio"] < 0.999 and point["max_ratio"] > 1.001 for point in curve[1:])
    start = common.Run(common.parse(["--dtype", "float64"]), "augtree", 3).model
    behind = []
    for step in range(3):
        (first,) = next_token_logprobs(start, [recorded[2 * step].prompt])
        response = recorded[2 * step].responses[0]
        behind.append(abs(float(first[response.tokens[0]]) - response.old_logprobs[0]))
    assert max(behind[:2]) < 1e-12 < 1e-4 < behind[2]  # step 1 is still sampled by the first weights


def test_figures_and_files_of_a_run(short, tmp_path):
    args = argparse.Namespace(out=str(tmp_path), steps=2, record=1, groups=2, samples=8, questions=4, seed=3)
    run = common.Run(common.parse([]), "augtree", 3)
    curve, recorded, planned = train.train(args, run)
    found = train.evaluate(args, run)
    train.write(args, run, curve, recorded, planned, found)
    assert read_groups(tmp_path / "rollouts.jsonl.gz") == recorded and len(recorded) == 2
    written = json.loads((tmp_path / "train.json").read_text())
    assert written["steps"] == curve and written["accuracy"] == found["accuracy"]
    rewards = [r.reward for group in recorded for r in group.responses]
    assert curve[0]["reward"] == pytest.approx(sum(rewards) / 16)
    assert curve[0]["rows"] < curve[0]["unshared_rows"] == sum(
        len(group.prompt) + len(r.tokens) - 1 for group in recorded for r in group.responses)
    for picture in ("plan.png", "reward.png"):
        content = (tmp_path / picture).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5000


# ---- the replay


def test_ring_agrees_with_augtree_at_every_step(short):
    _, recorded, args = trained(4)
    table = verify.compare([recorded[i:i + 2] for i in range(0, 8, 2)], common.parse(SGD64), args.seed)
    assert [row["step"] for row in table] == [1, 2, 3, 4]
    worst = max(row[name] for row in table for name in ("logprobs", "grad_norm", "parameters"))
    assert worst < 1e-11 and table[-1]["moved"] > 0.01
    assert sum(row["clipped_low"] for row in table) > 0 and sum(row["clipped_high"] for row in table) > 0
    assert all(report.replay_claims(table).values())


@pytest.mark.parametrize("broken", ["old_logprobs", "reward", "tokens"])
def test_the_replay_sees_one_changed_response(short, monkeypatch, broken):
    _, recorded, args = trained(2)
    update = common.Run.update

    def changed(run, groups):
        if run.mode == "augtree":
            response = groups[0].responses[0]
            value = {"old_logprobs": tuple(x - 0.05 for x in response.old_logprobs), "reward": 0.5,
                     "tokens": (*response.tokens[:-1], response.tokens[-1] ^ 1)}[broken]
            responses = (replace(response, **{broken: value}), *groups[0].responses[1:])
            groups = [replace(groups[0], responses=responses), *groups[1:]]
        return update(run, groups)

    monkeypatch.setattr(common.Run, "update", changed)
    table = verify.compare([recorded[2:]], common.parse(SGD64), args.seed)
    claims = report.replay_claims(table)
    agrees = next(holds for text, holds in claims.items() if text.startswith("ring agrees"))
    assert not agrees


@pytest.mark.parametrize("content", [None, "{", "[]", '{"groups": 2}'])
def test_a_replay_without_a_training_says_so(tmp_path, monkeypatch, capfd, content):
    if content is not None:
        (tmp_path / "train.json").write_text(content)
    monkeypatch.setattr("sys.argv", ["verify", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        verify.main()
    message = capfd.readouterr().err
    assert end.value.code == 2 and f"{tmp_path}/train.json" in message and "remedy: " in message


def test_a_replay_without_rollouts_says_so(tmp_path):
    (tmp_path / "train.json").write_text('{"groups": 2, "seed": 1}')
    with pytest.raises(InputError, match=r"rollouts\.jsonl\.gz"):
        verify.recorded(str(tmp_path))


def test_results_that_cannot_be_written_say_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--out"):
        common.write_json(str(tmp_path / "file"), "verify.json", [])


# ---- claims


def training_figures(**changes) -> dict:
    steps = [{"reward": 0.1 if i < 10 else 0.9, "clipped_low": 1, "clipped_high": 2} for i in range(20)]
    return {"steps": steps, "recorded_steps": 5, "accuracy": 0.9, "shuffled_accuracy": 0.12, **changes}


def replay_figures(**changes) -> list[dict]:
    row = {"logprobs": 1e-13, "grad_norm": 1e-13, "parameters": 1e-13, "moved": 0.1, "clipped_low": 1,
           "clipped_high": 1, "rows": 10, "unshared_rows": 80, "seconds": {"augtree": 1.0, "ring": 5.0}}
    return [dict(row), {**row, **changes}]


def test_claims_hold_for_good_figures():
    assert all(report.training_claims(training_figures()).values())
    assert all(report.replay_claims(replay_figures()).values())


@pytest.mark.parametrize("changes", [
    {"steps": [{"reward": 0.1, "clipped_low": 1, "clipped_high": 2}] * 20},
    {"steps": [{"reward": i / 20, "clipped_low": 0, "clipped_high": 2} for i in range(20)]},
    {"steps": [{"reward": i / 20, "clipped_low": 2, "clipped_high": 0} for i in range(20)]},
    {"accuracy": 0.42}, {"shuffled_accuracy": 0.23}, {"shuffled_accuracy": 0.02},
])
def test_a_training_claim_fails(changes):
    assert list(report.training_claims(training_figures(**changes)).values()).count(False) == 1


@pytest.mark.parametrize("changes", [
    {"logprobs": 2e-8}, {"grad_norm": 2e-8}, {"parameters": 2e-8}, {"moved": 0.0}, {"rows": 999}])
def test_a_replay_claim_fails(changes):
    assert list(report.replay_claims(replay_figures(**changes)).values()).count(False) == 1


@pytest.mark.parametrize("good", [True, False])
def test_the_report_ends_with_what_was_proven(tmp_path, monkeypatch, capsys, good):
    accuracy = 0.9 if good else 0.2
    (tmp_path / "train.json").write_text(json.dumps(training_figures(accuracy=accuracy)))
    (tmp_path / "verify.json").write_text(json.dumps(replay_figures()))
    monkeypatch.setattr("sys.argv", ["report", "--out", str(tmp_path)])
    assert report.main() == (0 if good else 1)
    printed = capsys.readouterr().out
    assert ("FAILS" in printed) is not good
    assert re.search(r"parameters to 1e-13 \(at most 1e-08\)", printed) and f"is {accuracy:.3f}" in printed
