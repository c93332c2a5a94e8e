"""What benchmark scripts share: launching ranks, intervals, and figures in files."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any


def torchrun(ranks: int, *command: str, show: bool = False) -> None:
    """Runs a command on some ranks, one thread each; its output is shown only where it fails, or with `show`.

    Raises:
        SystemExit: the command failed.
    """
    full = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(full, env=environment, capture_output=not show, text=True)
    if done.returncode:
        told = "" if show else f":\n{done.stderr[-4000:]}"
        sys.exit(f"{' '.join(full)}\nended with {done.returncode}{told}")


def interval(values: list[float]) -> tuple[float, float]:
    """80 % interval of the median, by resampling with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[200], medians[1799]


def machine() -> str:
    """What ran this."""
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    """The commit of the checkout that this file is in, if it is one."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


def write_json(path: str, data: Any) -> None:
    """Figures in a file, in one atomic rename."""
    partial = f"{path}.partial"
    Path(partial).write_text(json.dumps(data, indent=1))
    os.replace(partial, path)
