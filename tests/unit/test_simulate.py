"""The simulator by hand on small cases, and what holds of every plan."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace

import numpy as np
import pytest

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.cluster import Cluster, preset
from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Span
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.price import price
from megatron_augtree.planning.schedule import Payload, Rows, Transfer
from megatron_augtree.planning.simulate import Simulated, compute_bound, simulate
from megatron_augtree.planning.simulate_clock import Clock, Messages, Wiring
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest
from tests.unit.test_plan import phased

#: Of a layer's linear operations 2/7 are QKV; keys and values of a row are 128 bytes, their gradients too.
MODEL = ModelShape(layers=2, hidden=32, ffn=64, vocab=64, q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
#: Nothing beside what is given.
FREE = 1 << 60
#: A row's linear layers take 1000 ns, a pair 10 ns, a byte 1 ns; a causal tile masks half a pair a row.
ROUND = Cluster(
    name="round", node_ranks=8, memory_bytes=1 << 40, gemm_flops=MODEL.linear_flops * 10**6, gemm_half_rows=0,
    row_bytes_s=FREE, attention_flops=MODEL.pair_flops * 10**8, tile_ns=10, tile_rows=1, query_rows=1,
    attention_backward_pct=300, gemm_backward_pct=200, stage_ns=50, layer_ns=100, pass_ns=1000,
    message_ns=500, link_bytes_s=10**9, nic_bytes_s=10**9, host_bytes_s=0, base_bytes=7,
)  # fmt: skip
PRICES = Prices(MODEL, ROUND)
#: A prompt of 4 rows, responses of 3 and 7.
SHAPE = ForestShape((-1, 0, 0), (4, 3, 7), (0, 0, 0), (0, 1, 1))


def plan_of(primitive: str = "gather_kv", **fields) -> Plan:
    """Rank 0 holds the prompt and the first response, rank 1 the second one: 7 rows each."""
    placement = (Span(0, 0, 4), Span(1, 0, 3)), (Span(2, 0, 7),)
    p = Pass(0, 0, "fused", (0, 1), placement, primitive=primitive, **fields)
    return Plan(2, "augtree", SHAPE, (p,), (Event("forward", 0), Event("backward", 0)))


def ns_of(found: Simulated) -> list[tuple[int, int]]:
    """[span] (start, duration) in ns."""
    return [(round(s.start * NS), round(s.duration * NS)) for s in found.spans]


# ---- by hand


def test_a_gather_of_two_ranks():
    """Rank 0 sends 4 rows of keys and values, 512 + 500 ns.

    Forward, first layer: QKV ends at 2000 on both; the message is there at 3012, rank 0's tiles (12 + 7 + 12
    pairs, three calls: 340) at 2340, rank 1's triangle (31 pairs: 320) at 2320. With 50 for the stage both go
    on at 3062: rank 1 with 28 pairs (290), then 5000 + 100. So the first layer takes 8162 and 8452; later
    ones wait for rank 1's QKV: 8452 each.
    """
    found = simulate(plan_of(), PRICES)
    # Backward of a layer: 10200; rank 1's late tile, 870; the message leaves at 11070, beside the early
    # tiles, and is there at 12082; 50; QKV 4000. Both ranks end at 16132, and so on.
    assert ns_of(found) == [(0, 1000 + 8162 + 8452), (0, 1000 + 2 * 8452), (17904, 1000 + 2 * 16132),
                            (17904, 1000 + 2 * 16132)]  # fmt: skip
    assert round(found.makespan * NS) == 17904 + 33264
    # Rank 0 begins its tiles when it comes, the messages when rank 1 comes, too.
    forwards, backwards = 3012 - 2340 + 1012 - (340 - 290), 12082 - 10200 - 1020
    assert [round(x * NS) for x in found.exposed] == [forwards + 2 * backwards, 2 * 692 + 2 * 52]
    forward = 1000 + 2 * (7000 + 340 + 50 + 100), 1000 + 2 * (7000 + 610 + 50 + 100)
    backward = 1000 + 2 * (14000 + 3 * 340 + 50 + 200), 1000 + 2 * (14000 + 3 * 610 + 50 + 200)
    assert [round(x * NS) for x in found.busy] == [forward[0] + backward[0], forward[1] + backward[1]]


@pytest.mark.parametrize("layers", [1, 2, 3, 7, 40])
def test_layers_add_up(layers):
    found = simulate(plan_of(), Prices(replace(MODEL, layers=layers), ROUND))
    assert ns_of(found)[:2] == [(0, 1000 + 8162 + (layers - 1) * 8452), (0, 1000 + layers * 8452)]


def test_a_ring_hop():
    """Both send all 7 rows, 896 + 500 ns: there at 3396, and on at 3446; rank 0 needs none of them."""
    found = simulate(plan_of("ring"), Prices(replace(MODEL, layers=1), ROUND))
    assert ns_of(found)[:2] == [(0, 1000 + 3446 + 5100), (0, 1000 + 3446 + 290 + 5100)]


def test_without_overlap_tiles_wait():
    found = simulate(plan_of(), Prices(replace(MODEL, layers=1), replace(ROUND, overlap=False)))
    assert ns_of(found)[:2] == [(0, 1000 + 3012 + 340 + 50 + 5100), (0, 1000 + 3012 + 320 + 50 + 290 + 5100)]


def test_recompute_repeats_what_it_does_not_keep():
    """A layer again, with its traffic or without: both ranks begin it where the layer behind has ended."""
    base = round(simulate(plan_of(keep_layers=2), PRICES).makespan * NS)
    again = round(simulate(plan_of(keep_layers=1), PRICES).makespan * NS)
    rest = round(simulate(plan_of(keep_layers=1, keep_attention=1), PRICES).makespan * NS)
    assert again - base == 8452
    assert rest - base == 7100
    flags = Prices(replace(MODEL, recomputed=1), ROUND)
    assert round(simulate(plan_of(), flags).makespan * NS) == again


def test_vocabulary_and_the_last_to_end():
    """Scored rows are projected behind the layers; nobody is done before their values are there."""
    scored = replace(plan_of(), shape=replace(SHAPE, scored=(0, 0, 7)))
    prices = Prices(replace(MODEL, layers=1), replace(ROUND, gemm_flops=MODEL.linear_flops * 10**6))
    once = prices.vocabulary.ns(7)
    assert once > 0
    plain, found = (ns_of(simulate(p, prices)) for p in (plan_of(), scored))
    assert [f[1] for f in found[:2]] == [plain[1][1] + once] * 2
    assert [f[1] for f in found[2:]] == [plain[2][1] + 2 * once] * 2


def transfers(*pairs: tuple[int, int]) -> list[Transfer]:
    here = Rows("home", ((0, 10),))
    return [Transfer(Payload.KV, src, dst, here, here) for src, dst in pairs]


def last_of(cards: int, *pairs: tuple[int, int]) -> int:
    """When the last of some messages of 1280 bytes between two nodes of 8 is done."""
    wiring = Wiring.of(range(16), Prices(MODEL, replace(ROUND, message_ns=0)), cards)
    messages = Messages(transfers(*pairs), wiring, {Payload.KV: 128})
    return int(messages.serve(np.zeros(16, np.int64), np.zeros(64, np.int64))[0].max())


def test_ranks_of_a_node_share_its_cards():
    every = [(rank, 8 + rank) for rank in range(8)]
    assert last_of(0, every[3]) == last_of(0, *every) == last_of(8, *every) == 1280
    # Four cards for eight ranks: each twice as fast, and two ranks at each.
    assert last_of(4, every[3]) == 640
    assert last_of(4, *every) == 2 * 640
    assert last_of(1, *every) == 8 * last_of(1, every[3]) == 1280


def test_messages_queue_on_both_sides():
    """Near ones first; a receiver takes one after the other, links and cards at the same time."""
    assert last_of(0, (1, 0), (2, 0), (3, 0)) == 3 * 1280
    assert last_of(0, (0, 1), (0, 2), (0, 3)) == 3 * 1280
    assert last_of(0, (0, 1), (1, 2), (2, 3)) == 1280
    assert last_of(0, (0, 1), (0, 9)) == 1280
    # An exchange of everyone with everyone wastes no time.
    everyone = [(a, b) for a in range(8) for b in range(8) if a != b]
    assert last_of(0, *everyone) == 7 * 1280


# ---- pipelines


def equal_passes(count: int) -> Plan:
    """So many trees of 10 rows on one rank, a pass each."""
    shape = ForestShape((-1,) * count, (10,) * count, (0,) * count, (1,) * count)
    passes = tuple(Pass(i, i, "fused", (0,), ((Span(i, 0, 10),),), primitive="local") for i in range(count))
    events = tuple(Event(a, i) for i in range(count) for a in ("forward", "backward"))
    return Plan(1, "augtree", shape, passes, events)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_equal_passes_fill_and_drain_a_pipeline(stages, count):
    quick = replace(ROUND, nic_bytes_s=FREE, link_bytes_s=FREE, message_ns=0)
    prices = Prices(replace(MODEL, layers=4, stages=stages), quick)
    found = simulate(equal_passes(count), prices)
    one = simulate(equal_passes(1), Prices(replace(MODEL, layers=4 // stages), quick))
    assert round(found.makespan * NS) == (count + stages - 1) * round(one.makespan * NS)
    assert found.makespan * NS == pytest.approx(price(equal_passes(count), prices).time_ns, rel=1e-9)
    # At most as many passes are under way on a stage as there are stages from it on.
    for stage in range(stages):
        under_way = most = 0
        for span in (s for s in found.spans if s.stage == stage):
            under_way += 1 if span.action == "forward" else -1
            most = max(most, under_way)
        assert most == min(count, stages - stage)


def test_activations_take_time_between_stages():
    prices = Prices(replace(MODEL, stages=2), replace(ROUND, node_ranks=1, nic_bytes_s=10**8))
    found = simulate(equal_passes(1), prices)
    first, second, third, fourth = ((s.start, s.start + s.duration) for s in found.spans)
    hop = 10 * MODEL.input_bytes * 10 + 500
    assert round((second[0] - first[1]) * NS) == round((fourth[0] - third[1]) * NS) == hop
    assert third[0] == second[1]
    blocking = simulate(equal_passes(1), replace(prices, cluster=replace(prices.cluster, overlap=False)))
    assert blocking.makespan == found.makespan
    assert round(sum(blocking.exposed) * NS) == hop  # of its busiest stage: it sends once


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_waves_end_before_their_prompt(stages):
    plan = phased()
    found = simulate(plan, Prices(replace(MODEL, stages=stages), preset("h100")))
    assert len(found.spans) == 2 * stages * sum(len(p.block) for p in plan.passes)
    when = {
        (s.action, s.pass_id, s.rank, s.stage): (round(s.start * NS), round((s.start + s.duration) * NS))
        for s in found.spans
    }
    for p in plan.passes:
        for rank in p.block:
            for stage in range(stages):
                assert when["forward", p.id, rank, stage][1] <= when["backward", p.id, rank, stage][0]
                for read in p.reads:
                    assert when["forward", read, rank, stage][1] <= when["forward", p.id, rank, stage][0]
                    assert when["backward", p.id, rank, stage][1] <= when["backward", read, rank, stage][0]
                if stage:
                    assert when["forward", p.id, rank, stage - 1][1] < when["forward", p.id, rank, stage][0]
                    assert when["backward", p.id, rank, stage][1] < when["backward", p.id, rank, stage - 1][0]


# ---- of every plan

LENGTHS = {
    "short": [(40, [60, 20, 33]), (12, [30, 70])],
    "prompts": [(3000, [100, 80, 300, 20]), (900, [50, 60])],
    "answers": [(100, [900, 2500, 700]), (50, [800] * 4), (20, [4000])],
}
FORCED = ("", "degree=8", "degree=4,pieces=2", "degree=8,phase=phased,waves=2,chunks=2",
          "degree=4,phase=phased,waves=2,primitive=move_q", "copies=2,degree=8", "degree=16",
          "degree=16,primitive=move_kv")  # fmt: skip


@functools.cache
def plans(lengths: str, force: str, cluster: str, **model) -> tuple[Plan, Prices] | None:
    """A plan of some lengths on 16 ranks; None where it cannot be forced."""
    shape = forest(*(from_lengths(p, r) for p, r in LENGTHS[lengths]))
    prices = Prices(replace(MODEL, **{"layers": 12, **model}), preset(cluster))
    config = AugTreeConfig(cluster=cluster, force=force)
    try:
        groups = range(len(LENGTHS[lengths]))
        return make_plan(shape, prices.model, 16, config, tree_groups=list(groups)), prices
    except InfeasiblePlanError:
        return None


CASES = [(lengths, force, cluster) for lengths in LENGTHS for force in FORCED
         for cluster in ("h100", "cpu")]  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("stages", [1, 3])
def test_what_holds_of_every_plan(lengths, stages):
    seen = 0
    for _, force, cluster in (case for case in CASES if case[0] == lengths):
        made = plans(lengths, force, cluster, stages=stages)
        if made is None:
            continue
        seen += 1
        plan, prices = made
        found = simulate(plan, prices)
        assert found == simulate(plan, prices)
        assert found.makespan == pytest.approx(max(s.start + s.duration for s in found.spans))
        assert found.makespan >= found.bound == compute_bound(plan.shape, prices, 16) > 0
        for rank in range(16):
            assert found.busy[rank] + found.idle[rank] == pytest.approx(found.makespan)
            assert 0 <= found.exposed[rank] <= found.idle[rank] + 1e-12
            # A rank does one thing at a time on a stage.
            for stage in range(stages):
                mine = [s for s in found.spans if (s.rank, s.stage) == (rank, stage)]
                for one, two in zip(mine, mine[1:]):
                    assert one.start + one.duration <= two.start + 1e-12
                assert all(0 < s.work <= s.duration + 1e-12 for s in mine)
        if stages == 1:
            assert max(found.peak_bytes) == price(plan, prices).peak_bytes
    assert seen > 8


def test_extrapolated_layers_are_those_that_are_played(monkeypatch):
    again = {"recomputed": 5, "attention_kept": 2}
    found = {case: simulate(*made) for case in CASES if (made := plans(*case, **again))}

    def one_by_one(clock, times, layer, *attentions):
        for _ in range(times):
            layer()

    monkeypatch.setattr(Clock, "repeat", one_by_one)
    assert len(found) > 26
    for case, extrapolated in found.items():
        assert simulate(*plans(*case, **again)) == extrapolated, case


def test_what_is_equal_is_played_once():
    plan, prices = equal_passes(20), Prices(MODEL, ROUND)
    assert len({s.duration for s in simulate(plan, prices).spans}) == 2


def test_the_price_is_near():
    """The price is a closed form of the same constants; where they differ is in docs/benchmarks.md."""
    ratios = [simulate(*made).makespan / made[0].seconds
              for case in CASES if (made := plans(*case)) is not None]  # fmt: skip
    assert 0.9 < statistics.median(ratios) < 1.1
    assert max(ratios) < 1.5


def test_prefetch_hides_what_a_wave_fetches():
    """Waves of a prompt that lies on another rank, over a slow link."""
    made = plans("prompts", "degree=8,phase=phased,waves=2", "h100")
    assert made is not None
    plan, prices = made
    slow = replace(prices, cluster=replace(prices.cluster, link_bytes_s=10**10, nic_bytes_s=10**9))
    times = {}
    for ahead in (False, True):
        fields = {"primitive": "gather_kv", "pieces": 1}
        passes = tuple(replace(p, prefetch=ahead and bool(p.reads), **fields) for p in plan.passes)
        times[ahead] = simulate(replace(plan, passes=passes, _programs={}), slow).makespan
    assert times[True] < times[False]


def test_what_rests_on_the_host_is_waited_for():
    plan = plan_of(offload=True)
    host = replace(PRICES, cluster=replace(ROUND, host_bytes_s=10**6))
    found, plain = simulate(plan, host), simulate(plan_of(), PRICES)
    assert found.makespan > 2 * plain.makespan
    assert [a > b for a, b in zip(found.exposed, plain.exposed)] == [True, True]
    assert max(found.peak_bytes) == price(plan, host).peak_bytes < max(plain.peak_bytes)


def test_no_passes_take_no_time():
    empty = Plan(2, "augtree", ForestShape((), (), (), ()), (), ())
    assert simulate(empty, PRICES) == Simulated(0.0, [0.0] * 2, [0.0] * 2, [0.0] * 2, [0] * 2, [], 0.0)
