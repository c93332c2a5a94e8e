"""Megatron-LM's own ``pretrain_gpt.py``, unmodified, on CPU: under AugTree's modes and without.

Needs a copy of Megatron-LM of the installed megatron-core's release; MEGATRON_LM_PATH names it, or several.
Compared with `examples/pretrain_gpt.py`, which shares the schedule but neither loop, DDP settings, optimizer
nor data path with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_augtree.data.groups import read_groups, write_groups
from megatron_augtree.mcore import build, launch
from megatron_augtree.runtime.trace import read_events
from megatron_augtree.runtime.transport import LocalTransport
from tests import traces
from tests.mcore import launcher_cases
from tests.mcore import pretrain_cases as cases
from tests.numerics.fixtures import err

TREE = cases.megatron_lm()
pytestmark = pytest.mark.skipif(TREE is None, reason=cases.NEEDS_TREE)

STEPS, BATCH = 10, 3
TWO_RANKS = "--context-parallel-mode augtree --augtree-force degree=2,lane_degree=2 "
FOUR_RANKS = f"--context-parallel-mode augtree {cases.GRPO} "
STEPPED = f"--train-iters {STEPS} --global-batch-size {BATCH} "
SAVED = "--save checkpoints --save-interval 5 --tensorboard-dir logs "


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return cases.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def ours(data):
    """What our own launcher makes of the flags: (losses, gradient norms, parameters)."""
    words = f"{cases.OURS} {STEPPED} --data-path {data}".split()
    launch.start(launcher_cases.example.parser().parse_args(words))

    def trained(flags: str, ranks: int):
        args = launcher_cases.example.parser().parse_args([*words, *flags.split()])
        records, trainer = launcher_cases.example.train(
            launcher_cases.example.prepare(args, ranks), LocalTransport(ranks)
        )
        found = {name: p.detach().clone() for name, p in trainer.ddp.module.named_parameters()}
        return [r.loss for r in records], [r.grad_norm for r in records], found

    yield trained
    build.destroy()


@pytest.fixture(scope="module")
def two_ranks(data, tmp_path_factory) -> Path:
    """The folder of ten steps on two ranks, evaluated after the fifth and the tenth."""
    folder = tmp_path_factory.mktemp("two")
    validation = folder / "validation.jsonl"
    write_groups(validation, read_groups(data)[BATCH:])
    files = f"--train-data-path {data} --valid-data-path {validation} --eval-iters 1 --eval-interval 5 "
    succeeded(cases.run(
        cases.LAUNCHER, TREE, 2, cases.MEGATRON + STEPPED + TWO_RANKS + SAVED + files, folder))
    return folder


def succeeded(done: subprocess.CompletedProcess) -> str:
    """Standard output of a run that ended well."""
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def series(values: list[float]) -> dict[str, torch.Tensor]:
    return {"": torch.tensor(values, dtype=torch.float64)}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def agrees(folder: Path, ours: tuple) -> None:
    """Losses, gradient norms and parameters after the last step."""
    losses, norms, parameters = ours
    assert len(losses) == STEPS and min(map(abs, losses)) > 0
    found = cases.parameters(folder / "checkpoints", STEPS)
    assert found.keys() == parameters.keys()  # no key of ours
    assert err(series(cases.scalars(folder / "logs", "loss")), series(losses)) < 1e-5
    assert err(series(cases.scalars(folder / "logs", "grad-norm")), series(norms)) < 1e-5
    assert err(found, parameters) < 1e-5


def test_ten_steps_on_two_ranks_equal_our_launchers(two_ranks, ours):
    agrees(two_ranks, ours(TWO_RANKS, 2))


def test_ten_steps_on_four_ranks_equal_our_launchers(data, ours, tmp_path):
    flags = cases.MEGATRON + STEPPED + FOUR_RANKS + SAVED + cases.NO_EVALUATION + f"--data-path {data} "
    out = succeeded(cases.run(cases.LAUNCHER, TREE, 4, f"{flags} --augtree-trace-dir traces", tmp_path))
    assert f"consumed samples: {STEPS * BATCH:12d}" in out  # groups, which four ranks do not divide
    agrees(tmp_path, ours(FOUR_RANKS, 4))
    line = r"^AugTree: iteration (\d+)/10 \| groups 3 \| rows (\d+) of (\d+) .*$"
    lines = re.findall(line, out, re.MULTILINE)
    rows = cases.scalars(tmp_path / "logs", "augtree/rows")
    assert [int(n) for n, _, _ in lines] == list(range(1, STEPS + 1))
    assert [float(computed) for _, computed, _ in lines] == rows and float(lines[0][2]) > rows[0] > 0
    assert min(cases.scalars(tmp_path / "logs", "augtree/measured_seconds")) > 0
    for rank in range(4):
        found = traces.checked(read_events(tmp_path / "traces" / f"rank-{rank:05d}.json"))
        kinds = (found.pop(f"rank {rank} {kind}", []) for kind in ("planned", "measured"))
        planned, measured = map(traces.passes, kinds)
        assert planned == measured and (planned or rank) and not found  # a rank may have no pass


def test_tensor_parallel_ranks_take_the_same_steps(data, two_ranks, tmp_path):
    """Two slices of the model on two ranks each; Megatron would pad the vocabulary to more by itself."""
    flags = cases.MEGATRON + STEPPED + TWO_RANKS + SAVED + cases.NO_EVALUATION + (
        f"--data-path {data} --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64")
    succeeded(cases.run(cases.LAUNCHER, TREE, 4, flags, tmp_path))
    for name in ("loss", "grad-norm"):
        whole, sliced = (cases.scalars(folder / "logs", name) for folder in (two_ranks, tmp_path))
        assert len(sliced) == STEPS and err(series(sliced), series(whole)) < 1e-5, name


def test_evaluation_sees_the_weights_of_its_step(two_ranks):
    """The validation groups are those that the sixth step trains on."""
    losses = cases.scalars(two_ranks / "logs", "loss")
    evaluated = cases.scalars(two_ranks / "logs", "loss validation")
    assert abs(evaluated[0] - losses[5]) < 1e-6 * losses[5]
    assert evaluated[1] < losses[9] < evaluated[0]


def test_a_run_that_resumes_takes_the_same_steps(data, two_ranks, tmp_path):
    saved, loaded = two_ranks / "checkpoints", tmp_path / "loaded"
    shutil.copytree(saved / "iter_0000005", loaded / "iter_0000005")
    (loaded / "latest_checkpointed_iteration.txt").write_text("5")
    flags = cases.MEGATRON + STEPPED + TWO_RANKS + SAVED + cases.NO_EVALUATION
    succeeded(cases.run(cases.LAUNCHER, TREE, 2, flags + f"--load {loaded} --data-path {data}", tmp_path))
    whole, rest = (cases.scalars(folder / "logs", "loss") for folder in (two_ranks, tmp_path))
    assert rest == whole[5:] and len(rest) == 5
    assert same_bits(cases.parameters(tmp_path / "checkpoints", 10), cases.parameters(saved, 10))


def test_a_copy_that_calls_the_hooks_itself_does_the_same(data, two_ranks, tmp_path):
    """`patches/check.py --apply` on a copy, then the script with no plug-in around it."""
    copy = tmp_path / "copy"
    (copy / "megatron").mkdir(parents=True)
    for path in TREE.iterdir():
        if path.name != "megatron":
            (copy / path.name).symlink_to(path)
    for path in (TREE / "megatron").iterdir():
        if path.name != "training":
            (copy / "megatron" / path.name).symlink_to(path)
    shutil.copytree(TREE / "megatron" / "training", copy / "megatron" / "training")
    check = subprocess.run(
        [sys.executable, cases.ROOT / "patches" / "check.py", copy, "--apply"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout
    flags = cases.MEGATRON + STEPPED + TWO_RANKS + SAVED + cases.NO_EVALUATION + f"--data-path {data}"
    succeeded(cases.run(cases.BARE, copy, 2, flags, tmp_path))
    whole, mine = (cases.scalars(folder / "logs", "loss") for folder in (two_ranks, tmp_path))
    assert mine == whole
    assert same_bits(
        cases.parameters(tmp_path / "checkpoints", 10), cases.parameters(two_ranks / "checkpoints", 10))
    report = cases.run(cases.LAUNCHER, copy, 1, "--augtree-report", tmp_path)
    assert succeeded(report).count("by hand") == 6


def test_without_a_mode_nothing_changes(tmp_path):
    """The shims alone, and the plug-in in place as well: what is logged and saved has the same bytes."""
    flags = cases.MEGATRON + (
        "--mock-data --no-create-attention-mask-in-dataloader --train-iters 3 --global-batch-size 4 "
        "--eval-iters 1 --eval-interval 2 --save checkpoints --save-interval 3 --tensorboard-dir logs"
    )
    found = {}
    for name, how in (("bare", cases.BARE), ("plugged", cases.LAUNCHER)):
        (tmp_path / name).mkdir()
        out = succeeded(cases.run(how, TREE, 2, flags, tmp_path / name))
        # Losses, and the arguments: timers are printed with dots too, and a colon behind them.
        lines = [line for line in out.splitlines() if re.search(r"\bloss\b.*\d|\.\. |parameters on", line)]
        timeless = [re.sub(r"^ *\[[^]]*\]|elapsed time[^|]*", "", line) for line in lines]
        file = tmp_path / name / "checkpoints" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
        found[name] = timeless, file.read_bytes(), [
            cases.scalars(tmp_path / name / "logs", key) for key in ("lm loss", "grad-norm")]
    for bare, plugged in zip(found["bare"], found["plugged"], strict=True):
        assert bare == plugged
    lines, _, (losses, norms) = found["bare"]
    assert len(losses) == 3 and losses[2] < losses[0] and min(norms) > 0
    assert any("lm loss:" in line for line in lines) and sum(".. " in line for line in lines) > 300
    assert not any("augtree" in line.lower() or "context_parallel_mode" in line for line in lines)


@pytest.mark.parametrize(
    "flags, told",
    [
        ("--context-parallel-mode augtre", "did you mean augtree?"),
        ("--context-parallel-mode augtree --data-path DATA --augtree-force degree=64", "degree"),
    ],
)
def test_what_cannot_run_ends_every_rank_with_one_message(data, flags, told):
    """A flag, before anything starts; a plan, before the first step."""
    flags = cases.MEGATRON + STEPPED + cases.NO_EVALUATION + flags.replace("DATA", str(data))
    done = cases.run(cases.LAUNCHER, TREE, 2, flags)
    assert done.returncode != 0 and f"exitcode  : {launch.USER_ERROR}" in done.stderr
    message = done.stderr.partition("elastic")[0]
    assert told in message and "consumed samples" not in done.stdout
    for part in ("values:", "rule:", "remedy:"):
        assert message.count(part) == 1, message
    assert "megatron_augtree/" not in done.stderr.replace(os.fspath(cases.ROOT), "")  # no traceback
