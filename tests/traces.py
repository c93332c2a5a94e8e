"""What every trace file holds: the schema of Chrome traces, and spans that nest."""

from __future__ import annotations

import re
from collections import defaultdict

#: Microseconds that rounding may move the end of a span.
ROUNDING = 1e-6


def checked(events: list[dict]) -> dict[str, list[dict]]:
    """Process name -> its spans in order of time, after the schema was asserted."""
    names, spans = {}, defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "M") and type(event["pid"]) is int and event["tid"] == 0
        if event["ph"] == "M" and event["name"] == "process_name":
            assert re.fullmatch(r"rank \d+ (planned|measured)", event["args"]["name"])
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "M":
            assert event["name"] == "process_sort_index" and type(event["args"]["sort_index"]) is int
        else:
            assert event.keys() == {"name", "cat", "ph", "pid", "tid", "ts", "dur"}
            assert event["name"] and event["ts"] >= 0 and event["dur"] >= 0
            spans[event["pid"]].append(event)
    assert spans.keys() <= names.keys() and len(set(names.values())) == len(names)
    for found in spans.values():
        found.sort(key=lambda event: (event["ts"], -event["dur"]))
        check_nesting(found)
    return {names[pid]: found for pid, found in spans.items()}


def check_nesting(spans: list[dict]) -> None:
    """Of two spans one lies within the other, or they are apart."""
    open_ends: list[float] = []
    for event in spans:
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= start + ROUNDING:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + ROUNDING, event
        open_ends.append(end)


def passes(spans: list[dict]) -> list[str]:
    """Names of the passes' spans, in order of time."""
    return [event["name"] for event in spans if event["cat"] == "pass"]
