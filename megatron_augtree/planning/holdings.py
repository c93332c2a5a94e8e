"""What the ranks of a block hold and see: spans laid out in buffers, indexed by node.

Everything tree-specific is here, in one rule. A query row sees its node's rows up to itself and all rows of
its ancestors, so what a rank sees of a node is *whole* (it holds rows of a descendant) or a *prefix* (up to
the first row of the last span that it holds), or nothing. Fused, prefill, chunk and replay passes, one tree
or many, two levels or ten, use the same code.

Two orders make ranges of what would be lists. Buffers are laid out by node and row, so the rows of a node
that a query sees are one range of a buffer. Nodes are numbered depth first, so the rows below a node are one,
too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.placement import Placement
from megatron_augtree.planning.schedule import HOME, Rows, Tile, rows
from megatron_augtree.planning.tree import ForestShape

#: Above every row number: a rank sees all of the node.
WHOLE = 1 << 62


def state_buffer(pass_id: int) -> str:
    """Name of the buffer with the keys and values that a pass kept."""
    return f"state/{pass_id}"


class Laid:
    """Spans in the order of nodes and rows, laid out in one buffer of one rank.

    Args:
        buffer: its name.
        spans: [3, n] node, first row and end row of each.

    Attributes:
        spans: as given.
        at: [n + 1] first buffer row of each span; the last entry is the number of rows.
        nodes: its nodes.
        first: [node + 1] the first span of each node; the last entry is the number of spans.
        offset: [node + 1] the first buffer row of each node; the last entry is the number of rows.
    """

    def __init__(self, buffer: str, spans: np.ndarray) -> None:
        self.buffer, self.spans = buffer, spans
        node, lo, hi = spans
        self.at = np.zeros(len(node) + 1, np.int64)
        np.cumsum(hi - lo, out=self.at[1:])
        self.first = np.append(np.flatnonzero(np.diff(node, prepend=-1)), len(node))
        self.nodes, self.offset = node[self.first[:-1]].tolist(), self.at[self.first].tolist()

    @property
    def count(self) -> int:
        """Rows of the buffer."""
        return self.offset[-1]

    def moved(self, buffer: str) -> Laid:
        """The same rows, laid out the same way in another buffer."""
        other = copy(self)
        other.buffer = buffer
        return other

    def below(self, node: int, end_node: int) -> tuple[int, int]:
        """The buffer rows of the nodes after `node` and before `end_node`."""
        first, end = bisect_right(self.nodes, node), bisect_left(self.nodes, end_node)
        return self.offset[first], self.offset[end]

    def sights(self, keys: Laid) -> dict[int, list[tuple[int, int, int]]]:
        """node -> its spans that see some of it in `keys`: (first row, end row, end of the rows seen)."""
        (node, lo, _), (key_node, _, key_hi) = self.spans, keys.spans
        scale = int(max(lo.max(initial=0), key_hi.max(initial=0))) + 1
        ends = key_node * scale + key_hi
        first, end = np.searchsorted(ends, [node * scale, node * scale + lo], "right")
        some = np.flatnonzero(end > first)
        columns = node, self.at, self.at[1:], keys.at[end]
        found: dict[int, list[tuple[int, int, int]]] = {}
        for key, *sight in zip(*(column[some].tolist() for column in columns)):
            found.setdefault(key, []).append(tuple(sight))
        return found


class Keys(NamedTuple):
    """Keys of a block by node and row: [n] each.

    Attributes:
        node, lo, hi: the span; nodes are numbered as in `Block.used`.
        rank, buffer, at: the rank that owns it, the buffer by its number in `Block.names`, and its first row.
    """

    node: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    rank: np.ndarray
    buffer: np.ndarray
    at: np.ndarray


class Block:
    """What every rank of a block holds and sees.

    Attributes:
        shape: the forest.
        world: ranks of the block.
        placement: as given.
        home: [rank] -> its own rows.
        state: [rank] -> what earlier passes kept there, as far as there is any.
        names: buffers that keys come from, by name; more are added as keys are handed on.
        used: forest nodes that have keys here, in order.
        keys: all keys.
        seen: [rank, used node] end of what a rank sees of a node.
        buffers: [rank] -> buffer name -> rows.

    Raises:
        AugTreeError: two spans of one node overlap.
    """

    def __init__(
        self, shape: ForestShape, placement: Placement, states: Sequence[tuple[int, Placement]]
    ) -> None:
        self.shape, self.world, self.placement = shape, len(placement), placement
        self.home = _laid(HOME, placement)
        kept = [_laid(state_buffer(p), placed) for p, placed in states]
        self.state = [[laid[rank] for laid in kept if laid[rank].count] for rank in range(self.world)]
        self.names = sorted([HOME, *(state_buffer(p) for p, _ in states)])
        self.buffers = [
            {laid[rank].buffer: laid[rank].count for laid in (self.home, *kept)} for rank in range(self.world)
        ]
        self.used, self.keys = self._index()
        self.seen = self._sight()

    def owned(self, rank: int) -> list[Laid]:
        """All keys and values that live on a rank."""
        return [*self.state[rank], *([self.home[rank]] if self.home[rank].count else [])]

    def _index(self) -> tuple[np.ndarray, Keys]:
        held = [(rank, laid) for rank in range(self.world) for laid in self.owned(rank)]
        if not held:
            return np.zeros(0, np.int64), Keys(*np.zeros((6, 0), np.int64))
        sizes = [len(laid.at) - 1 for _, laid in held]
        node, lo, hi = np.concatenate([laid.spans for _, laid in held], axis=1)
        rank = np.repeat([rank for rank, _ in held], sizes)
        buffer = np.repeat([self.names.index(laid.buffer) for _, laid in held], sizes)
        at = np.concatenate([laid.at[:-1] for _, laid in held])
        order = np.lexsort((lo, node))
        used, number = np.unique(node, return_inverse=True)
        keys = Keys(*(column[order] for column in (number, lo, hi, rank, buffer, at)))
        clash = np.flatnonzero((keys.node[1:] == keys.node[:-1]) & (keys.lo[1:] < keys.hi[:-1]))
        if len(clash):
            one, two = ((int(keys.lo[i]), int(keys.hi[i])) for i in (clash[0], clash[0] + 1))
            raise AugTreeError(
                "two spans of one node overlap",
                values=f"node {used[keys.node[clash[0]]]}: rows {one} and {two}",
                rule="a node is cut once; its spans are disjoint, here and in the prompt state",
                remedy="mend the placement",
            )
        return used, keys

    def _sight(self) -> np.ndarray:
        place = {node: i for i, node in enumerate(self.used.tolist())}
        seen = np.zeros((self.world, len(place)), np.int64)
        whole: dict[tuple[int, ...], list[int]] = {}
        for rank, home in enumerate(self.home):
            nodes = tuple(home.nodes)
            if nodes not in whole:
                above = frozenset().union(*[self.shape.ancestors[n] for n in nodes])
                whole[nodes] = sorted(place[n] for n in above if n in place)
            seen[rank, [place[n] for n in nodes]] = home.spans[1][home.first[1:] - 1]
            seen[rank, whole[nodes]] = WHOLE
        return seen

    def sees(self, rank: int) -> np.ndarray:
        """[keys] whether some query of a rank sees them, but for the rank's own."""
        return (self.keys.hi <= self.seen[rank][self.keys.node]) & (self.keys.rank != rank)

    def local_tiles(self, rank: int) -> list[Tile]:
        """Rectangles of a rank's own rows against the keys that it holds itself."""
        return [tile for keys in self.owned(rank) for tile in full_tiles(self.shape, self.home[rank], keys)]

    def triangles(self, rank: int, *, leaves: bool | None = None) -> list[Tile]:
        """Causal tiles of a rank's own rows, one a node: of leaves, of inner nodes, or of all."""
        home, tiles = self.home[rank], []
        for node, lo, hi in zip(home.nodes, home.offset, home.offset[1:]):
            if leaves is None or leaves != bool(self.shape.children[node]):
                mine = Rows(HOME, ((lo, hi),))
                tiles.append(Tile(mine, mine, causal=True))
        return tiles


def _laid(buffer: str, placement: Placement) -> list[Laid]:
    """[rank] -> its spans of a placement, in one buffer."""
    counts = [len(spans) for spans in placement]
    numbers = chain.from_iterable(chain.from_iterable(placement))
    flat = np.fromiter(numbers, np.int64, 3 * sum(counts)).reshape(-1, 3).T
    edges = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
    return [Laid(buffer, flat[:, lo:hi]) for lo, hi in zip(edges, edges[1:])]


def full_tiles(shape: ForestShape, queries: Laid, keys: Laid) -> list[Tile]:
    """Rectangles of query rows against key rows, as few as the mask allows.

    All query rows that see the same keys are one tile: the queries of all leaves against a spine shard are
    one tile, not one a leaf. A node's own rows in one buffer are a causal tile, and not here.
    """
    if not queries.count or not keys.count:
        return []
    buffer, ends = queries.buffer, shape.subtree_ends
    own = queries.sights(keys) if buffer != keys.buffer else {}
    merged: dict[Rows, list[tuple[int, int]]] = {}
    for node, start, stop in zip(keys.nodes, keys.offset, keys.offset[1:]):
        seeing: dict[int, list[tuple[int, int]]] = {}  # end of the key rows seen -> query rows
        for lo, hi, end in own.get(node, ()):
            seeing.setdefault(end, []).append((lo, hi))
        lo, hi = queries.below(node, ends[node])
        if lo < hi:
            seeing.setdefault(stop, []).append((lo, hi))
        for end, ranges in seeing.items():
            merged.setdefault(rows(buffer, ranges), []).append((start, end))
    return [Tile(q, rows(keys.buffer, ranges), causal=False) for q, ranges in merged.items()]
