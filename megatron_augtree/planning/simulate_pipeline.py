"""1F1B of a plan's passes over (rank, pipeline stage): a pass is a micro-batch of its block.

Every stage of a rank, whenever it is free, plays the next forward in the plan's order, if it is there and few
enough passes are between their forward and their backward on this stage: as many as stages from here on, and
the spine passes that must stay for their waves. Otherwise it plays the next backward, if the later stage is
done with it and so are all passes that read it. A block begins where all its ranks want the same, free.
Activations and their gradients travel from stage to stage beside other work, where transfers overlap.

    stage 0   F0 F1 F2    B0 F3 B1 ..
    stage 1      F0 F1 B0 F2 B1 F3 ..          (Narayanan and others, arXiv 2104.04473, section 2.2)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.simulate_pass import PassTimes, Played


class Placed(NamedTuple):
    """A forward or backward of a pass on one pipeline stage, in time.

    Attributes:
        pass_id, action, stage: what.
        start: ns.
        played: how long it takes each rank.
        order: breaks ties of `start`.
    """

    pass_id: int
    action: str
    stage: int
    start: int
    played: Played
    order: int


def play_pipeline(plan: Plan, times: Sequence[PassTimes], prices: Prices) -> list[Placed]:
    """All passes on all stages.

    Args:
        plan: the plan.
        times: [pass] how long it takes.
        prices: model, with its stages, and machine.
    """
    return _Pipeline(plan, times, prices).play()


class _Pipeline:
    """Ranks that play the same passes are one *team*; a block is some teams."""

    def __init__(self, plan: Plan, times: Sequence[PassTimes], prices: Prices) -> None:
        self.plan, self.times, self.prices = plan, times, prices
        self.stages = prices.model.stages
        mine: list[list[int]] = [[] for _ in range(plan.world)]
        for p in plan.passes:
            for rank in p.block:
                mine[rank].append(p.id)
        teams: dict[tuple[int, ...], int] = {}
        team_of = [teams.setdefault(tuple(passes), len(teams)) for passes in mine]
        #: [pass] team -> places of its ranks in the block.
        self.teams: list[dict[int, list[int]]] = []
        for p in plan.passes:
            places: dict[int, list[int]] = {}
            for place, rank in enumerate(p.block):
                places.setdefault(team_of[rank], []).append(place)
            self.teams.append(places)
        #: [action][team] its passes in the plan's order.
        self.queue = {
            which: [[e.pass_id for e in plan.events if e.action == which and t in self.teams[e.pass_id]]
                    for t in range(len(teams))]
            for which in ("forward", "backward")
        }  # fmt: skip
        count, size = len(plan.passes), len(teams)
        self.done = {which: [[False] * count for _ in range(self.stages)] for which in self.queue}
        #: [stage][pass] whether what comes from the stage before, or behind, is there.
        self.here = {which: [[False] * count for _ in range(self.stages)] for which in self.queue}
        self.here["forward"][0] = [True] * count
        self.next = {which: [[0] * size for _ in range(self.stages)] for which in self.queue}
        self.free = [[True] * size for _ in range(self.stages)]
        self.inside: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(self.stages)]
        self.readers: list[list[int]] = [[] for _ in plan.passes]
        for p in plan.passes:
            for read in p.reads:
                self.readers[read].append(p.id)
        self.extra = self.count = 0
        self.placed: list[Placed] = []
        self.events: list[tuple[int, int, str, int, int]] = []
        self.hops = [[self._hop(p, stage) for stage in range(self.stages - 1)] for p in range(count)]

    def play(self) -> list[Placed]:
        every = {(s, t) for s in range(self.stages) for t in range(len(self.free[0]))}
        left = 2 * self.stages * len(self.plan.passes)
        touched, now = every, 0
        while True:
            self._begin(touched, now)
            if not self.events:
                if len(self.placed) == left:
                    return self.placed
                # Blocks of different widths may wait for each other's limits; the plan's order never does.
                self.extra += 1
                touched = every
                continue
            now, touched = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                touched |= self._happen(*heapq.heappop(self.events)[2:])

    def _begin(self, touched: set[tuple[int, int]], now: int) -> None:
        """Begin all that can."""
        for stage, team in sorted(touched):
            wanted = self._wanted(stage, team)
            if wanted is None or any(self._wanted(stage, other) != wanted for other in self.teams[wanted[1]]):
                continue
            self._start(*wanted, stage, now)

    def _wanted(self, stage: int, team: int) -> tuple[str, int] | None:
        """What a team does next on a stage, if it is free."""
        if not self.free[stage][team]:
            return None
        for which in ("forward", "backward"):  # Megatron's steady state: a forward for every backward
            at, queue = self.next[which][stage][team], self.queue[which][team]
            if at < len(queue) and self._may(which, queue[at], stage, team):
                return which, queue[at]
        return None

    def _may(self, which: str, p: int, stage: int, team: int) -> bool:
        if not self.here[which][stage][p]:
            return False
        backward = self.done["backward"][stage]
        if which == "backward":
            return self.done["forward"][stage][p] and all(backward[r] for r in self.readers[p])
        forward, reads = self.done["forward"][stage], self.plan.passes[p].reads
        inside = sum(all(backward[r] for r in self.readers[x]) for x in self.inside[stage][team])
        return inside < self.stages - stage + self.extra and all(forward[r] for r in reads)

    def _start(self, which: str, p: int, stage: int, now: int) -> None:
        backward = which == "backward"
        played = self.times[p].of(backward, stage == self.stages - 1)
        after = stage - 1 if backward else stage + 1
        hop = self.hops[p][min(stage, after)] if 0 <= after < self.stages else 0
        if not self.prices.cluster.overlap:
            played, hop = Played(played.end + hop, played.busy, played.exposed + hop), 0
        self.placed.append(Placed(p, which, stage, now, played, len(self.placed)))
        for team, places in self.teams[p].items():
            self.free[stage][team] = False
            self.next[which][stage][team] += 1
            self._at(now + int(played.end[places].max()), "free", stage, team)
            if backward:
                self.inside[stage][team].remove(p)
            else:
                self.inside[stage][team].append(p)
        end = now + int(played.end.max())
        self._at(end, which, stage, p)
        if 0 <= after < self.stages:
            self._at(end + hop, f"{which} here", after, p)
        elif not backward:
            self._at(end, "backward here", stage, p)

    def _at(self, time: int, what: str, stage: int, which: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, what, stage, which))

    def _happen(self, what: str, stage: int, which: int) -> set[tuple[int, int]]:
        """Note what has happened; (stage, team) that may have something to do now."""
        if what == "free":
            self.free[stage][which] = True
            return {(stage, which)}
        if what.endswith("here"):
            self.here[what.removesuffix(" here")][stage][which] = True
        else:
            self.done[what][stage][which] = True
        return {(stage, team) for team in self.teams[which]}

    def _hop(self, p: int, stage: int) -> int:
        """Nanoseconds from a stage to the next: the slowest rank's rows. Stages have the pool's ranks each,
        one stage after the other."""
        c, world = self.prices.cluster, self.plan.world
        slowest = 0
        for rank, rows in zip(self.plan.passes[p].block, self.times[p].rows):
            here, there = ((s * world + rank) // c.node_ranks for s in (stage, stage + 1))
            rate = self.prices.link if here == there else self.prices.nic
            slowest = max(slowest, rate.ns(rows * self.prices.model.input_bytes) + c.message_ns)
        return slowest
