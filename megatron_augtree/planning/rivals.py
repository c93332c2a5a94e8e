"""The peers' plans as candidates, so that none is ever cheaper than the plan that is chosen.

Making and pricing all of them would take longer than planning. A peer plays a tree in one job, or more, on
one block, and no such job is cheaper than the cheapest that we know of on that block; so most are ruled out
by what the trees cost there before a single recipe is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_augtree.planning.baselines import (
    BASELINES,
    FREE,
    UNSHARED,
    Costs,
    baseline_recipes,
    recipes_of,
    seatings,
)
from megatron_augtree.planning.baselines.hybrid import Seat, degree_of, widths
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.pool import Pool
from megatron_augtree.planning.recipe import Recipe

#: DCP may play all trees of a replica in one pass. So does the pool's own arrangement of that degree
#: (`pool.py`, shared passes); on few ranks DCP's is priced as well.
_FEW_RANKS = 8

#: Modes whose forest the planner has; the others share nothing.
RIVALS = tuple(mode for mode in BASELINES if mode not in UNSHARED)


@dataclass(frozen=True)
class Rival:
    """A peer's plan and its price.

    Attributes:
        mode: of the peer.
        recipes, events, note: see `baselines`.
        time_ns, peak_bytes: its price.
    """

    mode: str
    recipes: list[Recipe]
    events: list[Event]
    note: str
    time_ns: int
    peak_bytes: int


class Rivals:
    """The peers of one step.

    Args:
        pool: the step's trees and what they cost.
        limit: the most ranks a block may have; the degree of peers that have one.
        limited: whether that is less than the pool allows.
        costs: what peers choose by.
    """

    def __init__(self, pool: Pool, limit: int, limited: bool, costs: Costs) -> None:
        self.pool, self.limit, self.limited, self.costs = pool, limit, limited, costs
        self.rows = [sum(pool.shape.rows[n] for n in nodes) for nodes in pool.trees]

    def faster_than(self, time_ns: int | None) -> Iterator[Rival]:
        """Peers' plans but those that cannot be faster than `time_ns`; None prices all."""
        pool = self.pool
        for mode in RIVALS:
            if mode in FREE:
                yield from self._free(mode, time_ns)
            elif pool.world % self.limit == 0 and not self._all_too_slow(mode, time_ns):
                made = baseline_recipes(
                    mode, pool.shape, pool.tree_groups, pool.world, self.limit, self.costs
                )
                yield self._priced(mode, *made)

    def _rules_out(self, time_ns: int | None, least: int) -> bool:
        return time_ns is not None and least >= time_ns

    def _priced(self, mode: str, recipes: list[Recipe], events: list[Event], note: str) -> Rival:
        return Rival(mode, recipes, events, note, *self.costs.price(self.pool.shape, recipes, events))

    def _all_too_slow(self, mode: str, time_ns: int | None) -> bool:
        """Whether a peer with one degree is too slow even if it balanced perfectly: by what its jobs take at
        the least, or else by what ours are estimated to take."""
        if mode.startswith("dcp") and self.pool.world <= _FEW_RANKS:
            return False
        trees = range(len(self.rows))
        for cost in (self._floor, self._job):
            costs = [cost(tree, self.limit) for tree in trees]
            if self._rules_out(time_ns, max(max(costs), sum(costs) * self.limit // self.pool.world)):
                return True
        return False

    def _floor(self, tree: int, width: int) -> int:
        return self.pool.jobs.floor(self.pool.trees[tree], width)

    def _job(self, tree: int, width: int) -> int:
        """A tree's cheapest job on a block, or no more than that, ns.

        Estimates may be a few per cent off, waves may project their rows on the vocabulary once where a fused
        pass does so twice, and under a pipeline short passes may be worth more than short jobs.
        """
        pool = self.pool
        prices, nodes = pool.jobs.prices, pool.trees[tree]
        floor = pool.jobs.floor(nodes, width)
        if prices.model.stages > 1 or pool.cost(tree, width) < 0:
            return floor
        scored = sum(pool.shape.scored[n] for n in nodes) // width
        return max(floor, pool.cost(tree, width) * 49 // 50 - prices.vocabulary.ns(scored))

    def _free(self, mode: str, time_ns: int | None) -> Iterator[Rival]:
        """A peer that gives every tree ranks of its own choice: its cheapest seating that may be faster."""
        pool, best = self.pool, None
        for degree in widths(pool.world):
            limit = -(-max(self.rows) // degree)
            asked = [degree_of(rows, limit, pool.world) for rows in self.rows]
            if degree > self.limit or self._rules_out(time_ns, self._even(asked)):
                continue
            for seating in seatings(mode, pool.shape, pool.tree_groups, pool.world, self.costs, [degree]):
                wide = self.limited and any(seat.width > self.limit for seat in seating.seats)
                if wide or self._rules_out(time_ns, self._finish(seating.seats)):
                    continue
                rival = self._priced(mode, *recipes_of(mode, pool.shape, seating))
                if best is None or rival.time_ns < best.time_ns:
                    best = rival
        if best is not None:
            yield best

    def _even(self, asked: Sequence[int]) -> int:
        """What trees take on so many ranks each, all even, ns: wider blocks only cost work."""
        costs = [self._floor(tree, width) for tree, width in enumerate(asked)]
        return max(max(costs), sum(c * w for c, w in zip(costs, asked)) // self.pool.world)

    def _finish(self, seats: Sequence[Seat]) -> int:
        """When the last rank of a seating ends at the earliest, ns."""
        busy = [0] * self.pool.world
        for tree, start, width in seats:
            cost = self._floor(tree, width)
            for rank in range(start, start + width):
                busy[rank] += cost
        return max(busy)
