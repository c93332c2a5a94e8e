"""Measure this machine: the constants that plans are priced with, in a file for ``--augtree-cluster``.

    python -m megatron_augtree.tools.calibrate --out machine.json [--ranks 2] [--seconds 120]
    torchrun --nnodes 2 --nproc-per-node 8 ... -m megatron_augtree.tools.calibrate --out machine.json

What matters most is measured first, and each quantity has its share of the time: a stage with transfers, the
path between nodes, tiles of few queries, whether transfers hide under tiles, matrix products and layers,
peaks of memory. Fits see half of the sizes; the error on the other half is printed and written. The file is
written at the end, in one rename. docs/calibration.md says what each constant means.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from megatron_augtree.config import AugTreeError, InputError, UnsupportedError
from megatron_augtree.planning.cluster import PRESETS, Cluster, load

DEVICES = ("cpu", "cuda")


def calibrate(
    out_path: str, *, ranks: int = 2, seconds: float = 120.0, device: str | None = None, until: float = 0.0
) -> Cluster:
    """Measures this machine and writes a calibration file.

    Under torchrun every rank calls it, and all return the same; otherwise it starts `ranks` processes.

    Args:
        out_path: the file.
        ranks: processes to start.
        seconds: for everything; a few rounds of each quantity are measured in any case.
        device: ``cpu`` or ``cuda``; default a GPU where there is one.
        until: end of the time, of `time.time`; default `seconds` from now.

    Raises:
        InputError: a file that cannot be written, or numbers out of range.
        UnsupportedError: torch or megatron-core is missing.
        AugTreeError: ranks failed; their messages came before.
    """
    until = until or time.time() + seconds
    _check(out_path, _launched_ranks() or ranks, seconds, device)
    _check_packages()
    if _launched_ranks():
        from megatron_augtree.tools.calibrate_ranks import Calibration  # torch and Megatron: ranks only

        return Calibration(device or "", until).run(out_path)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "megatron_augtree.tools.calibrate",
        "--out",
        out_path,
        "--until",
        str(until),
    ]
    command += ["--device", device] if device else []
    paths = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths})
    if ended.returncode:
        raise AugTreeError(
            "the calibration failed",
            values=f"{ranks} ranks ended with code {ended.returncode}",
            rule="all ranks measure together; nothing is written where one fails",
            remedy="read the ranks' first message above",
        )
    return load(out_path)


def _launched_ranks() -> int:
    """Ranks that torchrun started; 0 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 0


def _check(out_path: str, ranks: int, seconds: float, device: str | None) -> None:
    folder = Path(out_path).resolve().parent
    rules = (
        (2 <= ranks < 1 << 16, f"--ranks {ranks}", "transfers need at least 2 ranks"),
        (0 < seconds < 86400, f"--seconds {seconds}", "the time is above 0 and below a day"),
        (device is None or device in DEVICES, f"--device {device}", f"the device is {' or '.join(DEVICES)}"),
        (
            folder.is_dir() and os.access(folder, os.W_OK) and not Path(out_path).is_dir(),
            f"--out {out_path}",
            "the file's folder exists and can be written to",
        ),
    )
    broken = [(found, rule) for holds, found, rule in rules if not holds]
    if broken:
        raise InputError(
            "cannot calibrate",
            values=", ".join(found for found, _ in broken),
            rule="; ".join(rule for _, rule in broken),
            remedy="correct the flag",
        )


def _check_packages() -> None:
    missing = [name for name in ("torch", "megatron", "psutil") if find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            "measuring needs what training needs",
            values=f"no package {', '.join(missing)}",
            rule="calibrate runs torch and megatron-core; the presets need neither",
            remedy="pip install megatron-augtree[train], or name a preset",
        )


def table(cluster: Cluster, against: Cluster | None = None) -> str:
    """Constants as text, beside those of a preset."""
    shown = [c for c in (cluster, against) if c is not None]
    lines = [f"{'constant':24}" + "".join(f"{name:>22}" for name in ("measured", "preset")[: len(shown)])]
    for field in fields(Cluster):
        values = [getattr(c, field.name) for c in shown]
        if field.name != "name":
            texts = [str(v) if isinstance(v, bool) else f"{v:,}" for v in values]
            lines.append(f"{field.name:24}" + "".join(f"{text:>22}" for text in texts))
    return "\n".join(lines)


def nearest(cluster: Cluster) -> Cluster | None:
    """The preset whose name stands in a measured machine's; None where there is none."""
    return next((c for c in PRESETS.values() if c.name in cluster.name.lower()), None)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 2 for what a user can cause."""
    parser = argparse.ArgumentParser(
        prog="calibrate",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="where the constants go, JSON")
    parser.add_argument("--ranks", type=int, default=2, help="processes to start; under torchrun, its own")
    parser.add_argument("--seconds", type=float, default=120.0, help="for everything")
    parser.add_argument("--device", choices=DEVICES, help="default a GPU where there is one")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if _launched_ranks():
        import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported
        from megatron_augtree.mcore import launch  # torch and Megatron: ranks only

        launch.run(lambda: _work(args))  # ends the process, the others' too where this rank fails
    try:
        _work(args)
    except AugTreeError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _work(args: argparse.Namespace) -> None:
    cluster = calibrate(
        args.out, ranks=args.ranks, seconds=args.seconds, device=args.device, until=args.until
    )
    # Ranks that `calibrate` started leave the table to the process that started them.
    if not args.until and os.environ.get("RANK", "0") == "0":
        print(table(cluster, nearest(cluster)))
        print(f"\nwritten to {args.out}: --augtree-cluster {args.out}")


if __name__ == "__main__":
    sys.exit(main())
