"""The check: `ring` replays the recorded rollouts in fp64 and must find what AugTree finds.

    torchrun --standalone --nproc-per-node 2 -m examples.grpo.verify --out demo_out

Two runs start from the training's first weights and step with SGD on the recorded groups, whose old log-probs
are those of the policies that sampled them: `augtree` computes a prompt once, `ring` with every response.
After every step their log-probs, gradient norms and parameters are compared. Writes ``verify.json``.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from examples.grpo import common
from megatron_augtree.config import InputError
from megatron_augtree.data.groups import Group, read_groups
from megatron_augtree.mcore import build, launch
from megatron_augtree.mcore.weights import parameters_of


def difference(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest absolute difference over the largest expected magnitude, or over `floor` where that is more."""
    return float((found - expected).abs().max() / max(float(expected.abs().max()), floor))


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """:func:`difference` of the worst tensor; magnitudes are floored at 1e-3 of the largest tensor's."""
    floor = 1e-3 * max(float(tensor.abs().max()) for tensor in expected.values())
    return max(difference(found[name], tensor, floor) for name, tensor in expected.items())


def compare(steps: Sequence[list[Group]], settings: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Plays the steps in both modes, side by side.

    Args:
        steps: the groups of every step.
        settings: fp64 and SGD.
        seed: of the weights that training started from.

    Returns:
        A dictionary a step: differences, how far the parameters moved, clip counts, rows, seconds.
    """
    runs = {mode: common.Run(settings, mode, seed) for mode in ("augtree", "ring")}
    start = parameters_of(runs["ring"].model)
    table = []
    for number, groups in enumerate(steps, start=1):
        seen, seconds = {}, {}
        for mode, run in runs.items():
            clock = time.perf_counter()
            seen[mode] = run.update(groups)
            seconds[mode] = time.perf_counter() - clock
        (batch, ours, norm), (_, ring, ring_norm) = seen["augtree"], seen["ring"]
        weights, ring_weights = (parameters_of(run.model) for run in runs.values())
        low, high = common.clip_counts(ring)
        table.append({
            "step": number,
            "logprobs": difference(ours.values[:, 0], ring.values[:, 0]),
            "grad_norm": abs(norm - ring_norm) / ring_norm,
            "parameters": largest_difference(weights, ring_weights),
            "moved": largest_difference(ring_weights, start),
            "clipped_low": low,
            "clipped_high": high,
            "rows": batch.forest.shape.total_rows,
            "unshared_rows": batch.unshared_rows,
            "seconds": seconds,
        })
        tell(table[-1])
    return table


def tell(row: Mapping[str, Any]) -> None:
    """One line for a step."""
    common.say(
        f"replay {row['step']:3d}  log-probs {row['logprobs']:.0e}, gradient norm {row['grad_norm']:.0e}, "
        f"parameters {row['parameters']:.0e} apart (moved {row['moved']:.1e})  clipped {row['clipped_low']} "
        f"low, {row['clipped_high']} high  augtree {row['seconds']['augtree']:.2f} s, ring "
        f"{row['seconds']['ring']:.2f} s")


def parse() -> argparse.Namespace:
    """The program's flags."""
    parser = launch.RankParser(prog="verify", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="demo_out", help="the folder that train.py wrote")
    parser.add_argument("--lr", type=float, default=0.3)
    return parser.parse_args()


def recorded(folder: str) -> tuple[list[list[Group]], int]:
    """What train.py wrote: the groups of every recorded step, and the seed of the first weights.

    Raises:
        InputError: a file is missing or not what train.py writes.
    """
    path = os.path.join(folder, "train.json")
    try:
        with open(path, encoding="utf-8") as file:
            training = json.load(file)
        size, seed = int(training["groups"]), int(training["seed"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("there is no training to replay", values=f"{path}: {type(error).__name__}: {error}",
                         rule="--out is the folder that examples.grpo.train wrote to its end",
                         remedy="correct --out, or train first") from error
    groups = read_groups(os.path.join(folder, "rollouts.jsonl.gz"))
    return [groups[start:start + size] for start in range(0, len(groups), size)], seed


def main() -> None:
    """Replays what train.py recorded, and writes the differences on rank 0."""
    args = launch.agree(parse)
    steps, seed = launch.agree(lambda: recorded(args.out))
    settings = common.parse(["--dtype", "float64", "--optimizer", "sgd", "--lr", str(args.lr)])
    build.initialize(settings, seed=seed)
    table = compare(steps, settings, seed)
    launch.agree_on_rank_0(lambda: common.write_json(args.out, "verify.json", table))


if __name__ == "__main__":
    launch.run(main)
