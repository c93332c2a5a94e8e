"""Result files of a launch: how ranks agree after a case without using the process group."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

#: Relative error of fp64 runs that is rounding.
BAR = 1e-10


def write(folder: Path, index: int, rank: int, result: dict) -> None:
    """A rank's result of a case, in one rename."""
    path = folder / f"{index}.{rank}.json"
    path.with_suffix(".partial").write_text(json.dumps(result))
    os.replace(path.with_suffix(".partial"), path)


def read(folder: Path, index: int, world: int) -> list[dict | None]:
    """[rank] -> its result, None where there is none."""
    paths = [folder / f"{index}.{rank}.json" for rank in range(world)]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]


def agree(folder: Path, index: int, world: int, patience_s: float) -> bool:
    """Whether all ranks came through a case in step; waits for their results.

    In step are results of all ranks, and errors of all ranks that each found by itself (``orderly``). An
    error on some, or one that came from waiting for another, means that nothing that follows could be
    trusted.
    """
    end = time.monotonic() + patience_s
    while None in (results := read(folder, index, world)):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    failed = [result for result in results if "error" in result]
    return not failed or len(failed) == world and all(result["orderly"] for result in failed)


def checked(folder: Path, index: int, names: list[str], world: int, output: str) -> list[dict]:
    """[rank] a case's results: all are there, none is an error, and no figure is at `BAR` or above."""
    results = read(folder, index, world)
    assert None not in results, f"{first_failure(folder, names, world)}\n{output}"
    errors = {rank: result["error"] for rank, result in enumerate(results) if "error" in result}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
    for rank, result in enumerate(results):
        assert all(value < BAR for value in result.get("errors", {}).values()), (rank, result)
    return results


def first_failure(folder: Path, names: list[str], world: int) -> str:
    """The first case that any rank failed in, or never ended, with what each such rank said."""
    for index, name in enumerate(names):
        results = read(folder, index, world)
        bad = {rank: "nothing" if r is None else r["error"] for rank, r in enumerate(results)
               if r is None or "error" in r}
        if bad:
            return f"stopped at {name!r}, " + "; ".join(f"rank {rank}: {text}" for rank, text in bad.items())
    return "no case failed"
