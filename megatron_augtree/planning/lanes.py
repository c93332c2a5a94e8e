"""Leaves on the ranks of a block: whole, over lanes, over the whole block, or a mixture.

Inner nodes (spines) are always cut in a zigzag over the block. Imbalance costs more than traffic, so the
choice for the leaves is wide: on single ranks (longest first on top of what is there), on lanes of a given
size, on all ranks, or the longest on all ranks with row-granular shares that fill up what the whole ones
left uneven.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_augtree.planning.assign import assign, level
from megatron_augtree.planning.placement import Placement, Span, collect, zigzag
from megatron_augtree.planning.tree import ForestShape


def row_cost(shape: ForestShape, node: int, lo: int, hi: int, pairs_per_row: int) -> int:
    """Cost of rows in units of one (query, key) pair; `pairs_per_row` prices a row's linear layers."""
    return shape.area(node, lo, hi) + pairs_per_row * (hi - lo)


def node_costs(shape: ForestShape, nodes: Sequence[int], pairs_per_row: int) -> list[int]:
    """`row_cost` of whole nodes."""
    more = 2 * pairs_per_row + 1
    starts, rows = (map(values.__getitem__, nodes) for values in (shape.starts, shape.rows))
    return [(2 * start + of + more) * of // 2 for start, of in zip(starts, rows)]


def place_inner(shape: ForestShape, nodes: Sequence[int], degree: int) -> list[tuple[int, list[Span]]]:
    """Zigzag pieces of some nodes over the whole block."""
    pieces = []
    for node in nodes:
        pieces += enumerate(zigzag(node, 0, shape.rows[node], [1] * degree))
    return pieces


def loads_of(
    shape: ForestShape, pieces: Sequence[tuple[int, Sequence[Span]]], degree: int, pairs_per_row: int
) -> list[int]:
    """[block rank] cost of some pieces."""
    loads, starts = [0] * degree, shape.starts
    for rank, spans in pieces:
        for node, lo, hi in spans:  # `row_cost`, without a call for each of so many spans
            loads[rank] += (hi - lo) * (2 * starts[node] + lo + hi + 1) // 2 + pairs_per_row * (hi - lo)
    return loads


def place(
    shape: ForestShape,
    inner: Sequence[int],
    leaves: Sequence[int],
    degree: int,
    *,
    lane_degree: int,
    wide: int,
    pairs_per_row: int,
) -> Placement:
    """Place the nodes of a pass on a block.

    Args:
        shape: the forest.
        inner: nodes cut over the whole block.
        leaves: nodes that go to lanes.
        degree: ranks of the block.
        lane_degree: ranks of a lane; 1 keeps leaves whole, `degree` makes every leaf wide.
        wide: how many of the longest leaves are cut over the whole block whatever `lane_degree` is; their
            shares fill up what the other leaves left uneven.
        pairs_per_row: see `row_cost`.
    """
    if degree == 1:
        return collect(1, [(0, [Span(n, 0, shape.rows[n]) for n in (*inner, *leaves) if shape.rows[n]])])
    if lane_degree >= degree or wide >= len(leaves):  # nothing is left uneven
        return collect(degree, place_inner(shape, (*inner, *leaves), degree))
    pieces = place_inner(shape, inner, degree)
    by_length = sorted(leaves, key=lambda n: (-shape.rows[n], n))
    spread, narrow = by_length[:wide], by_length[wide:]
    loads = loads_of(shape, pieces, degree, pairs_per_row)
    lanes = [range(lo, lo + lane_degree) for lo in range(0, degree, lane_degree)]
    weights = node_costs(shape, narrow, pairs_per_row)
    for node, lane in zip(narrow, assign(weights, [sum(loads[r] for r in lane) for lane in lanes])):
        cut = zigzag(node, 0, shape.rows[node], [1] * lane_degree)
        pieces += zip(lanes[lane], cut)
    loads = loads_of(shape, pieces, degree, pairs_per_row) if spread else []
    for node in spread:
        shares = _shares(shape, node, loads, pairs_per_row)
        cut = list(enumerate(zigzag(node, 0, shape.rows[node], shares)))
        pieces += cut
        loads = [a + b for a, b in zip(loads, loads_of(shape, cut, degree, pairs_per_row))]
    return collect(degree, pieces)


def _shares(shape: ForestShape, node: int, loads: Sequence[int], pairs_per_row: int) -> list[int]:
    """How much of a wide leaf each rank takes; a zigzag's cost is nearly proportional to its rows."""
    shares = level(loads, row_cost(shape, node, 0, shape.rows[node], pairs_per_row))
    return shares if any(shares) else [1] * len(loads)
