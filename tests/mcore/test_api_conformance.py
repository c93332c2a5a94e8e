"""Trainers that work as frameworks do, on one rank (two ranks: tests/distributed/api_worker.py)."""

import re
from pathlib import Path

import pytest

from megatron_augtree.mcore import build
from tests.mcore.conformance.run import TRAINERS, compare, glue_lines
from tests.numerics import fixtures as f

ADOPT = Path(__file__).resolve().parents[2] / "docs" / "adopt.md"


@pytest.fixture(scope="module")
def lab():
    build.initialize(f.parse())
    yield f.Lab()
    build.destroy()


@pytest.mark.parametrize("name", [*TRAINERS, "plain"])
def test_gradients_equal_the_trainers_own(lab, name):
    errors = compare(name, lab)
    assert max(errors.values()) < 1e-10, errors


def test_lines_of_glue_are_those_of_the_document():
    counts = glue_lines()
    table = dict(re.findall(r"^\| `(\w+)\.py` \|.*\| (\d+) \|$", ADOPT.read_text(), flags=re.MULTILINE))
    names = {"slime": "slime_style", "verl": "verl_style", "bridge": "bridge_style", "plain": "plain_loop"}
    assert {name: int(table[file]) for name, file in names.items()} == counts
    assert counts["plain"] <= 30
