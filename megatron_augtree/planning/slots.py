"""Shorter slots under a pipeline.

How long a pipeline takes is played for a few finalists only (`finalists.py`). Until then filling and draining
it counts as (stages - 1) times the longest pass, without its vocabulary, whichever job has it. `Jobs` weighs
the longest pass of each job alike; so where an arrangement is made, jobs with the longest pass are played
anew, in more waves, as long as that shortens the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_augtree.planning.arrangement import Arrangement, Placed, arrange, busy_ranks, differing
from megatron_augtree.planning.jobs import Jobs

_SHORTER = ", shorter slots"

#: So many of either kind of arrangements are worth trying shorter slots, and being finalists.
PROMISING = 5
FINALISTS = 12


def promising(made: Sequence[Arrangement], most: int = PROMISING) -> list[Arrangement]:
    """The shortest arrangements, and those that would be the shortest if the pipeline took no time to fill
    and drain; so many of either kind that differ: pools with other weights find the same again."""
    made = differing(made)
    orders = (lambda x: x.time_ns, _busiest)
    return list(dict.fromkeys(x for order in orders for x in sorted(made, key=order)[:most]))


def _busiest(x: Arrangement) -> int:
    """What the passes of its busiest rank take."""
    world = max(p.start + p.width for p in x.placed)
    return max(busy_ranks(((p.start, p.width, p.job.offer.time) for p in x.placed), world))


def with_shorter_slots(made: Arrangement, ways: Sequence[Jobs], world: int) -> Arrangement | None:
    """The arrangement with other choices for its longest jobs; None where none helps.

    Args:
        made: the arrangement.
        ways: prices that weigh the longest pass differently.
        world: ranks of the pool.
    """
    stages = ways[0].prices.model.stages
    offers = {}

    def others(x: Placed) -> list[Placed]:
        key = x.job.nodes, x.width
        if key not in offers:
            found = (jobs.best(*key) for jobs in ways)
            offers[key] = [offer for offer in found if offer is not None]
        return [replace(x, job=replace(x.job, offer=offer)) for offer in offers[key]]

    now, placed = made, list(made.placed)
    while True:
        longest = max(x.job.offer.slot for x in placed)
        # All that are about as long: one alone would change nothing.
        for part in (16, 8, 2):
            then = []
            for x in placed:
                shorter = [x]
                if part * x.job.offer.slot > (part - 1) * longest:
                    shorter += [y for y in others(x) if part * y.job.offer.slot <= (part - 1) * longest]
                then.append(min(shorter[1:] or shorter, key=lambda y: y.job.offer.time))
            changed = arrange(made.name.removesuffix(_SHORTER) + _SHORTER, then, world, stages)
            if changed.time_ns < now.time_ns:
                now, placed = changed, then
                break
        else:
            return now if now is not made else None
