"""Rows and pairs from lengths alone, against the trees themselves."""

import random

import numpy as np
import pytest

from megatron_augtree import shared_cost
from megatron_augtree.config import InputError
from megatron_augtree.planning.tree import TokenSequence, from_sequences


def test_a_group_by_hand():
    """Prompt of 6, responses of 4, 2 and 3 tokens: 5 spine rows, leaves of 4, 2 and 3."""
    cost = shared_cost([10, 8, 9], [0, 6, 6])
    assert (cost.rows, cost.unshared_rows) == (5 + 4 + 2 + 3, 9 + 7 + 8)
    assert cost.unshared_pairs == 45 + 28 + 36
    assert cost.pairs == 15 + (6 + 7 + 8 + 9) + (6 + 7) + (6 + 7 + 8)


@pytest.mark.parametrize("seed", range(20))
def test_sorted_samples_cost_what_their_trees_have(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 8))]
    samples = sorted([draw.randrange(2) for _ in range(length)] for length in lengths)
    prefixes = [0]
    for a, b in zip(samples, samples[1:]):
        same = [x == y for x, y in zip(a, b)]
        prefixes.append(same.index(False) if False in same else len(same))
    cost = shared_cost([len(s) for s in samples], prefixes)
    sequences = [TokenSequence(np.asarray(s), np.ones(len(s) - 1, bool)) for s in samples]
    shape = from_sequences(sequences).shape
    assert cost.rows == shape.total_rows
    assert cost.pairs == sum(shape.area(node) for node in range(len(shape.rows)))


@pytest.mark.parametrize("lengths, prefixes", [([3], [1]), ([3, 3], [0, 4]), ([3, 2], [0, -1]), ([3], [])])
def test_what_does_not_fit(lengths, prefixes):
    with pytest.raises(InputError):
        shared_cost(lengths, prefixes)
