"""The batch over the pool: what arrangements promise; how blocks, degrees and shared passes come about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.planning import native
from megatron_augtree.planning.candidates import Choice
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.offers import Offer, Options
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import pairs_per_row, price
from megatron_augtree.planning.pool import Arrangement, Pool
from megatron_augtree.planning.recipe import plan_of
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest
from tests.unit.job_cases import DRAWN, GQA, HUGE, SMALL

#: Trees of a random batch: Python takes seconds for many; tests/unit/test_jobs.py compares it with the core.
MOST = 6 if native.core() is not None else 2


# Real prices.


@dataclass(frozen=True)
class Batch:
    """What a `Pool` arranges."""

    shape: ForestShape
    prices: Prices
    world: int
    limit: int
    room: int
    slot_weight: int = 0
    options: Options = Options()

    @property
    def unit(self) -> int:
        return pairs_per_row(self.prices.model, self.prices.cluster)

    @property
    def pool(self) -> Pool:
        options = self.options._replace(limit=self.limit)
        jobs = make_jobs(
            self.shape, self.prices, self.unit, self.room, options, self.slot_weight, world=self.world
        )
        return Pool(jobs, self.world, self.limit, 0, range(len(self.shape.roots)))

    def plan(self, arrangement: Arrangement) -> Plan:
        recipes, events = arrangement.recipes(self.shape, self.unit)
        rules = {"shape": self.shape, "world": self.world, "pairs_per_row": self.unit}
        return plan_of(recipes, events, mode="augtree", **rules)


def lengths(most: int) -> st.SearchStrategy[int]:
    return st.one_of(st.integers(1, 40), st.integers(1, most))


def batches(worlds: Sequence[int]) -> st.SearchStrategy[Batch]:
    """Ragged trees; machines, stages, limits and memory."""
    tree = st.builds(from_lengths, lengths(20000), st.lists(lengths(4000), min_size=1, max_size=6))
    return st.builds(
        lambda trees, model, stages, cluster, world, limited, room, weight: Batch(
            forest(*trees),
            Prices(replace(model, stages=stages), preset(cluster)),
            world,
            max(1, world // 2) if limited else world,
            room,
            weight if stages > 1 else 0,
        ),
        st.lists(tree, min_size=1, max_size=MOST),
        st.sampled_from((GQA, SMALL)),
        st.sampled_from((1, 1, 2, 4)),
        st.sampled_from(("h100", "cpu")),
        st.sampled_from(worlds),
        st.booleans(),
        st.sampled_from((HUGE, 27 * GIB, 8 * GIB)),
        st.sampled_from((0, 8, 16)),
    )


def like_the_first(arrangement: Arrangement, node_ranks: int) -> bool:
    """Whether every block meets nodes where a block that begins with rank 0 would: jobs are priced so."""
    return all(
        x.start % node_ranks == 0 or x.start % node_ranks + x.width <= node_ranks for x in arrangement.placed
    )


@settings(max_examples=40, deadline=None, phases=DRAWN)
@given(batches((1, 2, 4, 8, 16, 24, 6, 3)))
def test_an_arrangement_is_a_plan_at_its_price(batch):
    """Time and memory are what `planner.price` counts on the plan (a pipeline's time is played later: here it
    is no shorter than what a stage does); every tree is placed once, a leaf in one job, on blocks within the
    limit that begin at multiples of their width."""
    cluster, leaves = batch.prices.cluster, [n for n, c in enumerate(batch.shape.children) if not c]
    for arrangement in batch.pool.arrangements():
        placed = arrangement.placed
        assert all(x.width <= batch.limit and x.start % x.width == 0 for x in placed)
        assert all(x.start + x.width <= batch.world for x in placed)
        assert [x.width for x in placed] == sorted((x.width for x in placed), reverse=True)
        held = sorted(n for x in placed for n in x.job.nodes if not batch.shape.children[n])
        assert held == leaves
        assert arrangement.peak_bytes <= batch.room
        plan = batch.plan(arrangement)
        plan.check()
        if like_the_first(arrangement, cluster.node_ranks):
            priced = price(plan, batch.prices)
            fill = (batch.prices.model.stages - 1) * max(x.job.offer.slot for x in placed)
            busy = arrangement.time_ns - fill
            assert priced.time_ns >= busy if fill else priced.time_ns == busy, arrangement.name
            assert arrangement.peak_bytes + cluster.base_bytes == priced.peak_bytes, arrangement.name


@pytest.mark.parametrize("world", (3, 6, 24))
def test_pools_that_are_no_power_of_two_use_all_ranks(engine, world):
    """Aligned powers of two: 2 + 1, 4 + 2, 16 + 8; and the pool's own divisors as degrees."""
    trees = [from_lengths(n, [n // 2, n // 3]) for n in (60000, 50000, 40000, 30000, 20000, 10000)]
    batch = Batch(forest(*trees), Prices(SMALL, preset("h100")), world, world, HUGE)
    found = list(batch.pool.arrangements())
    best = min(found, key=lambda x: x.time_ns)
    assert {rank for x in best.placed for rank in range(x.start, x.start + x.width)} == set(range(world))
    joint = found[0]
    assert joint.name == "joint" and all(x.width & (x.width - 1) == 0 for x in joint.placed)
    assert len({x.width for x in joint.placed}) > 1


def test_few_tokens_share_passes(engine):
    """Twelve small trees on two ranks: passes cost more than tokens, so a rank plays all its trees in one;
    where they do not fit together, and nothing is recomputed, in more."""
    shape = forest(*[from_lengths(40, [8, 8]) for _ in range(12)])
    prices = Prices(SMALL, preset("h100"))

    def passes(room: int) -> tuple[int, int]:
        batch = Batch(shape, prices, 2, 2, room, options=Options(whole=-2))
        best = min(batch.pool.arrangements(), key=lambda x: x.time_ns)
        assert best.peak_bytes <= room
        plan = batch.plan(best)
        assert price(plan, prices).time_ns == best.time_ns
        return len(plan.passes), best.peak_bytes

    count, peak = passes(HUGE)
    assert count == 2
    fewer, half = passes(peak * 2 // 3)
    assert 2 < fewer < 12 and half <= peak * 2 // 3


def test_one_tree_takes_the_width_that_pays(engine):
    """A long tree takes the pool; a tiny one, where every message costs more than its rows, a rank."""
    prices = Prices(SMALL, preset("h100"))
    for shape, width in ((from_lengths(60000, [3000, 2000]), 8), (from_lengths(0, [20]), 1)):
        batch = Batch(shape, prices, 8, 8, HUGE)
        best = min(batch.pool.arrangements(), key=lambda x: x.time_ns)
        assert {x.width for x in best.placed} == {width}


# Known prices.


class Known(Jobs):
    """Trees of one node whose times are given, instead of prices.

    Args:
        times: [tree] {ranks: ns}; where there is none, a tree does not fit.
        unsettled: (tree, ranks) that are estimated to fit but, counted, do not.
        room: bytes, where each tree takes one.
    """

    def __init__(
        self, times: Sequence[dict[int, int]], unsettled: Sequence[tuple[int, int]] = (), room: int = HUGE
    ) -> None:
        shape = forest(*[from_lengths(0, [1]) for _ in times])
        super().__init__(shape, Prices(SMALL, preset("h100")), 1, room, Options(copies=1))
        self.times, self.unsettled = times, set(unsettled)
        self.settled: list[tuple[tuple[int, ...], int]] = []

    def ideal(self, nodes: Sequence[int], ranks: int) -> int:
        return sum(min(w * t for w, t in self.times[n].items()) for n in nodes) // ranks

    def floor(self, nodes: Sequence[int], ranks: int) -> int:
        return self.ideal(nodes, ranks)

    def estimate(self, nodes: Sequence[int], width: int) -> Offer | None:
        if any(width not in self.times[n] for n in nodes) or len(nodes) > self.room:
            return None
        time = sum(self.times[n][width] for n in nodes)
        return Offer(time, time, time, len(nodes), Choice(degree=width))

    def settle(self, nodes: Sequence[int], choice: Choice) -> Offer:
        self.settled.append((tuple(nodes), choice.degree))
        offer = self.estimate(nodes, choice.degree)
        fits = not any((n, choice.degree) in self.unsettled for n in nodes)
        return offer if fits else offer._replace(peak=self.room + 1)

    def best(self, nodes: Sequence[int], width: int) -> Offer | None:
        offer = self.estimate(nodes, width)
        return None if offer is None or any((n, width) in self.unsettled for n in nodes) else offer


def arrangements(jobs: Known, world: int, limit: int = 0, degree: int = 0, groups=()) -> list[Arrangement]:
    pool = Pool(jobs, world, limit or world, degree, groups or range(len(jobs.times)))
    return list(pool.arrangements())


def where(arrangement: Arrangement) -> dict[int, tuple[int, int]]:
    """Tree -> (ranks, first rank)."""
    return {n: (x.width, x.start) for x in arrangement.placed for n in x.job.nodes}


@st.composite
def tables(draw) -> tuple[list[dict[int, int]], int]:
    """Times of trees on widths of a pool; narrow widths may be missing, as where memory is short."""
    world = draw(st.sampled_from((2, 3, 4, 6, 8, 24)))
    widths = [1 << i for i in range(world.bit_length())]
    times = []
    for _ in range(draw(st.integers(1, 9))):
        first = draw(st.integers(0, len(widths) - 1))
        work = draw(st.integers(1000, 100000))
        times.append({w: work // w + draw(st.integers(0, work // 4)) for w in widths[first:]})
    return times, world


@settings(max_examples=150, deadline=None, phases=DRAWN)
@given(tables())
def test_the_joint_schedule_is_never_above_a_uniform_degree(case):
    """On one stage, by the times that it is given, where jobs settle as estimated. Widths of trees that end
    within an eighth of the time of an even batch are not all tried: so much it may then be above. (The
    planner takes the least of all arrangements, counted.)"""
    times, world = case
    jobs = Known(times)
    joint, *others = arrangements(jobs, world)
    assert joint.name == ("joint" if len(times) > 1 else "one tree")
    eighth = jobs.ideal(range(len(times)), world) // 8
    loss = eighth if min(min(row.values()) for row in times) < eighth and len(times) > 1 else 0
    assert all(joint.time_ns <= x.time_ns + loss for x in others), where(joint)
    busy = [0] * world
    for tree, (width, start) in where(joint).items():
        for rank in range(start, start + width):
            busy[rank] += times[tree][width]
    assert joint.time_ns == max(busy)


def test_degrees_by_hand():
    """Forced to blocks of two of four ranks: longest first 9 | 5 + 4, in turn (groups 0, 0, 1) 9 + 5 | 4."""
    times = [{2: 9}, {2: 5}, {2: 4}]
    found = {x.name: x for x in arrangements(Known(times), 4, degree=2, groups=[0, 0, 1])}
    assert where(found["degree 2"]) == {0: (2, 0), 1: (2, 2), 2: (2, 2)} and found["degree 2"].time_ns == 9
    assert found["joint"].time_ns == 9
    in_turn = Known([{3: 9}, {3: 5}, {3: 4}])
    found = {x.name: x for x in arrangements(in_turn, 6, degree=3, groups=[0, 0, 1])}
    assert where(found["degree 3"]) == {0: (3, 0), 1: (3, 3), 2: (3, 3)}
    assert found["joint"].time_ns == 9, "in units of the degree"


@pytest.mark.parametrize(("limit", "degree"), ((1, 0), (2, 0), (4, 0), (8, 0), (0, 4), (0, 1)))
def test_no_block_is_wider_than_the_limit(limit, degree):
    times = [{w: 900 // w + 10 for w in (1, 2, 4, 8)} for _ in range(3)]
    for trees in (times, times[:1]):
        found = arrangements(Known(trees), 8, limit, degree)
        used = {width for x in found for width, _ in where(x).values()}
        assert max(used) <= (limit or degree) and (not degree or used == {degree})
    assert degree or used == {limit}, "one tree takes all it may"


def test_what_counted_does_not_fit_is_played_elsewhere():
    """Two trees would run beside each other on two ranks each. Counted, one of them fits on four only, then
    both do, then one fits nowhere."""
    times = [{2: 20, 4: 15}, {2: 18, 4: 14}]
    assert where(arrangements(Known(times), 4)[0]) == {0: (2, 0), 1: (2, 2)}
    first = arrangements(Known(times, [(0, 2)]), 4)
    assert all(where(x)[0] == (4, 0) for x in first) and min(x.time_ns for x in first) == 15 + 14
    both = arrangements(Known(times, [(0, 2), (1, 2)]), 4)
    assert all(where(x) == {0: (4, 0), 1: (4, 0)} for x in both)
    assert arrangements(Known(times, [(0, 2), (0, 4)]), 4) == []


def test_an_empty_memory_gives_no_arrangement():
    assert arrangements(Known([{1: 5}, {1: 5}], room=0), 2) == []
