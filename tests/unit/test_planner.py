"""The planner: the same plan everywhere, within the budget, obeying what is forced."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import FORCE_KEYS, MODES, AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Span
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import make_plan, pairs_per_row, price
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest, shapes

SMALL = ModelShape(4, 256, 1024, 4096, 4, 4, 64, 64)
ONE = from_lengths(64, [16, 9, 30, 8, 24])
TWO = forest(from_lengths(24, [8, 8, 20]), from_lengths(16, [40, 8, 9, 4]))
DEEP = ForestShape((-1, 0, 1, 1, 0), (40, 30, 14, 22, 65), (0, 12, 14, 22, 65), (0, 0, 1, 1, 1))
#: Where budgets are not the question.
AMPLE = 1e6


def plan_of(
    shape: ForestShape,
    world: int,
    *,
    model: ModelShape = SMALL,
    cluster: str = "h100",
    degree: int = 0,
    force: str = "",
    budget: float = AMPLE,
    recompute: str = "auto",
) -> Plan:
    config = AugTreeConfig(
        degree=degree, force=force, cluster=cluster, memory_budget_gib=budget, recompute=recompute
    )
    return make_plan(shape, model, world, config, tree_groups=list(range(len(shape.roots))))


# The same plan everywhere.

SCRIPT = """
from tests.unit.test_planner import DEEP, ONE, TWO, plan_of
for shape in (ONE, TWO, DEEP):
    for world in (2, 4):
        print(plan_of(shape, world).digest())
"""


def test_the_same_plan_in_every_process():
    """Hash seeds differ between processes; sets and dictionaries must not decide anything."""
    root = Path(__file__).resolve().parents[2]
    printed = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        ).stdout.split()
        for seed in ("1", "77")
    ]
    here = [plan_of(shape, world).digest() for shape in (ONE, TWO, DEEP) for world in (2, 4)]
    assert printed == [here, here] and len(set(here)) == len(here)


def test_lengths_alone_decide():
    plan = plan_of(ONE, 2)
    assert plan == plan_of(ONE, 2) and plan.digest() == plan_of(replace(ONE), 2).digest()
    assert plan.digest() != plan_of(from_lengths(64, [16, 9, 30, 8, 25]), 2).digest()
    assert plan.digest() != plan_of(ONE, 2, cluster="h200").digest(), "the constants are part of the digest"


@settings(max_examples=40, deadline=None)
@given(shapes(max_nodes=8, max_rows=40), st.integers(1, 4))
def test_every_plan_checks(shape, world):
    plan = plan_of(shape, world)
    plan.check(pairs=True)
    assert plan.world == world and plan.shape == shape
    assert plan.seconds == price(plan, Prices(SMALL, preset("h100"))).time_ns / 1e9


@pytest.mark.parametrize("world", (3, 5, 6, 8, 24))
@pytest.mark.parametrize(
    "shape",
    (from_lengths(4096, [700, 90, 300]), from_lengths(1, [2, 2]), from_lengths(0, [4096])),
    ids=("tree", "tiny", "one sequence"),
)
def test_pools_that_are_no_power_of_two(shape, world):
    plan = plan_of(shape, world)
    plan.check(pairs=True)
    assert all(len(p.block) <= world for p in plan.passes)


def test_blocks_stay_within_context_parallel_size():
    shape = from_lengths(65536, [64, 64, 64, 64])
    assert max(len(p.block) for p in plan_of(shape, 4).passes) == 4
    for degree in (1, 2, 3):
        plan = plan_of(shape, 4, degree=degree)
        assert max(len(p.block) for p in plan.passes) <= degree
    # Two wide trees whose baseline on the whole pool would be the cheapest of all: it is no candidate either.
    pair = forest(from_lengths(0, [65536]), from_lengths(0, [65536]))
    assert max(len(p.block) for p in plan_of(pair, 4, degree=2).passes) <= 2


# Memory.


def test_peak_memory_by_hand():
    """One pass: what it keeps and one layer's work; phased: the prefill stays while the waves come and go."""
    prices, unit = Prices(SMALL, preset("h100")), 100
    shape = from_lengths(32, [8, 8])
    fused = price(build(Choice(degree=1), shape, 1, unit), prices).peak_bytes
    layer = SMALL.layers * SMALL.saved_bytes
    logits = 4096 * 4
    base = preset("h100").base_bytes
    assert fused == base + 48 * layer + 16 * logits * 2 + 48 * SMALL.saved_bytes * 9 // 4 + 16 * logits
    gradients = SMALL.layers * 4 * 128 * 4
    waves = price(build(Choice(degree=1, phase="phased", waves=2), shape, 1, unit), prices).peak_bytes
    kept = 32 * (layer + gradients)
    wave = kept + 8 * layer + 8 * logits * 2 + 8 * logits + 8 * SMALL.saved_bytes * 9 // 4
    assert waves == base + max(wave, kept + 32 * SMALL.saved_bytes * 9 // 4)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4000),
    st.lists(st.integers(1, 2000), min_size=2, max_size=5),
    st.sampled_from((1, 2, 4)),
    st.floats(0.3, 1.2),
)
def test_the_budget_is_never_exceeded(prompt, responses, world, factor):
    shape = from_lengths(prompt, responses)
    free = plan_of(shape, world)
    budget = factor * free.peak_bytes / GIB
    prices = Prices(SMALL, preset("h100"))
    try:
        plan = plan_of(shape, world, budget=budget)
    except InfeasiblePlanError as error:
        # Refused only where the leanest plan of each kind is over the budget too.
        assert "no plan fits" in error.what and factor < 1
        for choice in (Choice(degree=world, keep=False), Choice(degree=world, lane_degree=world, keep=False)):
            assert price(build(choice, shape, world, 100), prices).peak_bytes > budget * GIB
    else:
        assert plan.peak_bytes <= budget * GIB
        assert plan.peak_bytes == price(plan, prices).peak_bytes
        assert plan.seconds >= free.seconds


def test_a_tight_budget_finds_the_lean_plan_behind_fast_fat_ones():
    """The fastest candidates hold a prompt copy a rank, and so do their variants; one shared spine fits."""
    shape = from_lengths(64, [16] * 4)
    unit, prices = pairs_per_row(SMALL, preset("h100")), Prices(SMALL, preset("h100"))
    assert copies(plan_of(shape, 4)) == {4}
    waves = Choice(degree=4, phase="phased", waves=2, keep=False)
    lean = price(build(waves, shape, 4, unit), prices)
    plan = plan_of(shape, 4, budget=lean.peak_bytes / GIB, recompute="flags")
    assert plan.peak_bytes <= lean.peak_bytes and plan.seconds <= lean.time_ns / 1e9
    assert "phased" in plan.note


def test_an_impossible_budget_names_what_does_not_fit():
    """Case 54: the flag with its value, the leanest plan and what it needs, and the longest item."""
    shape = from_lengths(600, [40, 400])
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(shape, 2, budget=0.001)
    text = str(caught.value)
    assert "--augtree-memory-budget-gib 0.001" in text and "1000 rows (ends in node 2)" in text
    assert "degree 2" in text and "GiB" in text and caught.value.remedy.startswith("raise the budget")


def test_the_smallest_and_the_largest_budget():
    """Less than a byte is no licence to use everything; a number beyond any memory limits nothing."""
    for budget in (5e-324, 1e-12, 0.9 / GIB):
        with pytest.raises(InfeasiblePlanError, match=r"budget-gib 9\.313e-10"):
            plan_of(ONE, 2, budget=budget)
    assert plan_of(ONE, 2, budget=1.7e308) == plan_of(ONE, 2)
    empty, tiny = ForestShape((), (), (), ()), AugTreeConfig(memory_budget_gib=1e-12)
    for mode in MODES:
        nothing = make_plan(empty, SMALL, 2, tiny, tree_groups=[], mode=mode)
        assert nothing.passes == () and nothing.peak_bytes == 0


def test_the_prompt_is_charged_in_every_block_that_holds_it():
    """Case 54: P = 6, R = [4, 4]: two copies hold 10 rows a rank, one block 7."""
    shape, prices = from_lengths(6, [4, 4]), Prices(SMALL, preset("h100"))
    copies = build(Choice(degree=1, copies=2), shape, 2, 10)
    assert [copies.rows_of_rank(r) for r in range(2)] == [10, 10]
    block = build(Choice(degree=2), shape, 2, 10)
    assert [block.rows_of_rank(r) for r in range(2)] == [7, 7]
    assert price(copies, prices).peak_bytes > price(block, prices).peak_bytes
    waves = build(Choice(degree=1, phase="phased", waves=2), shape, 1, 10)
    assert [sorted(p.nodes) for p in waves.passes] == [[0], [1], [2]] and waves.provides == {0}


# Forced.


def jobs(plan: Plan, *kinds: str) -> set[int]:
    return {sum(plan.passes[p].kind in kinds for p in job) for job in plan.jobs}


def primitives(plan: Plan) -> set[str]:
    return {p.primitive for p in plan.passes}


def copies(plan: Plan) -> set[int]:
    return {
        sum(any(root in plan.passes[p].nodes for p in job) for job in plan.jobs) for root in plan.shape.roots
    }


FORCED = {
    "degree=1": lambda plan: {len(p.block) for p in plan.passes} == {1},
    "degree=2": lambda plan: {len(p.block) for p in plan.passes} == {2},
    "degree=3": lambda plan: 3 in {len(p.block) for p in plan.passes},
    "degree=4": lambda plan: {len(p.block) for p in plan.passes} == {4},
    "lane_degree=2": lambda plan: "lanes of 2" in plan.note,
    "degree=4,lane_degree=4": lambda plan: (
        "lanes of 4" in plan.note and {len(p.block) for p in plan.passes} == {4}
    ),
    "copies=2": lambda plan: 2 in copies(plan),
    "degree=4,copies=2": lambda plan: copies(plan) == {2} and {len(p.block) for p in plan.passes} == {2},
    "degree=4,copies=4": lambda plan: 4 in copies(plan) and primitives(plan) == {"local"},
    "primitive=gather_kv": lambda plan: primitives(plan) >= {"gather_kv"},
    "primitive=move_kv": lambda plan: primitives(plan) >= {"move_kv"},
    "primitive=move_q": lambda plan: primitives(plan) >= {"move_q"},
    "degree=1,primitive=local": lambda plan: primitives(plan) == {"local"},
    "pieces=2": lambda plan: {p.pieces for p in plan.passes if p.primitive == "gather_kv"} == {2},
    "keep_layers=1,keep_attention=2": lambda plan: (
        {(p.keep_layers, p.keep_attention) for p in plan.passes} == {(1, 2)}
    ),
    "keep_layers=0": lambda plan: {(p.keep_layers, p.keep_attention) for p in plan.passes} == {(0, 0)},
    "phase=fused": lambda plan: jobs(plan, "fused") == {1},
    "phase=phased": lambda plan: min(jobs(plan, "replay")) >= 1 and jobs(plan, "fused") == {0},
    "chunks=2": lambda plan: 2 in jobs(plan, "chunk"),
    "chunks=1": lambda plan: jobs(plan, "prefill") == {1},
    "waves=3": lambda plan: 3 in jobs(plan, "replay"),
    "degree=2,chunks=3,waves=2,primitive=move_q": lambda plan: (
        3 in jobs(plan, "chunk") and 2 in jobs(plan, "replay") and "move_q" in primitives(plan)
    ),
}


@pytest.mark.parametrize("shape", (ONE, TWO), ids=("one tree", "two trees"))
@pytest.mark.parametrize("force", FORCED)
def test_what_is_forced_is_done(force, shape):
    plan = plan_of(shape, 4, force=force)
    plan.check(pairs=True)
    assert FORCED[force](plan), str(plan)


def test_every_key_is_among_the_forced_ones():
    assert {item.split("=")[0] for force in FORCED for item in force.split(",")} == set(FORCE_KEYS)


REFUSED = {
    "degree=5": "at most --context-parallel-size",
    "degree=4,copies=3": "copies divides degree",
    "copies=3": "copies divides degree",
    "degree=4,lane_degree=3": "lane_degree divides",
    "degree=2,lane_degree=4": "lane_degree divides",
    "degree=4,copies=2,lane_degree=4": "lane_degree divides",
    "phase=fused,waves=2": "belong to phase=phased",
    "phase=fused,chunks=2": "belong to phase=phased",
    "phase=fused,primitive=move_q": "belong to phase=phased",
    "degree=2,primitive=local": "blocks of one rank",
    "primitive=local": "blocks of one rank",
    "degree=1,primitive=move_kv": "ranks for the primitive",
    "degree=1,primitive=move_q": "ranks for the primitive",
    "waves=6": "leaves for copies and waves",
    "degree=8,copies=8": "leaves for copies and waves",
    "chunks=65": "spine rows for chunks",
}


@pytest.mark.parametrize("force", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_reason(force):
    world = 8 if "8" in force else 4
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_of(ONE, world, force=force)
    assert REFUSED[force] in caught.value.rule
    assert f"--augtree-force {force!r}, {world} ranks, 1 tree, 5 leaves" in caught.value.values


@pytest.mark.parametrize("force", ("phase=phased", "waves=1", "chunks=1", "primitive=move_q"))
def test_a_phased_plan_needs_something_shared(force):
    with pytest.raises(InfeasiblePlanError, match="needs a shared prompt"):
        plan_of(from_lengths(0, [9, 5]), 2, force=force)


def test_force_and_budget_together():
    with pytest.raises(InfeasiblePlanError, match="no plan fits"):
        plan_of(ONE, 2, force="degree=2,phase=fused", budget=1e-4)


# Prices.


def test_trees_of_different_size_get_blocks_of_their_own():
    """Two equal trees on two ranks: no traffic at all is cheapest, one tree a rank."""
    pair = forest(from_lengths(512, [64, 64]), from_lengths(512, [64, 64]))
    plan = plan_of(pair, 2)
    assert primitives(plan) == {"local"} and {p.block for p in plan.passes} == {(0,), (1,)}
    assert sorted(sum((list(p.nodes) for p in plan.passes), [])) == [*range(6)]


def test_the_price_of_a_plan_is_its_slowest_ranks():
    prices = Prices(SMALL, preset("h100"))
    pair = forest(from_lengths(512, [64, 64]), from_lengths(16, [8, 8]))
    both = price(build(Choice(degree=1), pair, 2, 100), prices)
    alone = price(build(Choice(degree=1), from_lengths(512, [64, 64]), 2, 100), prices)
    assert both.time_ns == alone.time_ns and both.peak_bytes == alone.peak_bytes
    assert both.plan.passes[0].placement == ((Span(0, 0, 512), Span(1, 0, 64), Span(2, 0, 64)),)
    one_rank = price(build(Choice(degree=1, together=False), pair, 1, 100), prices)
    assert one_rank.time_ns > both.time_ns
