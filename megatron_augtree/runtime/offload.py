"""What a pass keeps for its backward, at rest in host memory from its forward on.

A dormant prompt's activations wait for all of its waves. With `Pass.offload` what autograd saves in the
pass's forward is copied to host memory tensor by tensor while the forward goes on, and comes back in the
opposite order while the backward does. A copy moves bits, so no value changes.

- **Stays on the device:** parameters, the prompt's keys and values that waves read, and whatever is not on
  the device anyway.
- **Recompute:** a layer that runs again saves its input alone, so that is what rests, and what attention gave
  where that is kept. What its repetition saves is used at once and stays. The output layer's chunks are
  checkpointed without re-entrance: their inputs rest.
- **Copies run beside computation**, on a side stream: a copy waits for what was computed before it, and the
  computation waits for copies only where more than `UNDER_WAY` are behind (so the device never holds more
  than these twice), at the end of the forward, and for a tensor that it wants back.
- **On a CPU** device and host memory are the same: nothing is copied and no hook is set.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_augtree.runtime.streams import CudaStreams, Streams

#: Tensors that may be on their way at once, in either direction.
UNDER_WAY = 8


@dataclass(eq=False)
class Resting:
    """A tensor in host memory.

    Attributes:
        host: its bits.
        copied: event after which they are there.
        before: the one that left before it, and comes back after it.
        back: on the device again, with the event after which it is, until it is taken.
    """

    host: Tensor
    copied: Any
    before: weakref.ref[Resting] | None
    back: tuple[Tensor, Any] | None = None


class HostMemory:
    """Where one pass's tensors rest.

    Args:
        streams: of the device.
        device: where they come from.

    Attributes:
        bytes: of all tensors that came to rest.
    """

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.streams, self.device, self.bytes = streams, device, 0
        self._last: weakref.ref[Resting] | None = None
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def saving(self, stays: Callable[[Tensor], bool]) -> AbstractContextManager:
        """What autograd saves inside rests here, but for what stays."""

        def pack(tensor: Tensor) -> Tensor | Resting:
            kept = tensor.device.type != self.device.type or not tensor.numel() or _is_parameter(tensor)
            return tensor if kept or stays(tensor) else self.put(tensor)

        def unpack(saved: Tensor | Resting) -> Tensor:
            return self.get(saved) if isinstance(saved, Resting) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def put(self, tensor: Tensor) -> Resting:
        """Begin to copy a tensor to host memory; nobody may write to it any more."""
        tensor = tensor.detach()
        ready = self.streams.mark()
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.device.type == "cuda")
        with self.streams.side():
            self.streams.wait(ready)
            host.copy_(tensor, non_blocking=True)
            copied = self.streams.mark()
        self.bytes += tensor.numel() * tensor.element_size()
        self._leaving.append((copied, tensor))
        self._let_go(UNDER_WAY)
        resting = Resting(host, copied, self._last)
        self._last = weakref.ref(resting)
        return resting

    def get(self, resting: Resting) -> Tensor:
        """The tensor on the device, and the next ones on their way."""
        wanted: Resting | None = resting
        for _ in range(UNDER_WAY):
            if wanted is None:
                break
            self._fetch(wanted)
            wanted = wanted.before() if wanted.before is not None else None
        (tensor, there), resting.back = resting.back, None
        self.streams.wait(there)
        return tensor

    def settle(self) -> None:
        """The forward is over: the device forgets what has left."""
        self._let_go(0)

    def _let_go(self, most: int) -> None:
        """Tensors are used again once their copies are done, by whoever computes next."""
        while len(self._leaving) > most:
            self.streams.wait(self._leaving.popleft()[0])

    def _fetch(self, resting: Resting) -> None:
        if resting.back is not None:
            return
        # Made where it is used, so its memory needs no word with the allocator.
        tensor = torch.empty_like(resting.host, device=self.device)
        ready = self.streams.mark()
        with self.streams.side():
            self.streams.wait(ready)
            self.streams.wait(resting.copied)
            tensor.copy_(resting.host, non_blocking=True)
            resting.back = tensor, self.streams.mark()


def host_streams(device: torch.device) -> Streams | None:
    """Streams for copies to host memory; None where that is the device's own."""
    return CudaStreams(device) if device.type == "cuda" else None


def _is_parameter(tensor: Tensor) -> bool:
    """A leaf of the graph, or a view of one."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad
