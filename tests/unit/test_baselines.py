"""Baselines: what each one moves and recomputes, by name; never cheaper than what the planner chooses."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_augtree.config import MODES, AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.baselines import BASELINES, UNSHARED, baseline_plan
from megatron_augtree.planning.cluster import PRESETS, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import make_plan, price
from megatron_augtree.planning.schedule import Payload
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest, shapes

MODEL = ModelShape(4, 256, 1024, 4096, 4, 4, 64, 64)
GROUPS = ((16, (8, 8, 8)), (8, (16,)))
SHARED = forest(*[from_lengths(p, r) for p, r in GROUPS])


def flat(prompt: int, response: int) -> ForestShape:
    """A response with its own copy of the prompt."""
    return ForestShape((-1,), (prompt + response,), (response,), (1,))


FLAT = forest(*[flat(p, n) for p, r in GROUPS for n in r])
FLAT_GROUPS = [0, 0, 0, 1]


def plan_of(mode: str, world: int, degree: int = 0) -> Plan:
    shape, groups = (FLAT, FLAT_GROUPS) if mode in UNSHARED else (SHARED, [0, 1])
    plan = baseline_plan(mode, shape, groups, world, degree)
    plan.check(pairs=True)
    return plan


def moved(plan: Plan) -> int:
    """Key rows that travel in one layer's forward, all ranks together."""
    return sum(
        t.source.count
        for p in plan.passes
        for s in plan.program(p.id).stages
        for t in s.transfers
        if t.payload is Payload.KV
    )


def test_every_mode_but_augtree_is_a_baseline():
    assert set(BASELINES) == set(MODES) - {"augtree"} and set(UNSHARED) < set(BASELINES)


def test_ring_shares_nothing():
    plan = plan_of("ring", 2)
    assert [(p.kind, p.primitive, p.reads) for p in plan.passes] == [("fused", "ring", ())] * 4
    assert sum(plan.rows_of_rank(r) for r in range(2)) == FLAT.total_rows == 3 * 24 + 24
    assert moved(plan) == FLAT.total_rows  # each half goes to the other rank


def test_ring_reuse_moves_everything_once():
    plan = plan_of("ring-reuse", 4)
    assert [(p.kind, p.primitive) for p in plan.passes] == [("fused", "ring")] * 2
    assert sum(plan.rows_of_rank(r) for r in range(4)) == SHARED.total_rows
    assert moved(plan) == 3 * SHARED.total_rows


def test_gather_reuse_gathers_in_one_piece_what_is_needed():
    plan = plan_of("gather-reuse", 2)
    assert [(p.kind, p.primitive, p.pieces) for p in plan.passes] == [("fused", "gather_kv", 1)] * 2
    # Leaf rows everywhere see the whole spine. Of a leaf cut in two, three quarters travel: rank 0's late
    # rows need all of rank 1's, rank 1 needs rank 0's early ones.
    assert moved(plan) == sum(p + sum(n * 3 // 4 for n in r) for p, r in GROUPS)


def test_ring_reuse_per_response_rotates_the_prompt_for_each():
    plan = plan_of("ring-reuse-per-response", 2)
    assert [(p.kind, p.reads) for p in plan.passes] == [
        ("prefill", ()),
        *[("replay", (0,))] * 3,
        ("prefill", ()),
        ("replay", (4,)),
    ]
    assert {p.primitive for p in plan.passes} == {"ring"}
    assert moved(plan) == sum(p + sum(p + n for n in r) for p, r in GROUPS)
    assert [e.action for e in plan.events[:8]] == ["forward", *["forward", "backward"] * 3, "backward"]


@pytest.mark.parametrize("mode", BASELINES)
@pytest.mark.parametrize(("world", "degree"), [(1, 0), (2, 0), (4, 2), (4, 1), (6, 3), (3, 3), (8, 0)])
def test_replicas_take_groups_in_turn(mode, world, degree):
    plan = plan_of(mode, world, degree)
    size = degree or world
    blocks = {p.block for p in plan.passes}
    assert blocks <= {tuple(range(lo, lo + size)) for lo in range(0, world, size)}
    assert len(blocks) == min(2, world // size), "two groups keep two replicas busy"
    assert plan.note == f"degree {size}" and plan.mode == mode


@pytest.mark.parametrize("mode", BASELINES)
def test_a_degree_that_does_not_divide_the_pool(mode):
    with pytest.raises(InfeasiblePlanError, match="--context-parallel-size 3, 4 ranks"):
        baseline_plan(mode, SHARED, [0, 1], 4, 3)


@settings(max_examples=30, deadline=None)
@given(shapes(max_nodes=8), st.integers(1, 4))
def test_baselines_of_any_forest_check(shape, world):
    for mode in BASELINES:
        baseline_plan(mode, shape, list(range(len(shape.roots))), world, 0).check(pairs=True)


LENGTHS = st.one_of(st.integers(1, 64), st.integers(1, 4096))
BATCHES = st.lists(st.tuples(LENGTHS, st.lists(LENGTHS, min_size=1, max_size=5)), min_size=1, max_size=3)


@settings(max_examples=25, deadline=None)
@given(BATCHES, st.sampled_from((1, 2, 3, 4, 6)), st.sampled_from(sorted(PRESETS)))
@example([(1, [808])], 6, "a100")  # three ranks, neither a power of two nor the pool
def test_no_baseline_is_predicted_to_beat_the_chosen_plan(batch, world, cluster):
    # A single response shares nothing: its tree is one node.
    shared = forest(*[from_lengths(p, r) if len(r) > 1 else flat(p, *r) for p, r in batch])
    unshared = forest(*[flat(p, n) for p, r in batch for n in r])
    flat_groups = [group for group, (_, r) in enumerate(batch) for _ in r]
    prices = Prices(MODEL, preset(cluster))
    config = AugTreeConfig(cluster=cluster, memory_budget_gib=1e6)
    groups = list(range(len(batch)))
    chosen = price(make_plan(shared, MODEL, world, config, tree_groups=groups), prices)
    for mode in BASELINES:
        shape, tree_groups = (unshared, flat_groups) if mode in UNSHARED else (shared, groups)
        for degree in (d for d in range(1, world + 1) if world % d == 0):
            other = price(baseline_plan(mode, shape, tree_groups, world, degree), prices)
            assert chosen.time_ns <= other.time_ns, (mode, degree, chosen.plan.note)
