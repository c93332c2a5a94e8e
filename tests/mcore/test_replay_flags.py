"""`replay.py`, `logprobs.py` and what they share, in one process: flags, dumps, weights, messages."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_augtree.config import AugTreeError, InputError, UnsupportedError
from megatron_augtree.data.groups import Group, Response, read_groups, write_groups
from megatron_augtree.mcore import build, launch, weights
from megatron_augtree.mcore.memory import PeakMemory

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
    return [Group("a", prompt, responses), Group("b", ids(4), (Response(ids(3), (True,) * 3, advantage=-2.0),))]


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
            f"--data d.jsonl --groups 1:3 --max-prompt-tokens 5 --max-response-tokens 6 --context-parallel-mode "
            f"augtree {' '.join(MODEL)} --dtype bfloat16 --context-parallel-size 2 --augtree-force "
            f"degree=2,phase=phased --objective grpo --optimizer adam --steps 3 --seed 4 --load w.safetensors "
            f"--dump {tmp_path}/o.safetensors".split())
        assert (args.groups, args.steps, args.seed, args.dtype, args.objective) == ("1:3", 3, 4, "bfloat16", "grpo")
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
    def test_what_is_found_later_ends_the_run_with_one_message(self, replay, data, tmp_path, capfd, mode, more,
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
        assert set(tensors) - {f"{p}/{n}" for p in ("param0", "grad", "param1") for n in names} == {"logprob", "loss"}
        assert metadata.keys() == {"plan", "rows", "messages", "bytes", "peak_bytes", "seconds", "steps"}
        assert metadata["rows"] == [14 + 13 + 8 + 6]
        assert metadata["peak_bytes"][0] >= 0
        seconds = metadata["seconds"]
        assert seconds.keys() == {"read", "build", "plan", "forward_backward", "optimizer", "total"}
        assert sum(seconds.values()) - seconds["total"] <= seconds["total"]
        assert os.listdir(tmp_path) == ["groups.jsonl", "out.safetensors"] or \
            sorted(os.listdir(tmp_path)) == ["groups.jsonl", "out.safetensors"]

    def test_numbers_belong_together(self, dump):
        tensors, metadata = dump("unshared")
        assert tensors["logprob"].dtype == torch.float64
        assert len(tensors["logprob"]) == 5 + 5 + 3
        torch.testing.assert_close(tensors["loss"], -tensors["logprob"].mean(), rtol=1e-14, atol=0)
        before, after, gradient = (part(tensors, p) for p in ("param0/", "param1/", "grad/"))
        for name in before:
            torch.testing.assert_close(after[name], before[name] - 0.1 * gradient[name], rtol=1e-13, atol=1e-15)
            assert gradient[name].abs().max() > 0
        assert metadata["steps"][0]["loss"] == tensors["loss"]

    @pytest.mark.parametrize("mode", ["ring", "ring-reuse", "ring-reuse-per-response", "gather-reuse", "augtree"])
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

    def test_clipping_and_old_logprobs_reach_the_gradient(self, replay, data, dump, groups, tmp_path):
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


class TestWeights:
    def test_a_dump_continues(self, dump, tmp_path):
        """Two steps are one step, saved and loaded, and another."""
        two, _ = dump("augtree", "--steps", "2")
        one, _ = dump("augtree")
        save_file(one, tmp_path / "one.safetensors")
        more, _ = dump("augtree", "--load", str(tmp_path / "one.safetensors"), "--seed", "99")
        for name in part(two, "param1/"):
            assert torch.equal(more[f"param0/{name}"], one[f"param1/{name}"])
            assert torch.equal(more[f"param1/{name}"], two[f"param1/{name}"])

    def test_plain_names_win_then_after_then_before(self, tmp_path):
        model = torch.nn.Linear(2, 2)
        named = dict(model.named_parameters())
        values = {prefix: {f"{prefix}{n}": torch.full_like(p, i) for n, p in named.items()}
                  for i, prefix in enumerate(("", "param1/", "param0/"))}
        for first, prefixes in enumerate((("", "param1/", "param0/"), ("param1/", "param0/"), ("param0/",))):
            save_file({k: v for p in prefixes for k, v in values[p].items()}, tmp_path / "w.safetensors")
            weights.load_weights(model, str(tmp_path / "w.safetensors"))
            assert all(torch.all(p == first) for p in model.parameters())

    @pytest.mark.parametrize(("tensors", "words"), [
        ({"weight": torch.zeros(2, 2)}, "1 missing, for instance bias"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, r"weight \[2, 3\] instead of \[2, 2\]"),
        ({"other": torch.zeros(1)}, "2 missing"),
    ])
    def test_what_does_not_fit_is_refused_and_changes_nothing(self, tmp_path, tensors, words):
        model = torch.nn.Linear(2, 2)
        before = weights.parameters_of(model)
        save_file(tensors, tmp_path / "w.safetensors")
        with pytest.raises(InputError, match=words):
            weights.load_weights(model, str(tmp_path / "w.safetensors"))
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())

    def test_not_a_safetensors_file(self, tmp_path):
        (tmp_path / "w").write_text("no")
        with pytest.raises(InputError, match="--load"):
            weights.load_weights(torch.nn.Linear(1, 1), str(tmp_path / "w"))

    def test_a_failed_dump_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "o.safetensors"
        path.write_text("old")
        monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            weights.save_dump(str(path), {"a": torch.zeros(1)}, {"b": 1})
        assert os.listdir(tmp_path) == ["o.safetensors"] and path.read_text() == "old"


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

    def test_batches_change_nothing(self, scripts, data, tmp_path):
        lines = []
        for size in ("1", "2"):
            scripts["logprobs"].main(["--data", data, "--output", str(tmp_path / size), "--field", "old_logprobs",
                                      "--context-parallel-mode", "ring", *MODEL, "--batch-groups", size])
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

    def test_compare_sees_a_difference(self, scripts, groups, replay, data, monkeypatch):
        check = scripts["check"]
        args = check.model_arguments()
        build.initialize(args)
        model = build.build_model(args, augtree=True, seed=1)
        result = check.compare(model, groups)
        assert (result.groups, result.tokens) == (2, 13) and result.good() and result.effect > check.LEAST_EFFECT
        assert not result.good(peak_bytes=-1)

        class Shifted(check.Scorer):
            def __call__(self, some):
                return super().__call__(some) + (1e-3 if self.config.mode == "ring" else 0)

        monkeypatch.setattr(check, "Scorer", Shifted)
        assert not check.compare(model, groups).good()


class TestLaunch:
    def test_agree_returns_or_ends(self, capfd):
        assert launch.agree(lambda: 3) == 3

        def fail():
            raise InputError("a thing is wrong", values="x 1", rule="x is 2", remedy="write 2")

        message = refused(capfd, launch.agree, fail)
        assert message.splitlines() == ["a thing is wrong", "  values: x 1", "  rule: x is 2", "  remedy: write 2"]

    @pytest.mark.parametrize(("error", "lost"), [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:4: reset"), True),
        (torch.distributed.DistNetworkError("closed"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("/gloo/"), False),
    ])
    def test_lost_peers_are_told_from_faults(self, error, lost):
        assert launch.is_lost_peer(error) == lost

    def test_a_rank_that_is_stopped_says_so(self, tmp_path):
        """SIGTERM ends a rank with a message and code 1 also while its main thread is busy in C."""
        ready = tmp_path / "ready"
        text = ("import pathlib, sys, time\nfrom megatron_augtree.mcore import launch\n"
                f"launch.run(lambda: (pathlib.Path({str(ready)!r}).touch(), sum(map(int, iter(int, 1)))))\n")
        env = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "PYTHONPATH": str(SCRIPTS.parent)}
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", text], env=env, stderr=subprocess.PIPE,
                                   text=True)
        try:
            deadline = time.monotonic() + 120
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, message = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 1 and message.startswith("rank 1: a peer was lost")


def test_peak_memory_sees_a_short_lived_tensor():
    with PeakMemory() as memory:
        tensor = torch.ones(64 << 18)  # 64 MiB
        time.sleep(0.05)
        del tensor
    assert 60 << 20 <= memory.above_start_bytes
