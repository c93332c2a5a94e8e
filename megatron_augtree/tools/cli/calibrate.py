"""``augtree calibrate``: measures this machine's constants."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

from megatron_augtree.tools import calibrate
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.output import Answer

HELP = "measure this machine: constants for --cluster and --augtree-cluster"
EXAMPLES = """\
  augtree calibrate --out machine.json
  augtree calibrate --out machine.json --ranks 8 --device cuda --seconds 60
  augtree plan --demo --cluster machine.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--out", required=True, metavar="FILE", help="where the constants go, JSON")
    parser.add_argument("--ranks", type=options.positive, default=2, metavar="N",
                        help="processes to start (default 2)")
    parser.add_argument("--seconds", type=float, default=120.0, metavar="S",
                        help="for everything (default 120)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None,
                        help="default a GPU where there is one")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    with _quiet() if args.json else nullcontext():
        cluster = calibrate.calibrate(args.out, ranks=args.ranks, seconds=args.seconds, device=args.device)
    data = {"out": args.out, "digest": cluster.digest(), "cluster": asdict(cluster)}
    told = f"written to {args.out}: use it with --cluster {args.out}, or --augtree-cluster in a run"
    return Answer(data, [calibrate.table(cluster, calibrate.nearest(cluster)), told])


@contextmanager
def _quiet() -> Iterator[None]:
    """What processes print meanwhile goes to stderr: stdout holds JSON only."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
