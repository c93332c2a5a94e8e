"""What several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_augtree.planning import native


@pytest.fixture(params=["python", "core"])
def engine(request) -> Iterator[str]:
    """Both twins. The core is absent only where it cannot be built, see test_joint.test_the_core_is_built."""
    if request.param == "core":
        if native.core() is None:
            pytest.skip("no C++ core")
        yield request.param
    else:
        with native.without_core():
            yield request.param
