"""Megatron's dynamic ("hybrid") context parallelism as pure functions on integers.

A sequence gets the smallest power of two of ranks that keeps its rows a rank within a limit. Sequences are
dealt out longest first. Two ways of dealing are known here:

- `rounds` decides as megatron-core's ``BalancedCPScheduler`` does (0.16 and 0.19; a test compares the two),
  quadratic work included. The ranks are cut into teams, round after round; a round ends when nothing fits any
  more, or when it is even and its sequences have become narrower than its first.
- `greedy` has no rounds: widest first, then longest, to the aligned block that is free first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappush, heapreplace
from typing import NamedTuple

from megatron_augtree.planning.assign import heaviest_first


class Seat(NamedTuple):
    """An item on ranks start..start+width."""

    item: int
    start: int
    width: int


def degrees_by_rows(lengths: Sequence[int], rows_per_rank: int, world: int) -> list[int]:
    """[length] the smallest power of two of ranks that hold its rows within the limit; at most the pool."""
    more = ((rows - 1) // rows_per_rank if rows else 0 for rows in lengths)  # ranks beside the first
    return [min(1 << ranks.bit_length(), world) for ranks in more]


def widths(world: int) -> list[int]:
    """Degrees that a pool has: powers of two, and all of it."""
    return sorted({1 << i for i in range(world.bit_length())} | {world})


def greedy(degrees: Sequence[int], loads: Sequence[int], world: int) -> list[Seat]:
    """Widest first, then heaviest, each to the aligned block of its width that is free first.

    On aligned blocks of powers of two, widest first leaves no gaps: all ranks of a block are free at the
    same time.

    Args:
        degrees: [item] ranks it takes, one of `widths`.
        loads: [item] work.
        world: ranks of the pool.

    Returns:
        Seats in the order they are played.
    """
    busy, seats = [0] * world, []
    wanted: dict[int, list[int]] = {}
    for item in heaviest_first(loads):
        wanted.setdefault(degrees[item], []).append(item)
    for width in sorted(wanted, reverse=True):
        heap = [(busy[start], start) for start in range(0, world - width + 1, width)]
        heapify(heap)
        for item in wanted[width]:
            load, start = heap[0]
            seats.append(Seat(item, start, width))
            heapreplace(heap, (load - (-loads[item] // width), start))
        for load, start in heap:
            busy[start : start + width] = [load] * width
    return seats


def rounds(lengths: Sequence[int], rows_per_rank: int, world: int) -> list[list[Seat]]:
    """Rounds as megatron-core makes them; within one, every rank plays its sequences without waiting.

    Args:
        lengths: [item] rows, at least 1.
        rows_per_rank: Megatron's ``max_seqlen_per_dp_cp_rank``.
        world: ranks of the pool.

    Returns:
        [round] -> seats, team by team.
    """
    work = _Work(lengths, rows_per_rank, world)
    waiting = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    made = []
    while waiting:
        round_ = _Round(work)
        waiting = round_.fill(_buckets(waiting, work))
        waiting += round_.trim()
        round_.widen()
        made.append(round_.seats())
    return made


class _Work:
    """Degrees and quadratic work a rank, scaled so that it is an integer at every width.

    Attributes:
        degrees: [item] ranks it asks for.
        own: [item] its work on each of them.
    """

    def __init__(self, lengths: Sequence[int], rows_per_rank: int, world: int) -> None:
        self.world, unit = world, world << world.bit_length()
        self.degrees = degrees_by_rows(lengths, rows_per_rank, world)
        self.own = [rows**2 * (unit // degree) for rows, degree in zip(lengths, self.degrees)]


def _buckets(waiting: Sequence[int], work: _Work) -> list[list[int]]:
    """Runs of about equal work, as many as there are degrees."""
    count = len({work.degrees[i] for i in waiting})
    total = sum(work.own[i] for i in waiting)
    buckets: list[list[int]] = []
    run, load = [], 0
    for place, item in enumerate(waiting):
        full = 10 * count * (load + work.own[item]) > 11 * total
        # Once a run is closed it counts both as made and as no longer wanted.
        if run and (full or len(waiting) - place <= count - 2 * len(buckets)):
            buckets.append(run)
            run, load = [], 0
        run.append(item)
        load += work.own[item]
    return [*buckets, run]


@dataclass
class _Team:
    """Neighbouring ranks that share items; `load` is that of each of them."""

    width: int
    load: int = 0
    items: list[int] = field(default_factory=list)


class _Round:
    """Teams side by side from rank 0 on; the ranks behind them are free."""

    def __init__(self, work: _Work) -> None:
        self.work, self.teams, self.free = work, [], work.world
        self._heaps: dict[int, list[tuple[int, int]]] = {}

    def fill(self, buckets: list[list[int]]) -> list[int]:
        """Seat items until nothing fits, or the round is even; returns those left over."""
        heads, highest, widest, narrower = [0] * len(buckets), 0, 0, False
        while True:
            place = self._next(buckets, heads)
            if place < 0:
                break
            item = buckets[place][heads[place]]
            heads[place] += 1
            width = self.work.degrees[item]
            highest = max(highest, self._seat(item, width))
            widest = widest or width
            narrower = narrower or width < widest
            if narrower and self._left(buckets, heads) and self._even(highest):
                break
        return [item for bucket, head in zip(buckets, heads) for item in bucket[head:]]

    def _next(self, buckets: Sequence[Sequence[int]], heads: Sequence[int]) -> int:
        """The first bucket whose first item has a team of its width, or room for one; -1: none."""
        for place, (bucket, head) in enumerate(zip(buckets, heads)):
            if head < len(bucket):
                width = self.work.degrees[bucket[head]]
                if width in self._heaps or self.free >= width:
                    return place
        return -1

    def _seat(self, item: int, width: int) -> int:
        """A new team while there is room, then the least loaded of that width; returns its load."""
        cost = self.work.own[item]
        if self.free >= width:
            self.free -= width
            self.teams.append(_Team(width, cost, [item]))
            heappush(self._heaps.setdefault(width, []), (cost, len(self.teams) - 1))
            return cost
        _, index = self._heaps[width][0]
        team = self.teams[index]
        team.load += cost
        team.items.append(item)
        heapreplace(self._heaps[width], (team.load, index))
        return team.load

    def _left(self, buckets: Sequence[Sequence[int]], heads: Sequence[int]) -> bool:
        return any(head < len(bucket) for bucket, head in zip(buckets, heads))

    def _even(self, highest: int) -> bool:
        """Within a twentieth; free ranks count as idle."""
        lowest = 0 if self.free else min(heap[0][0] for heap in self._heaps.values())
        return 20 * (highest - lowest) <= highest

    def trim(self) -> list[int]:
        """Take the last item from the busiest team while that makes the round more even."""
        taken: list[int] = []
        loads = [team.load for team in self.teams]
        while not self.free:
            highest = max(loads)
            slack, index = highest - min(loads), loads.index(highest)
            busiest = self.teams[index]
            if 20 * slack <= highest or len(busiest.items) < 2:
                break
            loads[index] -= self.work.own[busiest.items[-1]]
            if max(loads) - min(loads) >= slack:
                break
            busiest.load = loads[index]
            taken.append(busiest.items.pop())
        return taken

    def widen(self) -> None:
        """Give free ranks to the first of the narrowest teams, until none are left or none fits."""
        while self.free:
            team = min(self.teams, key=lambda t: t.width)
            wider = min(2 * team.width, self.work.world)
            if wider - team.width > self.free:
                return
            self.free -= wider - team.width
            team.width = wider

    def seats(self) -> list[Seat]:
        seats, start = [], 0
        for team in self.teams:
            seats += [Seat(item, start, team.width) for item in team.items]
            start += team.width
        return seats
