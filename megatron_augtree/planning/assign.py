"""Items to bins: the two assignments that planning needs, on integers, each with its guarantee.

Items are leaves with their cost, bins are lanes that already carry load; or trees, and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

#: `exact` stops being instant beyond this many items.
EXACT_ITEMS = 10


def heaviest_first(weights: Sequence[int]) -> list[int]:
    """Items by falling weight; ties go to the lower index."""
    return sorted(range(len(weights)), key=weights.__getitem__, reverse=True)  # which keeps ties in order


def longest_first(weights: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Give each item, heaviest first, to the least loaded bin.

    Guarantee: with empty bins the largest load is at most 4/3 - 1/(3 bins) of the smallest possible one
    (Graham 1969). Ties go to the lower index, so the result is the same everywhere.

    Args:
        weights: [item] non-negative costs.
        loads: [bin] what the bins carry already.

    Returns:
        [item] -> bin.
    """
    heap, where = [(load, bin_) for bin_, load in enumerate(loads)], [0] * len(weights)
    heapify(heap)
    for item in heaviest_first(weights):
        load, target = heap[0]
        where[item] = target
        heapreplace(heap, (load + weights[item], target))
    return where


def exact(weights: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The assignment with the smallest largest load, by branch and bound; for up to `EXACT_ITEMS` items.

    Guarantee: optimal. Items go heaviest first; a branch ends where a bin already reaches the best known
    largest load; of equally loaded bins only the first is tried.
    """
    order = heaviest_first(weights)
    best = longest_first(weights, loads)
    limit = largest_load(weights, loads, best)
    floor = max([*loads, -(-(sum(loads) + sum(weights)) // len(loads))])
    where, current = [0] * len(weights), list(loads)

    def place(depth: int) -> None:
        nonlocal best, limit
        if limit <= floor:
            return
        if depth == len(order):
            best, limit = list(where), max(current)
            return
        item, tried = order[depth], set()
        for bin_ in range(len(current)):
            if current[bin_] in tried or current[bin_] + weights[item] >= limit:
                continue
            tried.add(current[bin_])
            where[item] = bin_
            current[bin_] += weights[item]
            place(depth + 1)
            current[bin_] -= weights[item]

    place(0)
    return best


def assign(weights: Sequence[int], loads: Sequence[int]) -> list[int]:
    """`exact` for few items, `longest_first` for many."""
    few = len(weights) <= EXACT_ITEMS and len(loads) ** min(len(weights), 8) <= 4096
    return exact(weights, loads) if few else longest_first(weights, loads)


def largest_load(weights: Sequence[int], loads: Sequence[int], where: Sequence[int]) -> int:
    """The largest load of an assignment."""
    current = list(loads)
    for weight, target in zip(weights, where):
        current[target] += weight
    return max(current)


def level(loads: Sequence[int], amount: int) -> list[int]:
    """Share `amount` among bins so that the lowest are filled up first (water filling).

    Guarantee: the largest resulting load is the smallest possible, up to one unit a bin.

    Returns:
        [bin] amounts, summing to `amount`.
    """
    order = sorted(range(len(loads)), key=lambda b: (loads[b], b))
    shares, left, height = [0] * len(loads), amount, loads[order[0]] if loads else 0
    for count in range(1, len(order) + 1):
        ceiling = loads[order[count]] if count < len(order) else None
        rise = left // count if ceiling is None else min(ceiling - height, left // count)
        for filled in order[:count]:
            shares[filled] += rise
        left -= rise * count
        height += rise
        if ceiling is not None and height < ceiling:
            break
    for filled in order[:left]:
        shares[filled] += 1
    return shares
