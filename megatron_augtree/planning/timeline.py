"""A plan's events at their priced times: what each rank does when, and how much of it is waiting.

Times are the planner's own prices: the timeline shows what a plan was chosen for, not a measurement. A pass
starts when every rank of its block is free, and its block's ranks end it together: in every layer they wait
for the slowest. Names of passes are those of the measured trace, so that both can be laid side by side:

    rank 0   |fused 0 forward     |fused 0 backward            |
    rank 1   |fused 0 forward wait|fused 0 backward        wait|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_augtree.planning.cost import NS, PassPrice, Prices
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.plan import Pass, Plan


@dataclass(frozen=True)
class Bar:
    """What one rank does for a while.

    Attributes:
        rank: of the pool.
        pass_id: the pass.
        action: ``forward`` or ``backward``.
        start, duration: seconds.
        work: seconds of `duration` in which this rank has something to do; then it waits for its block.
        rows: rows of the pass on this rank.
        name: of the span, see `span_name`.
    """

    rank: int
    pass_id: int
    action: str
    start: float
    duration: float
    work: float
    rows: int
    name: str


def span_name(p: Pass, action: str) -> str:
    """What a pass's forward or backward is called in a trace, planned and measured."""
    return f"{p.kind} {p.id} {action}"


def timeline(plan: Plan, prices: Prices) -> list[Bar]:
    """The plan's events at their priced times, in the order of the plan.

    Args:
        plan: what is played.
        prices: of the model and the machine that the plan was made for.

    Returns:
        One bar an event and rank of its block.
    """
    loads = [
        PassLoads(plan.shape, p, [plan.passes[read].placement for read in p.reads], prices.cluster.node_ranks)
        for p in plan.passes
    ]
    times = [_rank_times(prices, load) for load in loads]
    free = [0] * plan.world
    bars = []
    for action, pass_id in plan.events:
        p, backward = plan.passes[pass_id], action == "backward"
        own = [time[backward] for time in times[pass_id]]
        start, duration, name = max(free[rank] for rank in p.block), max(own), span_name(p, action)
        for index, rank in enumerate(p.block):
            rows = loads[pass_id].ranks[index].rows
            bars.append(Bar(rank, pass_id, action, start / NS, duration / NS, own[index] / NS, rows, name))
            free[rank] = start + duration
    return bars


def _rank_times(prices: Prices, loads: PassLoads) -> list[tuple[int, int]]:
    """[block rank] (forward, backward) ns of a pass if no rank waited for another."""
    price, pair, times = PassPrice(prices, loads, provides=False), prices.pair(loads.p), []
    for line in list(price.lines):
        price.lines = [line]
        times.append(price.time(pair))
    return times


def idle_share(bars: Sequence[Bar], world: int) -> float:
    """Share of all ranks' time until the last bar ends in which a rank has nothing to do."""
    end = max((bar.start + bar.duration for bar in bars), default=0.0)
    return 1 - sum(bar.work for bar in bars) / (world * end) if end else 0.0
