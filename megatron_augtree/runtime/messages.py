"""Messages: all transfers of a stage from one rank to another, as bytes.

Fields of wider types come first, so that every field of a message is aligned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_augtree.attention.merge import merge_
from megatron_augtree.planning.schedule import Landing, Stage, Transfer
from megatron_augtree.runtime.buffers import Buffers, add_, by_width, copy_, pack, pieces, take, unpack


@dataclass(frozen=True)
class FieldSpec:
    """Shape and type of every field of a row, so that a receiver knows what arrives.

    Attributes:
        sizes: field -> shape of one row.
        dtypes: field -> type on the wire.
    """

    sizes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]


@dataclass
class Traffic:
    """Bytes of the tensors handed to torch, by payload, and messages."""

    bytes: Counter[str] = field(default_factory=Counter)
    messages: int = 0


#: (transfer, its fields) that have arrived.
Arrived = list[tuple[Transfer, dict[str, Tensor]]]


def messages_of(stage: Stage) -> dict[tuple[int, int], list[Transfer]]:
    """(from, to) -> transfers of a message."""
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for t in stage.transfers:
        pairs.setdefault((t.src, t.dst), []).append(t)
    return pairs


def pack_message(
    transfers: Sequence[Transfer], buffers: Buffers, spec: FieldSpec, traffic: Traffic
) -> Tensor:
    """The bytes of a message; of a single field of one range they are a view."""
    fields = []
    for t, name in _order(transfers, spec):
        fields.append(take(buffers[t.source.buffer][name], t.source).to(spec.dtypes[name]))
        _count(t, fields[-1], traffic)
    traffic.messages += 1
    return pack(fields)


def pack_into(
    message: Tensor, transfers: Sequence[Transfer], buffers: Buffers, spec: FieldSpec, traffic: Traffic
) -> None:
    """Write a message's bytes into `message`, uint8 of its length, copying every row once."""
    for (t, name), part in zip(_order(transfers, spec), _views(transfers, message, spec)):
        for piece, (lo, hi) in pieces(t.source, part):
            piece.copy_(buffers[t.source.buffer][name][lo:hi])
        _count(t, part, traffic)
    traffic.messages += 1


def _count(transfer: Transfer, part: Tensor, traffic: Traffic) -> None:
    traffic.bytes[transfer.payload.name] += part.numel() * part.element_size()


def length_of(transfers: Sequence[Transfer], spec: FieldSpec) -> int:
    """Bytes of a message."""
    total = 0
    for t, name in _order(transfers, spec):
        width = spec.dtypes[name].itemsize
        for size in spec.sizes[name]:
            width *= size
        total += width * t.sink.count
    return total


def arrived(stage: Stage, received: Mapping[tuple[int, int], Tensor], spec: FieldSpec) -> Arrived:
    """The transfers of a stage that some messages held, in the stage's order, with views of their fields."""
    fields: dict[tuple[int, str], Tensor] = {}
    for pair, transfers in messages_of(stage).items():
        if pair in received:
            order = _order(transfers, spec)
            views = _views(transfers, received[pair], spec)
            fields.update({(id(t), name): view for (t, name), view in zip(order, views)})
    return [
        (t, {name: fields[(id(t), name)] for name in t.payload.fields})
        for t in stage.transfers
        if (t.src, t.dst) in received
    ]


def write(landing: Iterable[tuple[Transfer, Mapping[str, Tensor]]], held: Mapping[int, Buffers]) -> None:
    """Write what arrived where it belongs, in the given order: same plan, same bits."""
    for t, parts in landing:
        buffer, sink = held[t.dst][t.sink.buffer], t.sink
        if t.payload.landing is Landing.MERGE:
            both = zip(pieces(sink, parts["out"]), pieces(sink, parts["lse"]))
            for (out, (lo, hi)), (lse, _) in both:
                merge_(buffer["out"][lo:hi], buffer["lse"][lo:hi], out, lse)
            continue
        for name, part in parts.items():
            if t.payload.landing is Landing.ADD:
                add_(buffer[name], sink, part)
            else:
                copy_(buffer[name], sink, part)


def _order(transfers: Sequence[Transfer], spec: FieldSpec) -> list[tuple[Transfer, str]]:
    """Fields of a message in packing order: wider types first over the whole message."""
    items = [(t, name) for t in transfers for name in by_width(spec.dtypes, t.payload.fields)]
    return sorted(items, key=lambda item: -spec.dtypes[item[1]].itemsize)


def _views(transfers: Sequence[Transfer], message: Tensor, spec: FieldSpec) -> list[Tensor]:
    order = _order(transfers, spec)
    return unpack(message, [((t.sink.count, *spec.sizes[name]), spec.dtypes[name]) for t, name in order])

