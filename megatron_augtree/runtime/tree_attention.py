"""The executor: runs a program's stages with a kernel and a transport, forwards and backwards.

For every stage: send what earlier stages made ready, compute the stage's tiles while it travels, land what
arrived. The backward plays the reversed program in the same loop. A process may host one rank of the block
(`DistTransport`) or all of them (`LocalTransport`); the hosted ranks' rows lie one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_augtree.attention.kernels.protocol import Kernel, Segment, SegmentGrad
from megatron_augtree.attention.merge import accumulation_dtype, delta_of, merge_, synthetic_out
from megatron_augtree.planning.compiler import state_buffer
from megatron_augtree.planning.schedule import HOME, QUERIES, Program, Tile
from megatron_augtree.runtime.buffers import Buffers, add_, pieces, take
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
        keep_attention: of the layers that run again in the backward, how many, from the first, keep what
            attention gave, so that neither it nor its traffic is repeated; -1: all.
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
    keep_attention: int = 0
    kept: dict[int, Attended] = field(default_factory=dict)

    @property
    def hosts(self) -> list[int]:
        return self.transport.hosts(self.block)

    @property
    def sizes(self) -> list[int]:
        """Rows of each hosted rank."""
        return [self.forward.buffers[rank][HOME] for rank in self.hosts]


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
    known = context.kept.pop(layer, None)
    kept = context.keep_attention < 0 or layer < context.keep_attention
    if kept and known is None and not torch.is_grad_enabled():
        # No gradient now: the layer will run again, once its gradient is wanted.
        known = context.kept[layer] = _attend(q, k, v, context, layer, scale)
    return _TreeAttention.apply(q, k, v, known, context, layer, scale)


class Attended(NamedTuple):
    """What a layer's attention gave.

    Attributes:
        out: [T, Hq, Dv] in the queries' type.
        lse: [T, Hq] in the accumulation type.
        received: (block rank, buffer) -> fields that came from other ranks, where the pass keeps them.
    """

    out: Tensor
    lse: Tensor
    received: dict[tuple[int, str], dict[str, Tensor]] | None


def _attend(q, k, v, context: PassContext, layer: int, scale: float) -> Attended:
    held = _forward_buffers(q, k, v, context, layer)
    _run(context.forward, held, context, _field_spec(q, k, v), scale)
    out = torch.cat([held[rank][HOME]["out"] for rank in context.hosts]).to(q.dtype)
    lse = torch.cat([held[rank][HOME]["lse"] for rank in context.hosts])
    return Attended(out, lse, _received(held) if context.keep else None)


class _TreeAttention(torch.autograd.Function):
    # Gradients are computed whatever ctx.needs_input_grad says: other ranks wait for this rank's dK and dV.

    @staticmethod
    def forward(ctx, q, k, v, known, context, layer, scale):
        out, lse, ctx.received = known or _attend(q, k, v, context, layer, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.context, ctx.layer, ctx.scale = context, layer, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        context = ctx.context
        held = _backward_buffers(q, k, v, out, lse, dout, ctx.received, context, ctx.layer)
        _run(context.backward, held, context, _field_spec(q, k, v), ctx.scale)
        ctx.received = None
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


def _forward_buffers(q, k, v, context: PassContext, layer: int) -> dict[int, Buffers]:
    spec, held = _field_spec(q, k, v), {}
    splits = [x.split(context.sizes) for x in (q, k, v)]
    for rank, q_rank, k_rank, v_rank in zip(context.hosts, *splits):
        buffers: Buffers = {}
        for name, count in context.forward.buffers[rank].items():
            if name == HOME:
                buffers[name] = {"q": q_rank, "k": k_rank, "v": v_rank, **_partials(count, spec, q.device)}
            elif name == QUERIES:
                buffers[name] = {
                    **_empty(("q",), count, spec, q.device, None),
                    **_partials(count, spec, q.device),
                }
            elif name.startswith("kv/"):
                buffers[name] = _empty(("k", "v"), count, spec, q.device, None)
        for pass_id, state in context.states.items():
            buffers[state_buffer(pass_id)] = state.read(layer, rank)
        held[rank] = buffers
    return held


def _partials(count: int, spec: FieldSpec, device: torch.device) -> dict[str, Tensor]:
    return {**_empty(("out",), count, spec, device, 0.0), **_empty(("lse",), count, spec, device, -torch.inf)}


def _received(held: Mapping[int, Buffers]) -> dict[tuple[int, str], dict[str, Tensor]]:
    """What came from other ranks and is worth keeping: keys, values and queries, not partial results."""
    return {
        (rank, name): {f: t for f, t in fields.items() if f in ("q", "k", "v")}
        for rank, buffers in held.items()
        for name, fields in buffers.items()
        if name == QUERIES or name.startswith("kv/")
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
            kept = received[(rank, name)] if received is not None and (rank, name) in received else None
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
    program: Program, held: dict[int, Buffers], context: PassContext, spec: FieldSpec, scale: float
) -> None:
    compute = _backward_tiles if program.backward else _forward_tiles
    context.transport.start()
    for index, stage in enumerate(program.stages):
        posted = context.transport.post(context.block, stage, held, spec) if stage.transfers else None
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
