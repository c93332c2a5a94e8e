"""The peers' plans as candidates, so that none is ever cheaper than the plan that is chosen.

Making and pricing all of them would take longer than planning. A peer plays a tree in one job, or more, on
one block, and no such job is cheaper than the cheapest that we know of on that block; so most are ruled out
by what the trees cost there before a single recipe is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from megatron_augtree.planning.assign import longest_first
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
from megatron_augtree.planning.recipe import Decision, Recipe

#: Modes whose forest the planner has; the others share nothing.
RIVALS = tuple(mode for mode in BASELINES if mode not in UNSHARED)


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
        shape = pool.shape
        self.rows = [sum(shape.rows[n] for n in nodes) for nodes in pool.trees]
        # Estimates may be a few per cent off, and waves may project their rows on the vocabulary once where a
        # fused pass does so twice.
        vocabulary = pool.jobs.prices.vocabulary
        self._twice = [vocabulary.ns(sum(shape.scored[n] for n in nodes)) for nodes in pool.trees]

    def faster_than(self, time_ns: int | None) -> Iterator[Decision]:
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

    def _priced(self, mode: str, recipes: list[Recipe], events: list[Event], note: str) -> Decision:
        return Decision(mode, recipes, events, note, *self.costs.price(self.pool.shape, recipes, events))

    def _all_too_slow(self, mode: str, time_ns: int | None) -> bool:
        """Whether a peer with one degree is too slow even if it balanced perfectly: by what its jobs take at
        the least, or else by what ours are estimated to take."""
        if mode.startswith("dcp") and not self._rules_out(time_ns, self._in_batches):
            return False
        trees = range(len(self.rows))
        for cost in (self._floor, self._job):
            costs = [cost(tree, self.limit) for tree in trees]
            if self._rules_out(time_ns, max(max(costs), sum(costs) * self.limit // self.pool.world)):
                return True
        return False

    @cached_property
    def _in_batches(self) -> int:
        """What DCP takes about at the least, ns: it may play all trees of a replica in one pass. On few ranks
        it is 0: pricing the plan costs no more."""
        pool = self.pool
        if pool.world <= 8 or pool.stages > 1:
            return 0
        latest, replicas = 0, pool.world // self.limit
        where = longest_first(pool.ideals, [0] * replicas)
        for replica in range(replicas):
            mine = [tree for tree, taker in enumerate(where) if taker == replica]
            took = sum(self._floor(tree, self.limit) for tree in mine)
            if len(mine) > 1:
                nodes = tuple(sorted(n for tree in mine for n in pool.trees[tree]))
                offer = pool.jobs.estimate(nodes, self.limit)
                took = took if offer is None else min(took, offer.cost)
            latest = max(latest, took)
        return latest * 48 // 50

    def _floor(self, tree: int, width: int) -> int:
        """What a tree takes on a block at the least, ns; more where its jobs there are estimated already."""
        pool = self.pool
        floor = pool.ideals[tree] // width + pool.launch_ns
        known = pool.costs.get((tree, width), 0)
        return max(floor, known * 49 // 50 - self._twice[tree] // width) if pool.stages == 1 else floor

    def _job(self, tree: int, width: int) -> int:
        """The same, with jobs estimated now."""
        self.pool.cost(tree, width)
        return self._floor(tree, width)

    def _free(self, mode: str, time_ns: int | None) -> Iterator[Decision]:
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
