"""The peers' plans as candidates, so that none is ever cheaper than the plan that is chosen.

Making and pricing all of them would take longer than planning. A peer plays a tree in one job, or more, on
one block, and no such job is cheaper than the cheapest that we know of on that block; so most are ruled out
by what the trees cost there before a single recipe is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import add, itemgetter, mul
from typing import NamedTuple

from megatron_augtree.planning.arrangement import busy_ranks
from megatron_augtree.planning.assign import heaviest_first, longest_first
from megatron_augtree.planning.baselines import (
    BASELINES,
    FREE,
    UNSHARED,
    Costs,
    baseline_recipes,
    modes,
    recipes_of,
    seatings,
)
from megatron_augtree.planning.baselines.hybrid import Seat, degrees_by_rows, widths
from megatron_augtree.planning.demand import Pair
from megatron_augtree.planning.least import RowBytes, row_bytes
from megatron_augtree.planning.offers import NEVER
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.pool import FEW_ROWS, Pool
from megatron_augtree.planning.recipe import Decision, Recipe
from megatron_augtree.planning.sharing import FEW_NODES

#: Modes whose forest the planner has; the others share nothing.
RIVALS = tuple(mode for mode in BASELINES if mode not in UNSHARED)

#: Modes that play a prompt first -> whether all its responses follow in one pass.
_WAVES = {"ring-reuse-two-pass": True, "ring-reuse-per-response": False, "dcp-phased": True}


#: From so many (node, rank) pairs on, estimating once more is cheaper than counting a peer's plan.
SLOW_TO_COUNT = 1 << 16


class _Sizes(NamedTuple):
    """Some nodes: how many inner ones; rows of these, of leaves, of the longest leaf and sequence."""

    inner: int
    spine: int
    tail: int
    leaf: int
    longest: int


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
        totals = [pool.jobs.totals(nodes) for nodes in pool.trees]
        self.rows, self.pairs = ([each[i] for each in totals] for i in range(2))
        # Estimates may be a few per cent off, and waves may project their rows on the vocabulary once where a
        # fused pass does so twice.
        vocabulary = pool.jobs.prices.vocabulary
        self._once: dict[str, list[int]] = {}
        self._bytes: dict[str, list[int]] = {}
        scored = pool.shape.scored
        self._twice = [vocabulary.ns(sum(scored[x[0] : x[-1] + 1])) for x in pool.trees]  # neighbours
        self._late: dict[tuple[int, int], bool] = {}

    def faster_than(self, time_ns: int | None) -> Iterator[Decision]:
        """Peers' plans but those that cannot be faster than `time_ns`; None prices all."""
        for mode in RIVALS:
            if mode in FREE:
                if time_ns is None or self._fits(mode, self.limit):
                    yield from self._free(mode, time_ns)
                continue
            for degree in self._degrees(mode):
                if time_ns is None or (self._fits(mode, degree) and not self._is_slow(mode, degree, time_ns)):
                    yield from self._at(mode, degree)

    def _degrees(self, mode: str) -> list[int]:
        """The limit, where it divides the pool; of small batches also what divides the pool below it, where a
        tree is one job."""
        few = self._small and mode in modes.SEATED
        return [d for d in range(1 if few else self.limit, self.limit + 1) if self.pool.world % d == 0]

    @cached_property
    def _small(self) -> bool:
        """Whether pricing peers costs no more than ruling them out; a prompt and its responses needs less."""
        shape = self.pool.shape
        nested = any(parent >= 0 and shape.children[node] for node, parent in enumerate(shape.parents))
        few = len(shape.rows) <= FEW_NODES and self.pool.world <= 64
        return few and (len(self.rows) > 1 or nested)

    def _at(self, mode: str, degree: int) -> Iterator[Decision]:
        """A peer's plans of a degree: all seatings of one in which a tree is one job, or what it runs."""
        pool = self.pool
        step = pool.shape, pool.tree_groups, pool.world
        if mode not in modes.SEATED:
            yield self._priced(mode, *baseline_recipes(mode, *step, degree, self.costs))
            return
        for seating in seatings(mode, *step, self.costs, [degree]):
            yield self._priced(mode, *recipes_of(mode, pool.shape, seating))

    def _priced(self, mode: str, recipes: list[Recipe], events: list[Event], note: str) -> Decision:
        return Decision(mode, recipes, events, note, *self.costs.price(self.pool.shape, recipes, events))

    # Memory.

    def _fits(self, mode: str, degree: int) -> bool:
        """Whether every tree may fit under a peer on blocks of a degree: peers keep what the flags say, and
        what they keep and work with, spread evenly, is the least of the heaviest rank. No peer that does not
        fit is ever chosen, so it is ruled out before anything of it is made."""
        return degree >= self._fits_any or max(self._bytes_under(mode)) <= self.pool.jobs.room * degree

    @cached_property
    def _fits_any(self) -> int:
        """Ranks on which every tree may fit under any peer: all its rows at once, keys and values kept."""
        row, room = self._row, max(1, self.pool.jobs.room)
        needs = ((of.spine + of.tail) * row.alone + of.spine * row.state for of in self._sizes)
        return max(-(-need // room) for need in needs)

    def _bytes_under(self, mode: str) -> list[int]:
        """[tree] bytes that it takes under a peer on all ranks of its block at the least."""
        if mode not in self._bytes:
            self._bytes[mode] = [self._bytes_of(mode, rows) for rows in self._sizes]
        return self._bytes[mode]

    @cached_property
    def _sizes(self) -> list[_Sizes]:
        """[tree] its rows."""
        return list(map(self._rows_of, self.pool.trees))

    def _rows_of(self, nodes: Sequence[int]) -> _Sizes:
        """Of all nodes of some trees."""
        if nodes[-1] - nodes[0] + 1 == len(nodes):
            take = itemgetter(slice(nodes[0], nodes[-1] + 1))
        else:
            take = itemgetter(*nodes)
        tail, inner = take(self._leaf_rows), sum(take(self._has_children))
        total, leaves = sum(take(self.pool.shape.rows)), sum(tail)
        return _Sizes(inner, total - leaves, leaves, max(tail), max(take(self._ends)))

    @cached_property
    def _has_children(self) -> list[bool]:
        """[node]."""
        return list(map(bool, self.pool.shape.children))

    @cached_property
    def _leaf_rows(self) -> list[int]:
        """[node] rows of a leaf; 0 of others."""
        return [0 if inner else rows for rows, inner in zip(self.pool.shape.rows, self._has_children)]

    @cached_property
    def _ends(self) -> list[int]:
        """[node] rows of a sequence that ends in it."""
        return list(map(add, self.pool.shape.starts, self.pool.shape.rows))

    def _least_bytes(self, mode: str, nodes: Sequence[int]) -> int:
        """Bytes that some trees take on all ranks of their block at the least, a job of theirs at a time."""
        return self._bytes_of(mode, self._rows_of(nodes))

    def _bytes_of(self, mode: str, of: _Sizes) -> int:
        row = self._row
        if mode == "paper":  # rounds may be as small as a response; the plain ring plays one after the other
            alone = of.longest * row.alone
            return min(alone, of.spine * (row.kept + row.state)) if of.inner else alone
        if of.inner and mode in _WAVES:
            wave = of.tail if _WAVES[mode] else of.leaf
            return of.spine * (row.kept + row.state) + wave * row.alone
        return (of.spine + of.tail) * row.alone

    @cached_property
    def _row(self) -> RowBytes:
        """Bytes of a row by the flags."""
        m = self.pool.jobs.prices.model
        return row_bytes(self.pool.jobs.prices, Pair(m.layers - m.recomputed, m.attention_kept))

    # Time.

    def _is_slow(self, mode: str, degree: int, time_ns: int) -> bool:
        """Whether a peer with one degree is too slow even if it balanced perfectly: by what its jobs take at
        the least, or else by what ours are estimated to take."""
        if mode.startswith("dcp"):
            return self._is_late(mode, degree, time_ns)
        key = degree, time_ns
        if key not in self._late:  # the same for all others
            self._late[key] = self._is_late(mode, degree, time_ns)
        return self._late[key]

    def _is_late(self, mode: str, degree: int, time_ns: int) -> bool:
        trees = heaviest_first(self.rows)
        costs = [self._floor(tree, degree) for tree in range(len(trees))]
        for done in range(0, len(trees), 8):
            if self._together(mode, degree, costs) >= time_ns:
                return True
            for tree in trees[done : done + 8]:
                costs[tree] = self._job(tree, degree)
        if self._together(mode, degree, costs) >= time_ns:
            return True
        if len(self.pool.shape.rows) * degree < SLOW_TO_COUNT:
            return False
        whole = [self._whole(tree, degree) for tree in range(len(trees))]
        return self._together(mode, degree, whole) >= time_ns

    def _together(self, mode: str, degree: int, costs: Sequence[int]) -> int:
        """What all trees take at the least, if one takes `costs` on a block of a degree: the longest, and an
        even share of all.

        DCP may play all trees of a replica in one pass, where they fit together. For small batches, and on
        few ranks, that is an even share of all work: pricing the plan costs no more than estimating it."""
        pool = self.pool
        if not mode.startswith("dcp"):
            return max(max(costs), sum(costs) * degree // pool.world)
        if self._small or pool.world <= 8:
            return sum(pool.ideals) // pool.world + pool.launch_ns
        batches = zip(self._replicas, self._batches(mode))
        return max(min(sum(costs[t] for t in mine), once * 48 // 50) for mine, once in batches)

    @cached_property
    def _replicas(self) -> list[list[int]]:
        """[replica] its trees, dealt out evenly."""
        count = self.pool.world // self.limit
        where = longest_first(self.pool.ideals, [0] * count)
        return [[t for t, taker in enumerate(where) if taker == replica] for replica in range(count)]

    def _batches(self, mode: str) -> list[int]:
        """[replica] what its trees are estimated to take in one pass; much, where they do not fit or are one
        tree only."""
        if mode not in self._once:
            pool, room, found = self.pool, self.pool.jobs.room * self.limit, []
            for mine in self._replicas:
                nodes = tuple(sorted(n for tree in mine for n in pool.trees[tree]))
                offer = None
                if len(mine) > 1 and self._least_bytes(mode, nodes) <= room:
                    offer = pool.jobs.estimate(nodes, self.limit)
                found.append(NEVER if offer is None else offer.cost)
            self._once[mode] = found
        return self._once[mode]

    def _floor(self, tree: int, width: int) -> int:
        """What a tree takes on a block at the least, ns: its even share, what the flags recompute included;
        more where our jobs there are estimated already, unless rows are so few that estimates say little."""
        pool = self.pool
        floor = self._alone[tree] // width + pool.launch_ns
        if self.rows[tree] < FEW_ROWS * width:
            return floor
        known = pool.costs.get((tree, width), 0)
        return max(floor, known * 49 // 50 - self._twice[tree] // width) if known else floor

    @cached_property
    def _alone(self) -> list[int]:
        """[tree] what it takes on one rank, with what runs again by the flags, ns."""
        prices = self.pool.jobs.prices
        m, found = prices.model, []
        for ideal, rows, pairs in zip(self.pool.ideals, self.rows, self.pairs):
            linear = prices.linear.ns(rows) + prices.beside.ns(rows)
            attention = (m.recomputed - m.attention_kept) * prices.attention.ns(pairs) if m.recomputed else 0
            found.append(ideal + (m.recomputed * linear + attention) // m.stages)
        return found

    def _job(self, tree: int, width: int) -> int:
        """The same, with jobs estimated now."""
        self.pool.cost(tree, width)
        return self._floor(tree, width)

    def _whole(self, tree: int, width: int) -> int:
        """The same where it is one job on the whole block, as peers play it: ours may be copies on parts."""
        pool, floor = self.pool, self._floor(tree, width)
        offer = pool.jobs.estimate(pool.trees[tree], width)
        return floor if offer is None else max(floor, offer.cost * 49 // 50 - self._twice[tree] // width)

    def _free(self, mode: str, time_ns: int | None) -> Iterator[Decision]:
        """A peer that gives every tree ranks of its own choice: its cheapest seating that may be faster."""
        pool, best = self.pool, None
        degrees = (d for d in widths(pool.world) if d <= self.limit and self._may_end(d, time_ns))
        for seating in seatings(mode, pool.shape, pool.tree_groups, pool.world, self.costs, degrees):
            wide = self.limited and any(seat.width > self.limit for seat in seating.seats)
            if wide or (time_ns is not None and self._is_out(mode, seating.seats, time_ns)):
                continue
            rival = self._priced(mode, *recipes_of(mode, pool.shape, seating))
            if best is None or rival.time_ns < best.time_ns:
                best = rival
        if best is not None:
            yield best

    def _may_end(self, degree: int, time_ns: int | None) -> bool:
        """Whether trees may end before on as many ranks as they ask for where the longest asks for `degree`,
        all even: wider blocks only cost work."""
        if time_ns is None:
            return True
        world, longest = self.pool.world, max(self.rows)
        limit = -(-longest // degree)
        asked, widest = degrees_by_rows(self.rows, limit, world), self.rows.index(longest)
        if self._floor(widest, asked[widest]) >= time_ns:
            return False
        costs = [self._floor(tree, width) for tree, width in enumerate(asked)]
        return max(costs) < time_ns and sum(map(mul, costs, asked)) // world < time_ns

    def _is_out(self, mode: str, seats: Sequence[Seat], time_ns: int) -> bool:
        """Whether a seating does not fit, or its last rank does not end before: trees on the rank that seems
        to be the last are estimated until it surely is, or all of them are known; then it alone is priced."""
        least, room = self._bytes_under(mode), self.pool.jobs.room
        if any(least[tree] > room * width for tree, _, width in seats):
            return True
        while True:
            busy = busy_ranks(
                ((start, width, self._floor(tree, width)) for tree, start, width in seats), self.pool.world
            )
            last = busy.index(max(busy))
            if busy[last] >= time_ns:
                return True
            mine = [seat for seat in seats if seat.start <= last < seat.start + seat.width]
            new = [seat for seat in mine if (seat.item, seat.width) not in self.pool.costs]
            for tree, _, width in new:
                self._job(tree, width)
            if not new and self.pool.stages > 1:
                return False  # fewer passes may take a pipeline longer
            if not new:
                return self._ends_late(mode, mine, time_ns)

    def _ends_late(self, mode: str, mine: Sequence[Seat], time_ns: int) -> bool:
        """Whether a rank that plays these seats, without a pipeline, does not end before. They are priced a
        few at a time: it takes as long as all of them, and none that is left less than its even share."""
        pool, few = self.pool, 4
        shares = [self._alone[tree] // width + pool.launch_ns for tree, _, width in mine]
        left, done = sum(shares), 0
        for first in range(0, len(mine), few):
            part = mine[first : first + few]
            left -= sum(shares[first : first + few])
            done += self._priced(mode, *recipes_of(mode, pool.shape, modes.Seating("", part))).time_ns
            if done + left >= time_ns:
                return True
        return False
