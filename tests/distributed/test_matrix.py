"""The parity matrix on real processes: TP, SP, recompute, plans, overlap, distributed optimizer, freezing."""

from itertools import combinations

import pytest
import torch

from megatron_augtree.mcore import build
from tests.distributed.launching import launch
from tests.distributed.matrix import FACTORS, MODELS, cases, name_of
from tests.distributed.results import checked
from tests.numerics import fixtures as f

WORLDS = {world: [case for case in cases() if case["world"] == world] for world in FACTORS["world"]}


@pytest.fixture(scope="session")
def oracles(tmp_path_factory):
    """A file with groups, un-shared outcome and starting weights of every model and data set."""
    path = tmp_path_factory.mktemp("matrix") / "oracles.pt"
    found = {}
    build.initialize(f.parse())
    try:
        for name, text in MODELS.items():
            lab = f.Lab(text)
            for data in FACTORS["data"]:
                groups, outcome = lab.data(data)
                found[name, data] = groups, outcome, lab.start
    finally:
        build.destroy()
    torch.save(found, path)
    return path


@pytest.fixture(scope="session")
def played(oracles, tmp_path_factory):
    """world -> (folder of results, output of the launch)."""
    known = {}

    def results(world: int):
        if world not in known:
            folder = tmp_path_factory.mktemp(f"matrix{world}")
            known[world] = folder, launch("matrix_worker.py", world, oracles, folder)
        return known[world]

    return results


PAIRS = [pytest.param(world, index, id=name_of(case))
         for world, found in WORLDS.items() for index, case in enumerate(found)]


@pytest.mark.parametrize("world, index", PAIRS)
def test_parity(played, world, index):
    folder, output = played(world)
    results = checked(folder, index, [name_of(case) for case in WORLDS[world]], world, output)
    assert all(result["errors"] for result in results)


def test_every_pair_is_there():
    met = {(a, case[a], b, case[b]) for case in cases() for a, b in combinations(FACTORS, 2)}
    wanted = {(a, x, b, y) for a, b in combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b]}
    assert wanted == met
