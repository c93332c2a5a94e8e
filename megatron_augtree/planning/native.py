"""The optional C++ core: whether it is there, and the tables that cross to it.

`megatron_augtree._core` (csrc/) holds bit-for-bit twins of pure-Python integer functions. An installation
without a compiler or without pybind11 has none, and everything works without it. Only this file imports it; a
caller asks

    core = native.core()
    table = native.table(times) if core else None
    return pure(times) if table is None else core.twin(table)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType

import numpy as np

#: What the core takes, gives and computes; csrc/module.cpp holds the same number.
VERSION = 18

#: Integers that cross to the core stay below this in magnitude, so that the sum of two fits into 64 bits.
LIMIT = 2**62

_absent: ContextVar[bool] = ContextVar("_absent", default=False)


def core() -> ModuleType | None:
    """The C++ core; None where it is not built, is of another version, or is hidden by `without_core`."""
    return None if _absent.get() else _load()


@contextmanager
def without_core() -> Iterator[None]:
    """Within this block `core` gives None: pure Python runs, for tests and benchmarks."""
    token = _absent.set(True)
    try:
        yield
    finally:
        _absent.reset(token)


def table(values: np.ndarray | Sequence) -> np.ndarray | None:
    """Integers, nested or not, as a contiguous int64 array of the same shape.

    Returns:
        None where a value is no integer below `LIMIT` in magnitude: then the caller runs pure Python.
    """
    found = np.asarray(values)
    if found.size == 0:
        return np.zeros(found.shape, np.int64)
    if found.dtype.kind != "i" or found.max() >= LIMIT or found.min() <= -LIMIT:
        return None
    return found.astype(np.int64, order="C", copy=False)


@cache
def _load() -> ModuleType | None:
    try:
        from megatron_augtree import _core
    except ImportError:
        return None
    return _core if getattr(_core, "VERSION", None) == VERSION else None
