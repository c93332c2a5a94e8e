"""The launcher: every mode trains alike, and what cannot run says why."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_augtree.config import MODES, AugTreeError, InputError
from megatron_augtree.data.groups import Group, Response, write_groups
from megatron_augtree.mcore import build, launch
from megatron_augtree.mcore.report import Report, StepRecord
from megatron_augtree.mcore.sampler import GroupSampler
from megatron_augtree.runtime.transport import LocalTransport
from tests import traces
from tests.mcore import launcher_cases as cases

GRPO = "--global-batch-size 2 --objective grpo --optimizer sgd --lr 0.1 --dtype float64"
AUGTREE = "--context-parallel-mode augtree"


@pytest.fixture(scope="module", autouse=True)
def megatron():
    args = cases.example.parser().parse_args(f"{cases.STOCK_MODEL} --data-path none --train-iters 1".split())
    launch.start(args)
    yield
    build.destroy()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return cases.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def stock(data):
    """Three steps of stock Megatron."""
    return cases.train(data, f"{GRPO} --train-iters 3 --entropy-coef 0.01 --temperature 0.7")


def close(a, b, bound: float = 1e-10) -> bool:
    return abs(a - b) <= bound * max(1.0, abs(b))


# --- modes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_as_stock_megatron_does(data, stock, mode):
    flags = f"{GRPO} --train-iters 3 --entropy-coef 0.01 --temperature 0.7 --context-parallel-mode {mode}"
    records, trainer = cases.train(data, flags, LocalTransport(2))
    for mine, theirs in zip(records, stock[0], strict=True):
        assert close(mine.loss, theirs.loss) and close(mine.grad_norm, theirs.grad_norm)
        assert mine.grad_norm > 0.1
        assert mine.metrics.keys() == theirs.metrics.keys()
        assert all(close(value, theirs.metrics[name]) for name, value in mine.metrics.items())
    reference = dict(stock[1].ddp.module.named_parameters())
    for name, parameter in trainer.ddp.module.named_parameters():
        assert (parameter - reference[name]).abs().max() < 1e-10, name
    assert any(r.metrics["clip_fraction_low"] + r.metrics["clip_fraction_high"] > 0 for r in records)


def test_megatrons_adam_sees_every_gradient_once(data):
    """param.grad is left an alias of DDP's buffer: without zero_grad the second step doubles a gradient."""
    flags = "--train-iters 3 --global-batch-size 2 --lr 0.01"
    (stock, _), (augtree, _) = cases.train(data, flags), cases.train(data, f"{flags} {AUGTREE}")
    for mine, theirs in zip(augtree, stock, strict=True):
        assert close(mine.loss, theirs.loss, 1e-4) and close(mine.grad_norm, theirs.grad_norm, 1e-3)


def test_rows_are_shared_under_augtree_only(data, stock):
    records, _ = cases.train(data, f"{GRPO} --train-iters 1 {AUGTREE}", LocalTransport(2))
    assert records[0].rows < 0.5 * records[0].unshared_rows
    assert stock[0][0].rows == stock[0][0].unshared_rows == records[0].unshared_rows
    assert records[0].predicted_seconds > 0 and records[0].plan_seconds > 0


def test_the_first_line_says_what_runs(data, capsys):
    cases.train(data, "--train-iters 1")
    assert capsys.readouterr().out.startswith("no --context-parallel-mode: stock Megatron, dense attention")
    cases.train(data, "--train-iters 1 --context-parallel-mode gather-reuse")
    assert capsys.readouterr().out.startswith("--context-parallel-mode gather-reuse; 1 rank, ")


def test_workers_plan_ahead(data, capfd):
    plain, _ = cases.train(data, f"{GRPO} --train-iters 2 {AUGTREE}")
    worker, _ = cases.train(data, f"{GRPO} --train-iters 2 {AUGTREE} --num-workers 1")
    assert cases.numbers(worker) == cases.numbers(plain)
    with pytest.raises(SystemExit) as ended:
        cases.train(data, f"{GRPO} --train-iters 2 {AUGTREE} --augtree-force degree=64 --num-workers 1")
    assert ended.value.code == 2
    message = capfd.readouterr().err
    assert "degree" in message and "rule:" in message and "remedy:" in message and "Traceback" not in message


def test_the_constant_divisor_follows_the_flag(data):
    flags = f"{GRPO} --train-iters 1 --loss-preset dr_grpo {AUGTREE}"
    # Two groups of four responses, the longest of 5 tokens.
    (default, _), (given, _) = cases.train(data, flags), cases.train(data, f"{flags} --loss-constant 80")
    assert close(default[0].loss, 2 * given[0].loss) and given[0].loss != 0


# --- flags and data --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--context-parallel-mode augtre", "augtre"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size"),
        ("--recompute-granularity full", "--recompute-granularity"),
        ("--attention-dropout 0.1", "--attention-dropout"),
        ("--augtree-force waves=2", "--augtree-force"),
        ("--context-parallel-size 2", "--context-parallel-size"),
        ("--train-iters 0", "--train-iters 0"),
        ("--global-batch-size 0", "--global-batch-size 0"),
        ("--save-interval 2", "--save-interval"),
        ("--finetune", "--finetune"),
        ("--load nowhere", "--load nowhere"),
        ("--clip-low 0.1", "--clip-low 0.1"),
        ("--objective grpo --clip-low -1", "clip_low"),
        ("--objective grpo --loss-preset unknown", "--loss-preset"),
        ("--groups 3:9", "--groups 3:9"),
        ("--vocab-size 32", "--vocab-size 32"),
        ("--context-parallel-mode ring --augtree-kernel cpu_flush", "did you mean cpu_flash?"),
        ("--context-parallel-mode ring --augtree-cluster b300", "--augtree-cluster b300"),
        ("--context-parallel-mode augtree --augtree-force degree=x", "degree=x"),
        ("--objective grpo --loss-constant 80", "--loss-constant 80.0, aggregation seq-mean-token-mean"),
        ("--objective grpo --loss-preset dr_grpo --loss-constant 0", "--loss-constant 0.0"),
        ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes"),
        ("--distributed-timeout-minutes nan", "'nan' is not a number above 0"),
        (f"--save {__file__}/folder", f"--save {__file__}/folder"),
        (f"--tensorboard-dir {__file__}", f"--tensorboard-dir {__file__}"),
        (f"--context-parallel-mode ring --augtree-trace-dir {__file__}", f"--augtree-trace-dir {__file__}"),
        ("--data-path nowhere.jsonl", "nowhere.jsonl"),
        ("--unknown", "--unknown"),
    ],
)
def test_what_cannot_run_says_why(data, flags, told):
    with pytest.raises(AugTreeError) as refused:
        cases.prepared(data, f"--train-iters 1 {flags}")
    assert told in str(refused.value) and "remedy: " in str(refused.value)


def test_folders_are_there_before_the_first_step(data, tmp_path):
    cases.prepared(data, f"--train-iters 1 --save {tmp_path}/new/save --tensorboard-dir {tmp_path}/logs")
    assert sorted(os.listdir(tmp_path)) == ["logs", "new"] and os.listdir(tmp_path / "new") == ["save"]


def test_ids_beyond_the_vocabulary_are_counted_and_not_shown(tmp_path):
    write_groups(tmp_path / "g.jsonl", [Group("a", (5, 977, 6), (Response((978, 8), (True, True)),))])
    with pytest.raises(InputError) as refused:
        cases.prepared(tmp_path / "g.jsonl", "--train-iters 1")
    assert refused.value.values == "group a: 2 of 5 ids, --vocab-size 64"


def test_a_loss_is_checked_against_the_groups(tmp_path):
    groups = cases.make_groups()
    bare = replace(groups[1], responses=tuple(replace(r, ref_logprobs=None) for r in groups[1].responses))
    unrewarded = replace(groups[1], responses=tuple(replace(r, reward=None) for r in groups[1].responses))
    path = tmp_path / "groups.jsonl"
    for changed, flags, told in ((bare, "", "ref_logprobs"), (unrewarded, "--kl-coef 0", "group g1")):
        write_groups(path, [groups[0], changed])
        with pytest.raises(InputError) as refused:
            cases.prepared(path, f"--train-iters 1 --objective grpo {flags}")
        assert told in refused.value.values
        cases.prepared(path, "--train-iters 1")  # plain likelihood needs neither


def test_text_needs_its_tokenizer(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text(
        '\n{"prompt": "2+2=", "responses": [{"text": "4", "reward": 1}, {"text": "5", "reward": 0}]}\n'
    )
    flags = f"--train-iters 2 --vocab-size 257 {AUGTREE}"
    records, _ = cases.train(path, f"{flags} --tokenizer-type ByteTokenizer")
    assert records[0].unshared_rows == 2 * 5 and np.isfinite(records[1].loss)
    with pytest.raises(InputError, match="token ids are expected") as refused:
        cases.prepared(path, flags)
    assert f"{path}:2: prompt" in refused.value.values


def test_several_files_ranges_and_folding(data):
    ready = cases.prepared(
        data,
        f"--data-path {data} {data} --groups 4:7 --vocab-size 16 --fold-token-ids "
        "--max-prompt-tokens 3 --train-iters 1",
    )
    assert [group.name for group in ready.groups] == ["g4", "g0", "g1"]
    assert all(len(group.prompt) == 3 and max(group.prompt) < 16 for group in ready.groups)


def test_shuffling_is_a_permutation_that_resumes():
    def sampler(**kwargs):
        return GroupSampler(7, 3, **{"shuffle": True, "seed": 1, **kwargs})

    taken = [group for step in sampler(steps=14) for group in step]
    epochs = [tuple(taken[i * 7 : i * 7 + 7]) for i in range(6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len(set(epochs)) == 6
    assert [group for step in sampler(consumed=15, steps=9) for group in step] == taken[15:42]
    assert [group for step in sampler(steps=14, seed=2) for group in step] != taken
    assert list(sampler(shuffle=False, steps=3)) == [[0, 1, 2], [3, 4, 5], [6, 0, 1]]


# --- what is told ----------------------------------------------------------------------------------------


def record(iteration: int) -> StepRecord:
    return StepRecord(
        iteration=iteration,
        loss=1.5,
        grad_norm=0.25,
        groups=2,
        rows=30,
        unshared_rows=120,
        note="degree 2, fused",
        lanes={1: 6, 2: 2},
        idle=0.0421,
        plan_seconds=0.0021,
        predicted_seconds=0.5,
        measured_seconds=1.25,
        metrics={"loss": 1.5, "kl": 0.01, "max/ratio": 1.1},
    )


LINE = (
    "iteration  3/20 | loss 1.500000E+00 | grad norm 0.2500 | kl 0.0100 | groups 2 | rows 30 of 120 "
    "(75.0% saved) | degree 2, fused | lanes 6 x 1 + 2 x 2 | idle 4.2% | plan 2.1 ms | predicted 500.0 ms | "
    "measured 1.25 s"
)


def test_one_tidy_line_a_step(capsys):
    report = Report(0, 20, interval=3)
    for iteration in (1, 2, 3):
        report.step(record(iteration))
    Report(0, 20, speaks=False).step(record(3))
    assert capsys.readouterr() == (LINE + "\n", "")


def test_the_progress_bar_keeps_off_the_lines(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report = Report(0, 20)
    report.step(record(3))
    report.step(record(20))
    report.close()
    assert capsys.readouterr().out.splitlines() == [LINE, LINE.replace(" 3/20", "20/20")]
    assert "1/20" in terminal.getvalue() and "loss" not in terminal.getvalue()


def test_tensorboard_and_trace(data, tmp_path):
    flags = (
        f"{GRPO} --train-iters 3 {AUGTREE} --augtree-force degree=2 --tensorboard-dir {tmp_path}/tb "
        f"--augtree-trace-dir {tmp_path}/tr"
    )
    records, trainer = cases.train(data, flags, LocalTransport(2))
    events = EventAccumulator(f"{tmp_path}/tb")
    events.Reload()
    logged = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert {
        "loss",
        "grad_norm",
        "kl",
        "clip_fraction_low",
        "clip_fraction_high",
        "ratio/max",
        "augtree/plan_seconds",
        "augtree/predicted_seconds",
        "augtree/measured_seconds",
        "augtree/rows",
        "augtree/unshared_rows",
    } <= logged.keys()
    assert logged["loss"] == [(r.iteration, pytest.approx(r.loss, rel=1e-6)) for r in records]
    assert logged["augtree/rows"] == [(r.iteration, r.rows) for r in records]
    assert logged["augtree/idle_share"] == [(r.iteration, pytest.approx(r.idle)) for r in records]
    assert 0 < records[0].idle < 0.5 and sum(records[0].lanes.values()) > 2
    assert "augtree/guard_fallback_steps" not in logged
    found = traces.checked(json.loads((tmp_path / "tr" / "rank-00000.json").read_text())["traceEvents"])
    plan = trainer.schedule.played.plan
    for rank in range(2):
        planned, measured = found[f"rank {rank} planned"], found[f"rank {rank} measured"]
        assert planned[0]["ts"] == 0 < measured[0]["ts"]
        events = [(action, plan.passes[p]) for action, p in plan.events]
        own = [f"{p.kind} {p.id} {action}" for action, p in events if rank in p.block]
        assert traces.passes(planned) == own
        # One process runs all ranks: a pass is the span of its block's first.
        first = [p for p in plan.passes if p.block[0] == rank]
        assert len(traces.passes(measured)) == 2 * len(first) and set(traces.passes(measured)) <= set(own)
        assert {"forward stage 0", "backward stage 0"} <= {span["name"] for span in measured}
    assert "reduction" in {span["name"] for span in found["rank 0 measured"]}


# --- real ranks: three launches --------------------------------------------------------------------------


def spawn(command_of, ranks: int = 2, timeout: float = 300) -> list[tuple[int, str]]:
    """(exit code, stderr) of processes that torchrun's variables make the ranks of one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(cases.ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command_of(rank))],
            stderr=subprocess.PIPE,
            text=True,
            stdout=subprocess.DEVNULL,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors)]


def test_real_ranks_train_alike_and_resume_their_shards(data, tmp_path):
    result = tmp_path / "result.json"
    script = Path(__file__).with_name("launcher_cases.py")
    ended = spawn(lambda rank: [script, data, tmp_path, result])
    assert [code for code, _ in ended] == [0, 0], ended
    # Rank 0 alone could not write its file: one message, and every rank was to end.
    told = "".join(error for _, error in ended)
    assert told.count("ranks [0]: a checkpoint cannot be written") == 1 and "on purpose" in told
    assert "Apex" not in told and "full scope" not in told  # what megatron-core would say in every run
    found = json.loads(result.read_text())
    local, _ = cases.train(data, f"{GRPO} --train-iters 2 {AUGTREE}", LocalTransport(2))
    for mode in ("stock", "ring", "augtree"):
        for mine, theirs in zip(found[mode], local, strict=True):
            assert close(mine["loss"], theirs.loss) and close(mine["grad_norm"], theirs.grad_norm), mode
        for name, norm in found[f"parameters {mode}"].items():
            assert close(norm, found["parameters stock"][name]), (mode, name)
    assert [different for different, _ in found["shards"]] == [[], []]
    assert all(moved > 10 for _, moved in found["shards"])
    assert found["save refused"] == [2, 2]
    assert found["total"] == [[1.0, 3.0], [2.0, 3.0]]  # and the argument is as it was
    # A checkpoint of two real ranks goes on in one process.
    rest, _ = cases.train(data, f"{GRPO} --train-iters 3 {AUGTREE} --load {tmp_path}/realtree")
    whole, _ = cases.train(data, f"{GRPO} --train-iters 3 {AUGTREE}", LocalTransport(2))
    assert len(rest) == 1 and close(rest[0].loss, whole[2].loss)


def test_one_ranks_broken_file_ends_every_rank_with_one_message(data, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": [1, 2], "responses": [{"tokens": [3], "rewards": 1}]}\n')

    def command(rank: int) -> list:
        words = f"{cases.MODEL} --train-iters 1 {AUGTREE} --data-path {broken if rank else data}"
        return [cases.SCRIPT, *words.split()]

    ended = spawn(command)
    assert [code for code, _ in ended] == [2, 2], ended
    told = "".join(error for _, error in ended)
    assert told.count("ranks [1]:") == 1 and f"{broken}:1: responses[0]" in told and "Traceback" not in told
    assert "Apex" not in told


def test_a_rank_that_dies_in_a_step_ends_the_others_with_a_message(data):
    """Killed in its second step's loss; the others' timeout is ten minutes, and no launcher stops them."""
    script = Path(__file__).with_name("launcher_cases.py")
    began = time.monotonic()
    ended = spawn(lambda rank: [script, "die", data], timeout=120)
    assert [code for code, _ in ended] == [launch.LOST_PEER, -signal.SIGKILL], ended
    assert "rank 0: a peer was lost" in ended[0][1] and "remedy: " in ended[0][1]
    died = float(ended[1][1].split("dies at ")[1])
    assert began < died and time.monotonic() - died < 60
