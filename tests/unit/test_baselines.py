"""Baselines: what each one moves and recomputes, by name; never cheaper than what the planner chooses, never
dearer than a naive version of itself."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_augtree.config import MODES, AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning import recipe
from megatron_augtree.planning.baselines import (
    BASELINES,
    UNSHARED,
    Costs,
    baseline_plan,
    baseline_recipes,
    lean,
    modes,
    recipes_of,
    seatings,
    variants,
)
from megatron_augtree.planning.baselines.hybrid import degrees_by_rows, greedy, rounds, widths
from megatron_augtree.planning.cluster import PRESETS, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import collect, contiguous
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import make_plan, pairs_per_row, price
from megatron_augtree.planning.schedule import Payload
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest, shapes

MODEL = ModelShape(4, 256, 1024, 4096, 4, 4, 64, 64)
#: The paper's: 28 layers, 28 query heads, 4 KV heads.
LARGE = ModelShape(28, 3584, 18944, 152064, 28, 4, 128, 128, gated=True, item_bytes=2)
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
    assert [*BASELINES, "augtree"] == list(MODES) and set(UNSHARED) < set(BASELINES)


def test_the_readme_has_a_line_a_mode():
    lines = (Path(__file__).resolve().parents[2] / "README.md").read_text().splitlines()
    assert [sum(line.startswith(f"| `{mode}` |") for line in lines) for mode in MODES] == [1] * len(MODES)


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


def test_ring_reuse_two_pass_rotates_the_prompt_twice():
    plan = plan_of("ring-reuse-two-pass", 2)
    assert [(p.kind, p.primitive, p.reads) for p in plan.passes[:2]] == [
        ("prefill", "ring", ()),
        ("replay", "ring", (0,)),
    ]
    assert moved(plan) == sum(p + p + sum(r) for p, r in GROUPS)
    assert [e.action for e in plan.events[:4]] == ["forward", "forward", "backward", "backward"]


IN_TURN = ("ring", "ring-reuse", "ring-reuse-two-pass", "ring-reuse-per-response", "gather-reuse")


@pytest.mark.parametrize("mode", IN_TURN)
@pytest.mark.parametrize(("world", "degree"), [(1, 0), (2, 0), (4, 2), (4, 1), (6, 3), (3, 3), (8, 0)])
def test_replicas_take_groups_in_turn(mode, world, degree):
    plan = plan_of(mode, world, degree)
    size = degree or world
    blocks = {p.block for p in plan.passes}
    assert blocks <= {tuple(range(lo, lo + size)) for lo in range(0, world, size)}
    assert len(blocks) == min(2, world // size), "two groups keep two replicas busy"
    assert plan.note == f"degree {size}" and plan.mode == mode


@pytest.mark.parametrize("mode", BASELINES)
def test_a_degree_that_the_pool_does_not_have(mode):
    for degree in (3, 8):
        with pytest.raises(InfeasiblePlanError, match=f"--context-parallel-size {degree}, 4 ranks"):
            baseline_plan(mode, SHARED, [0, 1], 4, degree)
    if mode.startswith("dynamic"):
        baseline_plan(mode, SHARED, [0, 1], 6, 4)  # a power of two, though no divisor
    else:
        with pytest.raises(InfeasiblePlanError, match="--context-parallel-size 4, 6 ranks"):
            baseline_plan(mode, SHARED, [0, 1], 6, 4)


@settings(max_examples=20, deadline=None)
@given(shapes(max_nodes=8), st.integers(1, 4), st.integers(0, 9))
def test_baselines_of_any_forest_check(shape, world, pick):
    """What every mode runs, and one of its other choices."""
    groups, rules = list(range(len(shape.roots))), {"mode": "ring", "shape": shape, "world": world}
    for mode in BASELINES:
        baseline_plan(mode, shape, groups, world, 0).check(pairs=True)
        made = list(variants(mode, shape, groups, world))
        for recipes, events, _ in (made[pick % len(made)], lean(made[-1])):
            recipe.plan_of(recipes, events, pairs_per_row=1, **rules).check(pairs=True)


LENGTHS = st.one_of(st.integers(1, 64), st.integers(1, 4096))
BATCHES = st.lists(st.tuples(LENGTHS, st.lists(LENGTHS, min_size=1, max_size=5)), min_size=1, max_size=3)


# Dynamic degrees; tests/mcore/test_hybrid_cp.py compares the rounds with megatron-core's own.


def test_degrees_follow_rows():
    lengths = 0, 1, 100, 101, 200, 201, 400, 401, 9999
    assert degrees_by_rows(lengths, 100, 8) == [1, 1, 1, 2, 2, 4, 4, 8, 8]
    assert degrees_by_rows((400, 401), 100, 6) == [4, 6]
    assert widths(1) == [1] and widths(6) == [1, 2, 4, 6] and widths(8) == [1, 2, 4, 8]


def test_greedy_takes_the_block_that_is_free_first():
    """8 on ranks 0-1, then 9 on 2, 7 on 3, 2 and 1 where least is done: after 4 rows of 8 on two ranks."""
    seats = greedy([1, 2, 1, 1, 1], [9, 8, 7, 2, 1], 4)
    assert seats == [(1, 0, 2), (0, 2, 1), (2, 3, 1), (3, 0, 1), (4, 1, 1)]
    assert greedy([3, 2, 1], [6, 4, 1], 3) == [(0, 0, 3), (1, 0, 2), (2, 2, 1)]


def test_dynamic_gives_ranks_by_length():
    """Lengths 32, 8, 8, 8 at most 8 rows a rank: four ranks, then one each."""
    shape = forest(*[flat(n - 2, 2) for n in (8, 32, 8, 8)])
    plan = baseline_plan("dynamic", shape, [0, 0, 0, 0], 4, 4)
    plan.check(pairs=True)
    assert [p.nodes for p in plan.passes if len(p.block) == 4] == [frozenset([1])]
    notes = {
        note.rpartition(", ")[2]: [(r.leaves, r.start, r.width) for r in recipes]
        for recipes, _, note in variants("dynamic", shape, [0] * 4, 4, degrees=[4])
    }
    # Megatron's second round has three sequences for four ranks, and widens the first of them.
    assert notes["2 rounds"] == [((1,), 0, 4), ((0,), 0, 2), ((2,), 2, 1), ((3,), 3, 1)]
    assert notes["greedy"] == [((1,), 0, 4), ((0,), 0, 1), ((2,), 1, 1), ((3,), 2, 1)]
    # One sequence does not leave three ranks idle: it is widened.
    (alone,) = baseline_recipes("dynamic", forest(flat(30, 2)), [0], 4, 1)[0]
    assert (alone.start, alone.width) == (0, 4)


def test_a_pool_that_is_no_power_of_two_is_filled_as_far_as_teams_fit():
    (round_,) = rounds([400, 150], 100, 7)
    assert [(seat.start, seat.width) for seat in round_] == [(0, 4), (4, 2)]
    (round_,) = rounds([400, 150], 100, 8)
    assert [(seat.start, seat.width) for seat in round_] == [(0, 4), (4, 4)]
    (round_,) = rounds([900], 100, 6)
    assert [(seat.start, seat.width) for seat in round_] == [(0, 6)]


# Balanced blocks.


def test_dcp_balances_whole_leaves_and_splits_the_long_one():
    """P = 8 and responses of 64, 8, 8, 8 on four ranks: whole leaves leave three ranks waiting."""
    shape = from_lengths(8, (64, 8, 8, 8))
    plans = {mode: baseline_plan(mode, shape, [0], 4, 0) for mode in ("dcp-fused", "dcp-phased")}
    for plan in plans.values():
        plan.check(pairs=True)
        assert max(plan.rows_of_rank(r) for r in range(4)) <= 2 * min(plan.rows_of_rank(r) for r in range(4))
        assert {p.primitive for p in plan.passes} == {"gather_kv"}
    assert [[p.kind for p in plan.passes] for plan in plans.values()] == [["fused"], ["prefill", "replay"]]


def test_dcp_deals_trees_out_longest_first_where_turns_are_worse():
    """Groups of 90, 10, 80 and 10 rows on two replicas: turns would put 170 rows on one of them."""
    shape = forest(*[from_lengths(n - 5, (4, 2)) for n in (90, 10, 80, 10)])
    made = [baseline_plan(mode, shape, range(4), 2, 1) for mode in ("gather-reuse", "dcp-fused")]
    loads = [[plan.rows_of_rank(rank) for rank in range(2)] for plan in made]
    assert max(loads[0]) - min(loads[0]) > 100 and max(loads[1]) - min(loads[1]) <= 20


def test_trees_share_a_pass_where_passes_cost_more_than_waiting():
    shape = forest(*[from_lengths(20, (4, 4)) for _ in range(3)])
    for per_pass, passes in ((10**9, 1), (0, 3)):
        costs = Costs(
            1, lambda s, r, _, each=per_pass: (each * len(r) + sum(len(x.inner) ** 2 for x in r), 1)
        )
        assert len(baseline_plan("dcp-fused", shape, range(3), 2, 0, costs).passes) == passes


# Prices.


def costs_of(name: str, world: int, budget: int = 0) -> Costs:
    prices = Prices(LARGE, preset(name))
    unit = pairs_per_row(LARGE, prices.cluster)

    def of(shape, recipes, events):
        rules = {"mode": "ring", "shape": shape, "world": world, "pairs_per_row": unit}
        priced = price(recipe.plan_of(recipes, events, **rules), prices)
        return priced.time_ns, priced.peak_bytes

    return Costs(unit, of, budget, LARGE, prices.cluster)


def price_of(mode, shape, groups, world, name, degree=0):
    plan = baseline_plan(mode, shape, groups, world, degree, costs_of(name, world))
    return price(plan, Prices(LARGE, preset(name)))


def batch(seed: int) -> list[tuple[int, tuple[int, ...]]]:
    draw = random.Random(seed)
    return [
        (
            draw.choice((100, 1000, 4000)) + draw.randint(0, 99),
            tuple(draw.randint(50, 1500) for _ in range(4)),
        )
        for _ in range(draw.randint(2, 4))
    ]


def forests(groups) -> dict[bool, tuple[ForestShape, list[int]]]:
    """Un-shared or not -> forest and the group of each tree."""
    return {
        True: (
            forest(*[flat(p, n) for p, r in groups for n in r]),
            [g for g, (_, r) in enumerate(groups) for _ in r],
        ),
        False: (forest(*[from_lengths(p, r) for p, r in groups]), list(range(len(groups)))),
    }


def in_one_piece(plan: Plan) -> Plan:
    """Naive: every node cut into one run a rank, so that early ranks wait for late ones."""
    passes = []
    for p in plan.passes:
        nodes = sorted(p.nodes)
        pieces = [
            piece
            for n in nodes
            for piece in enumerate(contiguous(n, 0, plan.shape.rows[n], [1] * len(p.block)))
        ]
        passes.append(replace(p, placement=collect(len(p.block), pieces)))
    return replace(plan, passes=tuple(passes), _programs={})


@pytest.mark.parametrize("name", ["h100", "paper", "cpu"])
@pytest.mark.parametrize("seed", range(3))
def test_no_baseline_is_dearer_than_a_naive_version_of_itself(seed, name):
    """At degree 4 of 8 ranks. Ring and packs: not in zigzag. Dynamic: one degree for all. Balanced blocks:
    every leaf over all ranks, groups in turn. The paper: responses to lanes in turn."""
    made, world, degree = forests(batch(seed)), 8, 4
    times = {mode: price_of(mode, *made[mode in UNSHARED], world, name, degree).time_ns for mode in BASELINES}
    for mode in IN_TURN:
        plan = baseline_plan(mode, *made[mode in UNSHARED], world, degree)
        assert times[mode] <= price(in_one_piece(plan), Prices(LARGE, preset(name))).time_ns, mode
    for mode, fixed in (("dynamic", "ring"), ("dynamic-reuse", "gather-reuse")):
        free = price_of(mode, *made[mode in UNSHARED], world, name).time_ns
        assert free <= min(times[mode], times[fixed]), mode
    assert times["dcp-fused"] <= times["gather-reuse"]
    assert times["dcp-phased"] <= times["ring-reuse-two-pass"]


@pytest.mark.parametrize("mode", BASELINES)
def test_what_a_mode_runs_is_its_first_variant(mode):
    shape, groups = forests(batch(0))[mode in UNSHARED]
    made = list(variants(mode, shape, groups, 4, costs_of("h100", 4), degrees=[2]))
    assert made[0] == baseline_recipes(mode, shape, groups, 4, 2, costs_of("h100", 4))
    if mode in modes.SEATED:
        found = [
            recipes_of(mode, shape, seating)
            for seating in seatings(mode, shape, groups, 4, costs_of("h100", 4), degrees=[2])
        ]
        assert sorted(map(str, found)) == sorted(map(str, made)) and len(made) >= 2


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
    costs = Costs(pairs_per_row(MODEL, prices.cluster))
    for mode in (mode for mode in BASELINES if mode != "dynamic"):
        shape, tree_groups = (unshared, flat_groups) if mode in UNSHARED else (shared, groups)
        degrees = widths(world) if mode == "dynamic-reuse" else range(1, world + 1)
        for degree in (d for d in degrees if mode == "dynamic-reuse" or world % d == 0):
            other = price(baseline_plan(mode, shape, tree_groups, world, degree, costs), prices)
            assert chosen.time_ns <= other.time_ns, (mode, degree, chosen.plan.note)
