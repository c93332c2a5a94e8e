"""Lock-step: all ranks play the same passes, at the price of the slowest of each; or a plan is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning import native
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import NS, PassPrice, Prices
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.lock_step import check_in_step, in_step, lock_step_ns, obeys
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.plan import Event, Plan
from megatron_augtree.planning.planner import decide, explain, make_plan, price
from megatron_augtree.planning.pool import Arrangement
from megatron_augtree.planning.recipe import Decision
from megatron_augtree.planning.rounds import LockStep
from megatron_augtree.planning.timeline import timeline
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest
from tests.unit.job_cases import DRAWN, GQA, HUGE, SMALL
from tests.unit.test_pool import Batch, batches

H100 = Prices(SMALL, preset("h100"))
RAGGED = [from_lengths(n, [n // 2, n // 3, 900]) for n in (9000, 7000, 6000, 4000, 3000, 2500, 2000, 300)]
CONFIG = AugTreeConfig(cluster="h100", lock_step=True)


def sequences(plan: Plan) -> list[list[Event]]:
    """[rank] the events that it plays."""
    return [[e for e in plan.events if rank in plan.passes[e.pass_id].block] for rank in range(plan.world)]


def blocks_of(plan: Plan) -> list[tuple[int, ...]]:
    """[pass] its ranks."""
    return [p.block for p in plan.passes]


def in_turns_ns(plan: Plan, prices: Prices) -> int:
    """The time of lock-step, event by event over all ranks, from passes counted one by one."""
    def load(p):
        states = [plan.passes[read].placement for read in p.reads]
        return PassLoads(plan.shape, p, states, prices.cluster.node_ranks)

    price = [PassPrice(prices, load(p), provides=False) for p in plan.passes]
    times = [x.time(prices.pair(x.p)) for x in price]
    bare = [x.time(prices.pair(x.p), vocabulary=False) for x in price]
    columns = list(zip(*sequences(plan), strict=True))
    lasts = [max(times[p][action == "backward"] for action, p in column) for column in columns]
    slots = []
    for column in columns:
        if column[0].action == "forward":
            back = next(other for other in columns if other[0] == Event("backward", column[0].pass_id))
            slots.append(max(bare[p][0] for _, p in column) + max(bare[p][1] for _, p in back))
    return sum(lasts) + (prices.model.stages - 1) * max(slots)


def degrees(batch: Batch) -> list[int]:
    return [d for d in range(1, batch.limit + 1) if batch.world % d == 0]


@settings(max_examples=40, deadline=None, phases=DRAWN)
@given(batches((1, 2, 4, 8, 6, 12)))
def test_all_ranks_play_the_same_passes_at_the_price_of_the_slowest(batch):
    """Every rank plays as many passes, of the same kinds, in the same order; a leaf is in one job; time and
    memory are those of the plan. Where nothing is found, a block would have no leaf, or none fits."""
    leaves = [n for n, below in enumerate(batch.shape.children) if not below]
    lock_step = LockStep(batch.pool)
    try:
        found = list(lock_step.arrangements())
    except InfeasiblePlanError as error:
        assert all(batch.world // degree > len(leaves) for degree in degrees(batch))
        assert all((error.what, error.values, error.rule, error.remedy))
        return
    assert found or lock_step.leanest.peak > batch.room
    for arrangement in found:
        plan = batch.plan(arrangement)
        plan.check()
        assert obeys(blocks_of(plan), plan.events, plan.world)
        kinds = [[(e.action, plan.passes[e.pass_id].kind) for e in events] for events in sequences(plan)]
        assert kinds[0] and all(mine == kinds[0] for mine in kinds)
        held = sorted(n for x in arrangement.placed for n in x.job.nodes if n in set(leaves))
        assert held == leaves
        widths = {x.width for x in arrangement.placed}
        assert max(widths) <= batch.limit
        assert not arrangement.name.startswith("lock-step") or len(widths) == 1
        assert arrangement.time_ns == lock_step_ns(plan, batch.prices) == in_turns_ns(plan, batch.prices)
        if batch.prices.model.stages == 1:
            assert arrangement.time_ns >= price(plan, batch.prices).time_ns
        peak = arrangement.peak_bytes + batch.prices.cluster.base_bytes
        assert arrangement.peak_bytes <= batch.room and peak == price(plan, batch.prices).peak_bytes


def best_of(batch: Batch) -> Arrangement:
    return min(LockStep(batch.pool).arrangements(), key=lambda x: x.time_ns)


def rounds(arrangement: Arrangement) -> int:
    """Jobs of a block."""
    return sum(x.start == 0 for x in arrangement.placed)


def test_the_cheaper_number_of_passes_is_chosen(engine):
    """Small trees share one pass a rank; where memory does not hold them together, in as few as fit."""
    batch = Batch(forest(*[from_lengths(40, [8, 8]) for _ in range(12)]), H100, 2, 2, HUGE)
    batch = replace(batch, options=Options(whole=-2, phased=0))
    ample = best_of(batch)
    assert rounds(ample) == 1 and len(ample.placed) == 2
    tight = best_of(replace(batch, room=ample.peak_bytes * 2 // 3))
    assert rounds(tight) > 1 and tight.time_ns > ample.time_ns
    assert tight.peak_bytes <= ample.peak_bytes * 2 // 3


def test_a_pipeline_wants_more_and_equal_slots(engine):
    """Filling and draining adds the longest pass, so more passes pay, and they are nearly as long."""
    trees = forest(*[from_lengths(9000, [900, 900]) for _ in range(4)])
    models = [replace(GQA, stages=stages) for stages in (1, 4)]
    flat, deep = (Batch(trees, Prices(model, preset("h100")), 2, 2, HUGE, 16) for model in models)
    shallow, piped = best_of(flat), best_of(deep)
    passes = [len(sequences(batch.plan(x))[0]) // 2 for batch, x in ((flat, shallow), (deep, piped))]
    assert passes[1] > passes[0]


def cheapest_dealing(batch: Batch) -> int | None:
    """The least time of every degree, number of rounds and dealing of whole trees, each job at its best."""
    trees, best, times = batch.shape.trees, cache(batch.pool.jobs.best), []
    for degree in degrees(batch):
        blocks = batch.world // degree
        for count in range(1, len(trees) // blocks + 1):
            places = range(blocks * count)
            for where in product(places, repeat=len(trees)):
                dealt = list(zip(trees, where))
                held = [tuple(n for tree, w in dealt if w == place for n in tree) for place in places]
                offers = [best(nodes, degree) if nodes else None for nodes in held]
                if None not in offers:
                    time = [offer.time for offer in offers]
                    times.append(sum(max(time[k * blocks : (k + 1) * blocks]) for k in range(count)))
    return min(times, default=None)


@pytest.mark.parametrize("room", [HUGE, 20 * GIB, 10 * GIB])
@pytest.mark.parametrize("seed", range(4))
def test_no_dealing_of_trees_is_much_cheaper(seed, room):
    """Against all dealings of fused jobs: within 1 %, and where none fits, none is found."""
    draw = random.Random(seed)
    trees = [
        from_lengths(draw.randint(100, 20000), [draw.randint(50, 4000) for _ in range(draw.randint(1, 6))])
        for _ in range(4)
    ]
    fused = Options(copies=1, phased=0)
    batch = Batch(forest(*trees), Prices(GQA, preset("h100")), 4, 4, room, options=fused)
    least, found = cheapest_dealing(batch), list(LockStep(batch.pool).arrangements())
    assert bool(found) == (least is not None)
    if found:
        assert 100 * min(x.time_ns for x in found) <= 101 * least


def test_a_long_tree_is_played_in_parts():
    """One tree of many leaves beside small ones: blocks of one rank each take a part, a prompt copy each."""
    shape = forest(from_lengths(64, [2000] * 16), from_lengths(64, [500]))
    batch = Batch(shape, H100, 8, 1, HUGE)
    found = best_of(batch)
    assert found.name.endswith("copies")
    assert sum(shape.roots[0] in x.job.nodes for x in found.placed) > 1
    with pytest.raises(InfeasiblePlanError, match="lock-step"):
        best_of(replace(batch, options=Options(copies=1)))


# Settings.


def plan_for(shape: ForestShape, world: int, config: AugTreeConfig = CONFIG, **more) -> Plan:
    plan = make_plan(shape, SMALL, world, config, tree_groups=range(len(shape.roots)), **more)
    check_in_step(plan)
    return plan


def test_settings_decide(engine):
    """A tiny sequence is fastest on one rank while others idle; with the flag it is played by all."""
    shape = from_lengths(0, [20])
    free = make_plan(shape, SMALL, 8, replace(CONFIG, lock_step=False), tree_groups=[0])
    plan = plan_for(shape, 8)
    assert {len(p.block) for p in free.passes} == {1} and {len(p.block) for p in plan.passes} == {8}
    assert free.seconds < plan.seconds == in_turns_ns(plan, H100) / NS
    with pytest.raises(InfeasiblePlanError, match="ranks play 0 to 1 pass"):
        check_in_step(free)


def test_it_costs_what_waiting_costs():
    """Where the planner's own choice keeps step, it is the choice; a plan in lock-step is never faster than
    its own passes without waiting."""
    shape = forest(from_lengths(30000, [900]), *[from_lengths(6000, [300]) for _ in range(4)])
    free = make_plan(shape, SMALL, 4, replace(CONFIG, lock_step=False), tree_groups=range(5))
    plan = plan_for(shape, 4)
    assert obeys(blocks_of(free), free.events, 4) and plan.seconds <= in_turns_ns(free, H100) / NS
    assert price(plan, H100).time_ns <= lock_step_ns(plan, H100)


@pytest.mark.parametrize(
    "force",
    ["degree=2", "degree=4,copies=2", "waves=2", "chunks=2,waves=1", "phase=phased",
     "degree=2,primitive=move_q", "phase=fused,pieces=1"],
)  # fmt: skip
def test_what_is_forced_is_obeyed_in_lock_step(force):
    shape = forest(*RAGGED)
    plan = plan_for(shape, 4, replace(CONFIG, force=force))
    assert len(plan.passes) >= 4 // max(len(p.block) for p in plan.passes)


def test_core_and_python_decide_alike():
    shape, ask = forest(*RAGGED[3:]), {"tree_groups": range(5)}
    fast = decide(shape, SMALL, 4, CONFIG, **ask)
    with native.without_core():
        assert decide(shape, SMALL, 4, CONFIG, **ask) == fast


def test_one_sequence_takes_the_pool_or_nothing():
    """A block of the pool always keeps step; narrower ones each need a leaf."""
    shape = from_lengths(4000, [800])
    assert {len(p.block) for p in plan_for(shape, 4).passes} == {4}
    with pytest.raises(InfeasiblePlanError) as error:
        plan_for(shape, 4, replace(CONFIG, degree=2))
    assert error.value.what == "no plan keeps all ranks in lock-step"
    assert "--augtree-lock-step" in error.value.values and "blocks of at most 2 ranks" in error.value.values
    assert "same number of passes" in error.value.rule and "--context-parallel-size" in error.value.remedy


def test_memory_that_is_too_small_is_told():
    with pytest.raises(InfeasiblePlanError, match="no plan fits the memory budget") as error:
        plan_for(forest(*RAGGED), 4, replace(CONFIG, memory_budget_gib=0.001))
    assert "the leanest plan (degree" in error.value.values


def test_peers_keep_step_or_are_refused():
    """`ring` over the pool plays everything on every rank; its replicas of two do not play five sequences."""
    shape = forest(*[from_lengths(0, [rows]) for rows in (900, 800, 700, 600, 500)])
    ask = {"tree_groups": range(5), "mode": "ring"}
    plan = plan_for(shape, 4, replace(CONFIG, mode="ring"))
    assert plan.seconds == in_turns_ns(plan, H100) / NS
    with pytest.raises(InfeasiblePlanError, match="--context-parallel-mode ring"):
        make_plan(shape, SMALL, 4, replace(CONFIG, mode="ring", degree=2), **ask)
    _, considered = explain(shape, SMALL, 4, CONFIG, **ask)
    assert considered and all("ring" in x.name for x in considered)


def test_the_timeline_begins_together_and_ends_at_the_price():
    plan = plan_for(forest(*RAGGED), 4, replace(CONFIG, force="degree=2,phase=phased"))
    bars = timeline(plan, H100, lock_step=True)
    starts = [[bar.start for bar in bars if bar.rank == rank] for rank in range(4)]
    assert all(mine == starts[0] == sorted(mine) for mine in starts)
    assert max(bar.start + bar.duration for bar in bars) == pytest.approx(plan.seconds)


def test_a_rank_more_or_another_order_breaks_step():
    """Equal numbers are not enough: forwards and backwards must meet their like."""
    plan = plan_for(forest(*RAGGED), 2, replace(CONFIG, force="degree=1,phase=phased,waves=2"))
    events = list(plan.events)
    mine = [i for i, e in enumerate(events) if plan.passes[e.pass_id].block == (1,)]
    first, second = next((a, b) for a, b in zip(mine, mine[1:]) if events[a].action != events[b].action)
    swapped: Sequence[Event] = [*events]
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert obeys(blocks_of(plan), events, 2) and not obeys(blocks_of(plan), swapped, 2)
    assert not obeys(blocks_of(plan), events, 3)


def test_in_step_prices_what_it_lets_through():
    batch = Batch(forest(*RAGGED), H100, 4, 4, HUGE)
    found = best_of(batch)
    recipes, events = found.recipes(batch.shape, batch.unit)
    decision = Decision("augtree", recipes, events, "", 0, 7)
    assert in_step(decision, batch.shape, H100, 4) == replace(decision, time_ns=found.time_ns)
    alone = [recipe._replace(start=0, width=1, lane_degree=1, wide=0) for recipe in recipes]
    assert in_step(replace(decision, recipes=alone), batch.shape, H100, 4) is None
