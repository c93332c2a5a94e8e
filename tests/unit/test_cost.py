"""Prices: the closed forms count exactly what the compiler emits, and cost rises with what is counted."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.cluster import PRESETS, preset
from megatron_augtree.planning.compiler import compile_pass
from megatron_augtree.planning.cost import PassPrice, Prices, Rate
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import count
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.planner import pairs_per_row
from megatron_augtree.planning.schedule import Payload, Program, promise, reverse, transfer_bytes
from megatron_augtree.planning.tree import from_lengths
from tests.unit.forests import forest, graphs, shapes

MODEL = ModelShape(
    layers=2, hidden=32, ffn=64, vocab=64, q_heads=4, kv_heads=2, k_dim=8, v_dim=6, item_bytes=2
)
PRICES = Prices(MODEL, preset("h100"))


def moved(program: Program, payload: Payload, *, src: int | None = None, dst: int | None = None) -> int:
    return sum(
        t.source.count
        for stage in program.stages
        for t in stage.transfers
        if t.payload is payload and src in (None, t.src) and dst in (None, t.dst)
    )


def bytes_of(program: Program, rank: int, node_ranks: int) -> tuple[int, int]:
    """What a rank sends or receives, whichever is more: inside its node, and across nodes."""

    def moved(end, across: bool) -> int:
        return sum(
            transfer_bytes(t, MODEL)
            for stage in program.stages
            for t in stage.transfers
            if end(t) == rank and (t.src // node_ranks != t.dst // node_ranks) == across
        )

    ends = (lambda t: t.src, lambda t: t.dst)
    return max(moved(end, False) for end in ends), max(moved(end, True) for end in ends)


@settings(max_examples=80, deadline=None)
@given(graphs(), st.sampled_from((2, 3, 8)))
def test_loads_equal_the_compiled_program(graph, node_ranks):
    for number, work in enumerate(graph.works):
        placements = [graph.works[read].placement for read in work.reads]
        for primitive, pieces in graph.primitives(work):
            program = compile_pass(
                graph.shape, work.placement, states=graph.states(work), primitive=primitive, pieces=pieces
            )
            p = Pass(
                number, 0, "fused", tuple(range(program.world)), work.placement, work.reads, primitive, pieces
            )
            loads = PassLoads(graph.shape, p, placements, node_ranks)
            busy = sum(bool(stage.transfers) for stage in program.stages)
            assert busy <= loads.stages and (busy > 0) == (loads.stages > 0)
            for rank, load in enumerate(loads.ranks):
                assert load.rows == count(work.placement[rank]) == program.buffers[rank]["home"]
                assert load.pairs == program.area(rank)
                if primitive in ("gather_kv", "move_q") and pieces == 1 and busy:
                    assert load.early == sum(tile.area for tile in program.stages[0].tiles[rank])
                assert load.kv_in == moved(program, Payload.KV, dst=rank)
                assert load.kv_out == moved(program, Payload.KV, src=rank)
                assert (
                    load.q_in
                    == moved(program, Payload.Q, dst=rank)
                    == moved(program, Payload.PARTIAL, src=rank)
                )
                assert (
                    load.q_out
                    == moved(program, Payload.Q, src=rank)
                    == moved(program, Payload.PARTIAL, dst=rank)
                )
                assert load.messages == promise(program, rank, MODEL).messages
                assert PRICES.traffic(load, backward=False, keep=True) == bytes_of(program, rank, node_ranks)
                for keep in (True, False) if primitive != "ring" else (True,):  # the ring baseline keeps
                    assert PRICES.traffic(load, backward=True, keep=keep) == bytes_of(
                        reverse(program, keep=keep), rank, node_ranks
                    )


CHOICES = [
    Choice(degree=degree, lane_degree=lane, wide=wide, pieces=pieces, primitive=primitive,
           phase=phase, chunks=chunks, waves=waves, node_ranks=node_ranks)
    for degree in (4, 8)
    for lane, wide in ((1, 0), (1, 2), (degree, 0), (2, 0))
    for primitive, pieces in (("gather_kv", 1), ("gather_kv", 2), ("gather_kv", 4),
                              ("move_kv", 1), ("move_q", 1))
    for phase, chunks, waves in (("fused", 1, 1), ("phased", 1, 2), ("phased", 4, 1))
    for node_ranks in ((0, 2, 4) if primitive == "gather_kv" else (0,))
]  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        from_lengths(640, [160, 90, 300, 80, 240]),
        from_lengths(400, [330] * 12),
        forest(from_lengths(240, [80, 80, 200]), from_lengths(160, [400, 80])),
    ],
    ids=("ragged", "many", "two trees"),
)
def test_tiles_and_merged_rows_are_those_of_the_program(shape):
    """Calls of the attention kernel and rows that are combined on the busiest rank, over the placements that
    the planner makes: hardly ever too few, and at most twice as many where nodes are short."""
    passes = few = merged_few = merged_many = 0
    for choice in CHOICES:
        plan = build(choice, shape, choice.degree, 5)
        for p in plan.passes:
            node_ranks = choice.node_ranks or 8
            loads = PassLoads(shape, p, [plan.passes[r].placement for r in p.reads], node_ranks)
            calls, combined = [], []
            for rank in range(choice.degree):
                mine = [tile for stage in plan.program(p.id).stages for tile in stage.tiles[rank]]
                calls.append(len(mine))
                combined.append(sum(tile.q.count for tile in mine) + loads.ranks[rank].q_out)
            tiles, merged = (max(getattr(x, name) for x in loads.ranks) for name in ("tiles", "merged"))
            said = str(choice), p.id
            assert max(calls) - tiles <= max(1, 0.3 * tiles) and tiles <= 2 * max(*calls, 2), said
            passes += 1
            few += max(calls) > tiles
            merged_few += max(combined) > 1.1 * merged
            merged_many += merged > 1.5 * max(combined)
            assert merged <= 2 * max(combined), said
    assert few <= 0.15 * passes and merged_few <= 0.05 * passes, (passes, few, merged_few)
    assert merged_many <= 0.1 * passes, (passes, merged_many)


@settings(max_examples=50, deadline=None)
@given(shapes(), st.integers(1, 4))
def test_scored_rows_are_those_of_the_shape_where_nodes_are_whole(shape, degree):
    """Cut nodes are an upper estimate: a rank may hold all of a node's scored rows."""
    plan = build(Choice(degree=degree, lane_degree=degree), shape, degree, 1)
    (p,) = plan.passes
    loads = PassLoads(shape, p, [], 8).ranks
    assert sum(load.scored for load in loads) >= sum(shape.scored)
    assert all(load.scored <= load.rows for load in loads)
    if degree == 1:
        assert loads[0].scored == sum(shape.scored)


# Prices.


def one_pass(rows: int, degree: int = 2, block: tuple[int, ...] | None = None, **changes) -> PassLoads:
    shape = from_lengths(rows, [rows // 2] * degree)
    (p,) = build(Choice(degree=degree), shape, degree, 100).passes
    p = replace(p, block=block or p.block, **changes)
    return PassLoads(shape, p, [], node_ranks=8)


def test_time_by_hand():
    """One rank, no traffic: linear work, element-wise traffic, pairs, tiles and fixed costs, as integers."""
    c = preset("h100")
    loads = one_pass(100, degree=1)
    (load,) = loads.ranks
    assert (load.rows, load.scored, load.kv_in, load.messages, loads.stages) == (150, 50, 0, 0, 0)
    assert load.pairs == sum(range(1, 151))
    linear = (150 + c.gemm_half_rows) * MODEL.linear_flops * 1e9 / c.gemm_flops
    rows = 150 * MODEL.saved_bytes * 2 * 1e9 / c.row_bytes_s
    # On a causal tile's diagonal a kernel takes up to `tile_rows` keys at once, half of them masked.
    masked = 100 * min(100, c.tile_rows) // 2 + 50 * min(50, c.tile_rows) // 2
    tiles = (load.pairs + masked) * MODEL.pair_flops * 1e9 / c.attention_flops + load.tiles * c.tile_ns
    merge = load.merged * 3 * MODEL.attended_bytes * 1e9 / c.row_bytes_s
    vocab = (50 + c.gemm_half_rows) * MODEL.vocab_flops * 1e9 / c.gemm_flops
    layer = linear + rows + tiles + merge + c.layer_ns
    forward = MODEL.layers * layer + vocab + c.pass_ns
    gemm, attention = c.gemm_backward_pct / 100, c.attention_backward_pct / 100
    back = (linear + rows) * gemm + tiles * attention + merge + 2 * c.layer_ns
    backward = MODEL.layers * back + 2 * vocab + c.pass_ns
    # Rounded down to whole nanoseconds, a few times a layer.
    assert PRICES.pass_ns(loads) == pytest.approx((forward, backward), abs=20)


@given(st.integers(1, 1 << 50), st.integers(1, 1 << 50), st.integers(0, 1 << 50))
def test_rates_keep_forty_bits(each, per_second, count):
    rate = Rate.of(each, per_second)
    exact = Fraction(each * count * 10**9, per_second)
    assert 0 <= exact - rate.ns(count) <= exact / (1 << 38) + 1
    assert rate.multiplier < 1 << 81 and rate.shift >= 0


def test_few_queries_cost_a_whole_tile():
    """A kernel's blocks run half empty: 16 rows against many keys cost what `query_rows` rows cost."""
    small, large = one_pass(4096), one_pass(4096)
    load = small.ranks[0]._replace(
        rows=16, cut=0, below=16, above=16 * 4096, pairs=16 * 4096, triangles=()
    )
    full = large.ranks[0]._replace(
        rows=128, cut=0, below=128, above=128 * 4096, pairs=128 * 4096, triangles=()
    )
    assert PRICES.cluster.query_rows == 128
    assert load.pairs + PRICES.masked_pairs(load) == full.pairs == full.pairs + PRICES.masked_pairs(full)
    # Of a node in zigzag each half meets other keys.
    halves = full._replace(cut=128, above=0)
    assert halves.pairs + PRICES.masked_pairs(halves) == 2 * full.pairs


def test_bytes_of_a_model_by_hand():
    assert (
        MODEL.kv_bytes == 2 * (8 + 6) * 2
        and MODEL.vocab_flops == 2 * 32 * 64
        and MODEL.pair_flops == 2 * 4 * 14
    )
    qkv = 4 * 8 + 2 * 14
    assert MODEL.linear_flops == 2 * (32 * qkv + 4 * 6 * 32 + 2 * 32 * 64)
    assert replace(MODEL, gated=True).linear_flops == MODEL.linear_flops + 2 * 32 * 64
    assert MODEL.saved_bytes == (6 * 32 + 2 * qkv + 2 * 64) * 2 + 4 * 7 * 4


@pytest.mark.parametrize("name", PRESETS)
def test_time_rises_with_work_and_traffic(name):
    prices = Prices(MODEL, preset(name))
    times = [prices.pass_ns(one_pass(rows)) for rows in (64, 512, 4096)]
    assert times == sorted(times) and all(isinstance(t, int) for pair in times for t in pair)
    assert all(forward < backward for forward, backward in times)
    near = prices.pass_ns(one_pass(4096))
    assert prices.pass_ns(one_pass(4096, keep=False))[1] >= near[1]
    assert prices.pass_ns(one_pass(4096, keep=False))[0] == near[0]


def test_nodes_cost_more_than_a_node():
    """Ranks 7 and 8 are on two nodes of eight: the slower link is priced."""
    near, far = one_pass(4096, block=(6, 7)), one_pass(4096, block=(7, 8))
    assert near.ranks[0].kv_far_in == 0 < far.ranks[0].kv_far_in == far.ranks[0].kv_in
    slow = Prices(MODEL, replace(preset("h100"), link_bytes_s=10**9, nic_bytes_s=10**8))
    assert slow.pass_ns(far)[0] > slow.pass_ns(near)[0]


def test_traffic_hides_under_tiles_only_where_it_may():
    loads = one_pass(2048)
    overlapped = Prices(MODEL, preset("h100"))
    exposed = Prices(MODEL, replace(preset("h100"), overlap=False))
    assert exposed.pass_ns(loads)[0] > overlapped.pass_ns(loads)[0]


def kept_bytes(prices: Prices, loads: PassLoads, *, provides: bool) -> list[int]:
    return PassPrice(prices, loads, provides=provides).kept(prices.pair(loads.p))


def work_bytes(prices: Prices, loads: PassLoads) -> list[int]:
    return PassPrice(prices, loads, provides=False).work(prices.pair(loads.p))


def test_memory_by_hand():
    """Kept: activations and received keys of every layer, prompt gradients where passes read, logits."""
    loads = one_pass(64)
    for rank, load in enumerate(loads.ranks):
        plain = MODEL.layers * load.rows * MODEL.saved_bytes + load.scored * 64 * 4 * 2
        received = MODEL.layers * load.kv_in * MODEL.kv_bytes
        gradients = MODEL.layers * load.rows * 2 * (8 + 6) * 4
        assert load.kv_in > 0 and kept_bytes(PRICES, loads, provides=False)[rank] == plain + received
        assert kept_bytes(PRICES, loads, provides=True)[rank] == plain + received + gradients
        lean = one_pass(64, keep=False)
        assert kept_bytes(PRICES, lean, provides=False)[rank] == plain
        assert work_bytes(PRICES, loads)[rank] > load.kv_in * 2 * MODEL.kv_bytes


def test_recompute_by_hand():
    """Kept: inputs of recomputed layers, for some what attention gave and received; the rest in full."""
    model = replace(MODEL, layers=4, recomputed=3, attention_kept=1)
    prices, plain = Prices(model, PRICES.cluster), Prices(replace(MODEL, layers=4), PRICES.cluster)
    loads = one_pass(64)
    for rank, load in enumerate(loads.ranks):
        received = load.kv_in * MODEL.kv_bytes
        kept = load.rows * (MODEL.saved_bytes + 3 * 32 * 2 + 4 * 7 * 4) + 2 * received
        assert kept_bytes(prices, loads, provides=False)[rank] == kept + load.scored * 64 * 4 * 2
        state = 4 * load.rows * 2 * (8 + 6) * 4 + 3 * load.rows * MODEL.kv_bytes
        lone, read = (kept_bytes(prices, loads, provides=provides)[rank] for provides in (False, True))
        assert read - lone == state
        again = work_bytes(prices, loads)[rank] - work_bytes(plain, loads)[rank]
        assert again == load.rows * MODEL.saved_bytes
    forward, backward = prices.pass_ns(loads)
    assert forward == plain.pass_ns(loads)[0]
    every = Prices(replace(model, recomputed=4, attention_kept=0), PRICES.cluster)
    without = Prices(replace(model, recomputed=4, attention_kept=4), PRICES.cluster)
    assert plain.pass_ns(loads)[1] < backward < every.pass_ns(loads)[1]
    assert plain.pass_ns(loads)[1] < without.pass_ns(loads)[1] < every.pass_ns(loads)[1]


def test_sequence_parallelism_cuts_norms_and_residuals():
    cut = replace(MODEL, row_parts=2)
    assert MODEL.saved_bytes - cut.saved_bytes == 6 * 16 * 2 and cut.input_bytes == 16 * 2


def test_a_rows_price_in_pairs():
    unit = pairs_per_row(MODEL, preset("h100"))
    assert unit >= 1 and pairs_per_row(replace(MODEL, ffn=64 * 64), preset("h100")) > unit
