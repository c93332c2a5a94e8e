"""Trees in parts with a prompt copy each: how they are cut, on one block and over several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.data.workloads import rollout_trees
from megatron_augtree.planning import native
from megatron_augtree.planning.assign import assign
from megatron_augtree.planning.candidates import copies_of, split_inner
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.lanes import row_cost
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import make_plan, pairs_per_row, price
from megatron_augtree.planning.tree import ForestShape, from_lengths
from megatron_augtree.tools.lengths import Step, step_of_lengths, step_of_rollouts
from tests.unit.forests import forest, shapes
from tests.unit.job_cases import DRAWN, GQA

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=14)
UNITS = st.sampled_from((1, 50, 5000))


def by_leaf(shape: ForestShape, nodes: Sequence[int], copies: int, unit: int) -> list[tuple[int, ...]]:
    """Leaves dealt out by their own cost, each with what is above it."""
    leaves = split_inner(shape, nodes)[1]
    weights = [row_cost(shape, n, 0, shape.rows[n], unit) for n in leaves]
    where = assign(weights, [0] * min(copies, len(leaves)))
    parts = [[n for n, w in zip(leaves, where) if w == part] for part in range(copies)]
    return [tuple(sorted({n for leaf in part for n in shape.chain(leaf)})) for part in parts if part]


# How a tree is cut.


@settings(max_examples=100, deadline=None, phases=DRAWN)
@given(st.lists(st.builds(from_lengths, st.integers(0, 3000), LENGTHS), min_size=1, max_size=3),
       st.integers(2, 16), UNITS)  # fmt: skip
def test_responses_of_a_prompt_are_dealt_by_their_cost(trees, copies, unit):
    """One tree, a part of one, or several in a job."""
    shape = forest(*trees)
    for nodes in (*shape.trees, tuple(range(len(shape.rows)))):
        if len(split_inner(shape, nodes)[1]) > 1:
            parts = copies_of(shape, nodes, copies, unit)
            assert parts == by_leaf(shape, nodes, copies, unit)
        else:
            assert copies_of(shape, nodes, copies, unit) == [nodes]


@settings(max_examples=200, deadline=None, phases=DRAWN)
@given(shapes(max_nodes=24, max_rows=300), st.integers(2, 9), UNITS)
def test_every_part_holds_its_leaves_and_what_is_above_them(shape, copies, unit):
    """Every leaf is in one part; there are as many parts as leaves allow; nothing else is held; and parts of
    parts are parts."""
    for nodes in (*shape.trees, tuple(range(len(shape.rows)))):
        leaves = list(split_inner(shape, nodes)[1])
        parts = copies_of(shape, nodes, copies, unit)
        assert len(parts) <= min(copies, len(leaves))
        assert sorted(n for part in parts for n in part if n in leaves) == leaves
        for part in parts:
            mine = [n for n in part if n in leaves]
            assert part == tuple(sorted({n for leaf in mine for n in shape.chain(leaf)}))
            again = copies_of(shape, part, 2, unit)
            assert sorted(n for half in again for n in half if n in mine) == mine


#: A prompt, and conversations below it: two turns, then two answers each.
TALKS = ForestShape(
    parents=(-1, *(p for t in range(4) for p in (0, 1 + 4 * t, 2 + 4 * t, 2 + 4 * t))),
    rows=(100, *(40, 30, 20, 10) * 4),
    scored=(0, *(0, 30, 20, 10) * 4),
    ends=(0, *(0, 0, 1, 1) * 4),
)


@pytest.mark.parametrize("copies", (2, 4))
def test_what_hangs_together_stays_together(copies):
    """Each conversation is in one part; the prompt alone is in all."""
    parts = copies_of(TALKS, TALKS.subtree(0), copies, 10)
    held = [n for part in parts for n in part]
    assert len(parts) == copies and held.count(0) == copies
    assert all(held.count(n) == 1 for n in range(1, len(TALKS.rows)))


def test_what_is_too_much_for_a_part_is_cut_further_down():
    """Eight parts of four conversations: the nodes of each are in the two parts that share its answers. And
    one long conversation among short ones is cut alone."""
    parts = copies_of(TALKS, TALKS.subtree(0), 8, 10)
    assert sorted(parts) == sorted(TALKS.chain(n) for n in range(17) if not TALKS.children[n])
    long = ForestShape((-1, 0, 1, 1, 0, 4, 4), (10, 50, 4000, 3000, 50, 30, 30), (0,) * 7, (1,) * 7)
    parts = copies_of(long, range(7), 2, 10)
    assert sorted(parts) == [(0, 1, 2), (0, 1, 3, 4, 5, 6)]


# Multi-turn rollouts.


def rollouts(groups: int) -> Step:
    return step_of_rollouts(rollout_trees(groups, 0))


def planned(
    step: Step, world: int, limit: int = 0, mode: str = "augtree", force: str = "", cluster: str = "h100"
) -> Plan:
    trees = step.trees(mode)
    config = AugTreeConfig(degree=limit, cluster=cluster, memory_budget_gib=200, force=force)
    return make_plan(trees.shape, GQA, world, config, tree_groups=trees.tree_groups, mode=mode)


def test_subtrees_cost_less_than_leaves(engine):
    """Of groups under one policy, at any number of copies, by price."""
    shape = rollouts(8 if engine == "core" else 4).merged.shape
    prices = Prices(GQA, preset("h100"))
    unit, nodes = pairs_per_row(GQA, prices.cluster), shape.subtree(0)
    jobs = make_jobs(shape, prices, unit, 200 * GIB, Options(), world=8)
    for copies in (2, 4, 8) if engine == "core" else (4,):
        cost = [max(jobs.estimate(part, 8 // copies).cost for part in cut(shape, nodes, copies, unit))
                for cut in (copies_of, by_leaf)]
        assert cost[0] < 0.98 * cost[1], copies


@pytest.mark.skipif(native.core() is None, reason="Python takes long for so many nodes")
def test_groups_under_one_policy_are_not_slower_than_apart_under_dcp():
    """64 groups on 64 ranks, a single tree; and copies of it can be forced."""
    step = rollouts(64)
    chosen = planned(step, 64)
    assert len(step.merged.shape.roots) == 1 and chosen.mode == "augtree"
    apart = make_plan(
        step.single.shape, GQA, 64, AugTreeConfig(degree=4, cluster="h100", memory_budget_gib=200),
        tree_groups=step.single.tree_groups, mode="dcp-fused",
    )  # fmt: skip
    assert chosen.seconds < apart.seconds
    for copies in (4, 8, 16):
        forced = planned(step, 64, force=f"copies={copies}")
        assert copies_held(forced) == [copies] and chosen.seconds <= 1.01 * forced.seconds


def copies_held(plan: Plan) -> list[int]:
    """[tree] how many jobs hold its root."""
    jobs = [{n for p in job for n in plan.passes[p].nodes} for job in plan.jobs]
    return [sum(root in held for held in jobs) for root in plan.shape.roots]


# Over several blocks.

GROUPS = [(2000, [3000, 2500, 2800, 3100, 2900, 3300, 2700, 2600]), (1500, [3000] * 8), (4000, [5500] * 8)]


@pytest.mark.parametrize("cluster", ("h100", "cpu"))
def test_few_trees_use_all_ranks_under_a_small_limit(engine, cluster):
    """Three trees on 16 ranks in blocks of two: parts of a tree on as many blocks as it has ranks, at the
    price of the plan, and faster than peers that deal responses to all ranks."""
    step = step_of_lengths(GROUPS)
    plan = planned(step, 16, 2, cluster=cluster)
    plan.check()
    assert all(plan.rows_of_rank(rank) for rank in range(16))
    assert {len(p.block) for p in plan.passes} <= {1, 2} and min(copies_held(plan)) > 1
    assert price(plan, Prices(GQA, preset(cluster))).time_ns == round(plan.seconds * 1e9)
    leaves = sorted(n for job in plan.jobs for n in {n for p in job for n in plan.passes[p].nodes}
                    if not plan.shape.children[n])  # fmt: skip
    assert leaves == [n for n in range(len(plan.shape.rows)) if not plan.shape.children[n]]
    for mode in ("ring", "dynamic", "dcp-fused") if engine == "core" else ("ring",):
        assert plan.seconds <= planned(step, 16, 2, mode, cluster=cluster).seconds


@pytest.mark.parametrize(("world", "limit", "ranks"), ((16, 3, 16), (24, 2, 16), (6, 1, 4), (6, 4, 6)))
def test_pools_and_limits_that_are_no_powers_of_two(world, limit, ranks):
    """One tree: its parts are on the largest power of two of the pool, in blocks of powers of two; or on so
    many blocks of a degree that divides the pool."""
    step = step_of_lengths([(3000, [4000] * 16)])
    plan = planned(step, world, limit)
    plan.check()
    widths = {len(p.block) for p in plan.passes}
    assert max(widths) <= limit and (widths == {3} if ranks == 6 else widths <= {1, 2})
    assert sum(plan.rows_of_rank(rank) > 0 for rank in range(world)) == ranks


@pytest.mark.parametrize("stages", (1, 2))
@pytest.mark.parametrize(("world", "leaves"), ((3, 9), (6, 8), (6, 13), (12, 24), (24, 40)))
def test_copies_divide_blocks_that_are_no_powers_of_two(world, leaves, stages):
    """A prompt copy on 3, 6 or 12 parts is tried, too: forced, none is faster than the plan."""
    shape = from_lengths(409, [100 + 37 * i % 250 for i in range(leaves)])
    model = replace(GQA, layers=24, stages=stages)

    def seconds(force: str = "") -> float:
        config = AugTreeConfig(cluster="paper", memory_budget_gib=1000, force=force)
        return make_plan(shape, model, world, config, tree_groups=[0]).seconds

    parts = [n for n in range(2, world + 1) if world % n == 0 and n <= leaves]
    assert seconds() <= min(seconds(f"copies={n},degree={world}") for n in parts)


def test_a_single_response_stays_on_its_block():
    plan = planned(step_of_lengths([(9000, [800])]), 8, 2)
    assert {len(p.block) for p in plan.passes} == {2} and len(plan.jobs) == 1


def test_a_forced_degree_is_that_of_every_block():
    """Of all copies together where these are forced, too; no power of two counts in units of itself."""
    one = step_of_lengths([(3000, [4000] * 16)])
    for degree, world, used in ((2, 16, 16), (1, 8, 8), (3, 12, 12)):
        plan = planned(one, world, force=f"degree={degree}")
        assert {len(p.block) for p in plan.passes} == {degree}
        assert sum(plan.rows_of_rank(rank) > 0 for rank in range(world)) == used
    alone = planned(one, 16, force="degree=2,copies=1")
    assert copies_held(alone) == [1] and len(alone.jobs) == 1
    spread = planned(one, 16, 2, force="degree=8,copies=4")
    assert copies_held(spread) == [4] and {len(p.block) for p in spread.passes} == {2}


def test_forced_copies_hold_for_every_tree():
    """Trees that could share a pass with one prompt copy do not."""
    plan = planned(step_of_lengths([(40, [8] * 4)] * 12), 4, force="copies=2")
    assert set(copies_held(plan)) == {2}


@pytest.mark.parametrize(("force", "rule"), (
    ("degree=4", "degree / copies at most --context-parallel-size"),
    ("degree=8,copies=2", "degree / copies at most --context-parallel-size"),
    ("degree=32,copies=16", "degree is at most the pool"),
    ("copies=3", "copies divides degree"),
    ("copies=32", "copies divides degree"),
    ("copies=4,lane_degree=4", "lane_degree divides"),
))  # fmt: skip
def test_refusals_under_a_limit(force, rule):
    with pytest.raises(InfeasiblePlanError) as caught:
        planned(step_of_lengths(GROUPS), 16, 2, force=force)
    assert rule in caught.value.rule


def test_what_fits_nowhere_says_what_the_limit_allows():
    """The leanest plan is one on blocks within the limit; wider blocks are named where they would do."""
    step = step_of_lengths([(60000, [6000] * 4)])
    config = AugTreeConfig(degree=2, cluster="h100", memory_budget_gib=6)
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(step.merged.shape, GQA, 8, config, tree_groups=step.merged.tree_groups)
    assert "leanest plan (degree 2" in caught.value.values
    assert "use blocks of" in caught.value.remedy
    wide = int(caught.value.remedy.split("use blocks of ")[1].split()[0])
    config = AugTreeConfig(degree=wide, cluster="h100", memory_budget_gib=6)
    make_plan(step.merged.shape, GQA, max(8, wide), config, tree_groups=step.merged.tree_groups)


def test_the_budget_that_a_refusal_names_is_enough():
    """Estimates say a little more than what is then counted: between the two there is a plan."""
    shape = from_lengths(20000, [900, 700, 500, 300])
    with pytest.raises(InfeasiblePlanError) as caught:
        make_plan(shape, GQA, 8, AugTreeConfig(cluster="h100", memory_budget_gib=0.6), tree_groups=(0,))
    enough = float(caught.value.remedy.split("raise the budget to ")[1].split()[0]) + 0.001
    make_plan(shape, GQA, 8, AugTreeConfig(cluster="h100", memory_budget_gib=enough), tree_groups=(0,))
