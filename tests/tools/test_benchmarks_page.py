"""docs/benchmarks.md has the figures of the files in benchmarks/, and a stale page is noticed."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT, PAGE, FIGURES = ROOT / "scripts" / "benchmarks_page.py", "docs/benchmarks.md", "benchmarks"


class Copy:
    """The page and its figures in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.page, self.figures = folder / "benchmarks.md", folder / FIGURES
        shutil.copy(ROOT / PAGE, self.page)
        shutil.copytree(ROOT / FIGURES, self.figures)

    def run(self, *words: str) -> subprocess.CompletedProcess:
        """The script on them."""
        where = ["--page", str(self.page), "--figures", str(self.figures)]
        command = [sys.executable, str(SCRIPT), *where, *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)

    def newest(self, script: str) -> Path:
        """A script's newest file."""
        return max(self.figures.glob(f"*-{script}.json"))


@pytest.fixture
def copy(tmp_path) -> Copy:
    """A copy to change."""
    return Copy(tmp_path)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/benchmarks_page.py, which is in no package."""
    sys.path.insert(0, str(SCRIPT.parent))
    yield importlib.import_module("benchmarks_page")
    sys.path.remove(str(SCRIPT.parent))


def test_the_page_is_up_to_date(copy):
    done = copy.run("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_of_the_repository_are_up_to_date():
    """The README, too."""
    command = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_figure_is_noticed(copy):
    path = copy.newest("paper_table")
    report = json.loads(path.read_text())
    report["rows"][0]["ours"]["simulated"] *= 2
    path.write_text(json.dumps(report))
    before, done = copy.page.read_text(), copy.run("--check")
    assert done.returncode == 1 and "stale" in done.stderr and "+| LongReward 16k" in done.stdout
    assert copy.page.read_text() == before
    assert copy.run().returncode == 0 and copy.run("--check").returncode == 0
    assert copy.page.read_text() != before


def test_a_changed_figure_inside_the_text_is_noticed(copy):
    path = copy.newest("bench_measured")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repeats": 97}))
    assert copy.run("--check").returncode == 1
    assert copy.run().returncode == 0 and "-->97<!-- end --> rounds" in copy.page.read_text()


def test_what_was_not_run_is_said(copy):
    for path in copy.figures.glob("*.json"):
        path.unlink()
    assert copy.run().returncode == 0 and copy.run("--check").returncode == 0
    page = copy.page.read_text()
    tables = re.findall(r"<!-- table (\S+)[^\n]* -->\n(.*?)<!-- end -->", page, re.DOTALL)
    told = {name: text for name, text in tables if name != "runs"}
    assert len(told) > 15 and all(re.fullmatch(r"Not run yet: `[^\n]+`\.\n", x) for x in told.values())
    assert set(re.findall(r"<!-- value [^\n]+? -->(.*?)<!-- end -->", page)) == {"(not run yet)"}


def test_every_table_stands_on_the_page(script):
    page = (ROOT / PAGE).read_text()
    shown = {match.split()[0] for match in re.findall(r"<!-- table ([^\n]+?) -->", page)}
    assert shown == {"runs", *script.TABLES}


@pytest.mark.parametrize("name", ("bench_planner", "bench_measured", "planner_quality", "simulate_regret"))
def test_no_table_says_that_all_bars_are_met_where_its_run_missed_one(script, name):
    """Nor the other way round."""
    tables = [table for table, (made_by, *_) in script.TABLES.items() if made_by == name]
    for line in ("decision, a step: 2 ms, bar 1 ms", None):
        said = []
        for table in tables:
            made_by, part, make, _ = script.TABLES[table]
            data = script.newest(ROOT / FIGURES, made_by, part).data | {"missed": [line] if line else []}
            said.append("\n".join(make(data)))
        assert any((line or "All bars are met.") in text for text in said)
        assert not any(("All bars are met." if line else "**Missed**") in text for text in said)


def test_an_older_file_stands_in_for_a_part(script, tmp_path):
    for day, data in (("01", {"settings": {}}), ("02", {"budgets": {}})):
        (tmp_path / f"2026-01-{day}-bench_memory.json").write_text(json.dumps(data))
    assert script.newest(tmp_path, "bench_memory").name.startswith("2026-01-02")
    assert script.newest(tmp_path, "bench_memory", "settings").name.startswith("2026-01-01")
    assert script.newest(tmp_path, "bench_memory", "model") is None


@pytest.mark.parametrize("text", [
    "<!-- table no_such_table -->\n<!-- end -->", "<!-- value no_such_script figure d --><!-- end -->",
    "<!-- table runs -->\n", "<!-- end -->", "<!-- table runs -->\n<!-- table runs -->\n<!-- end -->",
])  # fmt: skip
def test_a_wrong_marker_is_refused(copy, text):
    copy.page.write_text(f"A page.\n{text}\n")
    done = copy.run("--check")
    assert done.returncode == 1 and "rule: " in done.stderr and "remedy: " in done.stderr
    assert "Traceback" not in done.stderr


def plan(priced: float, simulated: float | None, **more) -> dict:
    """A plan's figures as tables have them."""
    return {"note": f"degree {priced:g}", "priced": priced, "simulated": simulated, "peak_gib": 1.0, **more}


def test_pools(script):
    """Ties are no losses, what does not fit is left out, and what was not simulated has no ratio."""
    names = ("dcp at its best degree", "dcp at 8, groups in turn", "paper")
    peers = dict(zip(names, (plan(1.98, 2.2, fits=True), plan(4.0, None, fits=True),
                             plan(1.0, 1.0, fits=False))))  # fmt: skip
    row = {"ranks": 64, "groups": 64, "preset": "rag", "seed": 1, "peers": peers, "ours": plan(2.0, 2.0),
           "ours_auto": plan(1.6, 1.6), "bound": 1.8, "bound_auto": 1.5, "moldable": 1.9}  # fmt: skip
    bar = {"what": "64 x 64, priced: mean over paper", "value": 0.5, "bar": "at least 1", "met": False}
    data = {"rows": [row], "bars": [bar]}
    text = "\n".join(script.TABLES["pool_ratios"].make(data))
    assert "| 0.99, 0.99 | 0.99 to 0.99 | 0, 1 of 1 | 1.10, 1.10 |" in text and "| - | - | - |" in text
    assert "rag, seed 1: dcp at its best degree takes 0.990 of our time, priced" in text
    assert "paper takes" not in text
    assert "- 64 x 64: mean over paper 0.5 / - (at least 1): **missed** priced" in text
    means = list(script.TABLES["pool_means"].make(data))
    assert means[-1] == "| 64 x 64 | 0.99 / 1.24 | 2.00 / 2.50 | 0.50 / 0.62 | 1.11 / 1.07 |"
    inside = script.DERIVED["pool_table"](data)["64 x 64"]["priced"]
    assert inside["dcp at its best degree"]["at_job_bound"] == pytest.approx(1.98 / 1.9)


def test_regret(script):
    found = {"mean": 0.004, "median": 0.0, "worst": 0.06, "least": 0.0, "count": 3}
    spread = {"count": 3, "mean": 1.02, "median": 1.01, "least": 0.9, "worst": 1.3}
    worst = {"seed": 7, "regret": 0.06, "world": 8, "cluster": "h100", "model": "m", "stages": 2,
             "chosen": plan(1.0, 1.06), "best": plan(1.1, 1.0, mode="paper")}  # fmt: skip
    data = {
        "batches": 3, "skipped": {"no rows": 1}, "regret": found, "not_the_best": 2,
        "not_the_best_by_1_percent": 1, "missed": ["worst regret 6.000%, bar 5%"], "worst": [worst],
        "simulated_over_priced": {"augtree, 1F1B": spread, "ring, one stage": {**spread, "mean": 1.0}},
    }  # fmt: skip
    text = "\n".join(script.TABLES["regret"].make(data))
    assert "regret mean 0.40 % (bar 1 %)" in text and "skipped: 1 no rows" in text
    assert "- seed 7, 8 ranks of h100, m, 2 stages: 6.00 %; `paper` is faster, not by its price" in text
    assert "| `augtree` | - | 1.020, 1.010, 0.90 to 1.30 |" in text and "| 1 others |" in text
    assert "**Missed**: worst regret" in text


def test_peers(script):
    figures = {"median_s": 0.5, "iqr_s": [0.4, 0.6], "error_fp64": 4e-15}
    case = {"case": "prompt 32", "rows": 10, "unshared_rows": 25,
            "peers": {"augtree": figures, "prefixgrouper": {**figures, "median_s": 0.75}}}  # fmt: skip
    line = list(script.TABLES["peers"].make({"cases": [case]}))[-1]
    assert "25, 10 (2.50)" in line and "0.750 s, 1.50 (0.400 to 0.600); 4e-15" in line
