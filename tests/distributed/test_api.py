"""The public API on real processes: one torchrun a world size; here each case is looked at by name."""

import pytest

from tests.distributed.api_cases import CASES
from tests.distributed.launching import launch
from tests.distributed.results import checked


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """world -> (folder of results, output of the launch), launched when first asked for and then kept."""
    known = {}

    def results(world: int):
        if world not in known:
            folder = tmp_path_factory.mktemp(f"api{world}")
            known[world] = folder, launch("api_worker.py", world, folder)
        return known[world]

    return results


PAIRS = [
    pytest.param(world, index, id=f"{world} ranks: {case['name']}")
    for world, cases in CASES.items()
    for index, case in enumerate(cases)
]


@pytest.mark.parametrize("world, index", PAIRS)
def test_case(launched, world, index):
    folder, output = launched(world)
    results = checked(folder, index, [case["name"] for case in CASES[world]], world, output)
    # An error is the same text on every rank.
    assert len({result.get("message") for result in results}) == 1, results


def test_names_are_different():
    assert all(len({case["name"] for case in cases}) == len(cases) for cases in CASES.values())
