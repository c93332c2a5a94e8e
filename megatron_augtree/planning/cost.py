"""What a pass costs: seconds and bytes in closed forms over the loads of its ranks (`loads.py`).

Times are integer nanoseconds. A speed is a multiplier and a shift (`Rate`), so no division depends on the
language: the C++ core computes the same integers.

    layer    = linear(rows) + attention(pairs, tiles) + merging + exposed traffic + fixed costs
    linear   = (rows + half_rows) * linear_flops / gemm_flops + element-wise traffic
    exposed  = traffic of a stage that does not fit under its tiles (all without overlap)
    pass     = max over ranks of  layers * layer + vocabulary of the scored rows,  + pass_ns
    backward = the same, and what recomputed layers do again

docs/cost_model.md writes them out with units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_augtree.planning.cluster import Cluster
from megatron_augtree.planning.demand import Copied, Demand, Pair
from megatron_augtree.planning.loads import PassLoads, RankLoad
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Pass

NS = 10**9


class Rate(NamedTuple):
    """Nanoseconds of a count of things: `count * multiplier >> shift`."""

    multiplier: int
    shift: int

    @staticmethod
    def of(each: int, per_second: int) -> Rate:
        """Things of which one costs `each` units, at `per_second` units a second; 40 bits are kept."""
        shift = max(0, 40 - (each * NS // per_second).bit_length() if each * NS >= per_second else 0)
        if each and each * NS < per_second:
            shift = 40 + (per_second // (each * NS)).bit_length()
        return Rate((each * NS << shift) // per_second, shift)

    def ns(self, count: int) -> int:
        return count * self.multiplier >> self.shift


class Wire(NamedTuple):
    """Bytes that one rank moves in one layer, sent or received, whichever is more."""

    near: int
    far: int


@dataclass(frozen=True)
class Prices:
    """Prices passes of one model on one machine."""

    model: ModelShape
    cluster: Cluster

    # Speeds.

    @cached_property
    def linear(self) -> Rate:
        """A row through one layer's linear layers."""
        return Rate.of(self.model.linear_flops, self.cluster.gemm_flops)

    @cached_property
    def vocabulary(self) -> Rate:
        """A row through the vocabulary projection."""
        return Rate.of(self.model.vocab_flops, self.cluster.gemm_flops)

    @cached_property
    def beside(self) -> Rate:
        """What is done row by row beside the linear layers: activations are written and read once."""
        return Rate.of(2 * self.model.saved_bytes, self.cluster.row_bytes_s)

    @cached_property
    def merging(self) -> Rate:
        """Merging a row of a partial result: both are read, one is written."""
        return Rate.of(3 * self.model.attended_bytes, self.cluster.row_bytes_s)

    @cached_property
    def attention(self) -> Rate:
        """A (query, key) pair."""
        return Rate.of(self.model.pair_flops, self.cluster.attention_flops)

    @cached_property
    def link(self) -> Rate:
        return Rate.of(1, self.cluster.link_bytes_s)

    @cached_property
    def nic(self) -> Rate:
        return Rate.of(1, self.cluster.nic_bytes_s)

    @cached_property
    def host(self) -> Rate | None:
        """A byte between device and host memory; None where they are the same."""
        return Rate.of(1, self.cluster.host_bytes_s) if self.cluster.host_bytes_s else None

    # Recompute.

    def pair(self, p: Pass) -> Pair:
        """A pass's recompute: its own, or what Megatron's flags say."""
        m = self.model
        if p.keep_layers < 0:
            return Pair(m.layers - m.recomputed, m.attention_kept)
        return Pair(p.keep_layers, p.keep_attention)

    # Time.

    def masked_pairs(self, load: RankLoad) -> int:
        """Pairs that a kernel computes beyond those of the mask: diagonals of causal tiles, and keys that
        meet fewer queries than a tile has rows: all those below a node together, and of a node in zigzag half
        of them at a time."""
        c = self.cluster
        diagonal = sum(rows * min(rows, c.tile_rows) // 2 for rows in load.triangles)
        area = sum(rows * (rows + 1) // 2 for rows in load.triangles)
        own = max(load.pairs - load.visiting - area, 0)
        visitors = _padding(load.visiting, load.q_in, c.query_rows)
        above = min(own, load.above)
        beside = _padding(own - above, load.cut // 2, c.query_rows)
        return diagonal + _padding(above, load.below, c.query_rows) + beside + visitors

    def tiles_ns(self, load: RankLoad, pairs: int) -> int:
        return self.attention.ns(pairs) + load.tiles * self.cluster.tile_ns

    def rows_ns(self, rows: int) -> int:
        """One layer's linear layers, and what is done row by row beside them, forward."""
        half = min(rows, 1) * self.cluster.gemm_half_rows
        return self.linear.ns(rows + half) + self.beside.ns(rows)

    def layer_ns(self, load: RankLoad, loads: PassLoads, *, backward: bool) -> tuple[int, int]:
        """(one layer of one rank, forward or backward; of that, traffic that nothing hides)."""
        c, p, stages = self.cluster, loads.p, loads.stages
        gemm, attention = (c.gemm_backward_pct, c.attention_backward_pct) if backward else (100, 100)
        linear = self.rows_ns(load.rows) * gemm // 100
        tiles = self.tiles_ns(load, load.pairs + self.masked_pairs(load)) * attention // 100
        merge = self.merging.ns(load.merged)
        moved = self.traffic(load, backward=backward, keep=p.keep)
        wire = self.link.ns(moved.near) + self.nic.ns(moved.far) + load.messages * c.message_ns
        if not c.overlap:
            exposed = wire
        elif p.prefetch and not backward:
            exposed = max(0, wire - linear - tiles)
        else:
            first = self.attention.ns(load.early) * attention // 100
            exposed = _exposed(wire, tiles, min(first, tiles), stages)
        fixed = stages * c.stage_ns + c.layer_ns * (2 if backward else 1)
        return linear + tiles + merge + exposed + fixed, exposed

    def traffic(self, load: RankLoad, *, backward: bool, keep: bool) -> Wire:
        """Bytes that a rank sends or receives, whichever is more, in one layer."""
        far = [self._bytes(load, out, backward, keep, far=True) for out in (True, False)]
        all_ = [self._bytes(load, out, backward, keep, far=False) for out in (True, False)]
        return Wire(max(a - f for a, f in zip(all_, far)), max(far))

    def _bytes(self, load: RankLoad, out: bool, backward: bool, keep: bool, *, far: bool) -> int:
        m = self.model
        if far:
            rows = load.kv_far_out, load.kv_far_in, load.q_far_out, load.q_far_in
        else:
            rows = load.kv_out, load.kv_in, load.q_out, load.q_in
        kv_out, kv_in, q_out, q_in = rows
        kv, grad, q, back = (kv_out, kv_in, q_out, q_in) if out else (kv_in, kv_out, q_in, q_out)
        query, value = m.q_heads * m.k_dim, m.q_heads * m.v_dim
        if not backward:
            return kv * m.kv_bytes + q * query * m.item_bytes + back * (value + m.q_heads) * m.accum_bytes
        # dK, dV go the other way.
        total = grad * m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes
        total += q * (value * m.item_bytes + 2 * m.q_heads * m.accum_bytes) + back * query * m.accum_bytes
        return total if keep else total + kv * m.kv_bytes + q * query * m.item_bytes

    def pass_ns(self, loads: PassLoads) -> tuple[int, int]:
        """(forward, backward) of a pass on one pipeline stage: its slowest rank."""
        return PassPrice(self, loads, provides=False).time(self.pair(loads.p))

    # Memory.

    def received_bytes(self, load: RankLoad) -> int:
        """Keys, values and queries that came to a rank in one layer."""
        m = self.model
        return load.kv_in * m.kv_bytes + load.q_in * m.q_heads * m.k_dim * m.item_bytes

    def logits_again(self, load: RankLoad) -> bool:
        """Logits beyond what is made at once are made again in the backward."""
        return 0 < self.model.logit_rows < load.scored


class _Line(NamedTuple):
    """One rank of a pass, ready for any recompute pair: nanoseconds and bytes.

    Attributes:
        forward, backward: of a layer; `exposed`: of both, traffic that nothing hides.
        again, again_rest: what a recomputed layer does again, all of it and without attention.
        vocabulary, vocabulary_back: the projection of the scored rows.
        fixed: bytes kept whatever the pair; `whole`, `attention`: more for each layer that keeps everything,
            or what attention gave.
        state: bytes of prompt state; `state_whole`: less for each layer that keeps everything anyway.
        work, work_again: bytes beside what is kept, without and with recomputed layers.
    """

    forward: int
    backward: int
    exposed: int
    again: int
    again_rest: int
    vocabulary: int
    vocabulary_back: int
    fixed: int
    whole: int
    attention: int
    state: int
    state_whole: int
    work: int
    work_again: int


class PassPrice:
    """The price of a pass for every recompute pair.

    Under a pipeline a pass is a slot of each stage: times are a stage's, with its share of the layers; as
    many passes as stages are under way, so bytes are those of all layers.

    Args:
        prices: model and machine.
        loads: the pass.
        provides: later passes read its keys and values.
    """

    def __init__(self, prices: Prices, loads: PassLoads, *, provides: bool) -> None:
        self.prices, self.p = prices, loads.p
        self.layers = prices.model.layers
        self.lines = [self._line(load, loads, provides) for load in loads.ranks]
        self.offloads = loads.p.offload and prices.host is not None

    def _line(self, load: RankLoad, loads: PassLoads, provides: bool) -> _Line:
        prices, m, p = self.prices, self.prices.model, loads.p
        once, exposed = prices.layer_ns(load, loads, backward=False)
        back, exposed_back = prices.layer_ns(load, loads, backward=True)
        vocabulary = prices.vocabulary.ns(load.scored + min(load.scored, 1) * prices.cluster.gemm_half_rows)
        chunked = prices.logits_again(load)
        logits = load.scored * m.vocab * m.accum_bytes
        received = prices.received_bytes(load) if p.keep else 0
        kv = load.rows * m.kv_bytes
        wire = (load.kv_in + load.kv_out) * m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes
        wire += load.kv_in * m.kv_bytes if p.prefetch else 0
        chunk = 3 * m.logit_rows * m.vocab * m.accum_bytes if chunked else logits
        quarter = load.rows * m.saved_bytes // 4
        return _Line(
            forward=once,
            backward=back,
            exposed=exposed + exposed_back,
            again=once,
            again_rest=prices.rows_ns(load.rows) + prices.cluster.layer_ns,
            vocabulary=vocabulary,
            vocabulary_back=vocabulary * (3 if chunked else 2),
            fixed=m.layers * load.rows * m.input_bytes
            + (load.scored * m.hidden * m.item_bytes if chunked else 2 * logits),
            whole=load.rows * (m.saved_bytes - m.input_bytes) + received,
            attention=load.rows * m.attended_bytes + received,
            state=m.layers * (load.rows * m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes + kv)
            if provides
            else 0,
            # Elsewhere the layer's own activations hold keys and values.
            state_whole=kv if provides and not p.offload else 0,
            work=9 * quarter + wire + chunk,
            work_again=13 * quarter + wire + chunk,
        )

    @property
    def hidden(self) -> bool:
        """Whether no traffic shows: other ways to move the same rows can only cost more."""
        return not any(x.exposed for x in self.lines)

    def slot(self, pair: Pair) -> int:
        """Forward and backward ns on a stage without the vocabulary: what filling and draining a pipeline
        waits for, once a stage but the last."""
        return sum(self.time(pair, vocabulary=False))

    def time(self, pair: Pair, *, vocabulary: bool = True) -> tuple[int, int]:
        """(forward, backward) ns of a stage's share of the layers, and the vocabulary: the slowest rank's."""
        stages = self.prices.model.stages
        # The slowest stage counts: most layers, most that run again, fewest that keep attention.
        layers, again = -(-self.layers // stages), -(-(self.layers - pair.whole) // stages)
        attention = min(pair.attention // stages, again)
        again -= attention
        forward = max(layers * x.forward + vocabulary * x.vocabulary for x in self.lines)
        backward = max(
            layers * x.backward + vocabulary * x.vocabulary_back + again * x.again + attention * x.again_rest
            for x in self.lines
        )
        if self.offloads:
            moved = self.prices.host.ns(max(self._resting(x, pair) for x in self.lines))
            forward, backward = max(forward, moved), max(backward, moved)
        return forward + self.prices.cluster.pass_ns, backward + self.prices.cluster.pass_ns

    def _resting(self, x: _Line, pair: Pair) -> int:
        """Bytes from forward to backward, prompt state aside."""
        return x.fixed + pair.whole * x.whole + pair.attention * x.attention

    def kept(self, pair: Pair) -> list[int]:
        """[rank] bytes on the device from forward to backward."""
        return [
            (0 if self.offloads else self._resting(x, pair)) + x.state - pair.whole * x.state_whole
            for x in self.lines
        ]

    def work(self, pair: Pair) -> list[int]:
        """[rank] bytes that one layer's backward needs beside what was kept: its activations' gradients,
        attention's accumulators and what is on the wire; measured, a little over two layers' activations.
        A recomputed layer's own activations come on top, and logits and their gradients."""
        return [x.work if pair.whole == self.layers else x.work_again for x in self.lines]

    def peak(self, pair: Pair) -> int:
        """Bytes of the heaviest rank while the pass runs alone."""
        return max(a + b for a, b in zip(self.kept(pair), self.work(pair)))

    def demand(self) -> Demand:
        """What the heaviest rank wants of memory, and what it saves, for every pair."""
        return Demand(
            layers=self.layers,
            fixed=max(x.state if self.offloads else x.state + x.fixed for x in self.lines),
            whole=0 if self.offloads else max(x.whole - x.state_whole for x in self.lines),
            attention=0 if self.offloads else max(x.attention for x in self.lines),
            work=max(x.work for x in self.lines),
            work_again=max(x.work_again for x in self.lines),
            saved=max(x.again for x in self.lines),
            saved_attention=max(x.again - x.again_rest for x in self.lines),
        )

    def copied(self) -> Copied:
        """The heaviest rank's times and copies, of a pass that is offloaded, for every pair."""
        stages, host = self.prices.model.stages, self.prices.host
        layers = -(-self.layers // stages)
        return Copied(
            layers=self.layers,
            forward=max(layers * x.forward + x.vocabulary for x in self.lines),
            backward=max(layers * (x.backward + x.again) + x.vocabulary_back for x in self.lines),
            saved=max(x.again for x in self.lines) // stages,
            saved_attention=max(x.again - x.again_rest for x in self.lines) // stages,
            fixed=host.ns(max(x.fixed for x in self.lines)),
            whole=host.ns(max(x.whole for x in self.lines)),
            attention=host.ns(max(x.attention for x in self.lines)),
        )


def _padding(pairs: int, rows: int, floor: int) -> int:
    """Pairs that a kernel computes for query rows that are not there."""
    return pairs * (floor - rows) // rows if 0 < rows < floor else 0


def _exposed(wire: int, tiles: int, first: int, stages: int) -> int:
    """Equal pieces: the first hides under the rank's own tiles, each later one under its forerunner's."""
    if not stages:
        return 0
    piece, later = wire // stages, (tiles - first) // stages
    return max(0, piece - first) + (stages - 1) * max(0, piece - later)


def pairs_per_row(model: ModelShape, cluster: Cluster) -> int:
    """What a row's linear and element-wise layers cost, in attention pairs of this machine."""
    row_ns = model.linear_flops * NS // cluster.gemm_flops + 2 * model.saved_bytes * NS // cluster.row_bytes_s
    # One division: a pair takes an accelerator a small part of a nanosecond.
    return max(1, row_ns * cluster.attention_flops // (model.pair_flops * NS))
