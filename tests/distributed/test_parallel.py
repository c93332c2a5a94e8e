"""Tensor parallelism and overlap on four real processes: one launch, a test a case."""

import pytest

from tests.distributed.launching import launch
from tests.distributed.parallel_worker import CASES
from tests.distributed.results import first_failure, read

BAR = 1e-10


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    return folder, launch("parallel_worker.py", 4, folder)


@pytest.mark.parametrize("index", range(len(CASES)), ids=CASES)
def test_case(played, index):
    folder, output = played
    results = read(folder, index, 4)
    assert None not in results, f"{first_failure(folder, list(CASES), 4)}\n{output}"
    for rank, result in enumerate(results):
        assert "error" not in result, f"rank {rank}:\n{result['error']}"
        assert all(value < BAR for value in result.get("errors", {}).values()), (rank, result)
    assert len({result.get("message") for result in results}) == 1
