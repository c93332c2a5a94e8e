"""Real processes: one torchrun a world size runs all its cases; here each is looked at by name."""

from pathlib import Path

import pytest

from tests.distributed.cases import CASES
from tests.distributed.launching import launch
from tests.distributed.results import agree, checked, first_failure, read, write


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """world -> (folder of results, output of the launch), launched when first asked for and then kept."""
    known = {}

    def results(world: int) -> tuple[Path, str]:
        if world not in known:
            folder = tmp_path_factory.mktemp(f"world{world}")
            known[world] = folder, launch("worker.py", world, folder)
        return known[world]

    return results


PAIRS = [pytest.param(world, index, id=f"{world} ranks: {case['name']}")
         for world, cases in CASES.items() for index, case in enumerate(cases)]


@pytest.mark.parametrize("world, index", PAIRS)
def test_case(launched, world, index):
    folder, output = launched(world)
    results = checked(folder, index, [case["name"] for case in CASES[world]], world, output)
    # Reduced gradients, parameters and messages are the same on every rank, to the bit.
    assert len({result.get("bits", result.get("message")) for result in results}) == 1, results


def test_ranks_out_of_step_are_noticed_and_named(tmp_path):
    good, own, caught = {"bits": ""}, {"error": "b", "orderly": True}, {"error": "timeout", "orderly": False}
    for index, (results, in_step) in enumerate((
            ([good, good], True), ([own, own], True), ([good, own], False), ([own, caught], False))):
        for rank, result in enumerate(results):
            write(tmp_path, index, rank, result)
        assert agree(tmp_path, index, 2, 1.0) == in_step
    write(tmp_path, 4, 0, good)
    assert not agree(tmp_path, 4, 2, 0.02)
    assert first_failure(tmp_path, ["a", "b"], 2) == "stopped at 'b', rank 0: b; rank 1: b"
    assert first_failure(tmp_path, ["a"], 2) == "no case failed"


def test_launches_are_few():
    """One a world size, and every case has its own name in it."""
    assert set(CASES) == {2, 3, 4, 8}
    assert all(len({case["name"] for case in cases}) == len(cases) for cases in CASES.values())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_some_cases_have_idle_ranks_and_most_have_traffic(launched, world):
    folder, output = launched(world)
    rows, sent = [], []
    for index, case in enumerate(CASES[world]):
        if case["do"] == "parity":
            results = read(folder, index, world)
            assert None not in results, output
            rows.append(min(result["rows"] for result in results))
            sent.append(sum(result["bytes"] for result in results))
    assert 0 in rows and max(rows) > 0
    assert 0 in sent and sum(size > 0 for size in sent) > len(sent) // 2
