"""The price of a pass for every recompute pair, and the pair that a budget gives it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.demand import HOST_SPARE, Copied, Demand, Pair
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.tree import from_lengths
from tests.unit.job_cases import SMALL, Case, cases


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


class TestCopied:
    """Recompute pairs of what rests in host memory, against all pairs."""

    @settings(max_examples=300, deadline=None)
    @given(
        st.builds(
            Copied,
            layers=st.integers(1, 9),
            forward=st.integers(0, 3000),
            backward=st.integers(9000, 20000),
            saved=st.integers(0, 900),
            saved_attention=st.integers(0, 900),
            fixed=st.integers(0, 3000),
            whole=st.integers(0, 900),
            attention=st.integers(0, 90),
        )
    )
    def test_no_pair_is_faster_by_more_than_a_layers_copy(self, copied):
        """If copies took a sixteenth more."""
        copies = copied.fixed, copied.whole, copied.attention
        fixed, whole, attention = (n + n // HOST_SPARE for n in copies)

        def time(pair):
            moved = fixed + pair.whole * whole + pair.attention * attention
            back = copied.backward - pair.whole * copied.saved - pair.attention * copied.saved_attention
            return max(copied.forward, moved) + max(back, moved)

        layers = range(copied.layers + 1)
        every = [Pair(x, y) for x in layers for y in layers if x + y <= copied.layers]
        found, least = copied.best(), min(map(time, every))
        # Where a number of layers lies between two, the one of which all copies hide is taken.
        assert found in every and time(found) <= least + max(attention, copied.saved_attention)

    def test_by_hand(self):
        """Of ten layers the copies of six whole ones hide behind the forward, with a sixteenth to spare."""
        free = Copied(10, 636, 5000, saved=90, saved_attention=40, fixed=0, whole=100, attention=0)
        assert free.best() == Pair(6, 4) and free._replace(forward=580).best() == Pair(5, 5)
        assert free._replace(whole=10).best() == Pair(10, 0)
        # A copy that takes longer than what it saves is not worth showing, one that takes less is.
        assert free._replace(attention=30, forward=0).best() == Pair(0, 10)
        assert free._replace(attention=50, forward=0).best() == Pair(0, 0)

    def test_times_are_those_of_the_pass(self):
        """Of one rank: what a pair takes, fixed costs aside, but for rounding."""
        prices = Prices(replace(SMALL, layers=6), replace(preset("h100"), host_bytes_s=10**8))
        price_ = PassPrice(prices, one_pass_loads(offload=True), provides=True)
        copied, fixed = price_.copied(), prices.cluster.pass_ns
        for pair in (Pair(0, 0), Pair(0, 6), Pair(6, 0), Pair(2, 3)):
            moved = copied.fixed + pair.whole * copied.whole + pair.attention * copied.attention
            back = copied.backward - pair.whole * copied.saved - pair.attention * copied.saved_attention
            forward, backward = price_.time(pair)
            assert abs(forward - fixed - max(copied.forward, moved)) <= 8
            assert abs(backward - fixed - max(back, moved)) <= 8


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
    free = replace(case.prices.cluster, link_bytes_s=10**24, nic_bytes_s=10**24, message_ns=0)
    slow = a_pass(case, False)
    fast_ = a_pass(replace(case, prices=replace(case.prices, cluster=free)), False)
    layers = lambda made: [(x.forward, x.backward) for x in made.lines]
    assert slow.hidden == (layers(slow) == layers(fast_)) and fast_.hidden
    if case.width == 1:
        assert slow.hidden


def test_a_stage_has_its_share_of_the_layers():
    """Six layers on two stages: three each; bytes are those of all layers under way."""
    model = replace(SMALL, layers=6, vocab=0)
    loads = one_pass_loads()
    one, two = (
        PassPrice(Prices(replace(model, stages=n), preset("h100")), loads, provides=False) for n in (1, 2)
    )
    fixed = preset("h100").pass_ns
    for pair in (Pair(6, 0), Pair(2, 4), Pair(0, 0)):
        for a, b in zip(one.time(pair), two.time(pair)):
            assert a - fixed == 2 * (b - fixed) > 0
        assert one.kept(pair) == two.kept(pair)


def test_what_rests_in_host_memory_takes_time_and_no_room():
    """At a byte a microsecond the copy decides; keys that waves read stay, with their gradients."""
    loads, layers = one_pass_loads(), SMALL.layers
    slow = Prices(SMALL, replace(preset("h100"), host_bytes_s=10**6))
    here = PassPrice(slow, loads, provides=True)
    away = PassPrice(slow, one_pass_loads(offload=True), provides=True)
    assert here.offloads is False and away.offloads is True
    pair = Pair(layers, 0)
    state = layers * (loads.ranks[0].rows * SMALL.kv_bytes * 2)  # keys and values, and their gradients
    assert away.kept(pair)[0] == state and away.work(pair) == here.work(pair)
    resting = here.kept(pair)[0] - layers * loads.ranks[0].rows * SMALL.kv_bytes
    moved = slow.host.ns(resting) + slow.cluster.pass_ns
    assert away.time(pair) == (moved, moved) and sum(away.time(pair)) > sum(here.time(pair))
    shared = Prices(SMALL, preset("cpu"))  # host memory is the device's own: nothing is gained
    stays = PassPrice(shared, one_pass_loads(offload=True), provides=True)
    assert stays.offloads is False


def one_pass_loads(**how) -> PassLoads:
    (p,) = build(Choice(degree=1), from_lengths(400, [30, 70]), 1, 100).passes
    return PassLoads(from_lengths(400, [30, 70]), replace(p, **how), [], 8)
