"""1F1B of priced passes: by hand, bounds of every plan, both engines; and what it changes in the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning import fast, finalists, native, slots
from megatron_augtree.planning.arrangement import Arrangement
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.pipeline import hops_of, play
from megatron_augtree.planning.plan import Event, Plan
from megatron_augtree.planning.planner import decide, make_plan, price
from megatron_augtree.planning.price import price_recipes
from megatron_augtree.planning.simulate import simulate
from megatron_augtree.planning.tree import from_lengths
from tests.unit.forests import forest
from tests.unit.job_cases import DRAWN, GQA, SMALL
from tests.unit.test_pool import Batch, batches


class Fixed:
    """Passes that take what is given: [pass] (forward, backward), and a hop from stage to stage."""

    def __init__(self, times: Sequence[tuple[int, int]], blocks: Sequence[range], hop: int = 0) -> None:
        self.times, self.blocks, self.between = times, blocks, hop

    def lasts(self, pass_id: int, backward: bool, stage: int) -> list[int]:
        return [self.times[pass_id][backward]] * len(self.blocks[pass_id])

    def hop(self, pass_id: int, stage: int) -> int:
        return self.between


def in_turn(count: int) -> list[Event]:
    return [Event(action, p) for p in range(count) for action in ("forward", "backward")]


def ends(times, stages, blocks=None, reads=None, events=None, hop=0) -> int:
    blocks = blocks or [range(1)] * len(times)
    world = max(block.stop for block in blocks)
    reads = reads or [()] * len(times)
    return play(blocks, reads, events or in_turn(len(times)), world, stages, Fixed(times, blocks, hop))[1]


@pytest.mark.parametrize("stages", (2, 3, 4))
@pytest.mark.parametrize("count", (1, 2, 5, 9))
def test_equal_passes_fill_and_drain(stages, count):
    assert ends([(10, 20)] * count, stages) == (count + stages - 1) * 30


def test_a_short_pass_fills_for_a_long_one():
    """Forwards of 1 and 10, backwards of 2 and 20, two stages. Short first: F 0-1 and 1-11 on the first
    stage; on the second F 1-2, B 2-4, F 11-21, B 21-41; on the first B 4-6 waits until 11, B 41-61. Long
    first: F 10-20, B 20-40 on the second, then the short pass's F 40-41, B 41-43 while the first stage plays
    B 40-60, then 60-62."""
    events = in_turn(2)
    assert ends([(1, 2), (10, 20)], 2, events=events) == 61
    assert ends([(10, 20), (1, 2)], 2, events=events) == 62


def test_hops_delay_but_keep_no_stage_busy():
    """One pass waits for each of them. Of many, two are under way on two stages, each for 10 + 5 + 30 + 5 +
    20; were stages busy with what they send, too, each had 40 to do for every pass."""
    assert ends([(10, 20)], 3, hop=5) == 90 + 4 * 5
    assert ends([(10, 20)] * 40, 2, hop=5) == 30 + 40 * 70 // 2


def test_a_prompt_waits_for_its_waves_on_every_stage():
    """One prompt and two waves on two stages: its backward is last, and it does not count as under way."""
    events = [Event("forward", 0), *(Event(a, w) for w in (1, 2) for a in ("forward", "backward"))]
    events.append(Event("backward", 0))
    found, end = play(
        [range(1)] * 3, [(), (0,), (0,)], events, 1, 2, Fixed([(10, 20)] * 3, [range(1)] * 3)
    )  # fmt: skip
    order = [(x.pass_id, x.backward) for x in sorted(found, key=lambda x: x.start) if x.stage == 1]
    assert order == [(0, False), (1, False), (1, True), (2, False), (2, True), (0, True)]
    assert end == 4 * 30


def test_blocks_of_two_widths_never_wait_forever():
    """Wide passes first, then those of each half."""
    blocks = [range(2), range(1), range(1, 2), range(2), range(1)]
    assert ends([(3, 5), (7, 9), (2, 3), (4, 4), (1, 1)], 4, blocks) < 4 * sum((8, 16, 5, 8, 2))


def counted(plan: Plan, prices: Prices) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """[pass] forward, backward without and with the vocabulary; and all its hops together."""
    times, hops = [], []
    for p in plan.passes:
        states = [plan.passes[r].placement for r in p.reads]
        loads = PassLoads(plan.shape, p, states, prices.cluster.node_ranks)
        made, pair = PassPrice(prices, loads, provides=p.id in plan.provides), prices.pair(p)
        times.append((*made.time(pair, vocabulary=False), *made.time(pair)))
        rows = [sum(s.hi - s.lo for s in spans) for spans in p.placement]
        hops.append(sum(hops_of(p.block, rows, prices, plan.world)))
    return times, hops


@settings(max_examples=25, deadline=None, phases=DRAWN)
@given(batches((1, 2, 4, 8, 6)))
def test_no_plan_beats_a_stage_or_the_way_of_a_pass(batch):
    """No shorter than what any rank does on the last stage, or than a pass takes through all stages and back;
    no longer than one pass after the other."""
    stages = batch.prices.model.stages
    assume(stages > 1)
    for arrangement in list(batch.pool.arrangements())[:4]:
        plan = batch.plan(arrangement)
        times, hops = counted(plan, batch.prices)
        busy = [sum(sum(times[p.id][2:]) for p in plan.passes if r in p.block) for r in range(plan.world)]
        through = [(stages - 1) * sum(t[:2]) + sum(t[2:]) + 2 * hop for t, hop in zip(times, hops)]
        found = price(plan, batch.prices).time_ns
        # A stage that sends without overlap is busy for as long, on either side.
        assert max(*busy, *through) <= found <= sum(through)


@settings(max_examples=40, deadline=None, phases=DRAWN)
@given(batches((1, 2, 4, 8, 16, 6)))
def test_twins(batch):
    """The core plays as Python does."""
    assume(batch.prices.model.stages > 1)
    if native.core() is None:
        pytest.skip("no C++ core")
    pool = batch.pool
    assert isinstance(pool.jobs, fast.FastJobs)
    for arrangement in list(pool.arrangements())[:4]:
        plan = batch.plan(arrangement)
        recipes, events = arrangement.recipes(batch.shape, batch.unit)
        priced = price(plan, batch.prices)
        assert price_recipes(pool.jobs, recipes, events, batch.world) == (priced.time_ns, priced.peak_bytes)


@pytest.mark.parametrize("count", (1, 5))
def test_stages_that_send_without_overlap_are_busy_for_as_long(count):
    """By both engines: one pass takes its hops both ways; of several, a stage in the middle sends all of them
    twice while it computes nothing."""
    shape, found = forest(*[from_lengths(900, [400, 300])] * count), []
    for overlap in (True, False):
        cluster = replace(preset("h100"), overlap=overlap, node_ranks=1)
        batch = Batch(shape, Prices(replace(SMALL, layers=6, stages=3), cluster), 1, 1, 1 << 60)
        pool = batch.pool
        arrangement = next(iter(pool.arrangements()))
        plan, (recipes, events) = batch.plan(arrangement), arrangement.recipes(shape, batch.unit)
        found.append(price(plan, batch.prices).time_ns)
        assert price_recipes(pool.jobs, recipes, events, 1)[0] == found[-1]
    beside, alone = found
    times, hops = counted(plan, batch.prices)
    assert alone >= sum(sum(time[:2]) + between for time, between in zip(times, hops))
    assert alone == beside if len(plan.passes) == 1 else alone > beside


#: The launchers' plans of four pipelines; waves, orders and whole peers win here.
RAGGED = (
    (26876, (51901, 21243)), (12429, (10039, 19802, 13898)), (41420, (38424, 13510, 20367)), (171, (854,)),
)  # fmt: skip
EVEN = ((700, (4677, 441, 1158, 9384)), (74, (3878, 2671, 627)))


@pytest.mark.parametrize("groups", (RAGGED, EVEN))
@pytest.mark.parametrize(("world", "stages", "cluster"), ((2, 4, "h100"), (4, 2, "paper"), (8, 4, "cpu")))
def test_what_is_chosen_is_played(groups, world, stages, cluster):
    """The plan's seconds are its price, and near what the simulator says."""
    shape = forest(*(from_lengths(prompt, list(leaves)) for prompt, leaves in groups))
    prices = Prices(replace(SMALL, stages=stages), preset(cluster))
    config = AugTreeConfig(cluster=cluster, memory_budget_gib=1000)
    plan = make_plan(shape, prices.model, world, config, tree_groups=range(len(groups)))
    priced = price(plan, prices).time_ns
    assert round(plan.seconds * 1e9) == priced
    assert 0.85 <= simulate(plan, prices).makespan * 1e9 / priced <= 1.15


def test_waves_and_orders_are_tried_where_they_fit():
    """Of the best all jobs in other waves, of the best of these other orders; and only what fits is kept."""
    trees = [from_lengths(prompt, list(leaves)) for prompt, leaves in RAGGED]
    batch = Batch(forest(*trees), Prices(replace(GQA, stages=4), preset("h100")), 2, 2, 1 << 60)
    made = next(iter(batch.pool.arrangements()))

    def priced(x: Arrangement) -> Arrangement:
        recipes, events = x.recipes(batch.shape, batch.unit)
        time_ns, peak = price_recipes(batch.pool.jobs, recipes, events, batch.world)
        return replace(x, time_ns=time_ns, peak_bytes=peak)

    def in_waves(waves: int):
        shape = {"waves": (waves,), "fused": False, "phased": 2} if waves else {"fused": True, "phased": 0}
        return replace(batch, options=batch.options._replace(**shape)).pool.jobs

    found = finalists.played([made], priced, in_waves, 1 << 60)
    assert len(found) == 1 + len(finalists.WAVES) + 4 * finalists.BEST_IN_ORDER
    assert len({x.time_ns for x in found}) > 4
    nodes = [sorted(n for p in x.placed for n in p.job.nodes) for x in (made, *found)]
    assert all(mine == nodes[0] for mine in nodes)
    room = sorted(x.peak_bytes for x in found)[len(found) // 2]
    kept = finalists.played([made], priced, in_waves, room)
    assert kept and all(x.peak_bytes <= room for x in kept)
    orders_only = finalists.played([made], priced, lambda waves: None, 1 << 60)
    assert len(orders_only) == 1 + 4


def test_the_same_plan_is_a_finalist_once():
    """Whatever weight its pool compared jobs by: else copies of the best would leave others no place."""
    trees = [from_lengths(prompt, list(leaves)) for prompt, leaves in RAGGED]
    batch = Batch(forest(*trees), Prices(replace(GQA, stages=4), preset("h100")), 4, 4, 1 << 60)
    found = list(batch.pool.arrangements())

    def weighed(x: Arrangement) -> Arrangement:
        jobs = [replace(p.job, offer=p.job.offer._replace(cost=p.job.offer.cost + 1)) for p in x.placed]
        return replace(x, placed=tuple(replace(p, job=job) for p, job in zip(x.placed, jobs)))

    again = list(map(weighed, found))
    assert {x.placed for x in again}.isdisjoint(x.placed for x in found)
    for most in (1, 2, 5):
        assert slots.promising(found + again, most) == slots.promising(found, most)


def test_a_forced_phase_is_kept():
    """Finalists change waves only where nobody forces them."""
    shape = forest(*(from_lengths(prompt, list(leaves)) for prompt, leaves in RAGGED))
    model = replace(SMALL, stages=4)
    for force, kinds in (("phase=fused", {"fused"}), ("phase=phased,waves=2", {"prefill", "replay"})):
        config = AugTreeConfig(cluster="h100", memory_budget_gib=1000, force=force)
        decision = decide(shape, model, 2, config, tree_groups=range(len(RAGGED)))
        with_inner = {r.kind for r in decision.recipes if r.kind != "fused" or r.inner}
        assert with_inner == kinds
