"""Placements: a zigzag evens out early and late rows; cuts cover every row once; lanes are chosen by area."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.planning.lanes import loads_of, place, place_inner, row_cost
from megatron_augtree.planning.placement import Span, collect, contiguous, count, zigzag
from megatron_augtree.planning.tree import from_lengths, from_sequences
from tests.unit.forests import row_names, shapes
from tests.unit.test_tree import sequence

SHARES = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


def test_the_picture_of_a_zigzag():
    """Four ranks, eight chunks: 0 1 2 3 3 2 1 0, the two in the middle adjacent on one rank."""
    assert zigzag(7, 0, 16, [1] * 4) == [
        [Span(7, 0, 2), Span(7, 14, 16)],
        [Span(7, 2, 4), Span(7, 12, 14)],
        [Span(7, 4, 6), Span(7, 10, 12)],
        [Span(7, 6, 8), Span(7, 8, 10)],
    ]
    assert collect(4, enumerate(zigzag(7, 0, 16, [1] * 4)))[3] == (Span(7, 6, 10),)


def test_targets_shift_across_a_zigzag():
    """Case 20: rank 0 of two holds [0, 1, 6, 7] -> [1, 2, 7, none]; a packed neighbour is never a target."""
    forest = from_sequences([sequence(range(8)), sequence(range(8, 16))])
    for tree, first in ((0, 0), (1, 8)):
        # Seven rows: the eighth token is nobody's input.
        ranks = [[i for s in spans for i in range(s.lo, s.hi)] for spans in zigzag(tree, 0, 8, [1, 1])]
        assert ranks == [[0, 1, 6, 7], [2, 3, 4, 5]]
        start = forest.shape.offsets[tree]
        pairs = [
            [(int(forest.inputs[start + i]), int(forest.targets[start + i])) for i in rank if i < 7]
            for rank in ranks
        ]
        assert pairs == [[(first + i, first + i + 1) for i in rank if i < 7] for rank in ranks]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20), st.integers(0, 40), SHARES)
def test_cuts_cover_every_row_once(lo, rows, shares):
    for cut in (zigzag, contiguous):
        spans = cut(3, lo, lo + rows, shares)
        assert len(spans) == len(shares) and all(
            span.node == 3 and span.lo < span.hi for s in spans for span in s
        )
        assert sorted(r for s in spans for span in s for r in range(span.lo, span.hi)) == [
            *range(lo, lo + rows)
        ]
        assert all(not s for s, share in zip(spans, shares) if share == 0)
        for s, share in zip(spans, shares):
            chunks = 2 if cut is zigzag else 1
            assert abs(count(s) - rows * share / sum(shares)) < chunks, "shares are kept to a row a cut"
        if cut is contiguous:
            assert [s for s in spans if s] == sorted(s for s in spans if s)


@pytest.mark.parametrize("degree", (1, 2, 3, 4, 5, 8))
def test_a_zigzag_evens_out_pairs(degree):
    """Rows that divide by 2 x degree: every rank computes exactly the same number of pairs."""
    shape = from_lengths(2 * degree * 3, [])
    loads = loads_of(shape, place_inner(shape, [0], degree), degree, 0)
    assert len(set(loads)) == 1 and sum(loads) == shape.area(0)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 5)), unique=True))
def test_collect_joins_only_neighbours(cells):
    """Cells are single rows; a rank's spans come by node, then row, and adjacent ones are one."""
    pieces = [(rank, [Span(node, row, row + 1)]) for rank, node, row in cells]
    placement = collect(3, pieces)
    for rank, spans in enumerate(placement):
        assert [(s.node, r) for s in spans for r in range(s.lo, s.hi)] == sorted(
            (n, r) for k, n, r in cells if k == rank
        )
        assert all(a.node < b.node or a.hi < b.lo for a, b in zip(spans, spans[1:]))
        assert count(spans) == sum(k == rank for k, _, _ in cells)


@settings(max_examples=100, deadline=None)
@given(shapes(max_nodes=8, max_rows=9), st.integers(1, 6), st.integers(0, 4), st.integers(0, 50), st.data())
def test_lanes_hold_every_row_once(shape, degree, wide, unit, data):
    lane = data.draw(st.sampled_from([d for d in range(1, degree + 1) if degree % d == 0]))
    inner = [n for n in range(len(shape.rows)) if shape.children[n]]
    leaves = [n for n in range(len(shape.rows)) if not shape.children[n]]
    placement = place(
        shape, inner, leaves, degree, lane_degree=lane, wide=min(wide, len(leaves)), pairs_per_row=unit
    )
    held = [name for spans in placement for name in row_names(shape, spans)]
    assert sorted(held) == [(n, r) for n, rows in enumerate(shape.rows) for r in range(rows)]
    narrow = sorted(leaves, key=lambda n: (-shape.rows[n], n))[wide:]
    for node in narrow if lane < degree else ():
        ranks = {rank for rank, spans in enumerate(placement) if any(s.node == node for s in spans)}
        assert len({rank // lane for rank in ranks}) == 1, "a narrow leaf stays in its lane"


def test_a_wide_leaf_fills_up_what_whole_ones_left_uneven():
    shape = from_lengths(8, [600, 300, 90])
    placement = place(shape, [0], [1, 2, 3], 2, lane_degree=1, wide=1, pairs_per_row=100)
    loads = [sum(row_cost(shape, *s, 100) for s in spans) for spans in placement]
    whole = place(shape, [0], [1, 2, 3], 2, lane_degree=1, wide=0, pairs_per_row=100)
    uneven = [sum(row_cost(shape, *s, 100) for s in spans) for spans in whole]
    assert max(loads) < 1.1 * np.mean(loads) and max(uneven) > 1.3 * np.mean(uneven)
    assert all(any(s.node == 1 for s in spans) for spans in placement)
    assert sum(any(s.node == 2 for s in spans) for spans in placement) == 1


def test_leaves_are_spread_over_lanes():
    """Four ranks in lanes of two: the two long leaves go to different lanes."""
    shape = from_lengths(8, [40, 41, 6, 7])
    placement = place(shape, [0], [1, 2, 3, 4], 4, lane_degree=2, wide=0, pairs_per_row=50)
    held = {
        n: {rank for rank, spans in enumerate(placement) if any(s.node == n for s in spans)} for n in (1, 2)
    }
    assert sorted(map(sorted, held.values())) == [[0, 1], [2, 3]]


def test_all_wide_leaves_are_even():
    shape = from_lengths(8, [8, 16])
    placement = place(shape, [0], [1, 2], 2, lane_degree=2, wide=0, pairs_per_row=1)
    assert placement == collect(2, place_inner(shape, [0, 1, 2], 2))
    assert row_cost(shape, 1, 2, 6, 10) == shape.area(1, 2, 6) + 40
