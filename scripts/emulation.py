"""Dilated emulation: the real executor over real messages, with sleeps in place of kernels.

An emulated rank is a process. It plays a plan with the real engine (`runtime/engine.py`): compiled programs,
layouts, prompt state, prefetch, autograd, and point-to-point messages over gloo. What an accelerator would
compute is slept through: attention tiles by their pairs, linear layers by their rows, at the constants of a
`Cluster`, times a dilation. Sleeping needs no core, so many ranks fit on a few.

- *Links are throttled*: a message carries the time at which its last byte leaves its sender, and lands no
  earlier than this and the receiver's own link allow. Each rank has a link inside the node and a card across
  nodes, either way one message at a time; what a stage sends together shares it evenly. Charged are the bytes
  of the model; the tensors that travel have heads of `WIDTH` elements instead of the model's (the emulated
  model's 1/32 for heads of 128), so that two cores can carry them. Dilation divides all rates.
- *Host work is hidden where a rank sleeps anyway*: every rank has a clock of what it should have done by now,
  and sleeps until then. What packing, autograd and the interpreter took beyond that is `lag`, is part of the
  emulated time, and is reported: it says how far a figure can be trusted.

Not emulated: recompute, offload, memory, the optimizer and the reduction of gradients.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_augtree.attention.kernels.protocol import Segment, SegmentGrad, empty_backward
from megatron_augtree.attention.merge import accumulation_dtype
from megatron_augtree.config import UnsupportedError
from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.runtime.layout import LocalRows
from megatron_augtree.runtime.messages import FieldSpec, arrived, length_of, write
from megatron_augtree.runtime.throttle import Link
from megatron_augtree.runtime.transport import DistTransport
from megatron_augtree.runtime.tree_attention import PassContext, tree_attention

#: Elements of a head in the tensors that travel.
WIDTH = 4
#: A message's tail: when its batch begins to leave, when its last byte has left, bytes of the model.
_STAMP = 3 * 8


class Clock:
    """What a rank should have done by now, in seconds of the machine's monotonic clock.

    Args:
        dilation: emulated seconds take so many real ones.
    """

    def __init__(self, dilation: float) -> None:
        self.dilation = dilation
        self.now = 0.0

    def start(self, at: float) -> None:
        """The step begins at a time that all ranks share."""
        self.now = at
        self.until(at)

    def work(self, ns: int) -> None:
        """Be busy for so many emulated nanoseconds."""
        self.until(self.now + ns * self.dilation / NS)

    def until(self, at: float) -> None:
        """Wait for a time that some other rank, or a link, says."""
        self.now = max(self.now, at)
        left = self.now - time.monotonic()
        if left > 0:
            time.sleep(left)

    @property
    def lag(self) -> float:
        """Real seconds that this rank is behind."""
        return max(0.0, time.monotonic() - self.now)


class Wire(DistTransport):
    """`DistTransport` over links with the rates of a machine.

    Args:
        prices: model and machine.
        clock: of this rank.
    """

    def __init__(self, prices: Prices, clock: Clock) -> None:
        super().__init__()
        self.clock, self.model, self.cluster = clock, prices.model, prices.cluster
        self.ended = self.lag = 0.0
        self._batch: dict[bool, tuple[float, float]] = {}
        self._full: FieldSpec | None = None
        self.reset()

    def reset(self) -> None:
        """All links are free, and nothing was sent."""
        self.sent = 0
        c, slower = self.cluster, self.clock.dilation
        message = c.message_ns * slower / NS
        rates = {False: c.link_bytes_s, True: c.nic_bytes_s}
        self.out = {far: Link(slower / rate, message) for far, rate in rates.items()}
        self.into = {far: Link(slower / rate, 0.0) for far, rate in rates.items()}

    def far(self, src: int, dst: int) -> bool:
        """Whether two ranks are on different nodes."""
        return src // self.cluster.node_ranks != dst // self.cluster.node_ranks

    def full(self, spec: FieldSpec) -> FieldSpec:
        """Fields as wide as the model's."""
        if self._full is None:
            widths = {name: self.model.v_dim if name in ("v", "out", "dout", "dv") else self.model.k_dim
                      for name in spec.sizes}
            sizes = {name: (*size[:1], widths[name]) if len(size) == 2 else size
                     for name, size in spec.sizes.items()}
            self._full = FieldSpec(sizes, spec.dtypes)
        return self._full

    def post(self, block, stage, held, spec, *, ahead=False):
        self.clock.work(self.cluster.stage_ns)
        self._batch = {}
        posted = super().post(block, stage, held, spec, ahead=ahead)
        return posted, block, max((ends for _, ends in self._batch.values()), default=0.0)

    def _exchange(self, block, me, pairs, buffers, spec):
        sizes: dict[bool, list[int]] = {}
        for pair, transfers in pairs.items():
            if pair[0] == me:
                size = length_of(transfers, self.full(spec))
                sizes.setdefault(self.far(*[block[rank] for rank in pair]), []).append(size)
        # What leaves together shares the link evenly: every message of the batch ends with it.
        self._batch = {
            far: self.out[far].carry(self.clock.now, sum(found), len(found)) for far, found in sizes.items()
        }
        return super()._exchange(block, me, pairs, buffers, spec)

    def _packed(self, pair, transfers, buffers, spec) -> Tensor:
        message = super()._packed(pair, transfers, buffers, spec)
        stamp = (*self._batch[self.far(*pair)], length_of(transfers, self.full(spec)))
        self.sent += stamp[2]
        return torch.cat([message, torch.tensor(stamp, dtype=torch.float64).view(torch.uint8)])

    def _message(self, use, pair, length) -> Tensor:
        return super()._message(use, pair, length + _STAMP)

    def land(self, posted) -> None:
        (stage, held, spec, works, received, _), block, done = posted
        for work in works:
            work.wait()
        arriving, bare = [], {}
        for pair, message in received.items():
            begins, ends, size = message[-_STAMP:].clone().view(torch.float64).tolist()
            arriving.append((begins, pair, ends, int(size)))
            bare[pair] = message[:-_STAMP]
        for begins, pair, ends, size in sorted(arriving):
            link = self.into[self.far(*[block[rank] for rank in pair])]
            done = max(done, ends, link.carry(begins, size)[1])
        self.clock.until(done)
        write(arrived(stage, bare, spec), held)

    def share(self, block, mine, counts, width, like) -> Tensor:
        values = super().share(block, mine, counts, width, like)
        me = block.index(self.rank)
        now = torch.tensor([[self.clock.now]], dtype=torch.float64)
        times = super().share(block, {me: now}, [1] * len(block), 1, now)
        self.clock.until(float(times.max()))  # the loss sees whole sequences
        return values

    def same(self, text: str) -> list[str]:
        self.ended, self.lag = time.monotonic(), self.clock.lag  # the last pass is over
        return super().same(text)


class Sleeper:
    """An attention kernel that sleeps: its results have the right shapes and say nothing.

    Args:
        prices: model and machine.
        clock: of this rank.
    """

    name = "sleeper"

    def __init__(self, prices: Prices, clock: Clock) -> None:
        self.prices, self.clock = prices, clock

    def forward(self, segments: Sequence[Segment], causal: bool, scale: float) -> list[tuple[Tensor, Tensor]]:
        self._sleep(segments, causal, 100)
        return [_nothing(x.q, x.v) for x in segments]

    def backward(self, segments: Sequence[SegmentGrad], causal: bool, scale: float):
        self._sleep(segments, causal, self.prices.cluster.attention_backward_pct)
        return [empty_backward(x.q, x.k, x.v) for x in segments]

    def _sleep(self, segments: Sequence[Segment | SegmentGrad], causal: bool, percent: int) -> None:
        prices, total = self.prices, 0
        for x in segments:
            queries, keys = len(x.q), len(x.k)
            tile = prices.attention.ns(self.pairs(queries, keys, causal)) + prices.cluster.tile_ns
            total += tile * percent // 100 + prices.merging.ns(queries)
        self.clock.work(total)

    def pairs(self, queries: int, keys: int, causal: bool) -> int:
        """Pairs that a tile computes, masked ones included."""
        c = self.prices.cluster
        if causal:
            return queries * (queries + 1) // 2 + queries * min(queries, c.tile_rows) // 2
        return max(queries, c.query_rows if queries else 0) * keys


def _nothing(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(q.dtype)
    return torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype), torch.zeros(q.shape[:2], dtype=dtype)


class _Slept(torch.autograd.Function):
    """Something between activations that takes time, forward and backward: [rows, ...] -> [n, ...] zeros."""

    @staticmethod
    def forward(ctx, x, clock, shape, forward_ns, backward_ns):
        ctx.shape, ctx.clock, ctx.ns, ctx.dtype = x.shape, clock, backward_ns, x.dtype
        clock.work(forward_ns)
        return torch.zeros(shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx, dout):
        ctx.clock.work(ctx.ns)
        return torch.zeros(ctx.shape, dtype=ctx.dtype), None, None, None, None


class SleepingModel:
    """A decoder whose linear layers and vocabulary projection sleep, around the executor's attention.

    Args:
        prices: model and machine.
        clock: of this rank.
    """

    def __init__(self, prices: Prices, clock: Clock) -> None:
        self.prices, self.clock, m = prices, clock, prices.model
        if m.recomputed:
            _refuse("a model that recomputes layers")
        qkv = m.hidden * (m.q_heads * m.k_dim + m.kv_heads * (m.k_dim + m.v_dim))
        #: Share of the linear layers before attention, per cent.
        self.before = 200 * qkv // m.linear_flops

    def __call__(self, local: LocalRows, context: PassContext) -> Tensor:
        """[n, 1] values of the scored rows."""
        prices, m, c = self.prices, self.prices.model, self.prices.cluster
        rows, scored = len(local.rows), len(local.scored)
        slow = c.gemm_backward_pct
        once = prices.rows_ns(rows)
        first = once * self.before // 100
        rest = once - first
        x = torch.zeros((rows, 1), dtype=torch.bfloat16, requires_grad=torch.is_grad_enabled())
        self.clock.work(c.pass_ns)
        heads = m.q_heads, m.kv_heads, m.kv_heads
        for layer in range(m.layers):
            shape = (rows, sum(heads), WIDTH)
            qkv = _Slept.apply(x, self.clock, shape, first + c.layer_ns, first * slow // 100 + 2 * c.layer_ns)
            q, k, v = qkv.split(heads, 1)
            out = tree_attention(q, k, v, context, layer, 1.0)
            x = _Slept.apply(out, self.clock, (rows, 1), rest, rest * slow // 100)
        once = prices.vocabulary.ns(scored + min(scored, 1) * c.gemm_half_rows)
        again = 3 if 0 < m.logit_rows < scored else 2
        return _Slept.apply(x, self.clock, (scored, 1), once, again * once + c.pass_ns).float()


def check_plan(plan: Plan, layers: int) -> None:
    """Refuses what is not emulated.

    Raises:
        UnsupportedError: a pass that recomputes, or rests in host memory.
    """
    for p in plan.passes:
        if 0 <= p.keep_layers < layers or p.offload:
            _refuse(f"pass {p.id}: keep_layers {p.keep_layers} of {layers}, offload {p.offload}")


def _refuse(values: str) -> None:
    raise UnsupportedError(
        "a plan that cannot be emulated",
        values=values,
        rule="emulated passes keep everything for their backward, on the device",
        remedy="emulate fewer rows or layers, or more memory",
    )
