"""Plays a plan in time: what its price adds up in closed forms is here simulated, pass by pass.

Two levels. A pass is played on its block alone (`simulate_pass.py`): compute and links of every rank, waiting
for messages, layers extrapolated from a few. Then the passes are played over the pool: in the plan's order,
each where all ranks of its block are free; in a pipeline by 1F1B over (rank, stage) (`simulate_pipeline.py`).

Nothing here is measured, and no constant is its own: all are `cost.Prices`'. So a difference from the price
is one of structure: who waits for whom, what is hidden, what is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.simulate_pass import PassSimulator, PassTimes
from megatron_augtree.planning.simulate_pipeline import Placed, play_pipeline
from megatron_augtree.planning.timeline import span_name
from megatron_augtree.planning.tree import ForestShape


class SimulatedBar(NamedTuple):
    """What one rank does for a while: a `timeline.Bar`, and the pipeline stage.

    Attributes:
        rank: of the pool.
        pass_id: the pass.
        action: ``forward`` or ``backward``.
        start, duration: seconds; ranks of a block begin together and end each when it is done.
        work: seconds of `duration` in which this rank computes.
        rows: rows of the pass on this rank.
        name: of the span, see `timeline.span_name`.
        stage: of the pipeline.
    """

    rank: int
    pass_id: int
    action: str
    start: float
    duration: float
    work: float
    rows: int
    name: str
    stage: int


@dataclass(frozen=True)
class Simulated:
    """A simulated step.

    Attributes:
        makespan: seconds until the last rank is done.
        busy: [rank] seconds that it computes, on its busiest pipeline stage; all of one rank's figures are
            of that stage.
        exposed: [rank] seconds of `idle` in which messages of its own are under way, posted by both ends, or
            copies to the host: what faster links would save.
        idle: [rank] seconds that it does not compute: `makespan` - `busy`.
        peak_bytes: [rank] largest memory above the model, of any pipeline stage.
        spans: one bar an event, rank of its block and pipeline stage, by time.
        bound: `compute_bound` of the plan's forest, seconds.
    """

    makespan: float
    busy: list[float]
    exposed: list[float]
    idle: list[float]
    peak_bytes: list[int]
    spans: list[SimulatedBar]
    bound: float


def simulate(plan: Plan, prices: Prices, *, cards: int = 0) -> Simulated:
    """Play a plan.

    Args:
        plan: a checked plan.
        prices: model and machine.
        cards: network cards of a node; its ranks share them evenly, and all cards together carry what the
            machine's ranks may send together. 0: one a rank.
    """
    simulator = PassSimulator(plan, prices, cards)
    times = [simulator.times(p) for p in plan.passes]
    stages = prices.model.stages
    placed = play_pipeline(plan, times, prices) if stages > 1 else _in_order(plan, times)
    placed.sort(key=lambda x: (x.start, x.order))
    end = max((x.start + int(x.played.end.max()) for x in placed), default=0)
    busy = np.zeros((stages, plan.world), np.int64)
    exposed = np.zeros((stages, plan.world), np.int64)
    spans = []
    for x in placed:
        block, name = list(plan.passes[x.pass_id].block), span_name(plan.passes[x.pass_id], x.action)
        busy[x.stage, block] += x.played.busy
        exposed[x.stage, block] += x.played.exposed
        columns = x.played.end.tolist(), x.played.busy.tolist(), times[x.pass_id].rows
        for rank, lasts, work, rows in zip(block, *columns):
            spans.append(SimulatedBar(rank, x.pass_id, x.action, x.start / NS, lasts / NS, work / NS, rows,
                                      name, x.stage))  # fmt: skip
    busiest, ranks = busy.argmax(axis=0), np.arange(plan.world)
    works = busy[busiest, ranks].tolist()
    return Simulated(
        end / NS,
        [work / NS for work in works],
        [waits / NS for waits in exposed[busiest, ranks].tolist()],
        [(end - work) / NS for work in works],
        _memory(plan, times, placed, prices),
        spans,
        compute_bound(plan.shape, prices, plan.world),
    )


def _in_order(plan: Plan, times: Sequence[PassTimes]) -> list[Placed]:
    """Every event where all ranks of its block are free, in the order of the plan."""
    free = np.zeros(plan.world, np.int64)
    placed = []
    for order, (action, pass_id) in enumerate(plan.events):
        block = list(plan.passes[pass_id].block)
        played = times[pass_id].of(action == "backward", True)
        start = int(free[block].max())
        free[block] = start + played.end
        placed.append(Placed(pass_id, action, 0, start, played, order))
    return placed


def _memory(
    plan: Plan, times: Sequence[PassTimes], placed: Sequence[Placed], prices: Prices
) -> list[int]:
    """[rank] bytes at the peak of its heaviest pipeline stage; a stage keeps its share of a pass."""
    stages = prices.model.stages
    alive = np.zeros((stages, plan.world), np.int64)
    peak = np.zeros((stages, plan.world), np.int64)
    for x in placed:
        block, passed = list(plan.passes[x.pass_id].block), times[x.pass_id]
        kept = -(-np.array(passed.kept, np.int64) // stages)
        if x.action == "forward":
            alive[x.stage, block] += kept
        high = alive[x.stage, block] + np.array(passed.work, np.int64)
        peak[x.stage, block] = np.maximum(peak[x.stage, block], high)
        if x.action == "backward":
            alive[x.stage, block] -= kept
    base = prices.cluster.base_bytes if plan.passes else 0
    return (base + peak.max(axis=0)).tolist()


def compute_bound(shape: ForestShape, prices: Prices, world: int) -> float:
    """Seconds that no plan of a forest is below: its work, spread evenly over all ranks and pipeline stages.

    In it: every row once through every linear layer and what is done row by row beside it, every (query, key)
    pair of the mask, forward and backward, at the rates of large products and tiles; every scored row through
    the vocabulary, forward and backward. Not in it: recompute, whatever the flags say; logits that are made
    again; prompt copies; what products of few rows and masked parts of tiles cost; launches; traffic.
    """
    c, m = prices.cluster, prices.model
    rows = shape.total_rows
    pairs = sum(shape.area(node) for node in range(len(shape.rows)))
    linear = (prices.linear.ns(rows) + prices.beside.ns(rows)) * (100 + c.gemm_backward_pct)
    attention = prices.attention.ns(pairs) * (100 + c.attention_backward_pct)
    vocabulary = 3 * prices.vocabulary.ns(sum(shape.scored))
    return (m.layers * (linear + attention) // 100 + vocabulary) / (world * m.stages) / NS
