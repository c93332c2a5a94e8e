"""Prices of jobs: the C++ core and pure Python agree bit for bit, estimates are near what is counted, and
recompute pairs are the best that fit."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from megatron_augtree.data.workloads import WORKLOADS, workload
from megatron_augtree.planning import fast, native
from megatron_augtree.planning.baselines import BASELINES, Costs, lean, variants
from megatron_augtree.planning.candidates import Choice, build, job_recipes
from megatron_augtree.planning.cluster import GIB, PRESETS, Cluster, preset
from megatron_augtree.planning.cost import Demand, Pair, PassPrice, Prices
from megatron_augtree.planning.jobs import Job, Jobs, Options
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.planner import pairs_per_row, price, price_recipes
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.tree import ForestShape, from_lengths
from megatron_augtree.tools.lengths import step_of_lengths
from tests.unit.forests import forest, shapes

GQA = ModelShape(28, 3584, 18944, 152064, 28, 4, 128, 128, gated=True, item_bytes=2, logit_rows=441)
SMALL = ModelShape(4, 256, 1024, 4096, 4, 4, 64, 64)
ODD = ModelShape(7, 96, 200, 301, 6, 3, 16, 24, item_bytes=8, accum_bytes=8)
TREE = from_lengths(3000, [500, 90, 1200, 40, 300, 300, 7])
HUGE = 1 << 60
#: A failing case is small enough as it is drawn; to shrink it takes minutes.
DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)


# Random cases.


@dataclass(frozen=True)
class Case:
    """What `Jobs` is made of, and a block.

    Attributes:
        part: hundredths of the cheapest job's peak that the room is; 0: no limit.
    """

    shape: ForestShape
    prices: Prices
    unit: int
    options: Options
    slot_weight: int
    width: int
    part: int

    @property
    def room(self) -> int:
        """Bytes around what the cheapest job takes."""
        if not self.part:
            return HUGE
        found = self.jobs(HUGE).best(range(len(self.shape.rows)), self.width)
        return found.peak * self.part // 100 if found else 10**9

    def jobs(self, room: int) -> Jobs:
        """By whichever engine is there."""
        return fast.make_jobs(
            self.shape, self.prices, self.unit, room, self.options, self.slot_weight, world=self.width
        )


def models() -> st.SearchStrategy[ModelShape]:
    """Models under all flags."""
    flags = {
        "stages": st.sampled_from((1, 1, 2, 4)),
        "recomputed": st.sampled_from((0, 3)),
        "attention_kept": st.sampled_from((0, 2)),
        "logit_rows": st.sampled_from((0, 5, 441)),
    }
    return st.builds(lambda model, flags: replace(model, **flags), st.sampled_from((GQA, SMALL, ODD)),
                     st.fixed_dictionaries(flags))  # fmt: skip


def clusters() -> st.SearchStrategy[Cluster]:
    """Presets with nodes of several sizes, with and without overlap."""
    return st.builds(
        lambda cluster, ranks, overlap: replace(cluster, node_ranks=ranks, overlap=overlap),
        st.sampled_from([*PRESETS.values()]),
        st.sampled_from((2, 3, 8, 64)),
        st.sampled_from((True, True, True, False)),
    )


def options() -> st.SearchStrategy[Options]:
    """Everything is tried, or something is forced."""
    often = lambda usual, *others: st.sampled_from((usual,) * 3 + others)
    forced = st.builds(
        Options,
        least=often(1, 2),
        lane_degree=often(0, 1, 2),
        pieces=often(Options().pieces, (2,), (0,), (3, 1)),
        phased=often(1, 0, 2),
        chunks=often(Options().chunks, (3,)),
        waves=often(Options().waves, (1,), (3, 9)),
        gather=often(True, False),
        move_q=st.booleans(),
        lean=often(True, False),
        hops=often(True, False),
        prefetch=often(True, False),
        offload=often(True, False),
        copies=often(0, 1, 2),
        whole=often(-1, -2, 2),
        attention=st.sampled_from((0, 1)),
    )
    unfused = forced.map(lambda o: o._replace(fused=False, phased=2))
    return st.one_of(st.just(Options()), forced, unfused)


def scaled(factors: st.SearchStrategy[int]) -> st.SearchStrategy[ForestShape]:
    """Deep and shallow forests, several roots, from a few rows to many; scored rows do not grow alike."""

    def made(shape: ForestShape, factor: int, odd: int) -> ForestShape:
        rows = tuple(n * factor + (i * odd) % factor for i, n in enumerate(shape.rows))
        scored = tuple(min(s * factor, n) for s, n in zip(shape.scored, rows))
        return replace(shape, rows=rows, scored=scored)

    return st.builds(made, shapes(max_nodes=12, max_rows=8), factors, st.integers(0, 10**6))


FACTORS, WIDTHS = st.sampled_from((1, 7, 400, 8000)), st.sampled_from((1, 2, 3, 4, 6, 8, 16))


def cases(
    factors: st.SearchStrategy[int] = FACTORS, widths: st.SearchStrategy[int] = WIDTHS
) -> st.SearchStrategy[Case]:
    """Cases whose rows are multiplied by one of `factors`, on blocks of one of `widths`."""
    return st.builds(
        Case,
        shape=scaled(factors),
        prices=st.builds(Prices, models(), clusters()),
        unit=st.sampled_from((1, 50, 5000)),
        options=options(),
        slot_weight=st.sampled_from((0, 4, 16)),
        width=widths,
        part=st.sampled_from((0, 0, 30, 70, 90, 100, 120)),
    )


def played(case: Case, jobs: Jobs, found: list[Job]) -> tuple[int, int]:
    """(ns, bytes) of jobs that follow each other on one block, by their recipes."""
    recipes: list[Recipe] = []
    events = []
    for number, job in enumerate(found):
        made = job_recipes(
            job.offer.choice, case.shape, job.nodes, job.offset, number, len(recipes), case.unit
        )
        recipes, events = recipes + made[0], events + made[1]
    return price_recipes(jobs, recipes, events, case.width)


def everything(case: Case, room: int, *, settled: bool = True) -> list:
    """What `Jobs` says of every tree and of all trees together."""
    jobs, said = case.jobs(room), []
    for nodes in [*map(case.shape.subtree, case.shape.roots), range(len(case.shape.rows))]:
        estimate, parts = jobs.estimate(nodes, case.width), jobs.with_copies(nodes, case.width)
        said += [estimate, parts]
        if settled:
            best = jobs.best(nodes, case.width)
            said += [best, jobs.leanest]
            said += [jobs.settle(nodes, offer.choice) for offer in (estimate, best) if offer]
            said += [played(case, jobs, found) for found in ([Job(tuple(nodes), 0, best)], parts)
                     if found and found[0].offer]  # fmt: skip
    return said


def twins(case: Case, **kinds: bool) -> None:
    """Both engines say the same, and the core does run."""
    room = case.room
    if not isinstance(case.jobs(room), fast.FastJobs):
        reject()
    found = everything(case, room, **kinds)
    with native.without_core():
        assert not isinstance(case.jobs(room), fast.FastJobs)
        assert everything(case, room, **kinds) == found


class TestTwins:
    """Python and C++ give the same, bit for bit."""

    @pytest.fixture(autouse=True)
    def _both(self):
        if native.core() is None:
            pytest.skip("no C++ core")

    @settings(max_examples=50, deadline=None, phases=DRAWN)
    @given(cases())
    def test_jobs(self, case):
        twins(case)

    @settings(max_examples=20, deadline=None, phases=DRAWN)
    @given(cases(widths=st.sampled_from((32, 64, 96))))
    def test_estimates_of_wide_blocks(self, case):
        twins(replace(case, part=0), settled=False)

    @pytest.mark.parametrize(("factor", "stages"), ((1, 4), (1000, 1)))
    def test_a_thousand_ranks(self, factor, stages):
        """Rows up to millions. Waves whose queries travel are left out: Python counts every pair of ranks."""
        tree = forest(TREE, from_lengths(900, [4, 2000]))
        shape = replace(tree, rows=tuple(n * factor for n in tree.rows))
        prices, few = Prices(replace(GQA, stages=stages), preset("h100")), Options(pieces=(4,), move_q=False)
        case = Case(shape, prices, 50, few, 16, 1024, 0)
        twins(case, settled=False)
        fused = Choice(degree=1024, lane_degree=1, wide=2, primitive="gather_kv", pieces=4)
        waves = replace(fused, phase="phased", waves=2, prefetch=True, keep=False, node_ranks=8)
        jobs = case.jobs(40 * GIB)
        assert isinstance(jobs, fast.FastJobs)
        for choice in (fused, waves):
            found = jobs.settle(shape.subtree(0), choice)
            with native.without_core():
                assert case.jobs(40 * GIB).settle(shape.subtree(0), choice) == found

    @pytest.mark.parametrize("name", WORKLOADS)
    @pytest.mark.parametrize(("groups", "world", "stages"), ((64, 64, 4), (512, 1024, 1)))
    def test_real_batches_are_small_enough(self, name, groups, world, stages):
        prices = Prices(replace(GQA, stages=stages), preset("h100"))
        shape = step_of_lengths(workload(name, groups, 1)).merged.shape
        unit = pairs_per_row(GQA, prices.cluster)
        made = fast.make_jobs(shape, prices, unit, 27 * GIB, Options(), 16, world=world)
        assert isinstance(made, fast.FastJobs)

    @settings(max_examples=40, deadline=None, phases=DRAWN)
    @given(cases(st.just(1), st.sampled_from((1, 4, 1024))), st.integers(0, 3))
    def test_up_to_the_largest_integers(self, case, below):
        """The core runs up to the bound, without a sum that overflows; beyond it Python does."""
        kinds = {"settled": case.width < 100}
        case = replace(case, part=0)

        def times(factor: int) -> Case:
            return replace(case, shape=replace(case.shape, rows=tuple(n * factor for n in case.shape.rows)))

        def small(factor: int) -> bool:
            return isinstance(times(factor).jobs(HUGE), fast.FastJobs)

        largest = max(range(63), key=lambda bits: (small(1 << bits), bits))
        factor = 1 << largest
        for bit in reversed(range(largest)):
            factor += small(factor + (1 << bit)) << bit
        assert small(factor) and not small(factor + 1)
        twins(times(factor >> below), **kinds)

    @settings(max_examples=60, deadline=None, phases=DRAWN)
    @given(cases())
    def test_no_integer_is_above_the_bound(self, case):
        bound = fast._largest(case.shape, case.prices, case.unit, case.width)
        jobs, room = case.jobs(HUGE), max(case.room, 1)
        for tight in (HUGE, room):
            for offer in (case.jobs(tight).best(case.shape.subtree(root), case.width)
                          for root in case.shape.roots):  # fmt: skip
                assert offer is None or max(offer[:4]) <= bound
        assert jobs.ideal(range(len(case.shape.rows)), 1) <= bound

    @pytest.mark.parametrize("what", ("rows", "room", "unit", "constant"))
    def test_what_does_not_cross(self, what):
        """A single integer that is too large leaves the core out; nothing else changes."""
        prices, rows = Prices(SMALL, preset("h100")), TREE.rows
        given = {"rows": rows, "room": HUGE, "unit": 50, "constant": preset("h100").tile_ns}
        for size, is_fast in ((given[what], True), (native.LIMIT, False)):
            made = {**given, what: size}
            shape = replace(TREE, rows=(size, *rows[1:])) if what == "rows" else TREE
            cluster = replace(preset("h100"), tile_ns=made["constant"])
            case = Case(shape, replace(prices, cluster=cluster), made["unit"], Options(), 0, 4, 0)
            jobs = case.jobs(made["room"])
            assert isinstance(jobs, fast.FastJobs) == is_fast
            assert jobs.estimate(range(len(shape.rows)), 4).choice.degree == 4

    @settings(max_examples=25, deadline=None, phases=DRAWN)
    @given(
        scaled(st.sampled_from((1, 50, 3000))), models(), clusters(), st.sampled_from((1, 2, 4, 6)), st.data()
    )
    def test_prices_of_every_baseline(self, shape, model, cluster, world, data):
        """All that planners make recipes of: what every mode runs and one of its other choices."""
        prices, groups = Prices(model, cluster), range(len(shape.roots))
        jobs = fast.make_jobs(shape, prices, 50, HUGE, Options(), world=world)
        assert isinstance(jobs, fast.FastJobs)
        for mode in BASELINES:
            made = list(variants(mode, shape, groups, world, Costs(50, model=model, cluster=cluster)))
            for recipes, events, _ in (made[0], lean(made[data.draw(st.integers(0, len(made) - 1))])):
                plan = plan_of(
                    recipes, events, mode=mode, shape=shape, world=world, pairs_per_row=50
                )
                counted = price(plan, prices)
                time_ns, peak = jobs.price(recipes, events, world)
                assert (time_ns, peak + cluster.base_bytes) == (counted.time_ns, counted.peak_bytes), mode


# What both engines promise.


@settings(max_examples=60, deadline=None, phases=DRAWN)
@given(cases())
def test_offers_are_the_prices_of_their_plans(case):
    """Settled offers; with whichever engine is there: the twins are the same."""
    room = case.room
    jobs = case.jobs(room)
    for nodes in map(case.shape.subtree, case.shape.roots):
        offer = jobs.best(nodes, case.width)
        if offer is None:
            assert jobs.leanest is None or jobs.leanest.peak > room
            continue
        assert offer.peak <= room and offer == jobs.settle(nodes, offer.choice)
        recipes, events = job_recipes(offer.choice, case.shape, tuple(nodes), 0, 0, 0, case.unit)
        rules = {"shape": case.shape, "world": case.width, "pairs_per_row": case.unit}
        plan = plan_of(recipes, events, mode="augtree", **rules)
        priced, stages = price(plan, case.prices), case.prices.model.stages
        assert priced.time_ns == offer.time + (stages - 1) * offer.slot
        assert priced.peak_bytes == offer.peak + case.prices.cluster.base_bytes
        assert offer.cost == offer.time + offer.slot * (stages - 1) * case.slot_weight // 16
        assert jobs.floor(nodes, case.width) <= offer.time


class TestFit:
    """Recompute pairs by the closed form, against all pairs."""

    @settings(max_examples=300, deadline=None)
    @given(
        st.builds(
            Demand,
            layers=st.integers(1, 9),
            fixed=st.integers(0, 50),
            whole=st.integers(0, 20),
            attention=st.integers(0, 9),
            work=st.integers(0, 20),
            work_again=st.integers(0, 40),
            saved=st.integers(0, 9),
            saved_attention=st.integers(0, 9),
        ),
        st.integers(0, 200),
    )
    def test_no_pair_that_fits_saves_more(self, demand, room):
        layers = range(demand.layers + 1)
        fitting = [
            pair
            for pair in (Pair(x, y) for x in layers for y in layers if x + y <= demand.layers)
            if demand.peak(pair) <= room
        ]
        saved = lambda pair: pair.whole * demand.saved + pair.attention * demand.saved_attention
        found = demand.fit(room)
        if not fitting:
            assert found is None
        else:
            assert found in fitting and saved(found) == max(map(saved, fitting))
            assert found.whole == max(pair.whole for pair in fitting if saved(pair) == saved(found))

    @settings(max_examples=60, deadline=None)
    @given(cases(), st.data())
    def test_memory_buys_time(self, case, data):
        """Of one pass: a pair that keeps more is never slower and never smaller; what fits stays in the room,
        and the more room, the faster."""
        price_ = a_pass(case, data.draw(st.booleans()))
        layers, demand = case.prices.model.layers, price_.demand()
        whole = data.draw(st.integers(0, layers - 1))
        attention = data.draw(st.integers(0, layers - whole - 1))
        pair, more = Pair(whole, attention), Pair(whole, attention + 1)
        assert sum(price_.time(more)) <= sum(price_.time(pair))
        assert demand.kept(pair) <= demand.kept(more) and price_.time(pair)[0] == price_.time(more)[0]
        assert price_.peak(pair) <= demand.peak(pair)
        least, most = demand.peak(Pair(0, 0)), demand.peak(Pair(layers, 0))
        assert demand.fit(least - 1) is None or most < least
        rooms = sorted((least, least + (most - least) // 3, max(least, most), 2 * max(least, most)))
        fits = [demand.fit(room) for room in rooms]
        assert all(price_.peak(fit) <= room for fit, room in zip(fits, rooms))
        # `saved` is that of the rank that saves most: one rank's share of a layer is what a pair may err by.
        gains = [fit.whole * demand.saved + fit.attention * demand.saved_attention for fit in fits]
        assert gains == sorted(gains) and fits[-1] == Pair(layers, 0)


# A pass.


def a_pass(case: Case, spine: bool) -> PassPrice:
    """All of a forest in one fused pass; or its spine alone, which waves will read."""
    nodes = range(len(case.shape.rows))
    inner = tuple(n for n in nodes if case.shape.children[n])
    spine = spine and bool(inner)
    leaves = () if spine else tuple(n for n in nodes if n not in inner)
    recipe = Recipe(0, "fused", 0, case.width, inner, leaves, case.width, pieces=2)
    (p,) = plan_of(
        [recipe], [], mode="augtree", shape=case.shape, world=case.width, pairs_per_row=case.unit
    ).passes
    loads = PassLoads(case.shape, p, [], case.prices.cluster.node_ranks)
    return PassPrice(case.prices, loads, provides=spine)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_hidden_traffic_costs_nothing(case):
    """`hidden` says whether wires without end would be any faster."""
    free = replace(case.prices.cluster, link_bytes_s=1 << 60, nic_bytes_s=1 << 60, message_ns=0)
    slow = a_pass(case, False)
    fast_ = a_pass(replace(case, prices=replace(case.prices, cluster=free)), False)
    layers = lambda made: [(x.forward, x.backward) for x in made.lines]
    assert slow.hidden == (layers(slow) == layers(fast_)) and fast_.hidden
    if case.width == 1:
        assert slow.hidden


def test_a_stage_has_its_share_of_the_layers():
    """Five layers on two stages: the larger share, three; bytes are those of all layers under way."""
    model = replace(SMALL, layers=5, vocab=0)
    loads = one_pass_loads()
    one, two = (
        PassPrice(Prices(replace(model, stages=n), preset("h100")), loads, provides=False) for n in (1, 2)
    )
    fixed = preset("h100").pass_ns
    for pair in (Pair(5, 0), Pair(0, 0)):
        for a, b in zip(one.time(pair), two.time(pair)):
            assert 5 * (b - fixed) == 3 * (a - fixed)
        assert one.kept(pair) == two.kept(pair)


def test_what_rests_in_host_memory_takes_time_and_no_room():
    """At a byte a microsecond the copy decides; keys that waves read stay, with their gradients."""
    loads, layers = one_pass_loads(), SMALL.layers
    slow = Prices(SMALL, replace(preset("h100"), host_bytes_s=10**6))
    here = PassPrice(slow, loads, provides=True)
    away = PassPrice(slow, loads.as_pass(replace(loads.p, offload=True)), provides=True)
    assert here.offloads is False and away.offloads is True
    pair = Pair(layers, 0)
    state = layers * (loads.ranks[0].rows * SMALL.kv_bytes * 2)  # keys and values, and their gradients
    assert away.kept(pair)[0] == state and away.work(pair) == here.work(pair)
    resting = here.kept(pair)[0] - layers * loads.ranks[0].rows * SMALL.kv_bytes
    moved = slow.host.ns(resting) + slow.cluster.pass_ns
    assert away.time(pair) == (moved, moved) and sum(away.time(pair)) > sum(here.time(pair))
    shared = Prices(SMALL, preset("cpu"))  # host memory is the device's own: nothing is gained
    stays = PassPrice(shared, loads.as_pass(replace(loads.p, offload=True)), provides=True)
    assert stays.offloads is False


def one_pass_loads() -> PassLoads:
    (p,) = build(Choice(degree=1), from_lengths(400, [30, 70]), 1, 100).passes
    return PassLoads(from_lengths(400, [30, 70]), p, [], 8)


# Estimates.

#: Estimated over counted: time on average and at worst, and bytes at worst.
MEAN_TIME, WORST_TIME, WORST_PEAK = 0.01, 0.08, 0.15
RAGGED = ("longreward", "lmsys", "openthoughts", "code-ocr", "docqa-rl")


@pytest.mark.parametrize("cluster", ("h100", "cpu"))
def test_estimates_are_near_what_is_counted(cluster):
    """By the heaviest rank, over what `settle` then counts on all of them; ample memory and little."""
    prices = Prices(GQA, preset(cluster))
    unit, times, peaks = pairs_per_row(GQA, prices.cluster), [], []
    for preset_name in RAGGED:
        for prompt, responses in workload(preset_name, 2, 1):
            shape = from_lengths(prompt - 1, responses)
            for width in (1, 2, 4, 8, 16, 32):
                for room in (27 * GIB, 200 * GIB):
                    jobs = fast.make_jobs(shape, prices, unit, room, Options(), world=width)
                    estimate = jobs.estimate(range(len(shape.rows)), width)
                    if estimate is not None:
                        counted = jobs.settle(range(len(shape.rows)), estimate.choice)
                        times.append(counted.time / estimate.time - 1)
                        peaks.append(counted.peak / estimate.peak - 1)
    assert len(times) > 100
    assert statistics.mean(map(abs, times)) <= MEAN_TIME and max(map(abs, times)) <= WORST_TIME
    assert max(map(abs, peaks)) <= WORST_PEAK
    assert any(times), "what is estimated is not counted"
