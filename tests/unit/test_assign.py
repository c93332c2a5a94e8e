"""Assignments on integers, each held to the guarantee in its docstring."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.planning.assign import EXACT_ITEMS, assign, exact, largest_load, level, longest_first

WEIGHTS = st.lists(st.integers(0, 40), max_size=6)
LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=3)


def best_possible(weights, loads) -> int:
    return min(
        largest_load(weights, loads, where) for where in product(range(len(loads)), repeat=len(weights))
    )


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, LOADS)
def test_exact_is_optimal(weights, loads):
    assert largest_load(weights, loads, exact(weights, loads)) == best_possible(weights, loads)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(1, 3))
def test_longest_first_keeps_grahams_bound(weights, bins):
    made = largest_load(weights, [0] * bins, longest_first(weights, [0] * bins))
    assert 3 * bins * made <= (4 * bins - 1) * best_possible(weights, [0] * bins)


def test_exact_beats_longest_first_where_greed_fails():
    weights = [3, 3, 2, 2, 2]
    assert largest_load(weights, [0, 0], longest_first(weights, [0, 0])) == 7
    assert largest_load(weights, [0, 0], exact(weights, [0, 0])) == 6
    assert largest_load(weights, [0, 0], assign(weights, [0, 0])) == 6


def test_loads_that_are_there_count():
    assert longest_first([5, 1], [4, 0]) == [1, 0]
    assert exact([5, 1], [10, 0]) == [1, 1]
    assert largest_load([5, 1], [4, 0], [1, 0]) == 5


def test_ties_go_to_the_lower_index():
    assert longest_first([2, 2, 2, 2], [0, 0]) == [0, 1, 0, 1]
    assert longest_first([1, 3, 1], [0, 0, 0]) == [1, 0, 2]


def test_many_items_are_assigned_greedily():
    weights = [3, 3, 2, 2, 2] + [0] * EXACT_ITEMS
    assert assign(weights, [0, 0]) == longest_first(weights, [0, 0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 200))
def test_level_fills_the_lowest_first(loads, amount):
    shares = level(loads, amount)
    assert sum(shares) == amount and min(shares) >= 0
    height = next(h for h in range(1000) if sum(max(0, h - load) for load in loads) >= amount)
    assert (
        max(load + s for load, s in zip(loads, shares) if s or not amount)
        <= max(height, 0) + (not amount) * 60
    )
    assert all(load >= height - 1 for load, s in zip(loads, shares) if s == 0 and amount)


@pytest.mark.parametrize(
    ("loads", "amount", "shares"),
    [
        ([0, 10, 4], 8, [6, 0, 2]),
        ([5, 5], 3, [2, 1]),
        ([7], 4, [4]),
        ([0, 0, 0], 0, [0, 0, 0]),
        ([9, 0], 3, [0, 3]),
    ],
)
def test_level_by_hand(loads, amount, shares):
    assert level(loads, amount) == shares
