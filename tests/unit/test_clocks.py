"""What measures spans: the host's clock, or events of the device's stream."""

from __future__ import annotations

import torch

from megatron_augtree.runtime.clocks import clock_of
from megatron_augtree.runtime.trace import HostClock, Trace
from tests import traces


class Event:
    """Stands for a CUDA event: what was queued before it takes a millisecond."""

    queued = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.waited = False

    def record(self) -> None:
        Event.queued += 1
        self.at = Event.queued

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert end.waited  # CUDA refuses the time of an event that has not happened
        return float(end.at - self.at)


def test_the_host_measures_what_it_computes_itself():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    start = clock.now()
    assert 0 <= clock.microseconds(start, clock.now()) < 60e6


def test_a_devices_spans_are_those_of_its_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    trace = Trace(clock_of(torch.device("cuda", 0)))
    trace.begin()
    with trace.span(0, "fused 0 forward", "pass"), trace.span(0, "wait", "attention"):
        pass
    found = traces.checked(trace.events())["rank 0 measured"]
    assert [(span["name"], span["ts"], span["dur"]) for span in found] == [
        ("fused 0 forward", 1000, 3000),
        ("wait", 2000, 1000),
    ]
