"""The policy in training: model, Megatron's DDP and optimizer, first weights as reference, checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from megatron_augtree.config import AugTreeConfig, InputError
from megatron_augtree.mcore import api, build, checkpoint, update
from megatron_augtree.mcore.ddp import gather_parameters_now
from megatron_augtree.mcore.pretrained import Pretrained, build_pretrained


@dataclass
class Policy:
    """A policy, new or resumed.

    Attributes:
        args: of `team_flags`.
        config: AugTree's settings; None is stock Megatron.
        data: identifies what is trained on; a checkpoint of something else does not resume.
        pretrained: the first weights; None makes them from ``--seed``.
        first: steps done before this run.
    """

    args: argparse.Namespace
    config: AugTreeConfig | None
    data: str
    pretrained: Pretrained | None = None
    first: int = 0

    def __post_init__(self) -> None:
        args = self.args
        model = self._first_model()
        # The reference lies beside the model; it takes the model's place while its log-probs are computed.
        self.initial = [parameter.detach().clone() for parameter in model.parameters()]
        self.made = checkpoint.made_for(args, update.pool_size())
        found = checkpoint.latest(args.save) if args.save else None
        if found is not None:
            found.require(self.made)
            self._require_data(found)
            found.load_model(model)
            self.first = found.progress.iteration
        self.ddp = update.wrap_as_asked(args, model)
        if args.overlap_grad_reduce:
            model.config.no_sync_func = self.ddp.no_sync  # as Megatron's trainer sets it
        self.optimizer = update.make_optimizer(args, self.ddp)
        if found is not None:
            found.load_training(self.ddp.module, self.optimizer)
        self.handle = None
        if self.config is not None:
            self.handle = api.prepare_model(self.ddp, self.config, shadow_every=args.shadow_every)

    def _first_model(self) -> torch.nn.Module:
        if self.pretrained is None:
            return build.build_model(self.args, augtree=False, seed=self.args.seed)
        return build_pretrained(replace(self.pretrained, args=self.args), augtree=False)

    def _require_data(self, found: checkpoint.Checkpoint) -> None:
        if found.progress.data != self.data:
            raise InputError(
                "a checkpoint was made with other data",
                values=f"{found.folder}: {found.progress.data}; here: {self.data}",
                rule="a run resumes with the task, the sizes and the seed that it was started with",
                remedy="restore the flags, or give another folder with --save",
            )

    @property
    def model(self) -> torch.nn.Module:
        """The ``GPTModel`` inside DDP."""
        return self.ddp.module

    def settle(self) -> None:
        """Whole parameters on every rank, also under --overlap-param-gather; collective.

        Before anything that not every rank runs as often: sampling, and the reference's weights.
        """
        gather_parameters_now(self.ddp)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The model has its first weights inside, and afterwards the bits that it had before."""
        parameters = list(self.model.parameters())
        kept = [parameter.detach().clone() for parameter in parameters]
        self._put(parameters, self.initial)
        try:
            yield
        finally:
            self._put(parameters, kept)

    @staticmethod
    @torch.no_grad()
    def _put(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
        for parameter, value in zip(parameters, values):
            parameter.copy_(value)

    def forget_gradients(self) -> None:
        """Before every optimizer step: DDP's buffers, and what Megatron's optimizer holds beside them."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """One optimizer step on the reduced gradient.

        Returns:
            The gradient's norm before clipping.
        """
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def save(self, step: int) -> None:
        """A checkpoint after `step` steps; collective."""
        self.settle()
        progress = checkpoint.Progress(step, step * self.args.groups, self.data)
        checkpoint.save(
            self.args.save, self.made, progress, self.model, self.optimizer, self.args.ckpt_format)
