"""Lays the rewards of two runs of ``team.py`` over each other, and says how far apart they are.

    python -m examples.grpo.curves runs/augtree runs/stock --png runs/rewards.png
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.tools.plot import plot_curve


def read(folder: str) -> list[dict[str, Any]]:
    """The figures of a run.

    Raises:
        InputError: there are none.
    """
    path = os.path.join(folder, "steps.jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            found = [json.loads(text) for text in file]
    except (OSError, ValueError) as error:
        raise InputError("there is no run to draw", values=f"{path}: {type(error).__name__}: {error}",
                         rule="the folder is the --out of examples.grpo.team",
                         remedy="correct it, or train first") from error
    if not found:
        raise InputError("there is no run to draw", values=f"{path}: no step", rule="a run has a step",
                         remedy="train first")
    return found


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Largest differences over the steps that both have: of rewards, and relative ones of their updates."""
    found = {"reward": max(abs(a["reward"] - b["reward"]) for a, b in zip(ours, theirs))}
    for name in ("loss", "grad_norm"):
        pairs = [(x[name], y[name]) for a, b in zip(ours, theirs) for x, y in zip(a["updates"], b["updates"])
                 if name in x and name in y]  # no loss where an update had supervised samples only
        scale = max((abs(y) for _, y in pairs), default=1.0) or 1.0
        found[name] = max((abs(x - y) / scale for x, y in pairs), default=0.0)
    return found


def main() -> int:
    """Draws the picture and prints the differences; 1 where rewards differ by more than ``--limit``."""
    parser = argparse.ArgumentParser(prog="curves", description=__doc__.partition("\n")[0])
    parser.add_argument("ours", help="--out of a run")
    parser.add_argument("theirs", help="--out of another run with the same seed and sizes")
    parser.add_argument("--png", default="rewards.png", help="the picture")
    parser.add_argument("--limit", type=float, default=float("inf"),
                        help="largest difference of rewards allowed")
    args = parser.parse_args()
    try:
        ours, theirs = read(args.ours), read(args.theirs)
    except AugTreeError as error:
        print(error, file=sys.stderr)
        return 2
    names = [os.path.basename(os.path.normpath(folder)) for folder in (args.ours, args.theirs)]
    rewards = [[step["reward"] for step in steps] for steps in (ours, theirs)]
    plot_curve(rewards[0], args.png, label=names[0], title=f"Mean reward: {names[0]} and {names[1]}",
               over={names[1]: rewards[1]})
    found = differences(ours, theirs)
    print(f"{min(len(ours), len(theirs))} steps; largest differences: reward {found['reward']:.1e}, loss "
          f"{found['loss']:.1e} and gradient norm {found['grad_norm']:.1e} of the largest; {args.png}")
    return int(found["reward"] > args.limit)


if __name__ == "__main__":
    raise SystemExit(main())
