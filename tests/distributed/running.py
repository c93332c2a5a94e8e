"""How a worker runs its cases: a result file a case and rank, and an end where ranks are out of step."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

from megatron_augtree.config import AugTreeError
from tests.distributed.results import agree, write

#: Seconds that ranks wait for each other, in the process group and between cases.
PATIENCE = 60


def bound(worker: object, case: dict) -> Callable[[], dict]:
    """A case as a function: what it does, with its own arguments."""
    fields = {key: value for key, value in case.items() if key not in ("do", "name")}
    return functools.partial(getattr(worker, case["do"]), **fields)


def run(cases: Iterable[tuple[int, Callable[[], dict]]], folder: Path) -> None:
    """Runs cases in the given order; each comes with its number, and returns a result for its file."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for index, case in cases:
        start = time.monotonic()
        try:
            result = case()
        except Exception as error:
            orderly = isinstance(error, (AssertionError, AugTreeError))
            result = {"error": traceback.format_exc(), "orderly": orderly}
        write(folder, index, rank, {**result, "seconds": time.monotonic() - start})
        if not agree(folder, index, world, 2 * PATIENCE):
            # Ranks are out of step: nothing that follows would mean anything.
            os._exit(1)
