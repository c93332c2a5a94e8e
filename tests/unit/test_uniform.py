"""Shortcuts of the pool's search: they rule out what cannot win, and change nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_augtree.planning.arrangement import mates_of, same_mates
from megatron_augtree.planning.assign import heaviest_first
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import Prices, pairs_per_row
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.lanes import node_costs, row_cost
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.pool import Pool
from megatron_augtree.planning.sharing import Sharing
from megatron_augtree.planning.tree import from_lengths
from megatron_augtree.planning.uniform import Uniform
from tests.unit.forests import forest, shapes

MODEL = ModelShape(4, 256, 1024, 32000, 4, 4, 64, 64, item_bytes=2, logit_rows=64)
GIB = 2**30


def pool(seed: int, world: int = 8) -> Pool:
    """Of more trees than are counted whatever estimates say."""
    draw = random.Random(seed)
    size = draw.choice((100, 5000, 20000))
    trees = [
        from_lengths(size + draw.randint(1, size), [draw.randint(1, size) for _ in range(draw.randint(2, 6))])
        for _ in range(draw.randint(9, 24))
    ]
    prices, options = Prices(MODEL, preset("h100")), Options(limit=world)
    unit, room = pairs_per_row(MODEL, prices.cluster), draw.choice((GIB, 64 * GIB))
    jobs = make_jobs(forest(*trees), prices, unit, room, options, world=world)
    return Pool(jobs, world, world, 0, range(len(trees)))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_ruled_out_could_not_win(seed, monkeypatch):
    """With every uniform seating counted in full, and with all waves and searches, the best is the same."""
    found = list(pool(seed).arrangements())
    monkeypatch.setattr(Pool, "_ends_late", lambda *_: False)
    monkeypatch.setattr(Pool, "_last_in_small_waves", lambda *_: 0)
    monkeypatch.setattr(Uniform, "_is_out", lambda *_: False)
    counted = Sharing.counted
    monkeypatch.setattr(Sharing, "counted", lambda self, x, _, known: counted(self, x, 1 << 61, known))
    every = list(pool(seed).arrangements())
    assert len(found) <= len(every)
    assert min(found, key=lambda x: x.time_ns) == min(every, key=lambda x: x.time_ns)


@given(shapes(), st.integers(0, 50))
def test_nodes_cost_what_their_rows_cost(shape, unit):
    nodes = range(len(shape.rows))
    assert node_costs(shape, nodes, unit) == [row_cost(shape, n, 0, shape.rows[n], unit) for n in nodes]


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 3)] * 2), max_size=2 * n)))
def test_the_same_mates_on_other_bins(pairs):
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    assert same_mates(one, other) == (sorted(mates_of(one)) == sorted(mates_of(other)))
    assert same_mates(one, [3 - bin_ for bin_ in one])


@given(st.lists(st.integers(0, 5)))
def test_heaviest_first_keeps_ties_in_order(weights):
    assert heaviest_first(weights) == sorted(range(len(weights)), key=lambda i: (-weights[i], i))
