"""What the demo proved, from the figures that training and replay wrote; fails where a claim does not hold.

    python -m examples.grpo.report --out demo_out
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from examples.grpo import task

#: Mean reward of the last WINDOW steps less that of the first; accuracy's distance from chance; differences.
WINDOW, GAIN, CONTROL, LIMIT = 10, 0.3, 0.1, 1e-8


def training_claims(found: Mapping[str, Any]) -> dict[str, bool]:
    """Claims about the training, and whether they hold.

    Args:
        found: what train.py wrote.
    """
    steps = found["steps"]
    first, last = (mean(step["reward"] for step in part) for part in (steps[:WINDOW], steps[-WINDOW:]))
    recorded = steps[: found["recorded_steps"]]
    low, high = (sum(step[side] for step in recorded) for side in ("clipped_low", "clipped_high"))
    right, wrong = found["accuracy"], found["shuffled_accuracy"]
    return {
        f"mean reward rose from {first:.3f} (first {WINDOW} steps) to {last:.3f} (last {WINDOW} of "
        f"{len(steps)}), by {last - first:.3f} (at least {GAIN})": last - first >= GAIN,
        f"accuracy on new questions is {right:.3f} (at least {task.CHANCE + GAIN}); with shuffled prompts "
        f"{wrong:.3f} (within {CONTROL} of chance, {task.CHANCE})":
            abs(wrong - task.CHANCE) <= CONTROL and right >= task.CHANCE + GAIN,
        f"clipping held {low} ratios from below and {high} from above in the first {len(recorded)} steps":
            min(low, high) > 0,
    }


def replay_claims(steps: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Claims about the replay, and whether they hold.

    Args:
        steps: what verify.py wrote.
    """
    worst = {name: max(step[name] for step in steps) for name in ("logprobs", "grad_norm", "parameters")}
    low, high = (sum(step[side] for step in steps) for side in ("clipped_low", "clipped_high"))
    rows, unshared = (sum(step[name] for step in steps) for name in ("rows", "unshared_rows"))
    ours, ring = (sum(step["seconds"][mode] for step in steps) for mode in ("augtree", "ring"))
    moved = steps[-1]["moved"]
    return {
        f"ring agrees at each of {len(steps)} steps in fp64: log-probs to {worst['logprobs']:.0e}, gradient "
        f"norm to {worst['grad_norm']:.0e}, parameters to {worst['parameters']:.0e} (at most {LIMIT:.0e})":
            max(worst.values()) <= LIMIT,
        f"these steps moved the parameters by {moved:.0%} of their largest; clipping held {low} ratios from "
        f"below and {high} from above": moved > 0.01 and min(low, high) > 0,
        f"they took {rows} rows and {ours:.1f} s by augtree, {unshared} rows and {ring:.1f} s by ring":
            rows < unshared,
    }


def main() -> int:
    """Prints the claims; 1 where one does not hold."""
    parser = argparse.ArgumentParser(prog="report", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="demo_out", help="the folder that train.py and verify.py wrote")
    out = parser.parse_args().out
    with open(os.path.join(out, "train.json"), encoding="utf-8") as training:
        claims = training_claims(json.load(training))
    with open(os.path.join(out, "verify.json"), encoding="utf-8") as replay:
        claims |= replay_claims(json.load(replay))
    for text, holds in claims.items():
        print(f"  {'holds' if holds else 'FAILS'}: {text}")
    print(f"  pictures: {os.path.join(out, 'reward.png')}, {os.path.join(out, 'plan.png')}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
