"""1F1B of a plan's passes over (rank, pipeline stage): a pass is a micro-batch of its block.

Every stage of a rank, whenever it is free, plays the next forward in the plan's order, if it is there and few
enough passes are between their forward and their backward on this stage: as many as stages from here on, and
the spine passes that must stay for their waves. Otherwise it plays the next backward, if the later stage is
done with it and so are all passes that read it. A block begins where all its ranks want the same, free.
Activations and their gradients travel from stage to stage beside other work, where transfers overlap.

    stage 0   F0 F1 F2    B0 F3 B1 ..
    stage 1      F0 F1 B0 F2 B1 F3 ..          (Narayanan and others, arXiv 2104.04473, section 2.2)

`price.py` plays passes as long as they are priced, `simulate.py` as long as they are simulated.
`csrc/pipeline.cpp` is the twin of the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.plan import Event

Block = Sequence[int]


class Begun(NamedTuple):
    """A forward or backward of a pass on one pipeline stage: which, and when it begins, ns."""

    pass_id: int
    backward: bool
    stage: int
    start: int


class Timing(Protocol):
    """How long passes take."""

    def lasts(self, pass_id: int, backward: bool, stage: int) -> Sequence[int]:
        """[rank of the block in turn] ns."""

    def hop(self, pass_id: int, stage: int) -> int:
        """ns from a stage to the next, or back."""


class Hops:
    """What passes hand on from stage to stage: beside other work, or a stage that sends is not free before.

    Args:
        blocks: [pass] its ranks.
        rows: [pass][rank of its block in turn] rows.
        prices: model, with its stages, and machine.
        world: ranks of a stage.
    """

    def __init__(
        self, blocks: Sequence[Block], rows: Sequence[Sequence[int]], prices: Prices, world: int
    ) -> None:
        self.overlap, self.last = prices.cluster.overlap, prices.model.stages - 1
        self.hops = [hops_of(block, mine, prices, world) for block, mine in zip(blocks, rows)]

    def hop(self, pass_id: int, stage: int) -> int:
        """See `Timing`."""
        return self.hops[pass_id][stage] if self.overlap else 0

    def held(self, pass_id: int, backward: bool, stage: int) -> int:
        """ns that a stage is not free for since it sends."""
        at = stage - 1 if backward else stage
        return self.hops[pass_id][at] if not self.overlap and 0 <= at < self.last else 0


class PricedTiming(Hops):
    """Passes that take all ranks of a block as long as they are priced: the slowest rank's.

    Args:
        times: [pass] (forward, backward) ns of a stage that is not the last, then of the last.
        blocks, rows, prices, world: see `Hops`.
    """

    def __init__(
        self,
        times: Sequence[tuple[int, int, int, int]],
        blocks: Sequence[Block],
        rows: Sequence[Sequence[int]],
        prices: Prices,
        world: int,
    ) -> None:
        super().__init__(blocks, rows, prices, world)
        self.times, self.blocks = times, blocks

    def lasts(self, pass_id: int, backward: bool, stage: int) -> Sequence[int]:
        """See `Timing`."""
        time = self.times[pass_id][2 * (stage == self.last) + backward]
        return [time + self.held(pass_id, backward, stage)] * len(self.blocks[pass_id])


def hops_of(block: Block, rows: Sequence[int], prices: Prices, world: int) -> list[int]:
    """[stage but the last] ns from it to the next: the slowest rank's rows. Stages have the pool's ranks
    each, one stage after the other."""
    c, size, found = prices.cluster, prices.model.input_bytes, []
    for stage in range(prices.model.stages - 1):
        slowest = 0
        for rank, mine in zip(block, rows):
            here, there = ((s * world + rank) // c.node_ranks for s in (stage, stage + 1))
            rate = prices.link if here == there else prices.nic
            slowest = max(slowest, rate.ns(mine * size) + c.message_ns)
        found.append(slowest)
    return found


def play(
    blocks: Sequence[Block], reads: Sequence[Sequence[int]], events: Sequence[Event], world: int, stages: int,
    timing: Timing,
) -> tuple[list[Begun], int]:  # fmt: skip
    """All passes on all stages, as they begin, and when the last is done, ns.

    Args:
        blocks: [pass] its ranks.
        reads: [pass] passes whose state it reads.
        events: the plan's.
        world: ranks of a stage.
        stages: of the pipeline, 2 or more.
        timing: how long each takes.
    """
    return _Pipeline(blocks, reads, events, world, stages, timing).play()


class _Pipeline:
    """Ranks that play the same passes are one *team*; a block is some teams."""

    def __init__(
        self, blocks: Sequence[Block], reads: Sequence[Sequence[int]], events: Sequence[Event], world: int,
        stages: int, timing: Timing,
    ) -> None:  # fmt: skip
        self.reads, self.stages, self.timing = reads, stages, timing
        self.teams, size = _teams(blocks, world)
        #: [backward][team] its passes in the plan's order.
        self.queue: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(2)]
        for action, p in events:
            for team in self.teams[p]:
                self.queue[action == "backward"][team].append(p)
        count = len(blocks)
        self.done = [[[False] * count for _ in range(stages)] for _ in range(2)]
        #: [backward][stage][pass] whether what comes from the stage before, or behind, is there.
        self.here = [[[False] * count for _ in range(stages)] for _ in range(2)]
        self.here[0][0] = [True] * count
        self.next = [[[0] * size for _ in range(stages)] for _ in range(2)]
        self.free = [[True] * size for _ in range(stages)]
        #: [stage][team] passes between their forward and their backward.
        self.inside: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(stages)]
        #: [stage][pass] passes that read it and are not back yet.
        waiting = [0] * count
        for read in chain.from_iterable(reads):
            waiting[read] += 1
        self.waiting = [list(waiting) for _ in range(stages)]
        self.extra = self.number = self.end = 0
        self.begun: list[Begun] = []
        self.events: list[tuple[int, int, str, bool, int, int]] = []

    def play(self) -> tuple[list[Begun], int]:
        every = {(s, t) for s in range(self.stages) for t in range(len(self.free[0]))}
        left = 2 * self.stages * len(self.reads)
        touched, now = every, 0
        while True:
            for stage, team in sorted(touched):
                self._begin(stage, team, now)
            if not self.events:
                if len(self.begun) == left:
                    return self.begun, self.end
                # Blocks of different widths may wait for each other's limits; the plan's order never does.
                self.extra += 1
                touched = every
                continue
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                touched |= self._happen(*heapq.heappop(self.events)[2:])

    def _begin(self, stage: int, team: int, now: int) -> None:
        """Begin what a team wants, if all ranks of its block want the same."""
        wanted = self._wanted(stage, team)
        if wanted is None or any(self._wanted(stage, other) != wanted for other in self.teams[wanted[1]]):
            return
        backward, p = wanted
        self.begun.append(Begun(p, backward, stage, now))
        lasts = self.timing.lasts(p, backward, stage)
        for mate, places in self.teams[p].items():
            self.free[stage][mate] = False
            self.next[backward][stage][mate] += 1
            self._at(now + max(lasts[place] for place in places), "free", backward, stage, mate)
            if backward:
                self.inside[stage][mate].remove(p)
            else:
                self.inside[stage][mate].append(p)
        end, after = now + max(lasts), stage - 1 if backward else stage + 1
        self.end = max(self.end, end)
        self._at(end, "done", backward, stage, p)
        if 0 <= after < self.stages:
            self._at(end + self.timing.hop(p, min(stage, after)), "here", backward, after, p)
        elif not backward:
            self._at(end, "here", True, stage, p)

    def _wanted(self, stage: int, team: int) -> tuple[bool, int] | None:
        """What a team does next on a stage, if it is free."""
        if not self.free[stage][team]:
            return None
        for backward in (False, True):  # Megatron's steady state: a forward for every backward
            at, queue = self.next[backward][stage][team], self.queue[backward][team]
            if at < len(queue) and self._may(backward, queue[at], stage, team):
                return backward, queue[at]
        return None

    def _may(self, backward: bool, p: int, stage: int, team: int) -> bool:
        if not self.here[backward][stage][p]:
            return False
        waiting, forward = self.waiting[stage], self.done[False][stage]
        if backward:
            return forward[p] and not waiting[p]
        inside = sum(not waiting[x] for x in self.inside[stage][team])
        return inside < self.stages - stage + self.extra and all(forward[r] for r in self.reads[p])

    def _at(self, time: int, what: str, backward: bool, stage: int, which: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, what, backward, stage, which))

    def _happen(self, what: str, backward: bool, stage: int, which: int) -> set[tuple[int, int]]:
        """Note what has happened; (stage, team) that may have something to do now."""
        if what == "free":
            self.free[stage][which] = True
            return {(stage, which)}
        if what == "here":
            self.here[backward][stage][which] = True
        else:
            self.done[backward][stage][which] = True
            for read in self.reads[which] if backward else ():
                self.waiting[stage][read] -= 1
        return {(stage, team) for team in self.teams[which]}


def _teams(blocks: Sequence[Block], world: int) -> tuple[list[dict[int, list[int]]], int]:
    """([pass] team -> places of its ranks in the block, teams)."""
    mine: list[list[int]] = [[] for _ in range(world)]
    for p, block in enumerate(blocks):
        for rank in block:
            mine[rank].append(p)
    numbers: dict[tuple[int, ...], int] = {}
    team_of = [numbers.setdefault(tuple(passes), len(numbers)) for passes in mine]
    found = []
    for block in blocks:
        places: dict[int, list[int]] = {}
        for place, rank in enumerate(block):
            places.setdefault(team_of[rank], []).append(place)
        found.append(places)
    return found, len(numbers)
