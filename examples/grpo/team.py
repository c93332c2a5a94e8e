"""GRPO as a team runs it, on AugTree's public API. Copy it: `Training.step` is the loop.

    torchrun --standalone --nproc-per-node 2 -m examples.grpo.team --context-parallel-mode augtree \
        --prompt-tokens 200 --out runs/augtree
    torchrun --standalone --nproc-per-node 2 -m examples.grpo.team --prompt-tokens 200 --out runs/stock
    python -m examples.grpo.curves runs/augtree runs/stock --png runs/rewards.png

A step: sample groups; drop those that say nothing; plan each mini-batch once; with that plan, log-probs of
the policy that sampled and of the reference; then several optimizer steps. In the first of them the policy
has not moved yet, so its ratio must be exactly 1 and its divergence exactly 0: checked in every step.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from statistics import mean
from typing import Any

from megatron.core import parallel_state
from tqdm import tqdm

from examples.grpo import common, team_flags
from examples.grpo.policy import Policy
from examples.grpo.sources import Replayed, Sampled, Task, usable
from examples.grpo.steps import (
    AugTreeSteps,
    MiniBatch,
    StockSteps,
    make_mini_batch,
    pool_total,
    supervised_jobs,
)
from examples.grpo.task import Retrieval
from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.data.groups import Group, fingerprint, fold, read_groups, truncate
from megatron_augtree.mcore import launch
from megatron_augtree.mcore.arguments import augtree_config
from megatron_augtree.mcore.objective import check_groups, loss_config
from megatron_augtree.mcore.pretrained import Pretrained
from megatron_augtree.mcore.weights import check_folder

FIGURES = "steps.jsonl"


class Training:
    """A run, new or resumed; what a user can get wrong is behind it when it is made.

    Args:
        args: of `team_flags.parse`; the process groups exist.
        pretrained: the first weights, where they are not made from the seed.
        task: what is asked and rewarded; not used with ``--data``.
        groups: of the file of ``--data``.
    """

    def __init__(
        self, args: argparse.Namespace, pretrained: Pretrained | None, task: Task, groups: list[Group]
    ) -> None:
        self.args, self.loss = args, loss_config(args)
        data = (
            f"groups {fingerprint(groups)[:16]}" if groups
            else f"{args.init}, prompts {args.prompt_tokens}, responses {args.response_tokens}"
        )
        data += f"; {args.groups} groups of {args.samples} a step, seed {args.seed}"
        config = augtree_config(args)
        self.policy = Policy(args, config, data, pretrained)
        place = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        )
        self.ended = task.has_answered if args.drop_overlong else None
        self.replays = bool(groups)
        self.source = (
            Replayed(groups, args.groups, place) if groups
            else Sampled(task, self.policy.model, args.groups, args.samples, args.seed,
                         self.loss.temperature, place)
        )
        self.steps = (
            StockSteps(self.policy.ddp, self.loss) if config is None
            else AugTreeSteps(self.policy.handle, self.loss)
        )

    def run(self) -> list[dict[str, Any]]:
        """All steps that are left, with figures, lines and checkpoints.

        Returns:
            Figures of every step, those before a resumption included.
        """
        args, first = self.args, self.policy.first
        curve = launch.agree(lambda: read_figures(args.out, first))
        launch.agree_on_rank_0(lambda: write_figures(args.out, curve))
        with tqdm(total=args.steps, initial=first, unit="step", leave=False,
                  disable=launch.env_rank() != 0 or not sys.stderr.isatty()) as bar:
            for step in range(first, args.steps):
                curve.append(self.step(step))
                launch.agree_on_rank_0(lambda: write_figures(args.out, curve[-1:], "a"))
                if launch.env_rank() == 0:
                    bar.write(line(curve[-1], args.steps), file=sys.stdout)
                    sys.stdout.flush()
                bar.update()
                if args.save and ((step + 1) % args.save_interval == 0 or step + 1 == args.steps):
                    self.policy.save(step + 1)
        return curve

    def step(self, step: int) -> dict[str, Any]:
        """A rollout and the optimizer steps on it; collective, also on a rank that has no sample."""
        args, clock = self.args, time.perf_counter()
        self.policy.settle()
        rolled = self.source.of_step(step)
        kept = {n: usable(group, self.loss.advantage, self.ended) for n, group in rolled.items()}
        sampled = time.perf_counter()

        works = [
            self.steps.prepare(make_mini_batch(
                [group for n, group in kept.items() if group is not None and n % args.mini_batches == part],
                self.loss.temperature))
            for part in range(args.mini_batches)
        ]
        self.score(works, step)
        fresh = step == 0 or not self.replays  # the policy that sampled is the one that is about to move
        updates = []
        for epoch in range(args.epochs):
            for part, work in enumerate(works):
                found = self.update(work, f"{step} {epoch} {part}")
                if found is not None and not updates and fresh:
                    check_unmoved(found, with_reference=step == 0 and self.loss.kl_coef > 0)
                updates += [found] if found is not None else []
        return {
            "step": step,
            **rollout_figures(rolled, kept),
            "updates": updates,
            "sample_seconds": sampled - clock,
            "update_seconds": time.perf_counter() - sampled,
        }

    def score(self, works: list[MiniBatch], step: int) -> None:
        """Log-probs of the policy that sampled, and of the reference, with the plans of the updates."""
        if not self.replays:
            for work in works:
                work.old = self.steps.logprobs(work)
        if self.loss.kl_coef or self.replays:
            with self.policy.reference():
                for work in works:
                    work.ref = self.steps.logprobs(work)
        if self.replays:
            for work in works:
                work.old = work.ref

    def update(self, work: MiniBatch, name: str) -> dict[str, Any] | None:
        """One optimizer step; None where no rank has anything to step on.

        Adam and weight decay would move the weights on a gradient of zero, too: so there is no step then.
        """
        args = self.args
        supervised = None
        if args.sft:
            supervised = supervised_jobs(self.source.gold(name, args.sft), args.sft_weight)
        elif not work.denominators.tokens:
            return None
        self.policy.forget_gradients()
        found = self.steps.gradients(work, supervised)
        return {**found, "grad_norm": self.policy.step()}


def check_unmoved(found: dict[str, Any], *, with_reference: bool) -> None:
    """Fail, on all ranks alike, where the first update sees another policy than the one that sampled.

    Args:
        found: metrics of the update.
        with_reference: the reference's weights are the policy's, too.

    Raises:
        AugTreeError: a ratio that is not exactly 1, or a divergence that is not exactly 0.
    """
    wanted = {"min/ratio": 1.0, "max/ratio": 1.0, "max/kl_to_old": 0.0}
    if with_reference:
        wanted["kl"] = 0.0
    sampled = found.get("tokens", 0) > 0
    wrong = {name: found[name] for name, value in wanted.items() if sampled and found[name] != value}
    if wrong:
        raise AugTreeError(
            "log-probs of the same weights differ",
            values=", ".join(f"{name} {value!r}" for name, value in wrong.items()),
            rule="before its first step the policy is the one that sampled: ratio exactly 1, KL exactly 0. "
            "With like= plans, old, reference and current log-probs are computed alike, to the bit",
            remedy="plan the samples once, pass like= everywhere, and change no weight in between",
        )


def rollout_figures(rolled: dict[int, Group], kept: dict[int, Group | None]) -> dict[str, float]:
    """Rewards and counts over all ranks; collective."""
    rewards = [r.reward for group in rolled.values() for r in group.responses]
    used = [group for group in kept.values() if group is not None]
    names = ("reward", "right", "responses", "groups", "kept_groups", "samples")
    values = (sum(rewards), sum(reward > 0 for reward in rewards), len(rewards), len(rolled), len(used),
              sum(len(group.responses) for group in used))
    found = dict(zip(names, pool_total(values)))
    for name in ("reward", "right"):
        found[name] /= max(found["responses"], 1)
    return found


def line(found: dict[str, Any], last: int) -> str:
    """A step as one line of text."""
    cells = [
        f"step {found['step'] + 1:>{len(str(last))}}/{last}",
        f"reward {found['reward']:.3f}, right {found['right']:.2f}",
        f"groups {found['kept_groups']:.0f} of {found['groups']:.0f}, samples {found['samples']:.0f}",
    ]
    updates = found["updates"]
    if updates:
        average = {name: mean(update[name] for update in updates if name in update)
                   for name in ("loss", "kl", "entropy", "sft_loss", "grad_norm", "clip_fraction_low",
                                "clip_fraction_high", "rows", "unshared_rows")
                   if any(name in update for update in updates)}
        ratios = [update[name] for update in updates for name in ("min/ratio", "max/ratio") if name in update]
        cells.append(f"{len(updates)} updates")
        cells += [f"{name.replace('_', ' ')} {average[name]:.4f}"
                  for name in ("loss", "kl", "entropy", "sft_loss", "grad_norm") if name in average]
        if ratios:
            cells.append(f"ratio {min(ratios):.2f} to {max(ratios):.2f}, clipped "
                         f"{average['clip_fraction_low'] + average['clip_fraction_high']:.1%}")
        cells.append(f"rows {average['rows']:.0f} of {average['unshared_rows']:.0f} an update")
        cells += [f"shadow: log-probs {update['shadow/logprobs']:.0e}, gradient "
                  f"{update['shadow/gradient']:.0e}" for update in updates if "shadow/gradient" in update]
    else:
        cells.append("nothing to learn from: no update")
    cells.append(f"sampling {found['sample_seconds']:.1f} s, updating {found['update_seconds']:.1f} s")
    return " | ".join(cells)


# ---- figures on disk


def read_figures(folder: str, steps: int) -> list[dict[str, Any]]:
    """The figures of the first `steps` steps; what came after the checkpoint does not count.

    Raises:
        InputError: the folder lacks them.
    """
    path = os.path.join(folder, FIGURES)
    found: list[dict[str, Any]] = []
    try:
        if steps:
            with open(path, encoding="utf-8") as file:
                found = [json.loads(text) for text in file][:steps]
        problem = f"{len(found)} steps"
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if len(found) < steps:
        raise InputError("the figures of the resumed run are missing",
                         values=f"--out {folder}, {FIGURES}: {problem}; the checkpoint has {steps}",
                         rule="a run resumes with the --out and the --save that it was started with",
                         remedy="correct --out, or give another folder with --save to start anew")
    return found


def write_figures(folder: str, steps: Sequence[dict[str, Any]], mode: str = "w") -> None:
    """Figures, a step a line; mode ``a`` adds them to those that are there."""
    with common.written(folder), open(os.path.join(folder, FIGURES), mode, encoding="utf-8") as file:
        file.writelines(json.dumps(step) + "\n" for step in steps)


def prepare(args: argparse.Namespace, pretrained: Pretrained | None) -> tuple[Task, list[Group]]:
    """The task, and the groups of ``--data``.

    Raises:
        AugTreeError: a file or a setting that cannot be used.
    """
    augtree_config(args)
    loss = loss_config(args)
    groups = []
    if args.data:
        groups = fold(truncate(read_groups(args.data), args.max_prompt_tokens), args.vocab_size)
        check_groups(groups, "grpo", loss.preset("grpo", kl_coef=0.0))
    task = Retrieval(args.prompt_tokens, args.response_tokens)
    if pretrained is not None:
        from examples.grpo.text_task import TextRetrieval

        task = TextRetrieval(pretrained.tokenizer, args.prompt_tokens, args.response_tokens)
    return task, groups


def main() -> None:
    """Trains; figures go to ``--out``, lines to the screen."""
    args, pretrained = launch.agree(team_flags.parse)
    launch.agree_on_rank_0(lambda: check_folder(args.out, "--out"))
    task, groups = launch.agree(lambda: prepare(args, pretrained))
    launch.start(args)
    training = launch.agree(lambda: Training(args, pretrained, task, groups))
    size, first = sum(p.numel() for p in training.policy.model.parameters()), training.policy.first
    common.say(
        f"{args.context_parallel_mode or 'stock Megatron'} on {launch.env_world()} ranks (tensor-parallel "
        f"size {args.tensor_model_parallel_size}): {size} parameters a rank, {args.steps} steps of "
        f"{args.groups} groups, {args.epochs * args.mini_batches} updates each"
        + f"; resumed after step {first}" * (first > 0))
    training.run()
    if training.policy.handle is not None:
        report = training.policy.handle.report()
        worst = max((found["shadow/gradient"] for found in report["shadow"]), default=0.0)
        common.say(f"computed {report.get('rows', 0)} rows where samples apart have "
                   f"{report.get('unshared_rows', 0)}; {len(report['shadow'])} shadow runs, largest "
                   f"difference of gradients {worst:.1e}")


if __name__ == "__main__":
    launch.run(main)
