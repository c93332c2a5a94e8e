"""``augtree simulate``, its picture and its trace, and scripts/simulate_regret.py in small."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_augtree.config import MODES
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.simulate import simulate
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli import parser as command_line
from megatron_augtree.tools.cli.choose import choose
from tests.tools.calling import STEP, answer, call, refused

ROOT = Path(__file__).resolve().parents[2]


def test_all_modes_side_by_side(capsys):
    data = answer(capsys, f"simulate {STEP}")
    assert (data["groups"], data["ranks"], data["stages"]) == (2, 2, 1)
    assert data["pricing"] == preset("cpu").digest() and data["left_out"] == {}
    lines = {line["mode"]: line for line in data["modes"]}
    assert set(lines) == set(MODES)
    simulated = [line["simulated_seconds"] for line in data["modes"]]
    assert simulated == sorted(simulated)
    for line in data["modes"]:
        assert line["over_bound"] == pytest.approx(line["simulated_seconds"] / data["bound_seconds"])
        assert line["over_bound"] > 1 and line["over_price"] > 0.5 and line["fits"] and line["peak_bytes"] > 0
        assert line["busy_share"] + line["idle_share"] == pytest.approx(1)
        assert 0 <= line["exposed_share"] <= line["idle_share"] + 1e-9
    chosen = choose(command_line().parse_args(f"plan {STEP}".split()))
    assert lines["augtree"]["simulated_seconds"] == simulate(chosen.plan, chosen.prices).makespan
    assert lines["augtree"]["priced_seconds"] == chosen.plan.seconds
    # What the flags do not share is computed once more.
    assert lines["ring"]["simulated_seconds"] > lines["augtree"]["simulated_seconds"]


def test_told_to_people(capsys):
    head, title, columns, *rows = call(capsys, f"simulate {STEP} --modes ring,paper").splitlines()
    assert "2 groups on 2 ranks (cpu), simulated, not measured; bound " in head
    assert title == "exposed is a part of idle" and columns.split()[:2] == ["mode", "simulated"]
    assert {row.split()[0] for row in rows} == {"augtree", "ring", "paper"}


def test_a_mode_that_has_no_plan_says_why(capsys):
    line = f"--preset lmsys --num-groups 3 {STEP[STEP.index('--ranks') :]}".replace("--ranks 2", "--ranks 3")
    data = answer(capsys, f"simulate {line} --context-parallel-size 2 --modes ring,augtree")
    assert [x["mode"] for x in data["modes"]] == ["augtree"]
    assert "divides the number of ranks" in data["left_out"]["ring"]
    assert "ring: " in call(capsys, f"simulate {line} --context-parallel-size 2 --modes ring")
    assert "divides the number of ranks" in refused(
        capsys, f"simulate {line} --context-parallel-size 2 --mode ring --modes augtree")


def test_cards_and_stages_reach_the_simulation(capsys):
    line = "simulate --group 900:200x6 --ranks 16 --cluster h100 --model smollm2-135m --modes augtree " \
        "--force degree=16"
    plain = answer(capsys, line)["modes"][0]
    one_card = answer(capsys, f"{line} --cards 1")["modes"][0]
    assert one_card["exposed_share"] > plain["exposed_share"]
    assert one_card["simulated_seconds"] > plain["simulated_seconds"]
    piped = answer(capsys, f"{line.replace('--force degree=16', '')} --stages 3")
    assert piped["stages"] == 3 and piped["modes"][0]["busy_share"] < plain["busy_share"]


def test_what_simulate_refuses(capsys):
    assert "lock-step is not simulated" in refused(capsys, f"simulate {STEP} --lock-step")
    assert "did you mean ring?" in refused(capsys, f"simulate {STEP} --modes rong")
    assert "not a positive integer" in refused(capsys, f"simulate {STEP} --cards 0")
    assert "the model has 30" in refused(capsys, f"simulate {STEP} --stages 31")


@pytest.mark.parametrize("stages", [1, 2])
def test_the_trace_and_the_picture_are_of_the_chosen_mode(capsys, tmp_path, stages):
    trace, picture = tmp_path / "trace.json", tmp_path / "gantt.png"
    call(capsys, f"simulate {STEP} --stages {stages} --mode dcp-fused --modes dcp-fused --trace {trace} "
                 f"--gantt {picture}")
    events = json.loads(trace.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = [e["args"]["name"] for e in events if e.get("name") == "process_name"]
    assert names == ["rank 0 simulated", "rank 1 simulated"]
    passes = [e for e in events if e["ph"] == "X" and e["cat"] == "pass"]
    assert {e["tid"] for e in passes} == set(range(stages))
    played = [sorted((e["pid"], e["name"]) for e in passes if e["tid"] == stage) for stage in range(stages)]
    assert all(mine == played[0] for mine in played), "every stage plays every pass on all its ranks"
    args = command_line().parse_args(f"plan {STEP} --mode dcp-fused".split())
    chosen = choose(args)
    if stages == 1:
        assert len(passes) == 2 * sum(len(p.block) for p in chosen.plan.passes)
        found = simulate(chosen.plan, chosen.prices)
        assert max(e["ts"] + e["dur"] for e in passes) == pytest.approx(found.makespan * 1e6)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert sorted(tmp_path.iterdir()) == [picture, trace]


def test_modes_of_a_flag():
    assert options.modes("all") == list(MODES) and options.modes("ring,paper") == ["ring", "paper"]


# ---- scripts/simulate_regret.py


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    path = ROOT / "scripts" / "simulate_regret.py"
    spec = importlib.util.spec_from_file_location("simulate_regret", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.modules.pop("never_slower", None)


def side(script, mode: str, simulated: float, priced: float = 1.0):
    return script.Side(mode, mode, priced, simulated, 0.5, 0.1, 1.0)


def test_regret_by_hand(script):
    """Against the best of all, the chosen plan included; a tie is no regret."""
    about = {"stages": 1, "world": 2, "cluster": "cpu", "model": "m", "gib": 27, "limit": 0, "groups": 1}
    mine, others = side(script, "augtree", 1.1), [side(script, "ring", 2.0), side(script, "paper", 1.0, 1.2)]
    lost = script.Figures(1, about, mine, others, "")
    assert lost.regret == pytest.approx(0.1) and "not by its price" in lost.reason
    assert script.Figures(1, about, mine, others[:1], "").regret == 0
    assert script.Figures(1, about, mine, [side(script, "dcp-fused", 1.1)], "").best is mine
    seen = "also by its price"
    assert seen in script.Figures(1, about, mine, [side(script, "paper", 1.0, 1.0)], "").reason
    report = script.report_of([lost, script.Figures(2, about, mine, [], ""),
                               script.Figures(3, about, None, [], "no rows")])
    assert report["batches"] == 2 and report["skipped"] == {"no rows": 1}
    assert report["regret"]["mean"] == pytest.approx(0.05) and report["regret"]["worst"] == pytest.approx(0.1)
    assert [line["seed"] for line in report["worst"]] == [1]
    assert report["simulated_over_priced"]["augtree, one stage"]["count"] == 2


def test_the_script_in_small(tmp_path):
    out = tmp_path / "regret.json"
    line = [sys.executable, "scripts/simulate_regret.py", "--batches", "4", "--json", str(out)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    report = json.loads(out.read_text())
    missed = [line for line in done.stdout.splitlines() if line.startswith("MISSED")]
    assert done.returncode == bool(missed), done.stderr
    assert [f"MISSED  {line}" for line in report["missed"]] == missed
    assert report["batches"] + sum(report["skipped"].values()) == 4
    assert set(report) >= {"machine", "commit", "cluster_digests", "regret", "simulated_over_priced", "worst"}
    assert 0 <= report["regret"]["median"] <= report["regret"]["worst"]
    assert statistics.fmean([x["median"] for x in report["simulated_over_priced"].values()]) < 1.5
