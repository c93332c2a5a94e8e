"""What a pass costs: seconds and bytes in closed forms, from its placement alone.

The forms count exactly what the compiler emits (rows, pairs, received rows, messages; a test compares them),
so that candidates are priced without compiling them. Times are integer nanoseconds.

    layer    = max over ranks of  linear(rows) + attention(pairs, tiles) + exposed traffic + fixed costs
    linear   = rows * linear_flops / gemm_flops * (1 + half_rows / rows) + element-wise traffic
    exposed  = traffic of a stage that does not fit under its tiles (all without overlap) + stage_ns * stages
    pass     = layers * (forward + backward) + vocabulary of the scored rows + pass_ns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_augtree.planning.cluster import Cluster
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Placement, Span, count
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.tree import ForestShape

NS = 10**9


@dataclass(frozen=True)
class RankLoad:
    """What one rank does in one layer of a pass.

    Attributes:
        rows, scored: its rows, and those that reach the vocabulary.
        pairs: (query, key) pairs it computes.
        early: those that need nothing received, leaves' own aside: computed while the first piece travels.
        triangles: rows of each of its causal tiles.
        tiles: attention calls, an estimate.
        kv_in, kv_out: key rows received and sent.
        q_in, q_out: query rows received and sent (``move_q``).
        messages: messages sent in the forward.
        far: whether its block spans nodes.
    """

    rows: int
    scored: int
    pairs: int
    early: int
    triangles: tuple[int, ...]
    tiles: int
    kv_in: int
    kv_out: int
    q_in: int
    q_out: int
    messages: int
    far: bool


class PassLoads:
    """The loads of a pass on every rank of its block.

    Args:
        shape: the forest.
        p: the pass.
        states: placements of the passes it reads.
        node_ranks: ranks of a node of the machine.
    """

    def __init__(self, shape: ForestShape, p: Pass, states: Sequence[Placement], node_ranks: int) -> None:
        self.shape, self.p, self.states, self.node_ranks = shape, p, states, node_ranks
        self.world = len(p.placement)

    @cached_property
    def _views(self) -> list[tuple[frozenset[int], dict[int, int]]]:
        """[rank] -> (nodes that it sees whole, node -> end of what its own rows of the node see)."""
        views = []
        for spans in self.p.placement:
            whole = (
                frozenset().union(*[self.shape.ancestors[s.node] for s in spans]) if spans else frozenset()
            )
            last: dict[int, int] = {}
            for s in spans:
                last[s.node] = max(last.get(s.node, 0), s.lo)
            views.append((whole, last))
        return views

    def _visible(self, spans: Sequence[Span], rank: int) -> int:
        """Rows of `spans`, held elsewhere, that some query of `rank` sees."""
        whole, last = self._views[rank]
        return sum(s.hi - s.lo for s in spans if s.node in whole or s.hi <= last.get(s.node, 0))

    @cached_property
    def ranks(self) -> list[RankLoad]:
        if self.p.primitive == "move_q":
            return self._move_q()
        return self._ring() if self.p.primitive == "ring" else self._gather()

    @property
    def stages(self) -> int:
        """Stages with transfers in the forward."""
        remote = self.world - 1
        if not remote or not any(r.messages for r in self.ranks):
            return 0
        if self.p.primitive == "move_q":
            return 2
        return remote if self.p.primitive in ("ring", "move_kv") else min(self.p.pieces, remote)

    def _basic(self, rank: int) -> dict[str, Any]:
        spans = self.p.placement[rank]
        own: dict[int, int] = {}
        for s in spans:
            own[s.node] = own.get(s.node, 0) + s.hi - s.lo
        return {
            "rows": count(spans),
            "scored": sum(min(self.shape.scored[s.node], s.hi - s.lo) for s in spans),
            "pairs": sum(self.shape.area(*s) for s in spans),
            "early": self._early(rank, own),
            "triangles": tuple(own.values()),
        }

    def _early(self, rank: int, own: dict[int, int]) -> int:
        """Pairs with keys that a rank holds itself, but for leaves' triangles: those are computed last."""
        held = dict.fromkeys(range(len(self.shape.rows)), 0)
        for state in self.states:
            for s in state[rank]:
                held[s.node] += s.hi - s.lo
        pairs = 0
        for node, n in own.items():
            pairs += n * sum(own.get(a, 0) + held[a] for a in self.shape.ancestors[node])
            pairs += n * (n + 1) // 2 + n * held[node] if self.shape.children[node] else 0
        return pairs

    @property
    def _far(self) -> bool:
        """A block that spans nodes is priced by the path between them."""
        return len({rank // self.node_ranks for rank in self.p.block}) > 1

    def _tiles(self, rank: int, sources: int) -> int:
        """Own triangles, and a tile a source for the shared nodes and for every other node cut over ranks."""
        whole, last = self._views[rank]
        cut = [n for n in last if n not in whole]
        spread = sum(1 for n in cut if sum(n in view[1] for view in self._views) > 1)
        shared = min(len(whole), 2)
        return len(last) + shared * (sources + 1) + spread * sources

    def _gather(self) -> list[RankLoad]:
        kinds = [self.p.placement, *self.states]
        flows = [
            [
                [self._visible(kind[src], dst) if src != dst else 0 for kind in kinds]
                for dst in range(self.world)
            ]
            for src in range(self.world)
        ]
        sources = self.world - 1 if self.p.primitive == "move_kv" else min(self.p.pieces, self.world - 1)
        return [
            RankLoad(
                **self._basic(r),
                tiles=self._tiles(r, sources),
                kv_in=sum(sum(f[r]) for f in flows),
                kv_out=sum(sum(f) for f in flows[r]),
                q_in=0,
                q_out=0,
                messages=sum(any(f) for f in flows[r]),
                far=self._far,
            )
            for r in range(self.world)
        ]

    def _ring(self) -> list[RankLoad]:
        shards = [sum(count(kind[r]) for kind in (self.p.placement, *self.states)) for r in range(self.world)]
        total, remote = sum(shards), self.world - 1
        loads = []
        for r in range(self.world):
            passing = [shards[(r - hop) % self.world] for hop in range(remote)]
            arriving = total - shards[r] if remote else 0
            loads.append(
                RankLoad(
                    **self._basic(r),
                    tiles=self._tiles(r, remote),
                    kv_in=arriving,
                    kv_out=sum(passing),
                    q_in=0,
                    q_out=0,
                    messages=sum(x > 0 for x in passing),
                    far=self._far,
                )
            )
        return loads

    def _move_q(self) -> list[RankLoad]:
        home = [
            [self._visible(self.p.placement[src], dst) if src != dst else 0 for dst in range(self.world)]
            for src in range(self.world)
        ]
        visits = [
            [self._visitors(src, dst) if src != dst else 0 for dst in range(self.world)]
            for src in range(self.world)
        ]
        loads = []
        for r in range(self.world):
            basic = self._basic(r)
            basic["pairs"] += self._pairs_moved(r)
            q_out, q_in = sum(visits[r]), sum(v[r] for v in visits)
            sent = sum(bool(home[r][o] or visits[r][o]) for o in range(self.world))
            back = sum(bool(visits[o][r]) for o in range(self.world))
            loads.append(
                RankLoad(
                    **basic,
                    tiles=self._tiles(r, 1) + 1,
                    kv_in=sum(h[r] for h in home),
                    kv_out=sum(home[r]),
                    q_in=q_in,
                    q_out=q_out,
                    messages=sent + back,
                    far=self._far,
                )
            )
        return loads

    def _sees_state(self, query: Span, rank: int) -> int:
        """Rows of prompt state on `rank` that a query span sees."""
        ancestors = self.shape.ancestors[query.node]
        return sum(
            s.hi - s.lo
            for state in self.states
            for s in state[rank]
            if s.node in ancestors or (s.node == query.node and s.hi <= query.lo)
        )

    def _visitors(self, src: int, dst: int) -> int:
        return sum(q.hi - q.lo for q in self.p.placement[src] if self._sees_state(q, dst))

    def _pairs_moved(self, rank: int) -> int:
        """Pairs that visitors bring to a rank, less those that its own queries take elsewhere."""
        come = sum(
            (q.hi - q.lo) * self._sees_state(q, rank)
            for other, spans in enumerate(self.p.placement)
            if other != rank
            for q in spans
        )
        go = sum(
            (q.hi - q.lo) * self._sees_state(q, other)
            for q in self.p.placement[rank]
            for other in range(self.world)
            if other != rank
        )
        return come - go


@dataclass(frozen=True)
class Prices:
    """Prices passes of one model on one machine."""

    model: ModelShape
    cluster: Cluster

    def linear_ns(self, rows: int, flops: int) -> int:
        """A forward of linear layers over some rows."""
        c = self.cluster
        return (rows + min(rows, 1) * c.gemm_half_rows) * flops * NS // c.gemm_flops

    def wasted_pairs(self, load: RankLoad) -> int:
        """Masked pairs that a kernel computes on the diagonals of causal tiles."""
        return sum(rows * min(rows, self.cluster.tile_rows) // 2 for rows in load.triangles)

    def layer_ns(self, load: RankLoad, stages: int, *, backward: bool, keep: bool) -> int:
        """One layer of one rank, forward or backward."""
        c, m = self.cluster, self.model
        gemm, attention = (c.gemm_backward_pct, c.attention_backward_pct) if backward else (100, 100)
        linear = self._rows_ns(load.rows) * gemm // 100
        computed = (load.pairs + self.wasted_pairs(load)) * m.pair_flops * NS // c.attention_flops
        tiles = (computed + load.tiles * c.tile_ns) * attention // 100
        moved = self.traffic_bytes(load, backward=backward, keep=keep)
        wire = moved * NS // (c.nic_bytes_s if load.far else c.link_bytes_s) + load.messages * c.message_ns
        exposed = self._exposed(wire, tiles, load, stages) if c.overlap else wire
        return linear + tiles + exposed + stages * c.stage_ns + c.layer_ns * (2 if backward else 1)

    def _rows_ns(self, rows: int) -> int:
        """One layer's linear layers, and what is done row by row beside them, forward."""
        beside = rows * self.model.saved_bytes * 2 * NS // self.cluster.row_bytes_s
        return self.linear_ns(rows, self.model.linear_flops) + beside

    def _again_ns(self, load: RankLoad, stages: int) -> int:
        """What recomputed layers do again before their backward."""
        m = self.model
        whole = self.layer_ns(load, stages, backward=False, keep=True)
        without_attention = self._rows_ns(load.rows) + self.cluster.layer_ns
        return (m.recomputed - m.attention_kept) * whole + m.attention_kept * without_attention

    def _exposed(self, wire: int, tiles: int, load: RankLoad, stages: int) -> int:
        """Equal pieces: the first hides under the rank's own tiles, each later one under its forerunner's."""
        if not stages:
            return 0
        first = tiles * load.early // max(load.pairs, 1)
        piece, later = wire // stages, (tiles - first) // stages
        return max(0, piece - first) + (stages - 1) * max(0, piece - later)

    def traffic_bytes(self, load: RankLoad, *, backward: bool, keep: bool) -> int:
        """Bytes that a rank sends or receives, whichever is more, in one layer."""
        return max(self._bytes(load, out, backward=backward, keep=keep) for out in (True, False))

    def _bytes(self, load: RankLoad, out: bool, *, backward: bool, keep: bool) -> int:
        m = self.model
        kv, q, back = (load.kv_out, load.q_out, load.q_in) if out else (load.kv_in, load.q_in, load.q_out)
        query, value = m.q_heads * m.k_dim, m.q_heads * m.v_dim
        if not backward:
            return kv * m.kv_bytes + q * query * m.item_bytes + back * (value + m.q_heads) * m.accum_bytes
        grad = load.kv_in if out else load.kv_out  # dK, dV go the other way
        total = grad * m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes
        total += q * (value * m.item_bytes + 2 * m.q_heads * m.accum_bytes) + back * query * m.accum_bytes
        return total if keep else total + kv * m.kv_bytes + q * query * m.item_bytes

    def pass_ns(self, loads: PassLoads) -> tuple[int, int]:
        """(forward, backward) of a pass: its slowest rank."""
        m, c, p = self.model, self.cluster, loads.p
        times = []
        for backward in (False, True):
            slowest = 0
            for load in loads.ranks:
                layer = self.layer_ns(load, loads.stages, backward=backward, keep=p.keep)
                vocab = self.linear_ns(load.scored, m.vocab_flops) * (2 if backward else 1)
                again = self._again_ns(load, loads.stages) if backward else 0
                slowest = max(slowest, m.layers * layer + vocab + again)
            times.append(slowest + c.pass_ns)
        return times[0], times[1]

    def pass_bytes(self, loads: PassLoads, *, provides: bool) -> list[int]:
        """[rank] bytes that a pass keeps from its forward to its backward."""
        m, p = self.model, loads.p
        held = []
        for load in loads.ranks:
            received = load.kv_in * m.kv_bytes + load.q_in * m.q_heads * m.k_dim * m.item_bytes
            received = received if p.keep else 0
            total = (m.layers - m.recomputed) * (load.rows * m.saved_bytes + received)
            total += m.recomputed * load.rows * m.input_bytes
            total += m.attention_kept * (load.rows * m.attended_bytes + received)
            if provides:
                total += m.layers * load.rows * m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes
                # Elsewhere the layer's own activations hold keys and values.
                total += m.recomputed * load.rows * m.kv_bytes
            held.append(total + load.scored * m.vocab * m.accum_bytes * 2)
        return held

    def work_bytes(self, loads: PassLoads) -> list[int]:
        """[rank] bytes that one layer's backward needs beside what was kept: its activations' gradients, the
        attention's accumulators and what is on the wire; measured, a little over two layers' activations.
        A recomputed layer's activations come on top."""
        m = self.model
        quarters = 13 if m.recomputed else 9
        return [
            load.rows * m.saved_bytes * quarters // 4
            + (load.kv_in + load.kv_out) * m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes
            + load.scored * m.vocab * m.accum_bytes
            for load in loads.ranks
        ]
