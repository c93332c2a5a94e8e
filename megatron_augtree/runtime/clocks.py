"""The clock of a device, for `trace.Trace`."""

from __future__ import annotations

import torch

from megatron_augtree.runtime.trace import Clock, HostClock


class CudaClock:
    """Times of the current stream's work: the host only queues it, so its own clock would say when."""

    def now(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def microseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def clock_of(device: torch.device) -> Clock:
    """What measures work on a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
