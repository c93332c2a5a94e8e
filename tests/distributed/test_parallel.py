"""Tensor parallelism and overlap on four real processes: one launch, a test a case."""

import pytest

from tests.distributed.launching import launch
from tests.distributed.parallel_worker import CASES
from tests.distributed.results import checked


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    return folder, launch("parallel_worker.py", 4, folder)


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_case(played, index):
    folder, output = played
    results = checked(folder, index, list(CASES), 4, output)
    assert len({result.get("message") for result in results}) == 1
