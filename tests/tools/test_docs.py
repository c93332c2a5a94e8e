"""Pages about planning: their commands run, and docs/worth_it.md has the tables that the planner makes."""

from __future__ import annotations

import re

import pytest

from megatron_augtree.config import FORCE_KEYS, MOST_PASSES, RECOMPUTE
from megatron_augtree.planning.baselines import UNSHARED
from tests.tools.calling import answer, call
from tests.worth import PAGE, TABLES, rewritten

DOCS = PAGE.parent
PAGES = [PAGE, DOCS / "planner.md"]
COMMANDS = [
    command
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    for command in re.findall(r"^augtree (.+?)(?: +#.*)?$", block, re.MULTILINE)
]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_runs(capsys, line):
    assert call(capsys, line)


@pytest.mark.parametrize("table", TABLES)
def test_the_page_has_the_table(table):
    page = PAGE.read_text()
    assert rewritten(page, table) == page, "run python -m tests.worth"


def test_the_bound_is_what_estimate_counts(capsys):
    """G (P + R) / (P + G R), and for pairs G (P + R)^2 / (P^2 + 2 G P R + G R^2), for long P and R."""
    data = answer(capsys, "estimate --prompt 32768 --responses 512x8")
    assert data["linear_ratio"] == pytest.approx(8 * 33280 / (32768 + 8 * 512), rel=1e-3)
    pairs = 8 * 33280**2 / (32768**2 + 2 * 8 * 32768 * 512 + 8 * 512**2)
    assert data["attention_ratio"] == pytest.approx(pairs, rel=1e-3)


def test_what_gains_nothing_is_not_shared(capsys):
    """The page's example of a prompt that is not worth sharing."""
    (line,) = [line for line in COMMANDS if line.startswith("explain --prompt 20 ")]
    data = answer(capsys, line)
    assert data["mode"] in UNSHARED and data["degrees"] == [1]
    ours = min(c["seconds"] for c in data["candidates"] if c["name"].startswith("augtree"))
    assert 1 < ours / data["predicted_seconds"] < 1.05


def test_the_planners_page_names_files_that_exist():
    page = (DOCS / "planner.md").read_text()
    planning = DOCS.parent / "megatron_augtree" / "planning"
    names = set(re.findall(r"(?<![\w/])(\w+\.py)\b", page))
    assert len(names) > 15 and [name for name in sorted(names) if not (planning / name).is_file()] == []
    assert f"and {MOST_PASSES} |" in page


def test_every_forced_key_has_a_line():
    rows = re.findall(r"^\| `(\w+)` \| ", (DOCS / "planner.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted((*FORCE_KEYS, *RECOMPUTE))
