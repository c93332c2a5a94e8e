"""The planned timeline: every event where it can begin, ranks of a block together, and what is waiting."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import MODES, AugTreeConfig
from megatron_augtree.planning import native
from megatron_augtree.planning.baselines import UNSHARED
from megatron_augtree.planning.candidates import Choice, job_recipes
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.placement import Span, count
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.recipe import plan_of
from megatron_augtree.planning.timeline import Bar, idle_share, rank_times, timeline
from megatron_augtree.planning.tree import from_lengths
from tests.unit.forests import forest
from tests.unit.job_cases import DRAWN, HUGE, Case, cases
from tests.unit.test_plan import MODEL, phased

PRICES = Prices(MODEL, preset("h100"))
MODELS = {"plain": MODEL, "recomputed": replace(MODEL, recomputed=2), "two stages": replace(MODEL, stages=2)}


@pytest.mark.parametrize("name", MODELS)
def test_every_event_begins_when_its_ranks_are_free(name):
    plan, prices = phased(), replace(PRICES, model=MODELS[name])
    bars = timeline(plan, prices)
    played = [(action, p, rank) for action, p in plan.events for rank in plan.passes[p].block]
    assert [(bar.action, bar.pass_id, bar.rank) for bar in bars] == played
    loads = {p.id: PassLoads(plan.shape, p, [plan.passes[r].placement for r in p.reads],
                             prices.cluster.node_ranks) for p in plan.passes}
    ends: dict[int, float] = defaultdict(float)
    for action, p in plan.events:
        mine = [bar for bar in bars if (bar.action, bar.pass_id) == (action, p)]
        start = max(ends[rank] for rank in plan.passes[p].block)
        assert [bar.start for bar in mine] == pytest.approx([start] * len(mine))
        assert {round(bar.duration * NS) for bar in mine} == {prices.pass_ns(loads[p])[action == "backward"]}
        assert max(bar.work for bar in mine) == mine[0].duration
        assert all(0 < bar.work <= bar.duration for bar in mine)
        assert [bar.rows for bar in mine] == [count(spans) for spans in plan.passes[p].placement]
        assert {bar.name for bar in mine} == {f"{plan.passes[p].kind} {p} {action}"}
        ends |= {bar.rank: bar.start + bar.duration for bar in mine}


@pytest.mark.parametrize("force", ["", "degree=2,phase=phased,waves=2", "degree=1"])
def test_the_price_of_a_plan_is_its_busiest_ranks_time(force):
    """Waiting for others comes on top; what is planned leaves ranks less idle than one that does all."""
    shape = forest(from_lengths(90, [40, 60, 20, 33]), from_lengths(30, [10, 70]))
    plan = make_plan(shape, MODEL, 3, AugTreeConfig(cluster="h100", force=force), tree_groups=[0, 1])
    bars = timeline(plan, PRICES)
    busy = [sum(bar.duration for bar in bars if bar.rank == rank) for rank in range(3)]
    assert max(busy) == pytest.approx(plan.seconds, rel=1e-6)
    assert max(bar.start + bar.duration for bar in bars) >= max(busy) * (1 - 1e-12)
    assert 0 <= idle_share(bars, 3) < 0.7


def test_idle_by_hand():
    """Rank 0 works 3 of 4 seconds, rank 1 works 1 and waits 1 in its pass, rank 2 does nothing."""
    bars = [Bar(0, 0, "forward", 0.0, 3.0, 3.0, 7, "fused 0 forward"),
            Bar(1, 1, "forward", 2.0, 2.0, 1.0, 7, "fused 1 forward")]
    assert idle_share(bars, 3) == pytest.approx(1 - 4 / 12)
    assert idle_share(bars[:1], 1) == 0.0
    assert idle_share([], 2) == 0.0


def test_a_rank_with_fewer_rows_waits_for_its_block():
    shape = from_lengths(200, [300, 60])
    prompt, long, short = (Span(node, 0, rows) for node, rows in enumerate(shape.rows))
    p = Pass(0, 0, "fused", (0, 1), ((prompt, long), (short,)))
    plan = Plan(2, "augtree", shape, (p,), (Event("forward", 0), Event("backward", 0)))
    bars = timeline(plan, replace(PRICES, cluster=preset("cpu")))
    assert [bar.work == bar.duration for bar in bars] == [True, False] * 2
    assert 0.1 < idle_share(bars, 2) < 0.5


def both(plan: Plan, prices: Prices) -> list:
    """What the core says, which is what Python says."""
    found = rank_times(plan, prices)
    with native.without_core():
        assert rank_times(plan, prices) == found
    return found


@settings(max_examples=60, deadline=None, phases=DRAWN)
@given(cases(), st.integers(0, 3))
def test_core_and_python_agree_on_every_rank(case: Case, start: int):
    """Jobs as the planner plays them, on blocks that begin anywhere; rows are those of the placement."""
    nodes = range(len(case.shape.rows))
    offer = case.jobs(HUGE).best(nodes, case.width)
    choice = Choice(degree=case.width) if offer is None else offer.choice
    recipes, events = job_recipes(choice, case.shape, nodes, start, 0, 0, case.unit)
    rules = {"shape": case.shape, "world": start + case.width, "pairs_per_row": case.unit}
    plan = plan_of(recipes, events, mode="augtree", **rules)
    for p, times in zip(plan.passes, both(plan, case.prices), strict=True):
        assert [rows for *_, rows in times] == [count(spans) for spans in p.placement]


@pytest.mark.parametrize("mode", MODES)
def test_core_and_python_agree_on_every_mode(mode):
    shared = [from_lengths(900, [400, 600, 200, 33]), from_lengths(300, [10, 70])]
    alone = [from_lengths(0, [rows]) for rows in (900, 400, 80)]
    shape = forest(*(alone if mode in UNSHARED else shared))
    plan = make_plan(shape, MODEL, 4, AugTreeConfig(mode=mode, cluster="h100"),
                     tree_groups=range(len(shape.roots)))
    assert len(both(plan, PRICES)) == len(plan.passes) > 0


def test_a_block_of_ranks_that_are_no_neighbours():
    """A plan from a file may have one: Python counts it."""
    shape = from_lengths(200, [300, 60])
    prompt, long, short = (Span(node, 0, rows) for node, rows in enumerate(shape.rows))
    p = Pass(0, 0, "fused", (0, 9), ((prompt, long), (short,)))
    apart = Plan(10, "augtree", shape, (p,), (Event("forward", 0), Event("backward", 0)))
    near = replace(apart, passes=(replace(p, block=(0, 1)),))
    times = [[time for ranks in both(plan, PRICES) for time in ranks] for plan in (apart, near)]
    assert times[0][1][0] > times[1][1][0]  # keys cross to another node
