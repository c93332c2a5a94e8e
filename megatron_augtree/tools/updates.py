"""Timed GRPO updates of one model on this rank's process: what benchmarks on real ranks share."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from megatron_augtree.data.groups import Group, fold, read_groups
from megatron_augtree.mcore import build
from megatron_augtree.mcore.arguments import add_augtree_arguments, add_model_arguments
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.sampler import StepBatch, model_shape
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, wrap_model


@dataclass(frozen=True)
class Seconds:
    """Of one update, from the ranks' common start: to this rank's last backward, to the end of all ranks."""

    passes: float
    step: float


class Updates:
    """A model with its optimizer, built as the launchers build it; every rank makes one.

    Args:
        flags: of the model and its optimizer.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        parser = argparse.ArgumentParser()
        for add in (add_model_arguments, add_augtree_arguments, add_optimizer_arguments):
            add(parser)
        args = parser.parse_args(flags)
        build.initialize(args)
        self.vocab = args.vocab_size
        self.ddp = wrap_model(build.build_model(args, augtree=True, seed=1))
        self.optimizer = make_optimizer(args, self.ddp)
        self.shape = model_shape(self.ddp.module.config, self.vocab)
        self._passed = 0.0
        self.ddp.module.config.finalize_model_grads_func = self._finalize

    def _finalize(self, *args: Any, **named: Any) -> None:
        self._passed = time.perf_counter()
        finalize_model_grads(*args, **named)

    def groups(self, path: Path, start: int, stop: int | None) -> list[Group]:
        """Groups of a file, their tokens folded into the model's vocabulary."""
        return fold(read_groups(path, start, stop), self.vocab)

    def play(self, schedule: AugTreeSchedule, batch: StepBatch) -> Seconds:
        """One update: forward, backward, reduction of gradients, optimizer; all ranks begin together."""
        dist.barrier()
        started = time.perf_counter()
        self.ddp.zero_grad_buffer()
        schedule(
            forward_step_func=functools.partial(forward_step, loss_fn=Objective(batch)),
            data_iterator=iter([batch]),
            model=self.ddp,
        )
        self.optimizer.step()
        dist.barrier()
        return Seconds(self._passed - started, time.perf_counter() - started)
