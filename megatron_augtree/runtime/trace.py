"""Spans of a step as Chrome-trace JSON, to be opened in Perfetto. One schema for planned and measured."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Trace:
    """Spans of the ranks that this process hosts.

    Attributes:
        kind: ``measured`` or ``planned``; the process name in the viewer.
        events: complete events ("ph": "X"), times in microseconds.
    """

    kind: str = "measured"
    events: list[dict] = field(default_factory=list)

    @contextmanager
    def span(self, rank: int, name: str, category: str):
        """Record what happens inside as one span of a rank."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(rank, name, category, start / 1e3, (time.perf_counter_ns() - start) / 1e3)

    def add(self, rank: int, name: str, category: str, start_us: float, duration_us: float) -> None:
        """Record a span with known times, microseconds."""
        self.events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": self.kind,
                "tid": rank,
                "ts": start_us,
                "dur": duration_us,
            }
        )

    def write(self, path: str) -> None:
        """Write the trace in one atomic rename."""
        partial = f"{path}.partial"
        with open(partial, "w") as file:
            json.dump({"traceEvents": self.events, "displayTimeUnit": "ms"}, file)
        os.replace(partial, path)
