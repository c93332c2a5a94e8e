"""Point-to-point exchange of a stage's transfers, and the few small sums that a step needs.

Two transports with one protocol. `DistTransport` is one rank of a process group (gloo, NCCL); all transfers
of a stage from one rank to another are one message. `LocalTransport` plays all ranks of a pool in one process
in lock-step: it takes its snapshot of every message before any tile runs, as a real network would.

Landing follows the order of the stage's transfers, whatever arrives first: same plan, same bits.
Transport never sees a mask.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_augtree.attention.merge import merge_
from megatron_augtree.config import AugTreeError
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


class Transport(Protocol):
    """What the executor and the engine need of a pool."""

    world: int

    def hosts(self, block: Sequence[int]) -> list[int]:
        """Block ranks that this process plays."""

    def post(
        self, block: Sequence[int], stage: Stage, held: Mapping[int, Buffers], spec: FieldSpec
    ) -> object:
        """Start a stage's transfers; returns what `land` takes. `held` maps hosted block ranks to buffers."""

    def land(self, posted: object) -> None:
        """Wait for this process's transfers of a stage and write them."""

    def share(
        self,
        block: Sequence[int],
        mine: Mapping[int, Tensor],
        counts: Sequence[int],
        width: int,
        like: Tensor,
    ) -> Tensor:
        """[sum(counts), width] values of a block's ranks, in block order, on every rank of it."""

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        """Values added (``sum``) or compared (``min``, ``max``) over the pool's processes.

        The argument keeps its values; without other processes it may be what is returned.
        """

    def same(self, text: str) -> list[str]:
        """Every process's text, in order."""


def _messages(stage: Stage) -> dict[tuple[int, int], list[Transfer]]:
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for t in stage.transfers:
        pairs.setdefault((t.src, t.dst), []).append(t)
    return pairs


def _order(transfers: Sequence[Transfer], spec: FieldSpec) -> list[tuple[Transfer, str]]:
    """Fields of a message in packing order: wider types first over the whole message."""
    items = [(t, name) for t in transfers for name in by_width(spec.dtypes, t.payload.fields)]
    return sorted(items, key=lambda item: -spec.dtypes[item[1]].itemsize)


def _pack(transfers: Sequence[Transfer], buffers: Buffers, spec: FieldSpec, traffic: Traffic) -> Tensor:
    fields = []
    for t, name in _order(transfers, spec):
        part = take(buffers[t.source.buffer][name], t.source).to(spec.dtypes[name])
        traffic.bytes[t.payload.name] += part.numel() * part.element_size()
        fields.append(part)
    traffic.messages += 1
    return pack(fields)


def _unpack(transfers: Sequence[Transfer], message: Tensor, spec: FieldSpec) -> dict[tuple[int, str], Tensor]:
    order = _order(transfers, spec)
    layouts = [((t.sink.count, *spec.sizes[name]), spec.dtypes[name]) for t, name in order]
    return {(id(t), name): part for (t, name), part in zip(order, unpack(message, layouts))}


def _length(transfers: Sequence[Transfer], spec: FieldSpec) -> int:
    total = 0
    for t, name in _order(transfers, spec):
        width = spec.dtypes[name].itemsize
        for size in spec.sizes[name]:
            width *= size
        total += width * t.sink.count
    return total


def _write(transfer: Transfer, parts: Mapping[str, Tensor], buffers: Buffers) -> None:
    buffer, sink = buffers[transfer.sink.buffer], transfer.sink
    if transfer.payload.landing is Landing.MERGE:
        both = zip(pieces(sink, parts["out"]), pieces(sink, parts["lse"]))
        for (out, (lo, hi)), (lse, _) in both:
            merge_(buffer["out"][lo:hi], buffer["lse"][lo:hi], out, lse)
        return
    for name, part in parts.items():
        if transfer.payload.landing is Landing.ADD:
            add_(buffer[name], sink, part)
        else:
            copy_(buffer[name], sink, part)


class LocalTransport:
    """All ranks of a pool in one process.

    Args:
        world: ranks of the pool.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.traffic = [Traffic() for _ in range(world)]

    def hosts(self, block: Sequence[int]) -> list[int]:
        return list(range(len(block)))

    def post(self, block, stage, held, spec):
        sent = {
            pair: _pack(ts, held[pair[0]], spec, self.traffic[block[pair[0]]])
            for pair, ts in _messages(stage).items()
        }
        return stage, held, spec, sent

    def land(self, posted) -> None:
        stage, held, spec, sent = posted
        parts: dict[tuple[int, str], Tensor] = {}
        for pair, transfers in _messages(stage).items():
            parts.update(_unpack(transfers, sent[pair], spec))
        for t in stage.transfers:
            _write(t, {name: parts[(id(t), name)] for name in t.payload.fields}, held[t.dst])

    def share(self, block, mine, counts, width, like) -> Tensor:
        return torch.cat([mine[rank].detach() for rank in range(len(block))])

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        return values

    def same(self, text: str) -> list[str]:
        return [text]


class DistTransport:
    """One rank of a torch process group.

    Args:
        group: the pool: Megatron's data-parallel group with context parallelism. None is the default group.
        delay: called before every send; tests use it to shake the order of arrival.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, delay: Callable[[], float] | None = None
    ) -> None:
        self.group, self.delay = group, delay
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.traffic = [Traffic() for _ in range(self.world)]
        self._global = [dist.get_global_rank(group, r) if group is not None else r for r in range(self.world)]
        # A batch of sends must not be a communicator's first call: ranks without work post nothing.
        self.total(torch.zeros(1, device=self.device))

    @property
    def device(self) -> torch.device:
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def hosts(self, block: Sequence[int]) -> list[int]:
        return [block.index(self.rank)] if self.rank in block else []

    def post(self, block, stage, held, spec):
        if self.rank not in block:
            raise AugTreeError(
                "a rank plays a block that it is not in",
                values=f"rank {self.rank}, block {block}",
                rule="only a block's ranks exchange its transfers",
                remedy="report this plan",
            )
        me = block.index(self.rank)
        pairs = {pair: ts for pair, ts in _messages(stage).items() if me in pair}
        messages, works, sent = {}, [], []
        operations = []
        for (src, dst), transfers in pairs.items():
            if src == me:
                message = _pack(transfers, held[me], spec, self.traffic[self.rank])
                sent.append(message)
                operations.append(dist.P2POp(dist.isend, message, self._global[block[dst]], self.group))
            else:
                message = torch.empty(_length(transfers, spec), dtype=torch.uint8, device=self.device)
                messages[(src, dst)] = message
                operations.append(dist.P2POp(dist.irecv, message, self._global[block[src]], self.group))
        if operations:
            if self.delay is not None:
                time.sleep(self.delay())
            works = dist.batch_isend_irecv(operations)
        return stage, pairs, held, spec, messages, works, sent

    def land(self, posted) -> None:
        stage, pairs, held, spec, messages, works, _ = posted
        for work in works:
            work.wait()
        parts: dict[tuple[int, str], Tensor] = {}
        for pair, message in messages.items():
            parts.update(_unpack(pairs[pair], message, spec))
        for t in stage.transfers:
            if (t.src, t.dst) in messages:
                _write(t, {name: parts[(id(t), name)] for name in t.payload.fields}, held[t.dst])

    def share(self, block, mine, counts, width, like) -> Tensor:
        me = block.index(self.rank)
        parts = [like.new_empty((n, width)) for n in counts]
        parts[me] = mine[me].detach().to(like.dtype).contiguous()
        operations = []
        for other in range(len(block)):
            if other != me and counts[me]:
                operations.append(dist.P2POp(dist.isend, parts[me], self._global[block[other]], self.group))
            if other != me and counts[other]:
                operations.append(
                    dist.P2POp(dist.irecv, parts[other], self._global[block[other]], self.group)
                )
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return torch.cat(parts)

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        values = values.to(self.device, copy=True)  # all_reduce works in place; the caller keeps its tensor
        kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(values, op=kinds[op], group=self.group)
        return values

    def same(self, text: str) -> list[str]:
        texts: list[str] = [""] * self.world
        dist.all_gather_object(texts, text, group=self.group)
        return texts
