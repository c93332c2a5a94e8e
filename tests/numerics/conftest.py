"""One process stands for all ranks: megatron-core on the CPU, and a model with its oracle."""

import pytest

from megatron_augtree.mcore import build
from tests.numerics.fixtures import Lab, parse


@pytest.fixture(scope="module")
def megatron():
    build.initialize(parse())
    yield
    build.destroy()


@pytest.fixture(scope="module")
def lab(megatron):
    return Lab()
