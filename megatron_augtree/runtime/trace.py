"""Spans of a step as Chrome-trace JSON, to be opened in Perfetto. One schema for planned and measured.

In the viewer a process is a rank, planned or measured (``rank 3 planned``, ``rank 3 measured``), one above
the other; a pass has the same name in both. Times are microseconds since the step began on that rank. Spans
of one process nest: what a pass does lies within the pass.

No torch here: whoever has a plan can write its timeline down.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_augtree.planning.timeline import Bar

#: In the order of the viewer, top down.
KINDS = ("planned", "measured")


class Clock(Protocol):
    """Where spans take their times from."""

    def now(self) -> Any:
        """A mark: this moment."""

    def microseconds(self, start: Any, end: Any) -> float:
        """From one mark to another."""


class HostClock:
    """The host's clock: right where the host waits for what it computes, as on CPUs."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def microseconds(self, start: int, end: int) -> float:
        return (end - start) / 1e3


@dataclass
class Trace:
    """Spans of the ranks that this process hosts, in one step.

    Attributes:
        clock: measures spans.
        spans: (rank, name, category, start, end) in marks of the clock.
    """

    clock: Clock = field(default_factory=HostClock)
    spans: list[tuple[int, str, str, Any, Any]] = field(default_factory=list)
    _zero: Any = None

    def begin(self) -> None:
        """A step begins: earlier spans are forgotten, and this is its time 0."""
        self.spans.clear()
        self._zero = self.clock.now()

    @contextmanager
    def span(self, rank: int, name: str, category: str):
        """Record what happens inside as one span of a rank."""
        start = self.clock.now()
        try:
            yield
        finally:
            self.spans.append((rank, name, category, start, self.clock.now()))

    def events(self) -> list[dict]:
        """All spans as events, after those that name the processes."""
        found = []
        for rank, name, category, *marks in self.spans:
            start, end = (self.clock.microseconds(self._zero, mark) for mark in marks)
            found.append(_event("measured", rank, name, category, start, end))
        return [*_names("measured", {span[0] for span in self.spans}), *found]


def planned_events(bars: Iterable[Bar]) -> list[dict]:
    """A plan's timeline in the schema of measured traces.

    Args:
        bars: of `planning.timeline`; those of all ranks, or of some.
    """
    found, ranks = [], set()
    for bar in bars:
        start, end, work = (1e6 * s for s in (bar.start, bar.start + bar.duration, bar.start + bar.work))
        found.append(_event("planned", bar.rank, bar.name, "pass", start, end))
        if work < end:
            found.append(_event("planned", bar.rank, "wait", "attention", work, end))
        ranks.add(bar.rank)
    return [*_names("planned", ranks), *found]


def _event(kind: str, rank: int, name: str, category: str, start: float, end: float) -> dict:
    """From microsecond to microsecond."""
    process = {"pid": _process(kind, rank), "tid": 0}
    return {"name": name, "cat": category, "ph": "X", **process, "ts": start, "dur": end - start}


def _names(kind: str, ranks: Iterable[int]) -> list[dict]:
    """Events that name and order a kind's processes."""
    found = []
    for rank in sorted(ranks):
        number = _process(kind, rank)
        for key, value in (("name", f"rank {rank} {kind}"), ("sort_index", number)):
            words = {"name": f"process_{key}", "ph": "M", "pid": number, "tid": 0}
            found.append({**words, "args": {key: value}})
    return found


def _process(kind: str, rank: int) -> int:
    """Number of a process: ranks in order, planned above measured."""
    return len(KINDS) * rank + KINDS.index(kind)


def write_events(path: str | os.PathLike[str], events: Sequence[dict]) -> None:
    """Write a trace file, in one atomic rename."""
    partial = f"{os.fspath(path)}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    os.replace(partial, path)


def read_events(path: str | os.PathLike[str]) -> list[dict]:
    """The events of a file that `write_events` wrote; several files' together are one trace.

    Raises:
        OSError, ValueError: the file cannot be read, or is no trace.
    """
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise ValueError("no traceEvents")
    return data["traceEvents"]
