"""Which ranks of a pass's block hold keys, and which of them have queries that see these.

Keys of a node are seen by every rank that holds a row below the node, and, of a cut node, by the ranks that
hold a later row of it. So per node two things say who sees a span: which ranks see the node whole, and how
far down the others see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_augtree.planning.placement import Placement, Span
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.tree import ForestShape


class Keys(NamedTuple):
    """Keys of one node in a pass and its states.

    Attributes:
        spans: (end, first row, rank), by end.
        held: [rank] rows it holds.
        group: [node of the machine] rows held there.
        below: [node of the machine] prefix sums over `spans`: rows there of the first i spans.
    """

    spans: list[tuple[int, int, int]]
    held: list[int]
    group: list[int]
    below: list[list[int]]


class Viewers:
    """Who holds and who sees the keys of a pass and of its states.

    Args:
        shape: the forest.
        p: the pass.
        states: placements of the passes it reads.
        node_ranks: ranks of a node of the machine.
    """

    def __init__(self, shape: ForestShape, p: Pass, states: Sequence[Placement], node_ranks: int) -> None:
        self.shape, self.p, self.states = shape, p, states
        self.world = len(p.placement)
        numbers = [rank // node_ranks for rank in p.block]
        order = {number: i for i, number in enumerate(dict.fromkeys(numbers))}
        #: [rank] node of the machine, counted from 0 in block order.
        self.node_of = [order[number] for number in numbers]
        self.machine_nodes = len(order)

    @cached_property
    def _own(self) -> list[dict[int, int]]:
        """[rank] -> node -> its rows of the pass."""
        own: list[dict[int, int]] = []
        for spans in self.p.placement:
            rows: dict[int, int] = {}
            for s in spans:
                rows[s.node] = rows.get(s.node, 0) + s.hi - s.lo
            own.append(rows)
        return own

    @cached_property
    def _last(self) -> list[dict[int, int]]:
        """[rank] -> node -> first row of its last span: how far down it sees the node."""
        return [{s.node: s.lo for s in spans} for spans in self.p.placement]

    @cached_property
    def _whole(self) -> list[frozenset[int]]:
        """[rank] -> nodes that it sees whole: ancestors of what it holds."""
        known: dict[frozenset[int], frozenset[int]] = {}
        found = []
        for own in self._own:
            nodes = frozenset(own)
            if nodes not in known:
                known[nodes] = frozenset().union(*[self.shape.ancestors[n] for n in nodes])
            found.append(known[nodes])
        return found

    @cached_property
    def _seers(self) -> dict[int, tuple[int, list[int], list[int]]]:
        """node -> who sees its keys: ranks that see it whole, a bit a rank; how far down the others see, in
        order; and for every place in that order the ranks from there on."""
        whole: dict[int, int] = {}
        partly: dict[int, list[tuple[int, int]]] = {}
        for rank in range(self.world):
            for node in self._whole[rank]:
                whole[node] = whole.get(node, 0) | 1 << rank
            for node, last in self._last[rank].items():
                if node not in self._whole[rank]:
                    partly.setdefault(node, []).append((last, rank))
        seers = {}
        for node in whole.keys() | partly.keys():
            order = sorted(partly.get(node, ()))
            below = [0]
            for _, rank in reversed(order):
                below.append(below[-1] | 1 << rank)
            seers[node] = whole.get(node, 0), [last for last, _ in order], below[::-1]
        return seers

    @cached_property
    def _holders(self) -> dict[int, int]:
        """node -> ranks that hold rows of it in the pass."""
        holders: dict[int, int] = {}
        for own in self._own:
            for node in own:
                holders[node] = holders.get(node, 0) + 1
        return holders

    def _keys(self, kinds: Sequence[Placement]) -> dict[int, Keys]:
        """node -> its keys in some placements."""
        spans: dict[int, list[tuple[int, int, int]]] = {}
        for kind in kinds:
            for rank, mine in enumerate(kind):
                for s in mine:
                    spans.setdefault(s.node, []).append((s.hi, s.lo, rank))
        keys = {}
        for node, found in spans.items():
            found.sort()
            held, group = [0] * self.world, [0] * self.machine_nodes
            for hi, lo, rank in found:
                held[rank] += hi - lo
                group[self.node_of[rank]] += hi - lo
            keys[node] = Keys(found, held, group, self._prefix_sums(found))
        return keys

    def _prefix_sums(self, found: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        sums = [[0] for _ in range(self.machine_nodes)]
        for hi, lo, rank in found:
            for node, column in enumerate(sums):
                column.append(column[-1] + (hi - lo if self.node_of[rank] == node else 0))
        return sums

    def _arriving(self, keys: dict[int, Keys], rank: int) -> tuple[int, int]:
        """(near, far) key rows, held elsewhere, that some query of a rank sees."""
        home, near, far = self.node_of[rank], 0, 0
        for node in self._whole[rank]:
            if node in keys:
                k = keys[node]
                near += k.group[home] - k.held[rank]
                far += sum(k.group) - k.group[home]
        for node, last in self._last[rank].items():
            if node in keys and node not in self._whole[rank]:
                k = keys[node]
                index = bisect_left(k.spans, (last + 1,))
                mine = sum(hi - lo for hi, lo, r in k.spans[:index] if r == rank)
                near += k.below[home][index] - mine
                far += sum(column[index] for column in k.below) - k.below[home][index]
        return near, far

    def _viewers(self, span: Span) -> int:
        """Ranks with a query that sees a span of keys, a bit a rank."""
        if span.node not in self._seers:
            return 0
        whole, ends, below = self._seers[span.node]
        return whole | below[bisect_left(ends, span.hi)]

    def _leaving(self, kinds: Sequence[Placement], rank: int) -> tuple[int, int, int]:
        """Key rows that a rank sends, (near, far), and how many ranks get some."""
        near, far, reached = 0, 0, 0
        here, others = self._mates[self.node_of[rank]], ~(1 << rank)
        for kind in kinds:
            for s in kind[rank]:
                seen = self._viewers(s) & others
                reached |= seen
                near += (s.hi - s.lo) * (seen & here).bit_count()
                far += (s.hi - s.lo) * (seen & ~here).bit_count()
        return near, far, reached.bit_count()

    @cached_property
    def _mates(self) -> list[int]:
        """[node of the machine] its ranks, a bit a rank."""
        mates = [0] * self.machine_nodes
        for rank, node in enumerate(self.node_of):
            mates[node] |= 1 << rank
        return mates
