"""All trees on blocks of one degree: longest first, and groups in turn, as data parallelism deals them.

Degrees that estimates rule out are passed over before anything of them is dealt out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_augtree.planning.arrangement import Seated, same_mates
from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.joint import schedule
from megatron_augtree.planning.offers import NEVER

if TYPE_CHECKING:
    from megatron_augtree.planning.pool import Pool

#: So many trees tell what all cost on a degree.
_SAMPLE = 16


class Uniform:
    """Uniform seatings on one pool.

    Args:
        pool: the trees and what they cost.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def seatings(self, best: int | None) -> Iterator[Seated]:
        """By their estimates, the shortest first; at last those that could come near to the best only with
        a pass a block, whose trees are dealt out by their work.

        Args:
            best: time of the best arrangement so far, ns.
        """
        found: list[Seated] = []
        shared: list[int] = []
        for degree in self.pool.degrees():
            # A fifth more: some passes may yet be shared.
            plain = best is None or (self._may_pay(degree) and 4 * self._work(degree) < 5 * best)
            costs = self._costs(degree, best) if plain else None
            if costs is not None:
                found += self._dealt(degree, costs, True, best)
            elif plain or self.least_shared(degree) < best:
                shared.append(degree)
        yield from sorted(found, key=lambda x: x.estimate_ns)
        for degree in shared:
            if best is None or not self._is_out(degree, best):
                yield from self._dealt(degree, self.pool.ideals, False, best)

    def _is_out(self, degree: int, best: int) -> bool:
        """Whether no pass a block comes near to the best: of wider blocks, or of the longest tree's."""
        pool = self.pool
        return degree >= pool.too_wide or max(pool.ideals) // degree + pool.launch_ns >= best

    def _dealt(self, degree: int, costs: Sequence[int], plain: bool, best: int | None) -> Iterator[Seated]:
        """Trees on the blocks of a degree, by their costs there and in turn."""
        pool = self.pool
        blocks = pool.world // degree
        turns = [group % blocks for group in pool.tree_groups]
        dealt = {"": self._balanced(costs, blocks, plain, best, degree), ", groups in turn": turns}
        if same_mates(turns, dealt[""]):
            del dealt[", groups in turn"]
        for name, where in dealt.items():
            finish = max(_loads(costs, where, blocks)) if plain else NEVER
            yield Seated(f"degree {degree}{name}", [(degree, degree * block) for block in where], finish)

    def whole(self, seated: Seated) -> Iterator[Seated]:
        """Other ways to deal the trees to the blocks of a seating's degree, for passes that they share: by
        their work, and by what they cost as one job each, longest first and searched. None of these is what
        a tree adds to a pass; which one is nearest shows when the passes are counted."""
        pool, degree = self.pool, seated.where[0][0]
        offers = [pool.jobs.estimate(tree, degree) for tree in pool.trees]
        blocks, seen = pool.world // degree, [[start // degree for _, start in seated.where]]
        ways = [(pool.ideals, pool.ideals)]
        if None not in offers:
            ways.append(([x.cost for x in offers], [x.cost - pool.launch_ns for x in offers]))
        for costs, added in ways:
            searched = self._balanced(added, blocks, True, None, degree)
            for where in (longest_first(costs, [0] * blocks), searched):
                if not any(same_mates(where, other) for other in seen):
                    seen.append(where)
                    yield seated._replace(where=[(degree, degree * block) for block in where])

    def _balanced(
        self, costs: Sequence[int], blocks: int, plain: bool, best: int | None, degree: int
    ) -> list[int]:
        """[tree] block: longest first; where that comes near to the best, by the joint schedule's search."""
        where = longest_first(costs, [0] * blocks)
        least = max(sum(costs) // blocks, max(costs))
        if not plain or blocks == 1 or not self.pool.shared_may_pay(least, degree, best):
            return where
        found = schedule([[cost] for cost in costs], [1], blocks, [([0] * len(costs), where)])
        return list(found.start)

    def _costs(self, degree: int, best: int | None) -> list[int] | None:
        """[tree] estimated cost on a block of a degree; None where one does not fit there, or where the first
        trees, spread over all, say that the degree is slower than the best by a tenth."""
        pool, ideals = self.pool, self.pool.ideals
        whole, done, even, found = sum(ideals), 0, 0, [0] * len(ideals)
        for count, tree in enumerate(self._spread):
            found[tree] = cost = pool.cost(tree, degree)
            if cost < 0:
                return None
            done, even = done + cost, even + ideals[tree]
            total = done * whole // max(1, even) if count % 8 == 7 else 0
            if best is not None and count >= _SAMPLE and 10 * total * degree > 11 * best * pool.world:
                return None
        return found

    @cached_property
    def _spread(self) -> list[int]:
        """Trees so that the first few stand for all: by work, in strides."""
        order = sorted(range(len(self.pool.trees)), key=self.pool.ideals.__getitem__)
        return [tree for first in range(_SAMPLE) for tree in order[first::_SAMPLE]]

    def _work(self, degree: int) -> int:
        """How long trees keep the pool busy on blocks of a degree, at the least, ns."""
        pool, known = self.pool, self.pool.costs
        launches = degree * pool.launch_ns
        floors = (ideal + launches for ideal in pool.ideals)
        costs = [degree * known.get((tree, degree), 0) for tree in range(len(pool.trees))]
        return sum(map(max, floors, costs)) // pool.world

    def _may_pay(self, degree: int) -> bool:
        """Whether the fixed costs of so few blocks leave a chance."""
        pool = self.pool
        trees = -(-len(pool.trees) // (pool.world // degree))
        return degree in (pool.limit, pool.degree) or (trees - 1) * pool.pass_ns <= 2 * pool.floor_ns

    def least_shared(self, degree: int) -> int:
        """What all trees take on blocks of a degree, a pass a block, at least, ns: every rank has a tile of
        its own of every inner node on its block."""
        pool = self.pool
        c, m = pool.jobs.prices.cluster, pool.jobs.prices.model
        # Fewer rows do not reach every rank.
        inner = sum(rows >= 2 * degree for rows in self._inner_rows) * degree // pool.world
        inner = inner if degree > 1 else 0
        tiles = inner * c.tile_ns * (100 + c.attention_backward_pct) // 100 * -(-m.layers // m.stages)
        return pool.floor_ns + tiles + pool.launch_ns

    @cached_property
    def _inner_rows(self) -> list[int]:
        """Rows of each inner node."""
        shape = self.pool.shape
        return [rows for rows, children in zip(shape.rows, shape.children) if children]


def _loads(costs: Sequence[int], where: Sequence[int], blocks: int) -> list[int]:
    """[block] what its trees cost."""
    loads = [0] * blocks
    for cost, block in zip(costs, where):
        loads[block] += cost
    return loads
