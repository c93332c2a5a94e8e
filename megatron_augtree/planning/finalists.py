"""The end of the search under a pipeline: a few arrangements are played by 1F1B, and changed.

Until then a pipeline counts as what its busiest rank does and (stages - 1) longest passes. Played, passes of
different lengths wait for each other, and many short ones fill it better; so of the best all jobs are tried
fused, then in few and more waves, and jobs of a block in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_augtree.planning.arrangement import Arrangement, Placed, differing
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.plan import counted

#: Waves that all jobs are tried in; 0 is fused.
WAVES = (0, 1, 2, 4, 8, 16)
#: So many arrangements are changed: in their waves, then in their order.
BEST_IN_WAVES = 3
BEST_IN_ORDER = 2

#: Orders of the jobs of a block.
_ORDERS: dict[str, Callable[[Placed], int]] = {
    "short passes first": lambda p: p.job.offer.slot,
    "short first": lambda p: p.job.offer.time,
    "long first": lambda p: -p.job.offer.time,
    "in turn": lambda p: p.job.nodes[0],
}


def played(
    finalists: Sequence[Arrangement],
    price: Callable[[Arrangement], Arrangement],
    in_waves: Callable[[int], Jobs | None],
    room: int,
) -> list[Arrangement]:
    """The finalists at the price of their plans, and what became of the best of them.

    Args:
        finalists: arrangements that differ, estimated.
        price: plays one.
        in_waves: prices of jobs in so many waves, 0 for fused ones; None where they are not to be changed.
        room: bytes that a rank's peak may have.
    """
    found = list(map(price, finalists))
    ways = [(waves, jobs) for waves in WAVES if (jobs := in_waves(waves)) is not None]
    for x in _best(found, BEST_IN_WAVES):
        found += map(price, _in_other_waves(x, ways))
    for x in _best(found, BEST_IN_ORDER):
        found += map(price, _in_other_orders(x))
    return [x for x in found if x.peak_bytes <= room]


def _best(found: Sequence[Arrangement], most: int) -> list[Arrangement]:
    """The shortest of those that differ."""
    return sorted(differing(found), key=lambda x: x.time_ns)[:most]


def _in_other_waves(x: Arrangement, ways: Sequence[tuple[int, Jobs]]) -> Iterator[Arrangement]:
    """All jobs in the same number of waves, but those that do not fit so."""
    for waves, jobs in ways:
        placed = []
        for p in x.placed:
            offer = jobs.best(p.job.nodes, p.width)
            placed.append(p if offer is None else replace(p, job=replace(p.job, offer=offer)))
        name = f"{x.name}, {'in ' + counted(waves, 'wave') if waves else 'all fused'}"
        yield replace(x, name=name, placed=tuple(placed))


def _in_other_orders(x: Arrangement) -> Iterator[Arrangement]:
    """Jobs of a block in another order; wide blocks stay first."""
    for name, order in _ORDERS.items():
        placed = sorted(x.placed, key=lambda p: (-p.width, p.start, order(p)))
        yield replace(x, name=f"{x.name}, {name}", placed=tuple(placed))
