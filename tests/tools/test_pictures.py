"""Pictures and traces: what is drawn follows the plan; planned and measured timelines merge into one."""

from __future__ import annotations

import json
import struct

import pytest

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.timeline import timeline
from megatron_augtree.runtime.trace import Trace, planned_events, write_events
from megatron_augtree.tools import cli
from megatron_augtree.tools.cli.trace import merge_traces
from megatron_augtree.tools.lengths import step_of_lengths
from megatron_augtree.tools.models import model_shape
from megatron_augtree.tools.plot import plot_plan

MODEL = model_shape("smollm2-135m", dtype="float32")
PRICES = Prices(MODEL, preset("cpu"))


def plan_of(force: str, world: int = 2):
    trees = step_of_lengths([(40, [6, 3, 3]), (12, [5, 9])]).merged
    return make_plan(trees.shape, MODEL, world, AugTreeConfig(force=force), tree_groups=trees.tree_groups)


def size_of(png: bytes) -> tuple[int, int]:
    """(width, height) of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_picture_follows_the_plan(tmp_path):
    drawn = {}
    for name, force in (("a", "degree=2"), ("again", "degree=2"), ("b", "degree=2,phase=phased,waves=2"),
                        ("c", "degree=1")):
        path = tmp_path / f"{name}.png"
        plot_plan(plan_of(force), MODEL, preset("cpu"), str(path))
        drawn[name] = path.read_bytes()
        assert min(size_of(drawn[name])) > 300
    assert drawn["a"] == drawn["again"]
    assert len({drawn["a"], drawn["b"], drawn["c"]}) == 3


def test_a_picture_of_many_ranks_is_not_endless(tmp_path):
    trees = step_of_lengths([(200, [150] * 4)]).merged
    plan = make_plan(trees.shape, MODEL, 72, AugTreeConfig(mode="gather-reuse"),
                     tree_groups=trees.tree_groups)
    plot_plan(plan, MODEL, preset("cpu"), str(tmp_path / "p.png"))
    width, height = size_of((tmp_path / "p.png").read_bytes())
    assert height < 6000 and width < 2000


def test_the_command_writes_a_picture_and_a_trace(tmp_path, capsys):
    line = "plan --group 40:6,3x2 --ranks 2 --model smollm2-135m --cluster cpu --force degree=2"
    assert cli.main([*line.split(), "--png", f"{tmp_path}/p.png", "--trace", f"{tmp_path}/t.json"]) == 0
    told = capsys.readouterr().out
    assert f"{tmp_path}/p.png" in told and f"{tmp_path}/t.json" in told
    assert size_of((tmp_path / "p.png").read_bytes())[0] > 300
    spans = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in spans if e["cat"] == "pass"} == {"fused 0 forward", "fused 0 backward"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.png", "t.json"]


def measured(rank: int) -> list[dict]:
    """What a rank of a run writes, as the launchers do: its measured spans and its planned bars."""
    trace = Trace()
    trace.begin()
    for action in ("forward", "backward"):
        with trace.span(rank, f"fused 0 {action}", "pass"):
            pass
    bars = [bar for bar in timeline(plan_of("degree=2"), PRICES) if bar.rank == rank]
    return [*planned_events(bars), *trace.events()]


def test_planned_and_measured_traces_become_one(tmp_path):
    plan = plan_of("degree=2")
    write_events(tmp_path / "planned.json", planned_events(timeline(plan, PRICES)))
    for rank in (0, 1):
        write_events(tmp_path / f"rank{rank}.json", measured(rank))
    files = [str(tmp_path / name) for name in ("planned.json", "rank0.json", "rank1.json")]
    told = merge_traces(files, str(tmp_path / "all.json"))
    assert sorted(told["processes"]) == [
        "rank 0 measured", "rank 0 planned", "rank 1 measured", "rank 1 planned"]
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == told["spans"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for rank in (0, 1):
        for kind in ("planned", "measured"):
            mine = [e for e in spans if named[e["pid"]] == f"rank {rank} {kind}" and e["cat"] == "pass"]
            # each pass once, though two files hold the planned ones; one schema for both
            want = [f"{plan.passes[p].kind} {p} {action}" for action, p in plan.events]
            assert [e["name"] for e in mine] == (want if kind == "planned" else want[:2])
            fields = frozenset(("name", "cat", "ph", "pid", "tid", "ts", "dur"))
            assert {frozenset(e) for e in mine} == {fields}
            assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in mine)


def test_the_merging_command(tmp_path, capsys):
    write_events(tmp_path / "r.json", measured(0))
    (tmp_path / "no.json").write_text("[]")
    argv = ["trace", f"{tmp_path}/r.json", "--out", f"{tmp_path}/all.json"]
    assert cli.main([*argv, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["out"] == f"{tmp_path}/all.json" and data["spans"] > 0
    assert cli.main(argv) == 0
    assert f"{data['spans']} spans of 2 timelines" in capsys.readouterr().out
    assert cli.main(["trace", f"{tmp_path}/no.json", "--out", f"{tmp_path}/x.json"]) == 2
    assert "no traceEvents" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("force", ["degree=2", "degree=2,phase=phased,waves=2", "degree=1"])
def test_the_planned_trace_is_the_timeline(force):
    plan = plan_of(force)
    bars = timeline(plan, PRICES)
    events = [e for e in planned_events(bars) if e["ph"] == "X" and e["cat"] == "pass"]
    assert [(e["name"], e["ts"]) for e in events] == [(bar.name, 1e6 * bar.start) for bar in bars]
    assert [e["dur"] for e in events] == pytest.approx([1e6 * bar.duration for bar in bars])
