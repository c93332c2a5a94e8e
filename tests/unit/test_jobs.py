"""Prices of jobs: the C++ core and pure Python agree bit for bit, offers are what plans cost, estimates are
near them."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from megatron_augtree.data.workloads import WORKLOADS, workload
from megatron_augtree.planning import fast, native
from megatron_augtree.planning.baselines import BASELINES, Costs, lean, variants
from megatron_augtree.planning.candidates import Choice, copies_of, job_recipes
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.offers import Job, Options
from megatron_augtree.planning.planner import pairs_per_row, price, price_recipes
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.tree import from_lengths
from megatron_augtree.tools.lengths import step_of_lengths
from tests.unit.forests import forest
from tests.unit.job_cases import DRAWN, GQA, HUGE, SMALL, Case, cases, clusters, models, scaled

TREE = from_lengths(3000, [500, 90, 1200, 40, 300, 300, 7])


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
    """What `Jobs` says of every tree, of a part of it, and of all trees together."""
    jobs, trees = case.jobs(room), [case.shape.subtree(root) for root in case.shape.roots]
    parts = [copies_of(case.shape, nodes, 2, case.unit)[0] for nodes in trees]
    widths, every = [1 << i for i in range(case.width.bit_length())], range(len(case.shape.rows))
    share = jobs.ideal(every, case.width)
    said: list = [jobs.table(trees, widths, *x) for x in ((0, False), (share, False), (share, True))]
    for nodes in [*trees, *parts, every]:
        estimate, copied = jobs.estimate(nodes, case.width), jobs.with_copies(nodes, case.width)
        said += [estimate, copied]
        if settled:
            best = jobs.best(nodes, case.width)
            said += [best, jobs.leanest]
            said += [jobs.settle(nodes, offer.choice) for offer in (estimate, best) if offer]
            said += [played(case, jobs, found) for found in ([Job(tuple(nodes), 0, best)], copied)
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

    @settings(max_examples=30, deadline=None, phases=DRAWN)
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
        prices = Prices(replace(GQA, stages=stages), preset("h100"))
        few = Options(pieces=(4,), chunks=(2,), waves=(2,), move_q=False)
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

    @settings(max_examples=30, deadline=None, phases=DRAWN)
    @given(cases(st.just(1), st.sampled_from((1, 2, 4, 256))), st.integers(0, 3))
    def test_up_to_the_largest_integers(self, case, below):
        """The core runs up to the bound, without a sum that overflows; beyond it Python does."""
        kinds = {"settled": case.width < 100}
        few = {"chunks": case.options.chunks[:2], "waves": case.options.waves[:2]}
        case = replace(case, part=0, options=case.options._replace(**few))

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
        prices, (first, *rows) = Prices(SMALL, preset("h100")), TREE.rows
        given = {"rows": first, "room": HUGE, "unit": 50, "constant": preset("h100").tile_ns}
        for size, is_fast in ((given[what], True), (native.LIMIT, False)):
            made = {**given, what: size}
            shape = replace(TREE, rows=(made["rows"], *rows))
            cluster = replace(preset("h100"), tile_ns=made["constant"])
            case = Case(shape, replace(prices, cluster=cluster), made["unit"], Options(), 0, 4, 0)
            jobs = case.jobs(made["room"])
            assert isinstance(jobs, fast.FastJobs) == is_fast
            assert jobs.settle(range(len(shape.rows)), Choice(degree=4)).time > 0

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


@settings(
    max_examples=40, deadline=None, phases=DRAWN, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=cases())
def test_offers_are_the_prices_of_their_plans(engine, case):
    """And stay in the room, or say what came nearest."""
    room = case.room
    jobs = case.jobs(room)
    assert engine == "core" or not isinstance(jobs, fast.FastJobs)
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
        # A pipeline is played; its last stage does all that the offer says.
        assert priced.time_ns >= offer.time if stages > 1 else priced.time_ns == offer.time
        assert priced.peak_bytes == offer.peak + case.prices.cluster.base_bytes
        assert offer.cost == offer.time + offer.slot * (stages - 1) * case.slot_weight // 16
        assert jobs.floor(nodes, case.width) <= offer.time


# Estimates.

#: Estimated over counted: time on average and at worst, and bytes at worst.
MEAN_TIME, WORST_TIME, WORST_PEAK = 0.01, 0.08, 0.15
RAGGED = ("longreward", "lmsys", "openthoughts", "code-ocr", "docqa-rl")


@pytest.mark.parametrize("cluster", ("h100", "cpu"))
def test_estimates_are_near_what_is_counted(engine, cluster):
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
