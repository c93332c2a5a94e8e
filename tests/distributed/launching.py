"""How tests start real processes: one torchrun, with a limit that nothing outlives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Seconds for all cases of a world; several times what two cores need.
LIMIT = 900


def launch(worker: str, world: int, *arguments: object) -> str:
    """Run a worker of this folder; returns the tail of its output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
               str(ROOT / "tests" / "distributed" / worker), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    start = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, start_new_session=True, cwd=ROOT) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nstopped after {LIMIT} seconds"
    return f"exit code {process.returncode} after {time.monotonic() - start:.0f} s\n{output[-4000:]}"
