"""GRPO from scratch on CPU ranks: rollouts from the current policy, rewards, an update by AugTree.

    torchrun --standalone --nproc-per-node 2 -m examples.grpo.train --out demo_out

Rollouts are one update behind: those of step t + 1 are sampled before update t, so that sampling and updating
could run side by side. Ratios of new to old policy are therefore not 1, and clipping has something to do.

Writes into the folder: ``rollouts.jsonl.gz`` (the groups of the first steps, for verify.py), ``train.json``
(figures of every step and of the evaluation), ``plan.json``, ``plan.png`` and ``reward.png``.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import os
import time
from statistics import mean
from typing import Any

import torch.distributed as dist

from examples.grpo import common, task
from examples.grpo.rollout import accuracy, rollouts
from megatron_augtree.data.groups import Group, write_groups
from megatron_augtree.mcore import build, launch
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.mcore.weights import check_folder
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.runtime.engine import StepResult
from megatron_augtree.tools.plot import plot_curve, plot_plan

#: Steps of one line of output.
WINDOW = 10


def parse() -> argparse.Namespace:
    """The program's flags."""
    parser = launch.RankParser(prog="train", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="demo_out", help="folder for what is written")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--record", type=int, default=20, help="steps whose rollouts are written")
    parser.add_argument("--groups", type=int, default=7, help="groups a step")
    parser.add_argument("--samples", type=int, default=12, help="responses a group")
    parser.add_argument("--questions", type=int, default=256, help="questions of the evaluation")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def figures(questions: list[task.Question], groups: list[Group], batch: StepBatch, result: StepResult) \
        -> dict[str, Any]:
    """What is kept of a step."""
    low, high = common.clip_counts(result)
    answered = [(question, r) for question, group in zip(questions, groups) for r in group.responses]
    return {
        "reward": mean(response.reward for _, response in answered),
        "accuracy": mean(task.is_right(question, response.tokens) for question, response in answered),
        "loss": result.loss,
        "clipped_low": low,
        "clipped_high": high,
        "min_ratio": result.metrics["min/ratio"],
        "max_ratio": result.metrics["max/ratio"],
        "entropy": result.metrics["entropy"],
        "rows": batch.forest.shape.total_rows,
        "unshared_rows": batch.unshared_rows,
        "plan_seconds": batch.plan_seconds,
        "predicted_seconds": batch.plan.seconds,
        "idle": batch.idle,
    }


def train(args: argparse.Namespace, run: common.Run) -> tuple[list[dict[str, Any]], list[Group], StepBatch]:
    """The training loop.

    Returns:
        Figures of every step; the recorded groups, step after step; the last recorded step as it was planned.
    """
    curve, recorded, planned = [], [], None
    clock = time.perf_counter()

    def sampled(step: int) -> tuple[list[task.Question], list[Group]]:
        questions = task.questions_of_step(args.seed, step, args.groups)
        return questions, rollouts(run.model, questions, args.samples, seed=args.seed, step=step)

    current = sampled(0)
    for step in range(args.steps):
        following = sampled(step + 1)  # by weights that this step's update has not touched yet
        between = time.perf_counter()
        questions, groups = current
        batch, result, norm = run.update(groups)
        done = time.perf_counter()
        if step < args.record:
            recorded += groups
            planned = batch
        curve.append({**figures(questions, groups, batch, result), "grad_norm": norm,
                      "sample_seconds": between - clock, "update_seconds": done - between})
        if step % WINDOW == WINDOW - 1:
            tell(step + 1, curve[-WINDOW:])
        current, clock = following, done
    return curve, recorded, planned


def tell(step: int, window: list[dict[str, Any]]) -> None:
    """One line for the last steps."""
    average = {name: mean(point[name] for point in window) for name in window[0]}
    low, high = (sum(point[side] for point in window) for side in ("clipped_low", "clipped_high"))
    common.say(
        f"step {step:4d}  reward {average['reward']:.3f}  accuracy {average['accuracy']:.3f}  clipped {low} "
        f"low, {high} high  rows {average['rows']:.0f} of {average['unshared_rows']:.0f}  a step: "
        f"{average['sample_seconds']:.2f} s sampling, {average['update_seconds']:.2f} s updating (planned in "
        f"{average['plan_seconds']:.3f}, predicted {average['predicted_seconds']:.2f}, idle "
        f"{average['idle']:.0%})")


def evaluate(args: argparse.Namespace, run: common.Run) -> dict[str, float]:
    """Accuracy on new questions, and on the same questions with shuffled prompts."""
    questions = task.questions_of_step(args.seed, -1, args.questions)
    return {
        "accuracy": accuracy(run.model, questions, seed=args.seed),
        "shuffled_accuracy": accuracy(run.model, task.shuffle_prompts(questions), seed=args.seed),
    }


def write(args: argparse.Namespace, run: common.Run, curve: list[dict[str, Any]], recorded: list[Group],
          planned: StepBatch, found: dict[str, float]) -> None:
    """Files and pictures, by one rank.

    Raises:
        InputError: a file cannot be written.
    """

    def path(name: str) -> str:
        return os.path.join(args.out, name)

    write_groups(path("rollouts.jsonl.gz"), recorded)
    common.write_json(args.out, "plan.json", planned.plan.to_json())
    with common.written(args.out):
        plot_plan(planned.plan, run.shape, cluster_of(run.config.cluster), path("plan.png"))
        plot_curve([point["reward"] for point in curve], path("reward.png"),
                   levels={"best without reading the prompt": task.CHANCE},
                   title=f"Mean reward of {args.groups} groups of {args.samples} responses")
    figures_of_run = {**vars(args), **found, "recorded_steps": args.record, "steps": curve}
    common.write_json(args.out, "train.json", figures_of_run)  # last: verify.py asks for it first


def main() -> None:
    """Trains, evaluates, and writes the results on rank 0."""
    args = launch.agree(parse)
    launch.agree_on_rank_0(lambda: check_folder(args.out, "--out"))
    settings = common.parse(["--lr", str(args.lr), "--clip-grad", "1.0", "--adam-beta2", "0.99"])
    build.initialize(settings, seed=args.seed)
    run = common.Run(settings, "augtree", args.seed)
    size = sum(parameter.numel() for parameter in run.model.parameters())
    common.say(f"GRPO from scratch on {dist.get_world_size()} ranks: {size} parameters, {args.steps} steps "
               f"of {args.groups} prompts of {task.PROMPT_TOKENS[0]} to {task.PROMPT_TOKENS[1]} tokens, "
               f"{args.samples} responses each")
    curve, recorded, planned = train(args, run)
    common.say(f"the plan of step {args.record}\n{planned.plan}")
    found = evaluate(args, run)
    common.say(f"accuracy {found['accuracy']:.3f}, with shuffled prompts {found['shuffled_accuracy']:.3f}, "
               f"chance {task.CHANCE:.3f}")
    launch.agree_on_rank_0(lambda: write(args, run, curve, recorded, planned, found))


if __name__ == "__main__":
    launch.run(main)
