"""Which jobs share passes, slots of a pipeline, bounds that rule candidates out unpriced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.arrangement import arrange
from megatron_augtree.planning.baselines import FREE, variants
from megatron_augtree.planning.candidates import Choice
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import Prices, pairs_per_row
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.least import Least
from megatron_augtree.planning.offers import Offer, Options
from megatron_augtree.planning.pool import Pool
from megatron_augtree.planning.rivals import RIVALS, Rivals
from megatron_augtree.planning.search import Search
from megatron_augtree.planning.sharing import SharedPass, Sharing
from megatron_augtree.planning.slots import promising, with_shorter_slots
from megatron_augtree.planning.tree import from_lengths
from tests.unit.forests import forest
from tests.unit.job_cases import DRAWN, GQA, HUGE, SMALL

LAUNCH = 100


class Added(Jobs):
    """Trees of one node: a pass takes `LAUNCH` and what its trees take, over its ranks; a byte a tree."""

    def __init__(self, times, room: int = HUGE, launch: int = LAUNCH) -> None:
        shape = forest(*[from_lengths(0, [1]) for _ in times])
        super().__init__(shape, Prices(SMALL, preset("h100")), 1, room, Options())
        self.times, self.launch = times, launch

    def floor(self, nodes, ranks: int) -> int:
        return self.launch + sum(self.times[n] for n in nodes) // ranks

    def estimate(self, nodes, width: int) -> Offer | None:
        time = self.floor(nodes, width)
        return Offer(time, time, time, len(nodes), Choice(width)) if len(nodes) <= self.room else None


def search(times, world: int, start, **fields) -> tuple[int, list[SharedPass]]:
    jobs = Added(times, **fields)
    sharing = Sharing(jobs, world, [(n,) for n in range(len(times))])
    found = sharing.run([SharedPass(*p) for p in start], 10_000)
    return sharing.time_ns(found), sorted(found)


def test_jobs_of_a_block_share_a_pass():
    time, found = search([5, 4, 3], 1, [((0,), 1, 0), ((1,), 1, 0), ((2,), 1, 0)])
    assert time == LAUNCH + 12 and found == [((0, 1, 2), 1, 0)]
    time, found = search([5, 4, 3], 1, [((0,), 1, 0), ((1,), 1, 0), ((2,), 1, 0)], room=2)
    assert time == 2 * LAUNCH + 12 and len(found) == 2, "memory adds up"


def test_jobs_go_where_they_end_sooner():
    """9 + 8 + 2 | 1: in two moves or exchanges 10 | 10."""
    time, found = search([9, 8, 2, 1], 2, [((0, 1, 2), 1, 0), ((3,), 1, 1)])
    assert time == LAUNCH + 10 and sorted(p.mates for p in found) == [(0, 3), (1, 2)]
    time, found = search([9, 8], 2, [((0, 1), 1, 0)])
    assert time == LAUNCH + 9 and len({p.start for p in found}) == 2, "an idle block is a block"


def test_jobs_are_exchanged():
    """9 + 7 | 6 + 5, and 16 | 11 cannot move a job with gain: 9 for 6 makes 13 | 14."""
    time, found = search([9, 7, 6, 5], 2, [((0, 1), 1, 0), ((2, 3), 1, 1)])
    assert time == LAUNCH + 14 and {len(p.mates) for p in found} == {2}


def test_blocks_of_other_widths_stay():
    """A pass on all ranks below narrower ones: jobs move among blocks of their own width only."""
    start = [((0,), 2, 0), ((1, 2), 1, 0)]
    time, found = search([10, 6, 5], 2, start)
    assert ((0,), 2, 0) in found and {p.start for p in found if p.width == 1} == {0, 1}
    assert len(found) == 3 and time == LAUNCH + 5 + LAUNCH + 6


def test_what_does_not_fit_is_no_start():
    assert Sharing(Added([1, 1], room=1), 1, [(0,), (1,)]).run([SharedPass((0, 1), 1, 0)], 100) is None


def test_effort_ends_the_search():
    jobs = Added([5] * 8)
    start = [SharedPass((n,), 1, 0) for n in range(8)]
    sharing = Sharing(jobs, 2, [(n,) for n in range(8)])
    sharing.run(start, 0)
    assert sharing.time_ns(start) == 8 * (LAUNCH + 5)
    assert len(sharing.run(start, 0)) == 8 > len(sharing.run(start, 10_000))


# Pipelines.


@pytest.mark.parametrize("cluster", ("cpu", "h100"))
def test_one_long_tree_among_many_takes_shorter_slots(engine, cluster):
    """Under four stages the longest pass counts three times more, wherever it is."""
    shape = forest(from_lengths(9000, [4000] * 6), *[from_lengths(3000, [1000, 900, 800])] * 6)
    prices = Prices(replace(GQA, stages=4), preset(cluster))
    unit = pairs_per_row(prices.model, prices.cluster)
    options = Options(waves=(1, 2, 4, 8, 16))
    ways = [make_jobs(shape, prices, unit, HUGE, options, weight, world=2) for weight in (0, 16)]
    made = list(Pool(ways[0], 2, 2, 0, range(7)).arrangements())
    first = min(made, key=lambda x: x.time_ns)
    assert first in promising(made)
    found = with_shorter_slots(first, ways, 2)
    slots = [max(x.job.offer.slot for x in y.placed) for y in (first, found)]
    assert found.time_ns < first.time_ns and slots[1] < slots[0]
    assert found.time_ns == arrange("", found.placed, 2, 4).time_ns
    again = with_shorter_slots(found, ways, 2)
    assert again is None or again.time_ns < found.time_ns


# Bounds of memory.


@settings(max_examples=60, deadline=None, phases=DRAWN)
@given(
    st.integers(1, 30000),
    st.lists(st.integers(1, 4000), min_size=1, max_size=6),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from((-1, -2, 0, 1)),
    st.sampled_from(("h100", "cpu")),
    st.integers(0, 2),
)
def test_no_job_fits_below_the_bound(prompt, leaves, width, whole, cluster, recomputed):
    shape = forest(from_lengths(prompt, leaves), from_lengths(prompt // 2, leaves))
    prices = Prices(replace(GQA, recomputed=recomputed, attention_kept=recomputed // 2), preset(cluster))
    options, nodes = Options(whole=whole), tuple(range(len(shape.rows)))
    bound = Least(shape, prices, options).bytes(nodes)
    room = bound // width - 1
    jobs = make_jobs(shape, prices, pairs_per_row(prices.model, prices.cluster), room, options, world=8)
    assert jobs.best(nodes, width) is None and jobs.leanest.peak * width >= bound


@pytest.mark.parametrize("recomputed", (0, 1, 2))
def test_no_peer_needs_less_than_its_bound(recomputed):
    """On eight ranks of two nodes, every mode and all of its choices."""
    trees = [from_lengths(5000, [3000, 200, 100]), from_lengths(0, [700]), from_lengths(300, [2000] * 4)]
    shape = forest(*trees)
    prices = Prices(replace(GQA, recomputed=recomputed, attention_kept=recomputed // 2), preset("h100"))
    search = Search(shape, prices, 8, AugTreeConfig(), range(3))
    search._pool = next(search._pools())
    rivals = Rivals(search._pool, 8, False, search.costs())
    for mode in RIVALS:
        bound = max(rivals._least_bytes(mode, nodes) for nodes in shape.trees)
        degrees = [8] if mode not in FREE else []
        for recipes, events, note in variants(mode, shape, range(3), 8, search.costs(), degrees):
            peak = search.costs().price(shape, recipes, events)[1] - prices.cluster.base_bytes
            assert 8 * peak >= bound > 0, (mode, note)
