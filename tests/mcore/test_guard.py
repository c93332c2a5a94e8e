"""The guard: what it gives up and what it keeps, of made-up times; and that numbers stay the same."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.mcore import build, launch
from megatron_augtree.mcore.guard import MARGIN, Guard, Trial, kind_of
from megatron_augtree.mcore.sampler import StepBatch, plan_step
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.runtime.transport import LocalTransport
from tests.mcore import launcher_cases as cases
from tests.mcore.test_launcher import spawn

MODEL = ModelShape(layers=2, hidden=32, ffn=64, vocab=64, q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
GROUPS = cases.make_groups()


def planned(force: str = "degree=2", groups: int = 2, **settings) -> StepBatch:
    config = AugTreeConfig(force=force, guard_steps=3, min_shared_rows=4, **settings)
    return plan_step(GROUPS[:groups], MODEL, 2, config)


def played(guard: Guard, batches, seconds_of) -> list[str]:
    """Modes that were played; `seconds_of` says how long a step takes."""
    modes = []
    for batch in batches:
        chosen = guard.choose(batch)
        guard.done(seconds_of(chosen.plan.mode, batch.stock.plan.seconds))
        modes.append(chosen.plan.mode)
    return modes


def guard_with(steps: int) -> tuple[Guard, list[str]]:
    told: list[str] = []
    return Guard(steps, warn=told.append), told


def slower_by(factor: float, noise: float, seed: int):
    """Seconds of a step that ring is predicted to take `ring` seconds for."""
    rng = random.Random(seed)
    factors = {"augtree": 7 * factor, "ring": 7}
    return lambda mode, ring: ring * factors[mode] * (1 + rng.uniform(-noise, noise))


# --- decisions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise, seeds", [(0.0, 1), (0.05, 40)])
def test_what_is_slower_gives_way_and_is_told_once(noise, seeds):
    batches = [planned(groups=1 + i % 2) for i in range(2)] * 12  # steps of two sizes
    for seed in range(seeds):
        guard, told = guard_with(5)
        modes = played(guard, batches, slower_by(1.3, noise, seed))
        # Warm-up, then five of each in turn, then ring alone.
        assert modes == ["augtree", "augtree", "ring", "ring", *["augtree", "ring"] * 4, *["ring"] * 12]
        assert len(told) == 1 and kind_of(batches[0].plan) in told[0] and "of 5 and 5 steps" in told[0]
        assert (guard.fallback_steps, guard.timed_steps, guard.why) == (12, 6, "its kind measured slower")
        (trial,) = guard.trials.values()
        assert trial.ratio == pytest.approx(1.3, rel=2 * noise + 1e-9) and f"{trial.ratio:.2f} x" in told[0]


@pytest.mark.parametrize("factor, noise", [(1.0, 0.0), (1.0, 0.02), (1.04, 0.0), (0.99, 0.02)])
def test_ties_are_kept_whatever_the_noise(factor, noise):
    batches = [planned()] * 20
    for seed in range(40):
        guard, told = guard_with(5)
        modes = played(guard, batches, slower_by(factor, noise, seed))
        assert not told and guard.fallback_steps == 0 and guard.why == "" and set(modes[-6:]) == {"augtree"}
        assert [trial.verdict for trial in guard.trials.values()] == ["kept"]


def test_loud_noise_around_equality_hardly_ever_costs_a_kind():
    """Steps that scatter by 30 % either way: the rank test holds where a margin alone would not."""
    batches, lost = [planned()] * 12, {"guard": 0, "margin alone": 0}
    for seed in range(400):
        guard, told = guard_with(5)
        played(guard, batches, slower_by(1.0, 0.3, seed))
        (trial,) = guard.trials.values()
        lost["guard"] += len(told)
        lost["margin alone"] += len(trial.planned) == 5 and trial.ratio > MARGIN
    assert lost["guard"] <= 0.02 * 400 < 0.1 * 400 < lost["margin alone"]


def test_a_plan_that_is_clearly_faster_costs_two_slow_steps():
    guard, told = guard_with(50)
    modes = played(guard, [planned()] * 20, slower_by(0.3, 0.1, 0))
    assert modes == ["augtree", "augtree", "ring", "ring", "augtree", "ring", *["augtree"] * 14]
    assert guard.timed_steps == 3 and guard.fallback_steps == 0 and not told


def test_kinds_are_judged_apart():
    kinds = {"degree=2": 1.3, "degree=1": 0.5, "degree=2,phase=phased,waves=2": 1.0}
    batches = [planned(force) for force in kinds]
    factors = {kind_of(batch.plan): factor for batch, factor in zip(batches, kinds.values())}
    assert len(factors) == 3
    guard, told = guard_with(4)
    for _ in range(12):
        for batch in batches:
            chosen = guard.choose(batch)
            factor = factors[kind_of(batch.plan)] if chosen is batch else 1.0
            guard.done(factor * batch.stock.plan.seconds)
    assert [guard.trials[kind].verdict for kind in factors] == ["slower", "kept", "kept"]
    assert len(told) == 1 and "'augtree, fused, degree 2, gather_kv'" in told[0]


def test_a_verdict_needs_both_sides():
    trial = Trial(planned=[1.3] * 9, stock=[1.0])
    trial.judge(3)
    assert trial.verdict == ""


def test_steps_that_ring_cannot_play_or_that_are_rings_are_left_alone():
    odd = AugTreeConfig(degree=2, guard_steps=3, min_shared_rows=4)  # ring's replicas do not fill three ranks
    guard, told = guard_with(3)
    unguarded = plan_step(GROUPS[:2], MODEL, 2, AugTreeConfig())
    steps = (planned().stock, unguarded, plan_step(GROUPS, MODEL, 3, odd))
    assert steps[0].plan.mode == "ring" and steps[2].plan.mode == "augtree"
    for batch in steps:
        assert batch.stock is None
        for _ in range(10):
            assert guard.choose(batch) is batch
            guard.done(1e9)
    assert not guard.trials and not told


def test_a_kind_says_what_plans_have_in_common():
    assert kind_of(planned("degree=1").plan) == "augtree, fused, degree 1"
    assert kind_of(planned("degree=2").plan) == kind_of(planned("degree=2", groups=1).plan)
    assert kind_of(planned("degree=2,phase=phased,waves=2,primitive=move_q").plan) == (
        "augtree, phased, degree 2, gather_kv, move_q"
    )


@pytest.mark.parametrize(
    "settings", [{"guard_steps": 2}, {"guard_steps": -1}, {"guard_steps": 3, "mode": "ring"}]
)
def test_a_guard_that_cannot_judge_is_refused(settings):
    with pytest.raises(AugTreeError, match="--augtree-guard-steps") as error:
        AugTreeConfig(**settings)
    assert error.value.remedy


# --- runs ------------------------------------------------------------------------------------------------

GUARDED = "--context-parallel-mode augtree --augtree-force degree=2,phase=phased,waves=2"
STEPS = "--train-iters 11 --global-batch-size 2 --objective grpo --optimizer sgd --lr 0.1 --dtype float64"


@pytest.fixture
def megatron():
    args = cases.example.parser().parse_args(f"{cases.STOCK_MODEL} --data-path none --train-iters 1".split())
    launch.start(args)
    yield
    build.destroy()


def test_numbers_are_those_of_an_unguarded_run(megatron, tmp_path, monkeypatch, capsys, caplog):
    """Plans are said to be slower: three steps of each are timed, and the rest are ring's."""
    data = cases.write_data(tmp_path)
    plain, bare = cases.train(data, f"{STEPS} {GUARDED}", LocalTransport(2))
    original = Guard.done

    def done(self, seconds):
        assert 0 < seconds < 60
        original(self, 1.0 if self.why else 1.3)

    monkeypatch.setattr(Guard, "done", done)
    capsys.readouterr()
    flags = f"{STEPS} {GUARDED} --augtree-guard-steps 3 --num-workers 1"  # a worker plans ahead, both ways
    records, trainer = cases.train(data, flags, LocalTransport(2))
    shared = [record.rows < record.unshared_rows for record in records]
    assert shared == [True, True, False, False, True, False, True, False, False, False, False]
    assert [record.fallback_steps for record in records] == [0] * 8 + [1, 2, 3]
    for mine, theirs in zip(records, plain, strict=True):
        assert abs(mine.loss - theirs.loss) < 1e-10 and abs(mine.grad_norm - theirs.grad_norm) < 1e-10
    reference = dict(bare.ddp.module.named_parameters())
    for name, parameter in trainer.ddp.module.named_parameters():
        assert (parameter - reference[name]).abs().max() < 1e-10, name
    assert [record.message.count("AugTree's guard: plans of the kind") for record in caplog.records] == [1]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert "ring, degree 2 (timed for the guard)" in lines[2] and "fallback" not in lines[7]
    assert "ring, degree 2 (its kind measured slower)" in lines[8] and lines[8].endswith("| fallback 1 step")
    assert lines[10].endswith("| fallback 3 steps")
    assert records[10].plan_scalars()["augtree/guard_fallback_steps"] == 3


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_real_ranks_decide_alike_and_say_it_once(tmp_path, tensor_parallel):
    """Only rank 1 is slow, and only where it plays the plan: the slowest rank counts, of any pool."""
    data, result = cases.write_data(tmp_path), tmp_path / "result.json"
    script = Path(__file__).with_name("launcher_cases.py")
    ended = spawn(lambda rank: [script, "guard", data, result, str(tensor_parallel)])
    assert [code for code, _ in ended] == [0, 0], ended
    assert [error.count("AugTree's guard: plans of the kind") for _, error in ended] == [1, 0]
    found = json.loads(result.read_text())
    assert found["modes"] == [["augtree"] * 2 + ["ring"] * 2 + ["augtree", "ring"] * 2 + ["ring"] * 2] * 2
    assert found["fallback"] == [[0] * 8 + [1, 2]] * 2
    line = found["lines"][0][-1]
    assert "(its kind measured slower)" in line and line.endswith("| fallback 2 steps")
