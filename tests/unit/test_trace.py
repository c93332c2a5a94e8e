"""Trace files: planned and measured spans of one schema, in one tab of the viewer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_augtree.planning.timeline import Bar, timeline
from megatron_augtree.runtime.trace import Trace, planned_events, read_events, write_events
from tests import traces
from tests.unit.test_plan import phased
from tests.unit.test_timeline import PRICES


class Ticks:
    """A clock that goes on by one microsecond whenever it is read."""

    def __init__(self) -> None:
        self.ticks = 100

    def now(self) -> int:
        self.ticks += 1
        return self.ticks

    def microseconds(self, start: int, end: int) -> float:
        return float(end - start)


def test_measured_spans_are_counted_from_the_steps_beginning():
    trace = Trace(Ticks())
    for _ in range(2):  # the second step's spans alone are left
        trace.begin()
        with trace.span(3, "fused 0 forward", "pass"), trace.span(3, "forward stage 0", "attention"):
            pass
        with pytest.raises(RuntimeError), trace.span(1, "fused 1 forward", "pass"):
            raise RuntimeError
    found = traces.checked(trace.events())

    def of(process: str) -> list[tuple]:
        return [(span["name"], span["cat"], span["ts"], span["dur"]) for span in found.pop(process)]

    assert of("rank 3 measured") == [
        ("fused 0 forward", "pass", 1, 3),
        ("forward stage 0", "attention", 2, 1),
    ]
    assert of("rank 1 measured") == [("fused 1 forward", "pass", 5, 1)] and not found


def test_the_plan_has_the_same_schema():
    plan = phased()
    bars = timeline(plan, PRICES)
    found = traces.checked(planned_events(bars))
    assert set(found) == {f"rank {rank} planned" for rank in range(plan.world)}
    for rank in range(plan.world):
        spans, mine = found[f"rank {rank} planned"], [bar for bar in bars if bar.rank == rank]
        assert traces.passes(spans) == [bar.name for bar in mine]
        waits = [span["dur"] for span in spans if span["name"] == "wait"]
        assert sum(waits) == pytest.approx(1e6 * sum(bar.duration - bar.work for bar in mine), abs=1e-6)
    assert any(span["name"] == "wait" for spans in found.values() for span in spans)


def test_files_of_several_ranks_are_one_trace(tmp_path):
    events = []
    for rank in range(2):
        trace = Trace()
        trace.begin()
        with trace.span(rank, "fused 0 forward", "pass"):
            pass
        bar = Bar(rank, 0, "forward", 0.0, 2e-3, 1e-3, 5, "fused 0 forward")
        path = tmp_path / f"rank-{rank}.json"
        write_events(path, [*planned_events([bar]), *trace.events()])
        assert json.loads(path.read_text())["displayTimeUnit"] == "ms"
        events += read_events(path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]
    found = traces.checked(events)
    names = ["rank 0 planned", "rank 0 measured", "rank 1 planned", "rank 1 measured"]
    assert sorted(found) == sorted(names)
    order = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert sorted(order, key=order.get) == names
    assert {spans[0]["name"] for spans in found.values()} == {"fused 0 forward"}


@pytest.mark.parametrize("text", ["[]", "{}", '{"traceEvents": 1}', "{"])
def test_what_is_no_trace(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError):
        read_events(tmp_path / "file.json")


def test_no_torch_is_needed():
    code = "import sys, megatron_augtree.runtime.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
