"""The scripts behind the simulated tables: lengths, bounds, where time goes, and each script in small."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_augtree.tools.lengths import step_of_lengths

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """scripts/ is no package."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def cases(on_path):
    """scripts/table_cases.py."""
    return importlib.import_module("table_cases")


@pytest.fixture(scope="module")
def paper(on_path):
    """scripts/paper_table.py."""
    return importlib.import_module("paper_table")


@pytest.mark.parametrize("script", ["paper_table", "pool_table", "ablations"])
def test_quick_run(script, tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), "--quick", "--jobs", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS.parent, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["measured"] is False and report["columns"] == ["priced", "simulated"]
    assert all(len(digest) == 12 for digest in report["clusters"].values())
    assert "priced" in done.stdout and "simulated" in done.stdout


@pytest.mark.parametrize("which", ["first", "inferred"])
def test_lengths_fill_the_budget(paper, which):
    for corpus in paper.CORPORA:
        for budget in paper.BUDGETS:
            prompt, response = paper.lengths_of(which, corpus, budget)
            assert paper.GROUP * (prompt + response) == budget * 1024 and min(prompt, response) > 0


def test_lengths_are_those_of_the_method(paper):
    assert paper.lengths_of("first", "LongReward", 16) == (1920, 128)
    assert paper.lengths_of("first", "OpenThoughts", 256) == (2256, 30512)
    assert paper.lengths_of("inferred", "LongAlign", 64) == (8096, 96)
    assert paper.lengths_of("inferred", "LMSYS", 16) == paper.lengths_of("first", "LMSYS", 16)


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("mode", ["ring", "dcp-phased", "augtree"])
def test_parts_add_up_to_the_price(cases, mode, stages):
    setup = cases.Setup("h100", 8, stages)
    step = step_of_lengths([(4000, [500] * 8), (300, [2000, 100])])
    plan = setup.ours(step) if mode == "augtree" else setup.own(step, mode, 8)
    split = cases.parts(plan, setup.prices)
    assert sum(split.values()) == pytest.approx(plan.seconds, rel=1e-6)
    assert split["launches"] > 0 and split["recompute"] > 0
    assert (split["pipeline"] > 0) == (stages > 1)
    # Idealisations only take time away; a nanosecond is rounding.
    assert all(value >= -1e-6 for value in split.values())


def test_full_recompute_is_a_fourth_pass_over_the_layers(cases):
    """Where backward costs twice forward, it adds a third to all but the vocabulary's work."""
    setup = cases.Setup("paper", 8)
    shape = step_of_lengths([(4000, [8] * 8)]).merged.shape
    vocabulary = 3 * setup.prices.vocabulary.ns(sum(shape.scored)) / 8e9
    layers = setup.floor(shape) - vocabulary
    assert setup.bound(shape) - vocabulary == pytest.approx(4 / 3 * layers, rel=1e-6)


@pytest.mark.parametrize("mode", ["dcp-fused", "dynamic-reuse", "augtree"])
def test_nothing_is_below_the_bound(cases, mode):
    setup = cases.Setup("h100", 8)
    step = step_of_lengths([(30_000, [600] * 8), (50, [9000] * 4)])
    plan = setup.ours(step) if mode == "augtree" else setup.own(step, mode)
    made = cases.Timed.of(plan, setup.prices)
    assert min(made.priced, made.simulated) >= setup.bound(step.merged.shape)


def test_ratios_count_ties_and_losses(cases):
    found = cases.Ratios.of([1.0, 1.0009, 0.9, 2.0])
    assert (found.ties, found.slower, found.cases) == (2, 1, 4)
    assert found.mean == pytest.approx(1.225225) and found.least == 0.9


def test_what_was_never_simulated_has_no_ratios(cases, capsys):
    cases.print_ratios({"ring": {"priced": [2.0, 4.0], "simulated": []}}, "some title")
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split("|")[2].strip() == "3.00" and line.count(" - ") == 5


def test_a_missed_bar_is_kept_and_fails(cases, capsys, tmp_path):
    bars = cases.Bars()
    assert bars.least("good", 2.0, 1.0) and not bars.most("bad", 2.0, 1.0)
    assert bars.missed == ["bad"] and "MISSED  bad" in capsys.readouterr().out
    args = cases.parser_of("").parse_args(["--json", str(tmp_path / "x.json")])
    with pytest.raises(SystemExit) as end:
        cases.finish(args, {}, bars)
    assert end.value.code == 1
    assert [bar["met"] for bar in json.loads((tmp_path / "x.json").read_text())["bars"]] == [True, False]


def test_a_slower_point_misses_its_bar_and_is_explained(paper, cases, capsys):
    row = paper.row_of(paper.Case("first", "serial", "LMSYS", 16))
    row["ours"]["simulated"] *= 2
    bars = cases.Bars()
    paper.check({("first", "serial"): [{**row, "budget": 128}]}, bars)
    said = capsys.readouterr().out
    assert "first, serial, simulated: points not slower than any peer" in bars.missed
    assert "first, serial, priced: points not slower than any peer" not in bars.missed
    assert "launches" in said and "simulated over priced" in said


def test_best_degree_is_the_cheapest_that_fits(on_path):
    pool = importlib.import_module("pool_table")
    case = pool.Case(8, 4, "longreward", 0)
    peers = pool.Peers(case.setup, pool.step_of(case.preset, case.groups, case.seed))
    every = [peers.best("dcp-fused", [degree]) for degree in (1, 2, 4, 8)]
    fitting = [plan.seconds for plan in every if plan.peak_bytes <= peers.budget]
    assert peers.best("dcp-fused", [1, 2, 4, 8]).seconds == min(fitting)
    assert len(fitting) < len(every)  # else memory would not be tested
