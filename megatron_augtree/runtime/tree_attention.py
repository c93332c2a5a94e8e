"""The executor: runs a program's stages with a kernel and a transport, forwards and backwards.

For every stage: send what earlier stages made ready, compute the stage's tiles while it travels, land what
arrived. The backward plays the reversed program in the same loop. A process may host one rank of the block
(`DistTransport`) or all of them (`LocalTransport`); the hosted ranks' rows lie one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_augtree.attention.kernels.protocol import Kernel, Segment, SegmentGrad
from megatron_augtree.attention.merge import accumulation_dtype, delta_of, merge_, synthetic_out
from megatron_augtree.planning.compiler import state_buffer
from megatron_augtree.planning.schedule import HOME, QUERIES, RELAY, Program, Tile
from megatron_augtree.runtime.buffers import Buffers, add_, pieces, take
from megatron_augtree.runtime.offload import HostMemory, Resting
from megatron_augtree.runtime.prefetch import Flight, Prefetch
from megatron_augtree.runtime.prompt_state import PromptState, port
from megatron_augtree.runtime.trace import Trace
from megatron_augtree.runtime.transport import FieldSpec, Transport


@dataclass
class PassContext:
    """What attention needs to know of the pass it is in; rides through the model beside the activations.

    Attributes:
        block: pool ranks of the pass.
        forward, backward: its programs.
        keep: received buffers are kept between them.
        transport, kernel: what runs them.
        states: state of the passes it reads, by pass.
        own_state: where its own keys and values are kept for later passes, or None.
        trace: where spans are recorded, or None.
        keep_layers: of the model's layers, how many, the last ones, keep everything for the backward, while
            the others run again; -1: as the model was built.
        keep_attention: of the layers that run again in the backward, how many, from the first, keep what
            attention gave, so that neither it nor its traffic is repeated; -1: all. Layers without attention
            do not count.
        prefetch: sends the next layer's prompt keys and values ahead, or None.
        rest: where what the pass keeps for its backward rests, or None: on the device.
        kept: layer -> what its attention gave, from its forward to its repetition.
    """

    block: tuple[int, ...]
    forward: Program
    backward: Program
    keep: bool
    transport: Transport
    kernel: Kernel
    states: Mapping[int, PromptState] = field(default_factory=dict)
    own_state: PromptState | None = None
    trace: Trace | None = None
    keep_layers: int = -1
    keep_attention: int = 0
    prefetch: Prefetch | None = None
    rest: HostMemory | None = None
    kept: dict[int, Attended | _RestingAttended] = field(default_factory=dict)

    @property
    def hosts(self) -> list[int]:
        return self.transport.hosts(self.block)

    @property
    def sizes(self) -> list[int]:
        """Rows of each hosted rank."""
        return [self.forward.buffers[rank][HOME] for rank in self.hosts]

    @contextmanager
    def playing(self) -> Iterator[None]:
        """The model's forward inside: prefetch is on, what is saved rests where it should.

        Nothing is under way afterwards, also where the model raised.
        """
        saving = nullcontext() if self.rest is None else self.rest.saving(self._stays)
        try:
            with saving:
                if self.prefetch is not None:
                    self.prefetch.begin()
                yield
        except BaseException:
            if self.prefetch is not None:
                self.prefetch.abandon()
            raise
        if self.prefetch is not None:
            self.prefetch.finish()
        if self.rest is not None:
            self.rest.settle()

    def _stays(self, tensor: Tensor) -> bool:
        return self.own_state is not None and self.own_state.holds(tensor)

    def remember(self, layer: int, known: Attended) -> None:
        """Keep what a layer's attention gave until the layer runs again."""
        self.kept[layer] = known if self.rest is None else _RestingAttended.of(known, self.rest)

    def recall(self, layer: int) -> Attended | None:
        """What a layer's attention gave, if it was kept; it is kept no longer."""
        known = self.kept.pop(layer, None)
        return known.on_device(self.rest) if isinstance(known, _RestingAttended) else known


def tree_attention(q: Tensor, k: Tensor, v: Tensor, context: PassContext, layer: int, scale: float) -> Tensor:
    """Attention of a pass's rows to themselves and to their ancestors, wherever those live.

    Args:
        q: [T, Hq, Dk], rotary applied; the hosted ranks' rows one after the other.
        k, v: [T, Hkv, Dk], [T, Hkv, Dv]; KV heads are not expanded.
        context: the pass.
        layer: layer number, key of the prompt state.
        scale: factor on the scores.

    Returns:
        [T, Hq, Dv] in q's type.
    """
    if context.own_state is not None:
        k, v = port(k, v, context.own_state, layer, context.hosts, context.sizes)
    known = context.recall(layer)
    kept = context.keep_attention < 0 or layer < context.keep_attention
    if kept and known is None and not torch.is_grad_enabled():
        # No gradient now: the layer will run again, once its gradient is wanted.
        known = _attend(q, k, v, context, layer, scale)
        context.remember(layer, known)
    return _TreeAttention.apply(q, k, v, known, context, layer, scale)


class Attended(NamedTuple):
    """What a layer's attention gave.

    Attributes:
        out: [T, Hq, Dv] in the queries' type.
        lse: [T, Hq] in the accumulation type.
        received: (block rank, buffer, field) -> what came from other ranks, where the pass keeps it.
    """

    out: Tensor
    lse: Tensor
    received: dict[tuple[int, str, str], Tensor] | None


class _RestingAttended(NamedTuple):
    """The same in host memory."""

    out: Resting
    lse: Resting
    received: dict[tuple[int, str, str], Resting] | None

    @classmethod
    def of(cls, known: Attended, rest: HostMemory) -> _RestingAttended:
        received = known.received and {key: rest.put(tensor) for key, tensor in known.received.items()}
        return cls(rest.put(known.out), rest.put(known.lse), received)

    def on_device(self, rest: HostMemory) -> Attended:
        # In the opposite order: the last to leave is the first to come back.
        lse, out = rest.get(self.lse), rest.get(self.out)
        received = self.received and {key: rest.get(r) for key, r in reversed(self.received.items())}
        return Attended(out, lse, received)


def _attend(q, k, v, context: PassContext, layer: int, scale: float) -> Attended:
    flight = context.prefetch.take(layer) if context.prefetch is not None else None
    held = _forward_buffers(q, k, v, context, layer, flight)
    program = context.forward if flight is None else flight.prefetch.split.rest
    _run(program, held, context, _field_spec(q, k, v), scale, flight)
    out = torch.cat([held[rank][HOME]["out"] for rank in context.hosts]).to(q.dtype)
    lse = torch.cat([held[rank][HOME]["lse"] for rank in context.hosts])
    return Attended(out, lse, _received(held) if context.keep else None)


class _TreeAttention(torch.autograd.Function):
    # Gradients are computed whatever ctx.needs_input_grad says: other ranks wait for this rank's dK and dV.

    @staticmethod
    def forward(ctx, q, k, v, known, context, layer, scale):
        out, lse, received = known or _attend(q, k, v, context, layer, scale)
        # All of it by autograd's own means: so it rests where the pass says, and counts where it is counted.
        ctx.received = () if received is None else tuple(received)
        ctx.save_for_backward(q, k, v, out, lse, *(received or {}).values())
        ctx.context, ctx.layer, ctx.scale = context, layer, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse, *received = ctx.saved_tensors
        context, received = ctx.context, dict(zip(ctx.received, received))
        held = _backward_buffers(q, k, v, out, lse, dout, received, context, ctx.layer)
        _run(context.backward, held, context, _field_spec(q, k, v), ctx.scale)
        grads = [torch.cat([held[rank][HOME][name] for rank in context.hosts]) for name in ("dq", "dk", "dv")]
        return *[g.to(x.dtype) for g, x in zip(grads, (q, k, v))], None, None, None, None


def _field_spec(q: Tensor, k: Tensor, v: Tensor) -> FieldSpec:
    accum = accumulation_dtype(q.dtype)
    q_row, k_row, v_row = tuple(q.shape[1:]), tuple(k.shape[1:]), tuple(v.shape[1:])
    out_row = (q.shape[1], v.shape[2])
    sizes = {
        "q": q_row,
        "k": k_row,
        "v": v_row,
        "out": out_row,
        "dout": out_row,
        "lse": out_row[:1],
        "delta": out_row[:1],
        "dq": q_row,
        "dk": k_row,
        "dv": v_row,
    }
    dtypes = {name: q.dtype if name in ("q", "k", "v", "dout") else accum for name in sizes}
    return FieldSpec(sizes, dtypes)


def _empty(
    names: Sequence[str], rows: int, spec: FieldSpec, device: torch.device, fill: float | None
) -> dict[str, Tensor]:
    made = {
        name: torch.empty((rows, *spec.sizes[name]), dtype=spec.dtypes[name], device=device) for name in names
    }
    if fill is not None:
        for tensor in made.values():
            tensor.fill_(fill)
    return made


def _forward_buffers(
    q, k, v, context: PassContext, layer: int, flight: Flight | None
) -> dict[int, Buffers]:
    spec, held = _field_spec(q, k, v), {}
    splits = [x.split(context.sizes) for x in (q, k, v)]
    for rank, q_rank, k_rank, v_rank in zip(context.hosts, *splits):
        buffers: Buffers = {} if flight is None else dict(flight.buffers[rank])
        for name, count in context.forward.buffers[rank].items():
            if name == HOME:
                buffers[name] = {"q": q_rank, "k": k_rank, "v": v_rank, **_partials(count, spec, q.device)}
            elif name == QUERIES:
                buffers[name] = {
                    **_empty(("q",), count, spec, q.device, None),
                    **_partials(count, spec, q.device),
                }
            elif name.startswith("kv/") and name not in buffers:
                buffers[name] = _empty(("k", "v"), count, spec, q.device, None)
        for pass_id, state in context.states.items():
            buffers[state_buffer(pass_id)] = state.read(layer, rank)
        held[rank] = buffers
    return held


def _partials(count: int, spec: FieldSpec, device: torch.device) -> dict[str, Tensor]:
    return {**_empty(("out",), count, spec, device, 0.0), **_empty(("lse",), count, spec, device, -torch.inf)}


def _received(held: Mapping[int, Buffers]) -> dict[tuple[int, str, str], Tensor]:
    """What came from other ranks and is worth keeping: keys, values and queries; neither partial results nor
    what was only handed on."""
    return {
        (rank, name, f): tensor
        for rank, buffers in held.items()
        for name, fields in buffers.items()
        if name == QUERIES or (name.startswith("kv/") and not name.endswith(RELAY))
        for f, tensor in fields.items()
        if f in ("q", "k", "v")
    }


def _backward_buffers(
    q, k, v, out, lse, dout, received, context: PassContext, layer: int
) -> dict[int, Buffers]:
    spec, held = _field_spec(q, k, v), {}
    delta = delta_of(dout, out)
    splits = [x.split(context.sizes) for x in (q, k, v, out, lse, dout, delta)]
    for rank, *mine in zip(context.hosts, *splits):
        buffers: Buffers = {}
        for name, count in context.backward.buffers[rank].items():
            if name == HOME:
                buffers[name] = dict(zip(("q", "k", "v", "out", "lse", "dout", "delta"), mine))
                buffers[name] |= _empty(("dq", "dk", "dv"), count, spec, q.device, 0.0)
                continue
            kept = {f: received[rank, name, f] for f in ("q", "k", "v") if (rank, name, f) in received}
            if name == QUERIES:
                buffers[name] = _empty(("dout", "delta", "lse"), count, spec, q.device, None)
                buffers[name] |= kept or _empty(("q",), count, spec, q.device, None)
                buffers[name] |= _empty(("dq",), count, spec, q.device, 0.0)
            elif name.startswith("kv/"):
                buffers[name] = dict(kept or _empty(("k", "v"), count, spec, q.device, None))
                buffers[name] |= _empty(("dk", "dv"), count, spec, q.device, 0.0)
        for pass_id, state in context.states.items():
            buffers[state_buffer(pass_id)] = state.read_gradients(layer, rank)
        held[rank] = buffers
    return held


def _run(
    program: Program,
    held: dict[int, Buffers],
    context: PassContext,
    spec: FieldSpec,
    scale: float,
    flight: Flight | None = None,
) -> None:
    compute = _backward_tiles if program.backward else _forward_tiles
    context.transport.start()
    for index, stage in enumerate(program.stages):
        if flight is not None and flight.before(index):
            with _span(context, context.hosts[0], "wait"):
                flight.land()
        posted = context.transport.post(context.block, stage, held, spec) if stage.transfers else None
        if flight is not None:
            flight.after_post(index)
        for rank, buffers in held.items():
            with _span(context, rank, f"{'backward' if program.backward else 'forward'} stage {index}"):
                # One call a mask kind: a GPU kernel makes one variable-length launch of it.
                for causal in (True, False):
                    tiles = [tile for tile in stage.tiles[rank] if tile.causal == causal]
                    if tiles:
                        compute(tiles, causal, buffers, context.kernel, scale)
        if posted is not None:
            with _span(context, context.hosts[0], "wait"):
                context.transport.land(posted)


def _span(context: PassContext, rank: int, name: str):
    trace = context.trace
    return trace.span(context.block[rank], name, "attention") if trace is not None else _NO_SPAN


_NO_SPAN = nullcontext()  # one for all stages: it is entered in every layer


def _forward_tiles(
    tiles: Sequence[Tile], causal: bool, buffers: Buffers, kernel: Kernel, scale: float
) -> None:
    segments = [
        Segment(
            take(buffers[t.q.buffer]["q"], t.q),
            take(buffers[t.kv.buffer]["k"], t.kv),
            take(buffers[t.kv.buffer]["v"], t.kv),
        )
        for t in tiles
    ]
    for tile, (out, lse) in zip(tiles, kernel.forward(segments, causal, scale)):
        into = buffers[tile.q.buffer]
        for (part, (lo, hi)), (part_lse, _) in zip(pieces(tile.q, out), pieces(tile.q, lse)):
            merge_(into["out"][lo:hi], into["lse"][lo:hi], part, part_lse)


def _backward_tiles(
    tiles: Sequence[Tile], causal: bool, buffers: Buffers, kernel: Kernel, scale: float
) -> None:
    segments = []
    for tile in tiles:
        queries, keys = buffers[tile.q.buffer], buffers[tile.kv.buffer]
        dout = take(queries["dout"], tile.q)
        # A visiting query brought delta instead of its output.
        out = (
            take(queries["out"], tile.q)
            if "out" in queries
            else synthetic_out(dout, take(queries["delta"], tile.q))
        )
        segments.append(
            SegmentGrad(
                dout,
                take(queries["q"], tile.q),
                take(keys["k"], tile.kv),
                take(keys["v"], tile.kv),
                out,
                take(queries["lse"], tile.q),
            )
        )
    for tile, (dq, dk, dv) in zip(tiles, kernel.backward(segments, causal, scale)):
        add_(buffers[tile.q.buffer]["dq"], tile.q, dq)
        add_(buffers[tile.kv.buffer]["dk"], tile.kv, dk)
        add_(buffers[tile.kv.buffer]["dv"], tile.kv, dv)
