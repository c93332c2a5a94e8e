"""The price of a whole plan: its passes on the ranks, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.fast import FastJobs
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.pipeline import PricedTiming, play
from megatron_augtree.planning.plan import Event, Plan
from megatron_augtree.planning.recipe import Recipe, plan_of


@dataclass(frozen=True)
class Priced:
    """A plan with its predicted time (ns) and largest memory of a rank (bytes)."""

    plan: Plan
    time_ns: int
    peak_bytes: int


def price(plan: Plan, prices: Prices) -> Priced:
    """Predicted time and memory of a plan.

    A rank's time is the sum of its passes (a block waits for its slowest rank in every layer); the plan's is
    the slowest rank's. Under a pipeline the priced passes are played by 1F1B (`pipeline.py`); only its last
    stage has the vocabulary.
    Memory follows the events: what passes keep from forward to backward, plus one layer's work.
    """
    loads = [
        PassLoads(plan.shape, p, [plan.passes[r].placement for r in p.reads], prices.cluster.node_ranks)
        for p in plan.passes
    ]
    provides = plan.provides
    made = [PassPrice(prices, load, provides=p.id in provides) for load, p in zip(loads, plan.passes)]
    pairs = [prices.pair(p) for p in plan.passes]
    times = [(*x.time(pair, vocabulary=False), *x.time(pair)) for x, pair in zip(made, pairs)]
    kept = [x.kept(pair) for x, pair in zip(made, pairs)]
    work = [x.work(pair) for x, pair in zip(made, pairs)]
    busy, alive, peak = [0] * plan.world, [0] * plan.world, [0] * plan.world
    for action, pass_id in plan.events:
        p, backward = plan.passes[pass_id], action == "backward"
        for index, rank in enumerate(p.block):
            busy[rank] += times[pass_id][2 + backward]
            alive[rank] += 0 if backward else kept[pass_id][index]
            peak[rank] = max(peak[rank], alive[rank] + work[pass_id][index])
            alive[rank] -= kept[pass_id][index] if backward else 0
    time, stages = max(busy, default=0), prices.model.stages
    if stages > 1:
        blocks, rows = [p.block for p in plan.passes], [[x.rows for x in load.ranks] for load in loads]
        timing = PricedTiming(times, blocks, rows, prices, plan.world)
        time = play(blocks, [p.reads for p in plan.passes], plan.events, plan.world, stages, timing)[1]
    base = prices.cluster.base_bytes if plan.passes else 0
    return Priced(plan, time, base + max(peak, default=0))


def price_recipes(
    jobs: Jobs, recipes: Sequence[Recipe], events: Sequence[Event], world: int
) -> tuple[int, int]:
    """(ns, bytes) of some recipes, as `price` says of their plan."""
    if isinstance(jobs, FastJobs):
        time_ns, peak_bytes = jobs.price(recipes, events, world)
        return time_ns, peak_bytes + (jobs.prices.cluster.base_bytes if recipes else 0)
    rules = {"mode": "augtree", "shape": jobs.shape, "world": world, "pairs_per_row": jobs.unit}
    priced = price(plan_of(recipes, events, **rules), jobs.prices)
    return priced.time_ns, priced.peak_bytes
