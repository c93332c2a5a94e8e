"""Point-to-point exchange of a stage's transfers, and the few small sums that a step needs.

Two transports with one protocol. `DistTransport` is one rank of a process group (gloo, NCCL); all transfers
of a stage from one rank to another are one message. `LocalTransport` plays all ranks of a pool in one process
in lock-step: it takes its snapshot of every message before any tile runs, as a real network would.

Landing follows the order of the stage's transfers, whatever arrives first: same plan, same bits.
Transport never sees a mask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.schedule import Stage, Transfer
from megatron_augtree.runtime.buffers import Buffers
from megatron_augtree.runtime.messages import (
    FieldSpec,
    Traffic,
    arrived,
    length_of,
    messages_of,
    pack_into,
    pack_message,
    write,
)
from megatron_augtree.runtime.streams import CudaStreams, Streams, Waits


class Transport(Protocol):
    """What the executor and the engine need of a pool.

    Attributes:
        world: ranks of the pool.
        rank: this process's; 0 where it plays all.
    """

    world: int
    rank: int

    def hosts(self, block: Sequence[int]) -> list[int]:
        """Block ranks that this process plays."""

    def start(self) -> None:
        """A program begins: its buffers are made, and what is in them at first was given to the device."""

    def post(
        self,
        block: Sequence[int],
        stage: Stage,
        held: Mapping[int, Buffers],
        spec: FieldSpec,
        *,
        ahead: bool = False,
    ) -> object:
        """Start a stage's transfers; returns what `land` takes.

        Args:
            block: pool ranks.
            stage: the stage; all ranks of the block post the same ones in the same order.
            held: hosted block rank -> its buffers.
            spec: fields of a row.
            ahead: it travels beside later stages and lands when it is needed: at most two such at a time,
                which land in the order of their posting. Otherwise it lands before the next is posted.
        """

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

    def deliver(
        self, sent: Mapping[tuple[int, int], Tensor], counts: Mapping[tuple[int, int], int], like: Tensor
    ) -> dict[tuple[int, int], Tensor]:
        """Messages between any ranks of the pool.

        Args:
            sent: (from, to) -> [n, ...] rows of this process's ranks.
            counts: (from, to) -> rows of every message that this process's ranks send or receive; none is 0.
            like: [_, ...] a tensor of the type, device and width of every message.

        Returns:
            (from, to) -> [n, ...] what this process's ranks were sent.
        """

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        """Values added (``sum``) or compared (``min``, ``max``) over the pool's processes.

        The argument keeps its values; without other processes it may be what is returned.
        """

    def same(self, text: str) -> list[str]:
        """Every process's text, in order."""


class LocalTransport:
    """All ranks of a pool in one process.

    Args:
        world: ranks of the pool.
    """

    def __init__(self, world: int) -> None:
        self.world, self.rank = world, 0
        self.traffic = [Traffic() for _ in range(world)]

    def hosts(self, block: Sequence[int]) -> list[int]:
        return list(range(len(block)))

    def start(self) -> None:
        pass

    def post(self, block, stage, held, spec, *, ahead=False):
        sent = {
            pair: pack_message(transfers, held[pair[0]], spec, self.traffic[block[pair[0]]])
            for pair, transfers in messages_of(stage).items()
        }
        return stage, held, spec, sent

    def land(self, posted) -> None:
        stage, held, spec, sent = posted
        write(arrived(stage, sent, spec), held)

    def share(self, block, mine, counts, width, like) -> Tensor:
        return torch.cat([mine[rank].detach() for rank in range(len(block))])

    def deliver(self, sent, counts, like):
        return {pair: message.clone() for pair, message in sent.items()}

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        return values

    def same(self, text: str) -> list[str]:
        return [text]


class DistTransport:
    """One rank of a torch process group.

    Args:
        group: the pool: Megatron's data-parallel group with context parallelism. None is the default group.
        delay: called before every send; tests use it to shake the order of arrival.
        streams: transfers travel on a side stream of the device; by default CUDA's under NCCL, none under
            gloo, where the host itself waits.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        delay: Callable[[], float] | None = None,
        streams: Streams | None = None,
    ) -> None:
        self.group, self.delay = group, delay
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.traffic = [Traffic() for _ in range(self.world)]
        self._global = [dist.get_global_rank(group, r) if group is not None else r for r in range(self.world)]
        if streams is None and self.device.type == "cuda":
            streams = CudaStreams(self.device)
        self.waits = Waits(streams, self.device) if streams is not None else None
        # A batch of sends must not be a communicator's first call: ranks without work post nothing.
        self.total(torch.zeros(1, device=self.device))

    @property
    def device(self) -> torch.device:
        if "nccl" in dist.get_backend(self.group):  # also of a group with a library for each device
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def hosts(self, block: Sequence[int]) -> list[int]:
        return [block.index(self.rank)] if self.rank in block else []

    def start(self) -> None:
        if self.waits is not None:
            self.waits.start()

    def post(self, block, stage, held, spec, *, ahead=False):
        if self.rank not in block:
            raise AugTreeError(
                "a rank plays a block that it is not in",
                values=f"rank {self.rank}, block {block}",
                rule="only a block's ranks exchange its transfers",
                remedy="report this plan",
            )
        me = block.index(self.rank)
        pairs = {pair: transfers for pair, transfers in messages_of(stage).items() if me in pair}
        works, received, kept = [], {}, []
        if pairs and self.waits is not None:
            self.waits.before_packing(stage, me, ahead=ahead)
            with self.waits.streams.side():
                works, received, kept = self._exchange(block, me, pairs, held[me], spec)
        elif pairs:
            works, received, kept = self._exchange(block, me, pairs, held[me], spec)
        return stage, held, spec, works, received, kept

    def _exchange(self, block, me: int, pairs: Mapping[tuple[int, int], Sequence[Transfer]],
                  buffers: Buffers, spec: FieldSpec):
        """(works, (from, to) -> what is received, what is sent) of one batch of messages."""
        received, sent, operations = {}, [], []
        for pair, transfers in pairs.items():
            src, dst = (block[rank] for rank in pair)
            if pair[0] == me:
                sent.append(self._packed((src, dst), transfers, buffers, spec))
                operations.append(dist.P2POp(dist.isend, sent[-1], self._global[dst], self.group))
            else:
                received[pair] = self._message("receive", (src, dst), length_of(transfers, spec))
                operations.append(dist.P2POp(dist.irecv, received[pair], self._global[src], self.group))
        if self.delay is not None:
            time.sleep(self.delay())
        return dist.batch_isend_irecv(operations), received, sent

    def _packed(self, pair: tuple[int, int], transfers: Sequence[Transfer], buffers: Buffers,
                spec: FieldSpec) -> Tensor:
        traffic = self.traffic[self.rank]
        if self.waits is None:
            return pack_message(transfers, buffers, spec, traffic)
        message = self._message("send", pair, length_of(transfers, spec))
        pack_into(message, transfers, buffers, spec, traffic)
        return message

    def _message(self, use: str, pair: tuple[int, int], length: int) -> Tensor:
        if self.waits is None:
            return torch.empty(length, dtype=torch.uint8, device=self.device)
        return self.waits.message(use, pair, length)

    def land(self, posted) -> None:
        stage, held, spec, works, received, _ = posted
        if self.waits is not None:
            if works:
                self.waits.land(works, arrived(stage, received, spec), held)
            return
        for work in works:
            work.wait()
        write(arrived(stage, received, spec), held)

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

    def deliver(self, sent, counts, like):
        found, operations, kept = {}, [], []
        for pair in sorted(counts):
            src, dst = pair
            if src == dst:
                found[pair] = sent[pair]
            elif src == self.rank:
                kept.append(sent[pair].contiguous())
                operations.append(dist.P2POp(dist.isend, kept[-1], self._global[dst], self.group))
            else:
                found[pair] = like.new_empty((counts[pair], *like.shape[1:]))
                operations.append(dist.P2POp(dist.irecv, found[pair], self._global[src], self.group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return found

    def total(self, values: Tensor, op: str = "sum") -> Tensor:
        values = values.to(self.device, copy=True)  # all_reduce works in place; the caller keeps its tensor
        kinds = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        dist.all_reduce(values, op=kinds[op], group=self.group)
        return values

    def same(self, text: str) -> list[str]:
        texts: list[str] = [""] * self.world
        dist.all_gather_object(texts, text, group=self.group)
        return texts
