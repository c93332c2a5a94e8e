"""scripts/bench_measured.py: the quick run's figures, and figures that can be wrong."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_augtree.planning.cluster import load, preset

SCRIPTS = Path(__file__).parents[2] / "scripts"
MODES = ("ring", "ring-reuse", "gather-reuse", "dynamic", "augtree")


@pytest.fixture(scope="module")
def scripts():
    """The modules of scripts/, by name."""
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the quick run writes, and how it ended."""
    path = tmp_path_factory.mktemp("measured") / "figures.json"
    command = [
        sys.executable,
        str(SCRIPTS / "bench_measured.py"),
        "--quick",
        "--repeats",
        "2",
        "--json",
        str(path),
        "--markdown",
        str(path.with_suffix(".md")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert path.is_file(), ended.stderr
    return json.loads(path.read_text()) | {"folder": str(path.parent)}, ended


def test_every_mode_is_measured_over_every_link(report):
    found, ended = report
    assert found["kind"] == "measured" and "MEASURED" in ended.stdout
    assert [case["link"] for case in found["cases"]] == ["plain", "5 MB/s"]
    for case in found["cases"]:
        modes = [mode.split()[0] for row in case["plans"] for mode in row["modes"]]
        assert sorted(modes) == sorted(MODES)
        assert (
            case["digest"] == found["calibration"][case["link"]]["digest"] and case["digest"] in ended.stdout
        )
        assert case["unshared_rows"] == 4 * 159 + 16 + 32 + 48 + 64
        for row in case["plans"]:
            assert len(row["passes"]) == len(row["step"]) == len(row["waited"]) == 2
            assert all(0 < passes < step for passes, step in zip(row["passes"], row["step"]))
    assert len({case["digest"] for case in found["cases"]}) == 2
    assert ended.returncode == bool(found["missed"])
    table = (Path(found["folder"]) / "figures.md").read_text()
    assert table.count("\n") == 2 + sum(len(case["plans"]) for case in found["cases"])


def test_a_thin_link_shows_in_times_and_plans(report):
    """`ring` sends most; what `augtree` chooses over a thin link sends nothing."""
    plain, thin = report[0]["cases"]
    slow = {case["link"]: statistics.median(case["plans"][0]["passes"]) for case in (plain, thin)}
    assert plain["plans"][0]["modes"][0] == thin["plans"][0]["modes"][0] == "ring"
    # Keys, values and their gradients of a rank's rows, both layers: (2 + 1) x 128 kB x 2 at 5 MB/s, or more.
    assert min(thin["plans"][0]["passes"]) > 0.15 and slow["5 MB/s"] > slow["plain"]
    (ours,) = [row for row in thin["plans"] if "augtree" in row["modes"]]
    assert "degree 1" in ours["note"]


def rows_of(*rows: tuple[str, float, float]) -> dict:
    """A case of (mode, priced, measured), seven repeats without noise; wrong constants price it backwards."""
    plans = [{"modes": [mode], "predicted": priced, "passes": [seconds] * 7, "waited": [0.0] * 7,
              "wrong": [3 / seconds] * 50} for mode, priced, seconds in rows]  # fmt: skip
    return {"workload": "made up", "link": "5 MB/s", "plans": plans}


def judged(scripts, case: dict) -> tuple[dict, list[str]]:
    bars = scripts("planner_cases").Bars()
    return scripts("bench_measured").summary([case], bars), bars.missed


def test_right_prices_pass(scripts):
    found, missed = judged(scripts, rows_of(("ring", 3.0, 3.1), ("dynamic", 2.0, 2.1), ("augtree", 1.0, 1.0)))
    assert missed == [] and found["tau"] == {"5 MB/s": 1.0} and found["regret_largest"] == 1.0
    assert found["null"]["tau_mean"] == {"5 MB/s": -1.0} and found["null"]["error_passes"] == 0


@pytest.mark.parametrize("rows, tau, told", [
    # A mode that was not chosen is faster; the order of two of three pairs is wrong.
    ((("ring", 3.0, 3.0), ("dynamic", 2.0, 0.9), ("augtree", 1.0, 1.0)), 1 / 3, ("regret", "Kendall")),
    # Equal prices of what differs order nothing.
    ((("ring", 2.0, 3.0), ("dynamic", 2.0, 2.0), ("augtree", 1.0, 1.0)), 2 / 3, ("Kendall",)),
    ((("ring", 6.0, 3.0), ("dynamic", 4.0, 2.0), ("augtree", 2.0, 1.0)), 1.0, ("absolute",)),
])  # fmt: skip
def test_wrong_prices_miss_their_bars(scripts, rows, tau, told):
    found, missed = judged(scripts, rows_of(*rows))
    assert found["tau"]["5 MB/s"] == pytest.approx(tau)
    for name in told:
        assert any(name in line for line in missed), missed


def test_what_noise_could_have_ordered_is_tied(scripts):
    bench = scripts("bench_measured")
    case = rows_of(("ring", 1.0, 1.0), ("augtree", 2.0, 1.01))
    assert bench.compared(case, [1.0, 2.0]) == [], "closer than 2 %"
    case["plans"][1]["passes"] = [0.5, 1.5, 0.6, 1.4, 0.7, 1.6, 1.3]
    assert bench.compared(case, [1.0, 2.0]) == [], "its interval reaches from below 1 to above"
    case["plans"][1]["passes"] = [1.1] * 7
    assert bench.compared(case, [1.0, 2.0]) == [True] and bench.compared(case, [2.0, 1.0]) == [False]
    assert bench.taus([rows_of(("augtree", 1.0, 1.0))]) == {"5 MB/s": None}


def test_null_constants_pass_if_prices_say_nothing(scripts):
    """Wrong constants that do as well as ours fail the null test."""
    case = rows_of(("ring", 3.0, 3.1), ("augtree", 1.0, 1.0))
    for row in case["plans"]:
        row["wrong"] = row["passes"][:1] * 50
    assert any("null test" in line for line in judged(scripts, case)[1])


def test_wrong_machines_are_off_by_two(scripts):
    cpu = preset("cpu")
    wrong = scripts("measured_ranks").wrong_clusters(cpu)
    assert wrong == scripts("measured_ranks").wrong_clusters(cpu) and len({x.digest() for x in wrong}) == 50
    for name, right in asdict(cpu).items():
        values = {asdict(x)[name] for x in wrong}
        if name.endswith(("_flops", "_bytes_s", "_ns", "_pct")) and right:
            assert values == {right // 2, right * 2}, name
    assert {x.overlap for x in wrong} == {cpu.overlap}


def test_a_calibration_is_frozen_for_every_link(scripts, tmp_path):
    bench = scripts("bench_measured")
    path = tmp_path / "machine.json"
    bench.write_json(str(path), bench.document(preset("cpu"), {"how": "by hand", "curves": {}}))
    found = bench.frozen(argparse.Namespace(quick=False, calibration=str(path)), tmp_path)
    rates = {link: load(file).link_bytes_s for link, (file, _, _) in found.items()}
    assert rates == {"plain": preset("cpu").link_bytes_s, "35 MB/s": 35_000_000, "5 MB/s": 5_000_000}
    assert all(load(file).digest() == cluster.digest() for file, cluster, _ in found.values())
    assert found["plain"][2] == {"how": "by hand"}
