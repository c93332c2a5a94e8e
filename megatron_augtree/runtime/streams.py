"""Transfers beside computation: a side stream, and what waits for what.

The executor computes on the current stream. Messages are packed, sent, received and, where they are only
copied, put in their place on a side stream of ours. The host waits for nothing; streams wait for events:

===========================  =====================================================================
what                         waits for
===========================  =====================================================================
the side stream, once a      everything computed before the program: what its buffers hold, and all earlier
program                      uses of the memory that these buffers are made of
packing what lands by copy   nothing more. Keys, values, queries and what a backward starts from are never
                             computed within a program: they were there before it, or the side stream itself
                             put them there
packing what is added or     all that was computed so far: partial results and gradients come from tiles of
merged                       earlier stages. (No tile of the same stage touches what its transfers take.)
sending                      packing: the library's own stream waits for the side stream
unpacking                    the arrival, on the side stream
adding and merging           unpacking; it runs on the current stream, which owns the accumulators
tiles of the next stage      unpacking
using a message buffer       the sends that read it (the side stream waited for their end when the stage
again                        landed) and the additions that read it (an event, waited for before packing)
===========================  =====================================================================

So the keys of stage i+1 may travel while the tiles of stage i are still computed, and no further: a message's
buffers are two, used in turn, kept from stage to stage, from layer to layer and from step to step. What is
sent a layer ahead (`prefetch.py`) lands by copy only and has two buffers of its own. All of them are
made on the side stream, and every use on it or after it is ordered by the waits above. When they grow, their
old memory goes back to the side stream, behind those uses; so nothing has to be recorded with the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_augtree.planning.schedule import Landing, Stage
from megatron_augtree.runtime.buffers import Buffers
from megatron_augtree.runtime.messages import Arrived, write


class Streams(Protocol):
    """The two streams of a device."""

    def side(self) -> AbstractContextManager:
        """Makes the side stream the current one."""

    def mark(self) -> Any:
        """An event: all that the current stream was given so far."""

    def wait(self, event: Any) -> None:
        """The current stream waits for an event; the host does not."""


class CudaStreams:
    """`Streams` of a CUDA device.

    Args:
        device: its index is that of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._side = device, torch.cuda.Stream(device)

    def side(self) -> AbstractContextManager:
        return torch.cuda.stream(self._side)

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


class Waits:
    """What a transport's stages wait for; see the module.

    Args:
        streams: of the device.
        device: where message buffers are made.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.streams, self.device = streams, device
        self._turn, self._turn_ahead, self._filled = 0, 0, 0
        self._read: list[Any] = [None, None]  # additions that read a turn's messages
        self._buffers: dict[tuple[int, str, tuple[int, int]], Tensor] = {}

    def start(self) -> None:
        """A program begins: its buffers are made and filled."""
        ready = self.streams.mark()
        with self.streams.side():
            self.streams.wait(ready)

    def before_packing(self, stage: Stage, rank: int, *, ahead: bool = False) -> None:
        """On the current stream, before a stage's messages are packed on the side stream."""
        if ahead:
            self._turn_ahead = 1 - self._turn_ahead
            self._filled = 2 + self._turn_ahead
            return
        self._filled = self._turn = 1 - self._turn
        computed = any(t.src == rank and t.payload.landing is not Landing.COPY for t in stage.transfers)
        events = [self._read[self._turn], self.streams.mark() if computed else None]
        with self.streams.side():
            for event in events:
                if event is not None:
                    self.streams.wait(event)
        self._read[self._turn] = None

    def message(self, use: str, pair: tuple[int, int], length: int) -> Tensor:
        """On the side stream: uint8 of a length, whose last use is over.

        Args:
            use: ``send`` or ``receive``.
            pair: (from, to) ranks of the pool.
            length: bytes.
        """
        key = self._filled, use, pair
        known = self._buffers.get(key)
        if known is None or known.numel() < length:
            known = self._buffers[key] = torch.empty(length, dtype=torch.uint8, device=self.device)
        return known[:length]

    def land(self, works: list[Any], landing: Arrived, held: Mapping[int, Buffers]) -> None:
        """Wait for a stage's messages and write what arrived.

        Args:
            works: of the library, for the messages.
            landing: transfers of the stage, with views of the messages.
            held: block rank -> its buffers.
        """
        copies = [item for item in landing if item[0].payload.landing is Landing.COPY]
        rest = [item for item in landing if item[0].payload.landing is not Landing.COPY]
        with self.streams.side():
            for work in works:
                work.wait()  # the current stream waits, which is the side stream
            write(copies, held)
            landed = self.streams.mark()
        self.streams.wait(landed)
        if rest:
            write(rest, held)
            self._read[self._turn] = self.streams.mark()
