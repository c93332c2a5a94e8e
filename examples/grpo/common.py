"""What training and its check have in common: the model, the loss, and one update."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from examples.grpo import task
from megatron_augtree.config import AugTreeConfig, InputError
from megatron_augtree.data.groups import Group
from megatron_augtree.mcore import arguments, build, launch, update
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.sampler import StepBatch, model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.rl.losses import LossConfig
from megatron_augtree.runtime.engine import StepResult

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 128 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    f"--init-method-std 0.1 --vocab-size {task.VOCABULARY}"
).split()

#: The bonus on entropy keeps the policy from settling on one value before it has found out how to read.
LOSS = LossConfig.preset("grpo", kl_coef=0.0, entropy_coef=0.04)


def parse(flags: list[str]) -> argparse.Namespace:
    """Arguments of a run: the demo's model, and `flags` (optimizer, type of numbers) on top."""
    parser = argparse.ArgumentParser()
    arguments.add_model_arguments(parser)
    update.add_optimizer_arguments(parser)
    return parser.parse_args([*MODEL, *flags])


@dataclass
class Run:
    """A model in training: one mode, one optimizer.

    Attributes:
        args: of :func:`parse`.
        mode: the ``--context-parallel-mode``.
        seed: of the weights.
    """

    args: argparse.Namespace
    mode: str
    seed: int

    def __post_init__(self) -> None:
        self.ddp = update.wrap_model(build.build_model(self.args, augtree=True, seed=self.seed))
        self.optimizer = update.make_optimizer(self.args, self.ddp)
        self.config = AugTreeConfig(mode=self.mode)
        self.schedule = AugTreeSchedule(self.config, entropy=True)
        self.shape = model_shape(self.ddp.module.config, self.args.vocab_size)

    @property
    def model(self) -> torch.nn.Module:
        """The ``GPTModel`` inside DDP."""
        return self.ddp.module

    def update(self, groups: list[Group]) -> tuple[StepBatch, StepResult, float]:
        """One optimizer step.

        Returns:
            The planned step; its loss, metrics and log-probs; the norm of the gradient before clipping.
        """
        batch = plan_step(groups, self.shape, update.pool_size(), self.config)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()  # Megatron's leaves param.grad = main_grad behind: it would count twice
        step = functools.partial(forward_step, loss_fn=Objective(batch, "grpo", LOSS))
        self.schedule(forward_step_func=step, data_iterator=iter([batch]), model=self.ddp, collect=True)
        _, norm, _ = self.optimizer.step()
        return batch, self.schedule.last, float(norm)


def clip_counts(result: StepResult) -> tuple[int, int]:
    """Logical rows whose ratio was held by the lower and by the upper limit."""
    tokens = result.metrics["tokens"]
    low, high = (result.metrics[f"clip_fraction_{side}"] * tokens for side in ("low", "high"))
    return round(low), round(high)


@contextmanager
def written(folder: str) -> Iterator[None]:
    """Around the writing of results: what the system refuses says which folder to look at.

    Raises:
        InputError: a file of the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise InputError("a result cannot be written", values=f"--out {folder}: {error}",
                         rule="--out is a folder that can be written, with room for the results",
                         remedy="correct the path, or free some space") from error


def write_json(folder: str, name: str, content: Any) -> None:
    """One file of the results."""
    with written(folder), open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)


def say(text: str) -> None:
    """Print once for all ranks."""
    if launch.env_rank() == 0:
        print(text, flush=True)
