"""`replay.py`, `logprobs.py` and `check_real_data.py` in one process: flags, dumps, files."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_augtree.config import MODES, AugTreeError, UnsupportedError
from megatron_augtree.data.groups import Group, Response, read_groups, write_groups
from megatron_augtree.mcore import build

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODEL = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 32 --dtype float64 "
         "--init-method-std 0.3 --untie-embeddings-and-output-weights").split()


@pytest.fixture(scope="module")
def scripts():
    """The scripts as modules: they import one another by their plain names, as when they are run."""
    sys.path.insert(0, str(SCRIPTS))
    import check_real_data
    import logprobs
    import replay
    yield {"replay": replay, "logprobs": logprobs, "check": check_real_data}
    sys.path.remove(str(SCRIPTS))
    build.destroy()


@pytest.fixture(scope="module")
def replay(scripts):
    return scripts["replay"]


@pytest.fixture(scope="module")
def groups():
    """Ragged, with an empty response, equal beginnings, ids beyond the vocabulary and a mask with a hole."""
    draw = torch.Generator().manual_seed(3)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 90, (n,), generator=draw).tolist())

    prompt, first = ids(9), ids(6)
    responses = (Response(first, (True, True, False, True, True, True), advantage=1.5),
                 Response((*first[:3], *ids(2)), (True,) * 5, advantage=-0.5),
                 Response((), (), advantage=0.25))
    other = Response(ids(3), (True,) * 3, advantage=-2.0)
    return [Group("a", prompt, responses), Group("b", ids(4), (other,))]


@pytest.fixture
def data(tmp_path, groups):
    write_groups(tmp_path / "groups.jsonl", groups)
    return str(tmp_path / "groups.jsonl")


def argv(data, mode, out, *more):
    return ["--data", data, "--context-parallel-mode", mode, *MODEL, "--optimizer", "sgd", "--lr", "0.1",
            "--dump", str(out), *more]


def load(path):
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
        return tensors, {key: json.loads(text) for key, text in file.metadata().items()}


def part(tensors, prefix):
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@pytest.fixture
def dump(replay, data, tmp_path):
    """Runs a replay and reads its dump."""
    def of(mode, *more):
        replay.main(argv(data, mode, tmp_path / "out.safetensors", *more))
        return load(tmp_path / "out.safetensors")
    return of


def refused(capfd, function, *arguments):
    """The message with which a script ends all ranks."""
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    assert end.value.code == 2
    return capfd.readouterr().err


class TestArguments:
    def test_every_flag_of_the_contract_is_taken(self, replay, tmp_path):
        args = replay.parse(
            f"--data d.jsonl --groups 1:3 --max-prompt-tokens 5 --max-response-tokens 6 "
            f"--context-parallel-mode augtree {' '.join(MODEL)} --dtype bfloat16 --context-parallel-size 2 "
            f"--augtree-force degree=2,phase=phased --objective grpo --optimizer adam --steps 3 --seed 4 "
            f"--load w.safetensors --dump {tmp_path}/o.safetensors".split())
        assert (args.groups, args.steps, args.seed, args.dtype) == ("1:3", 3, 4, "bfloat16")
        assert (args.objective, args.optimizer, args.load) == ("grpo", "adam", "w.safetensors")
        assert (args.context_parallel_size, args.augtree_force) == (2, "degree=2,phase=phased")

    @pytest.mark.parametrize(("more", "words"), [
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--context-parallel-mode augtreee", "did you mean augtree?"),
        ("--dtype float16", "--dtype"),
        ("--steps 0", "--steps 0"),
        ("--steps two", "--steps"),
        ("--augtree-force degree=x", "degree=x"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1"),
        ("--context-parallel-size -1", "--context-parallel-size -1"),
        ("--dump nowhere/o.safetensors", "--dump nowhere/o.safetensors"),
        ("--context-parallel-mode unshared --augtree-force degree=1", "--augtree-force"),
        ("--context-parallel-mode unshared --context-parallel-size 2", "--context-parallel-size"),
        ("--context-parallel-mode unshared --use-distributed-optimizer", "--use-distributed-optimizer"),
        ("--context-parallel-mode unshared --objective grpo --clip-high 0.3", "clip_high 0.3"),
        ("--context-parallel-mode unshared --objective grpo --loss-preset dr_grpo --loss-constant 3",
         "aggregation constant"),
        ("--clip-high 0.3", "add --objective grpo"),
        ("--objective grpo --loss-constant 3", "--loss-constant 3.0"),
        ("--augtree-kernel fast", "--augtree-kernel fast"),
        ("--augtree-cluster b300", "--augtree-cluster b300"),
        ("--distributed-timeout-minutes soon", "--distributed-timeout-minutes"),
    ])
    def test_bad_values_are_named(self, replay, tmp_path, more, words):
        with pytest.raises(AugTreeError) as error:
            replay.parse(argv("d.jsonl", "augtree", tmp_path / "o.safetensors", *more.split()))
        assert words in str(error.value)

    def test_a_mode_is_needed(self, replay, tmp_path):
        flags = argv("d.jsonl", "ring", tmp_path / "o.safetensors")
        with pytest.raises(AugTreeError, match="--context-parallel-mode is not given"):
            replay.parse([*flags[:2], *flags[4:]])

    def test_unshared_is_one_process(self, replay, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UnsupportedError, match="2 processes"):
            replay.parse(argv("d.jsonl", "unshared", tmp_path / "o.safetensors"))

    @pytest.mark.parametrize(("mode", "more", "words"), [
        ("ring", "--groups 0:9", "groups 0:9|asked for 0:9"),
        ("ring", "--groups 2:1", "--groups '2:1'"),
        ("ring", "--load none.safetensors", "--load none.safetensors"),
        ("augtree", "--augtree-force degree=4", "degree=4"),
        ("augtree", "--augtree-plan none.json", "--augtree-plan none.json"),
        ("ring", "--use-distributed-optimizer", "--use-distributed-optimizer"),
    ])
    def test_what_is_found_later_ends_with_one_message(self, replay, data, tmp_path, capfd, mode, more,
                                                       words):
        out = tmp_path / "o.safetensors"
        message = refused(capfd, replay.main, argv(data, mode, out, *more.split()))
        assert any(word in message for word in words.split("|")) and message.count("  rule: ") == 1
        assert not out.exists()

    def test_unshared_refuses_what_does_not_fit_before_it_starts(self, replay, tmp_path, capfd, monkeypatch):
        long = Response((1,) * 300_000, (True,) * 300_000)
        write_groups(tmp_path / "long.jsonl", [Group("long", (1, 2), (long,))])
        monkeypatch.setattr(replay, "build_model", lambda *a, **k: pytest.fail("the model was built"))
        message = refused(capfd, replay.main, argv(str(tmp_path / "long.jsonl"), "unshared", tmp_path / "o"))
        assert "would not fit in memory" in message and "--max-response-tokens" in message


class TestDump:
    def test_keys(self, dump, groups, tmp_path):
        tensors, metadata = dump("unshared")
        names = set(part(tensors, "param0/"))
        assert "decoder.layers.1.self_attention.linear_qkv.weight" in names
        assert set(part(tensors, "grad/")) == names == set(part(tensors, "param1/"))
        assert set(tensors) == {"logprob", "loss", *(f"{p}/{n}" for p in ("param0", "grad", "param1")
                                                     for n in names)}
        assert metadata.keys() == {"plan", "rows", "messages", "bytes", "peak_bytes", "seconds", "steps"}
        assert metadata["rows"] == [14 + 13 + 8 + 6]
        assert metadata["peak_bytes"][0] >= 0
        seconds = metadata["seconds"]
        assert seconds.keys() == {"read", "build", "plan", "forward_backward", "optimizer", "total"}
        total = seconds.pop("total")
        assert 0 < sum(seconds.values()) <= total
        assert sorted(os.listdir(tmp_path)) == ["groups.jsonl", "out.safetensors"]

    def test_numbers_belong_together(self, dump):
        tensors, metadata = dump("unshared")
        assert tensors["logprob"].dtype == torch.float64
        assert len(tensors["logprob"]) == 5 + 5 + 3
        torch.testing.assert_close(tensors["loss"], -tensors["logprob"].mean(), rtol=1e-14, atol=0)
        before, after, gradient = (part(tensors, p) for p in ("param0/", "param1/", "grad/"))
        for name in before:
            expected = before[name] - 0.1 * gradient[name]
            torch.testing.assert_close(after[name], expected, rtol=1e-13, atol=1e-15)
            assert gradient[name].abs().max() > 0
        assert metadata["steps"][0]["loss"] == tensors["loss"]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("objective", ["nll", "grpo"])
    def test_modes_agree(self, dump, mode, objective):
        more = ["--objective", objective, "--steps", "2"]
        expected, _ = dump("unshared", *more)
        found, metadata = dump(mode, *more)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] - value).abs().max() <= 1e-12 * max(float(value.abs().max()), 0.1), name
        assert metadata["plan"]["table"].startswith(mode) and len(metadata["plan"]["digest"]) == 16
        assert len(metadata["steps"]) == 2 and metadata["messages"] == [0] and metadata["bytes"] == [{}]

    def test_flags_of_the_loss_reach_it(self, dump, data, groups):
        """Every mode gives one loss, and each flag moves it; the constant follows step and data."""
        scored = [Group(g.name, g.prompt, tuple(
            dataclasses.replace(r, old_logprobs=(-3.6,) * len(r.tokens), ref_logprobs=(-3.0,) * len(r.tokens))
            for r in g.responses)) for g in groups]
        write_groups(data, scored)
        losses = {}
        for flags in ("", "--loss-preset grpo", "--loss-preset gspo", "--clip-low 0.01 --clip-high 0.01",
                      "--entropy-coef 0.1", "--temperature 0.5", "--loss-preset dr_grpo",
                      "--loss-preset dr_grpo --loss-constant 12"):
            found = [dump(mode, "--objective", "grpo", *flags.split())[1]["steps"][0]["loss"]
                     for mode in ("augtree", "ring")]
            assert found[0] == pytest.approx(found[1], rel=1e-12)
            losses[flags] = found[0]
        assert len({round(loss, 9) for loss in losses.values()}) == len(losses)
        # 4 responses, the longest of 6 tokens
        assert losses["--loss-preset dr_grpo --loss-constant 12"] == pytest.approx(
            2 * losses["--loss-preset dr_grpo"], rel=1e-12)

    def test_order_is_group_response_token(self, dump):
        """The first response's rows come first, and those of a cut file are the ones that are left."""
        whole, _ = dump("augtree")
        last, _ = dump("augtree", "--groups", "1:2")
        torch.testing.assert_close(whole["logprob"][-3:], last["logprob"], rtol=1e-12, atol=0)
        cut, _ = dump("augtree", "--groups", "0:1", "--max-response-tokens", "4")
        kept = [0, 1, 2, 5, 6, 7, 8]  # of 5 (a hole at token 2) and 5 rows
        torch.testing.assert_close(whole["logprob"][kept], cut["logprob"], rtol=1e-12, atol=0)

    def test_a_plan_can_be_taken_from_a_dump(self, dump, tmp_path):
        first, metadata = dump("augtree")
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(metadata["plan"]["json"]))
        second, again = dump("augtree", "--augtree-plan", str(plan))
        assert again["plan"]["digest"] == metadata["plan"]["digest"]
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_clipping_and_old_logprobs_reach_the_gradient(self, data, dump, groups):
        """Old log-probs far away clip every row in the harmful direction: grpo's gradient is then 0."""
        far = [Group(g.name, g.prompt, tuple(
            Response(r.tokens, r.loss_mask, advantage=1.0, old_logprobs=(-50.0,) * len(r.tokens))
            for r in g.responses)) for g in groups]
        write_groups(data, far)
        for mode in ("unshared", "augtree"):
            tensors, _ = dump(mode, "--objective", "grpo")
            assert all(gradient.abs().max() == 0 for gradient in part(tensors, "grad/").values())
            assert float(tensors["loss"]) == pytest.approx(-1.2)

    def test_distributed_optimizer_has_the_same_gradients(self, dump):
        more = ["--dtype", "float32", "--optimizer", "adam"]
        plain, _ = dump("augtree", *more)
        sharded, _ = dump("augtree", *more, "--use-distributed-optimizer")
        for name in plain:
            torch.testing.assert_close(sharded[name], plain[name], rtol=1e-6, atol=1e-8)


class TestLoad:
    def test_a_dump_continues(self, dump, tmp_path):
        """Two steps are one step, saved and loaded, and another."""
        two, _ = dump("augtree", "--steps", "2")
        one, _ = dump("augtree")
        save_file(one, tmp_path / "one.safetensors")
        more, _ = dump("augtree", "--load", str(tmp_path / "one.safetensors"), "--seed", "99")
        for name in part(two, "param1/"):
            assert torch.equal(more[f"param0/{name}"], one[f"param1/{name}"])
            assert torch.equal(more[f"param1/{name}"], two[f"param1/{name}"])


class TestLogprobs:
    def test_file_has_the_logprobs_of_the_replay(self, scripts, dump, data, tmp_path, groups):
        expected, _ = dump("unshared")
        for mode in ("augtree", "unshared"):
            out = tmp_path / f"{mode}.jsonl.gz"
            scripts["logprobs"].main(["--data", data, "--output", str(out), "--field", "ref_logprobs",
                                      "--context-parallel-mode", mode, *MODEL])
            found = read_groups(out)
            values = [x for g in found for r in g.responses for x in r.ref_logprobs]
            masks = [m for g in found for r in g.responses for m in r.loss_mask]
            assert [math.isnan(x) for x in values] == [not m for m in masks]
            kept = torch.tensor([x for x in values if not math.isnan(x)], dtype=torch.float64)
            torch.testing.assert_close(kept, expected["logprob"], rtol=1e-12, atol=0)
            assert [g.prompt for g in found] == [g.prompt for g in groups]  # as in the file, not folded

    def test_results_that_cannot_be_written_end_with_a_message(self, scripts, data, tmp_path, capfd,
                                                              monkeypatch):
        def full(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        message = refused(capfd, scripts["replay"].main, argv(data, "ring", tmp_path / "o.safetensors"))
        assert "a dump cannot be written" in message and "No space left" in message
        flags = ["--data", data, "--output", str(tmp_path / "o"), "--field", "old_logprobs",
                 "--context-parallel-mode", "ring", *MODEL]
        message = refused(capfd, scripts["logprobs"].main, flags)
        assert "a group file cannot be written" in message and os.listdir(tmp_path) == ["groups.jsonl"]

    def test_batches_change_nothing(self, scripts, data, tmp_path):
        lines = []
        for size in ("1", "2"):
            scripts["logprobs"].main(["--data", data, "--output", str(tmp_path / size), "--field",
                                      "old_logprobs", "--context-parallel-mode", "ring", *MODEL,
                                      "--batch-groups", size])
            lines.append((tmp_path / size).read_bytes())
        assert lines[0] == lines[1]

    @pytest.mark.parametrize("more", ["--field new_logprobs", "--batch-groups 0", "--output nowhere/o.jsonl"])
    def test_bad_values_are_named(self, scripts, data, tmp_path, more):
        flags = ["--data", data, "--output", str(tmp_path / "o"), "--field", "old_logprobs",
                 "--context-parallel-mode", "ring", *MODEL, *more.split()]
        with pytest.raises(AugTreeError) as error:
            scripts["logprobs"].parse(flags)
        assert more.split()[1] in str(error.value)


class TestRealDataCheck:
    def test_batches_keep_order_and_limit(self, scripts):
        groups = [Group(str(n), (1,) * n, (Response((1,), (True,)),)) for n in (3, 4, 9, 1, 1)]
        found = list(scripts["check"].batches(groups, 7))
        assert [[g.name for g in batch] for batch in found] == [["3", "4"], ["9"], ["1", "1"]]

    def test_longest_groups(self, scripts, data):
        assert [g.name for g in scripts["check"].longest_groups(data, 1)] == ["a"]

    def test_compare_sees_a_difference(self, scripts, groups, monkeypatch):
        check = scripts["check"]
        args = check.model_arguments()
        build.initialize(args)
        model = build.build_model(args, augtree=True, seed=1)
        result = check.compare(model, groups)
        assert (result.groups, result.tokens) == (2, 13) and result.good()
        assert result.effect > check.LEAST_EFFECT
        assert not result.good(peak_bytes=-1)

        class Shifted(check.Scorer):
            def __call__(self, some):
                return super().__call__(some) + (1e-3 if self.config.mode == "ring" else 0)

        monkeypatch.setattr(check, "Scorer", Shifted)
        assert not check.compare(model, groups).good()
