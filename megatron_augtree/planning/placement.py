"""Where rows live: nodes cut into spans, spans given to the ranks of a block.

A node's rows may be on one rank, cut in a zigzag over a lane, or cut anywhere; a cut never depends on who
looks, so every pair of spans of one node is either the same span or strictly ordered.

Zigzag cuts a node into 2c chunks for the c ranks of a lane; rank i takes chunks i and 2c-1-i, so that early
(cheap) and late (dear) rows even out. With four ranks, rows run to the right:

    chunk  0 1 2 3 4 5 6 7
    rank   0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Rows lo..hi (half-open, counted from the node's first row) of a node."""

    node: int
    lo: int
    hi: int


#: [block rank] -> the spans it holds, by node, then by row; spans of one node are never adjacent.
Placement = tuple[tuple[Span, ...], ...]


def zigzag(node: int, lo: int, hi: int, shares: Sequence[int]) -> list[list[Span]]:
    """Cut rows lo..hi of a node in a zigzag.

    Args:
        node: the node.
        lo, hi: half-open row range.
        shares: [lane rank] non-negative weights; equal weights give the usual zigzag.

    Returns:
        [lane rank] -> at most two spans, in row order; empty spans are left out.
    """
    weights = [*shares, *reversed(shares)]
    total, rows = sum(weights), hi - lo
    spans: list[list[Span]] = [[] for _ in shares]
    edge, seen = lo, 0
    for chunk, weight in enumerate(weights):
        seen += weight
        end = lo + rows * seen // total
        if end > edge:
            spans[min(chunk, len(weights) - 1 - chunk)].append(Span(node, edge, end))
        edge = end
    return spans


def contiguous(node: int, lo: int, hi: int, shares: Sequence[int]) -> list[list[Span]]:
    """Cut rows lo..hi of a node into one run per rank, in rank order, in proportion to `shares`."""
    total, rows, edge, seen = sum(shares), hi - lo, lo, 0
    spans: list[list[Span]] = []
    for share in shares:
        seen += share
        end = lo + rows * seen // total
        spans.append([Span(node, edge, end)] if end > edge else [])
        edge = end
    return spans


def collect(degree: int, pieces: Iterable[tuple[int, Iterable[Span]]]) -> Placement:
    """Make a placement of (block rank, spans) pieces: sorted, adjacent spans of a node joined."""
    held: list[list[Span]] = [[] for _ in range(degree)]
    for rank, spans in pieces:
        held[rank].extend(spans)
    return tuple(tuple(_join(sorted(spans))) for spans in held)


def _join(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].node == span.node and joined[-1].hi == span.lo:
            joined[-1] = Span(span.node, joined[-1].lo, span.hi)
        else:
            joined.append(span)
    return joined


def count(spans: Iterable[Span]) -> int:
    """Rows in some spans."""
    return sum(span.hi - span.lo for span in spans)
