"""The planned timeline: every event where it can begin, ranks of a block together, and what is waiting."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.placement import Span, count
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.timeline import Bar, idle_share, timeline
from megatron_augtree.planning.tree import from_lengths
from tests.unit.forests import forest
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
