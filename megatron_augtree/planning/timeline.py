"""A plan's events at their priced times: what each rank does when, and how much of it is waiting.

Times are the planner's own prices: the timeline shows what a plan was chosen for, not a measurement. A pass
starts when every rank of its block is free, and its block's ranks end it together: in every layer they wait
for the slowest. Names of passes are those of the measured trace, so that both can be laid side by side:

    rank 0   |fused 0 forward     |fused 0 backward            |
    rank 1   |fused 0 forward wait|fused 0 backward        wait|

In lock-step all ranks of the pool begin their first, second, ... event together (`lock_step.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_augtree.planning.cost import NS, PassPrice, Prices
from megatron_augtree.planning.fast import FastJobs, make_jobs
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.plan import Event, Pass, Plan

#: (forward, backward, both without the vocabulary: ns, and rows) of a rank in a pass.
Times = Sequence[int]


class Bar(NamedTuple):
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


def timeline(plan: Plan, prices: Prices, *, lock_step: bool = False) -> list[Bar]:
    """The plan's events at their priced times, in the order of the plan.

    Args:
        plan: what is played.
        prices: of the model and the machine that the plan was made for.
        lock_step: every rank's k-th event begins, and ends, with all others' k-th.

    Returns:
        One bar an event and rank of its block.
    """
    times = rank_times(plan, prices)
    slowest = [[max(column) for column in zip(*ranks)] for ranks in times]
    spans = _in_step(plan, slowest) if lock_step else _when_free(plan, slowest)
    bars = []
    for (action, pass_id), (start, duration) in zip(plan.events, spans):
        p, backward = plan.passes[pass_id], action == "backward"
        name, begin, lasts = span_name(p, action), start / NS, duration / NS
        for rank, own in zip(p.block, times[pass_id]):
            bars.append(Bar(rank, pass_id, action, begin, lasts, own[backward] / NS, own[-1], name))
    return bars


def _when_free(plan: Plan, slowest: Sequence[Times]) -> list[tuple[int, int]]:
    """[event] (start, duration), ns: each where the ranks of its block are free."""
    free, spans = [0] * plan.world, []
    for action, pass_id in plan.events:
        block, duration = plan.passes[pass_id].block, slowest[pass_id][action == "backward"]
        start = max(free[rank] for rank in block)
        for rank in block:
            free[rank] = start + duration
        spans.append((start, duration))
    return spans


def _in_step(plan: Plan, slowest: Sequence[Times]) -> list[tuple[int, int]]:
    """[event] (start, duration), ns: each with all ranks' events of the same number."""
    numbers = event_numbers([p.block for p in plan.passes], plan.events, plan.world)
    lasts = [0] * (max(numbers, default=-1) + 1)
    for number, (action, pass_id) in zip(numbers, plan.events):
        lasts[number] = max(lasts[number], slowest[pass_id][action == "backward"])
    starts = [sum(lasts[:number]) for number in range(len(lasts))]
    return [(starts[number], lasts[number]) for number in numbers]


def event_numbers(blocks: Sequence[Sequence[int]], events: Sequence[Event], world: int) -> list[int]:
    """[event] how many events its block's ranks have played before, the one with most of them.

    Args:
        blocks: [pass] its ranks.
        events: what is played.
        world: ranks of the pool.
    """
    played, numbers = [0] * world, []
    for _, pass_id in events:
        number = max(played[rank] for rank in blocks[pass_id])
        for rank in blocks[pass_id]:
            played[rank] = number + 1
        numbers.append(number)
    return numbers


def rank_times(plan: Plan, prices: Prices) -> list[list[Times]]:
    """[pass][block rank] (forward ns, backward ns, rows) if no rank waited for another; by the core where it
    is there and blocks are neighbours.

    Args:
        plan: a checked plan.
        prices: model and machine.
    """
    # Times need no room and no options.
    jobs = make_jobs(plan.shape, prices, 1, 0, Options(), world=plan.world)
    neighbours = all(p.block == tuple(range(p.block[0], p.block[0] + len(p.block))) for p in plan.passes)
    if not isinstance(jobs, FastJobs) or not neighbours:
        return [_times(plan, p, prices) for p in plan.passes]
    found, first = jobs.rank_times(plan.passes), 0
    times = []
    for p in plan.passes:
        times.append(found[first : first + len(p.block)])
        first += len(p.block)
    return times


def _times(plan: Plan, p: Pass, prices: Prices) -> list[Times]:
    """`rank_times` of one pass."""
    states = [plan.passes[read].placement for read in p.reads]
    loads = PassLoads(plan.shape, p, states, prices.cluster.node_ranks)
    price, pair, times = PassPrice(prices, loads, provides=False), prices.pair(p), []
    for line, load in zip(list(price.lines), loads.ranks):
        price.lines = [line]
        times.append([*price.time(pair), *price.time(pair, vocabulary=False), load.rows])
    return times


def idle_share(bars: Sequence[Bar], world: int) -> float:
    """Share of all ranks' time until the last bar ends in which a rank has nothing to do."""
    end = max((bar.start + bar.duration for bar in bars), default=0.0)
    return 1 - sum(bar.work for bar in bars) / (world * end) if end else 0.0
