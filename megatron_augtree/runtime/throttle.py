"""Links of a chosen rate under a real transport: what a slower network would do, on a machine without one.

A rank's link lets bytes through at a rate, one message after the other, out and in at the same time. A
message carries the time at which it began to leave, and lands when its last byte would have arrived; until
then the receiver works on, or sleeps. Times follow from the times of posting and the sizes alone, so equal
steps are charged alike, and what travels keeps its bits.

Charged are a stage's messages (`post`, `land`). The sums and shares of losses that a step needs, and
Megatron's reduction of gradients, pass freely.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_augtree.config import UnsupportedError
from megatron_augtree.runtime.messages import arrived, write
from megatron_augtree.runtime.transport import DistTransport

#: A message's tail: the time at which it began to leave, float64 of the machine's monotonic clock.
_STAMP = 8


@dataclass
class Link:
    """One direction of a rank's link, a token bucket of no depth: an idle link saves nothing up.

    Attributes:
        byte_s, message_s: seconds a byte and a message.
        free: when it has nothing more to carry.
    """

    byte_s: float
    message_s: float = 0.0
    free: float = 0.0

    def carry(self, at: float, size: int, messages: int = 0) -> tuple[float, float]:
        """(begins, ends) of what is ready at a time."""
        begins = max(at, self.free)
        self.free = begins + size * self.byte_s + messages * self.message_s
        return begins, self.free


class ThrottledTransport(DistTransport):
    """`DistTransport` whose ranks, all on one machine, have links of a rate.

    Args:
        bytes_s: bytes a second a rank, each way.
        group: the pool; None is the default group.

    Raises:
        UnsupportedError: messages that the host does not wait for.
    """

    def __init__(self, bytes_s: int, group: dist.ProcessGroup | None = None) -> None:
        if "nccl" in dist.get_backend(group):
            raise UnsupportedError(
                "a link cannot be throttled on a GPU",
                values=f"backend {dist.get_backend(group)}",
                rule="the host holds messages back, so it has to be the host that waits for them",
                remedy="throttle gloo",
            )
        super().__init__(group)
        self.out = Link(1 / bytes_s)
        self.into = Link(1 / bytes_s)
        self._leaving: list[tuple[float, float]] = []

    def post(self, block, stage, held, spec, *, ahead=False):
        self._leaving = []
        posted = super().post(block, stage, held, spec, ahead=ahead)
        return posted, max((ends for _, ends in self._leaving), default=0.0)

    def _packed(self, pair, transfers, buffers, spec) -> Tensor:
        message = super()._packed(pair, transfers, buffers, spec)
        self._leaving.append(self.out.carry(time.monotonic(), message.numel()))
        stamp = torch.tensor([self._leaving[-1][0]], dtype=torch.float64)
        return torch.cat([message, stamp.view(torch.uint8)])

    def _message(self, use, pair, length) -> Tensor:
        return super()._message(use, pair, length + _STAMP)

    def land(self, posted) -> None:
        (stage, held, spec, works, received, _), done = posted
        for work in works:
            work.wait()
        arriving, bare = [], {}
        for pair, message in received.items():
            begins = message[-_STAMP:].clone().view(torch.float64).item()
            bare[pair] = message[:-_STAMP]
            arriving.append((begins, pair))
        for begins, pair in sorted(arriving):  # its last byte passes both links: they have one rate
            done = max(done, self.into.carry(begins, bare[pair].numel())[1])
        left = done - time.monotonic()
        if left > 0:
            time.sleep(left)
        write(arrived(stage, bare, spec), held)
