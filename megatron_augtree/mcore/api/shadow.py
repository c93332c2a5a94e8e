"""Shadow mode: now and then a step also runs un-shared, and both are compared. Nothing of the step changes.

The un-shared run is the stock model, sample by sample, where each was given, with the same loss function. Its
gradients go through the same buffers, which are put back to the bit afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_augtree.config import UnsupportedError
from megatron_augtree.mcore.api.handle import Handle
from megatron_augtree.mcore.api.losses import Losses
from megatron_augtree.mcore.api.model import ModelCall
from megatron_augtree.mcore.ddp import gather_parameters, inner_module
from megatron_augtree.mcore.shards import tensor_parallel_group
from megatron_augtree.runtime.transport import Transport


def play_stock(call: ModelCall, losses: Losses, forward_only: bool) -> None:
    """Own samples one after the other (a group's together) through the stock model."""
    plan = call.step
    rank = plan.transport.rank
    own = [i for i, number in enumerate(plan.numbers) if plan.owners[number] == rank]
    own = [i for i in own if plan.samples[i].computed.any()]
    if not own:
        gather_parameters(plan.handle.model)  # the others' forwards wait for it
    for indices in losses.calls(own):
        with torch.set_grad_enabled(not forward_only):
            values = torch.cat([call.stock(i) for i in indices])
        gradient = losses.evaluate(indices, values.detach())
        if not forward_only:
            values.backward(torch.zeros_like(values) if gradient is None else gradient)


@dataclass
class Shadow:
    """One comparison.

    Attributes:
        call, losses: of the step, which was played when `run` is called.
        before: the gradients that stood in the buffers before the step.
        found: what was found: ``shadow/logprobs`` (largest difference), ``shadow/gradient`` (norm of the
            gradients' difference over that of the un-shared one), ``shadow/gradient_norm`` (difference of
            the norms, relative). Of gradients of the whole pool.
    """

    call: ModelCall
    losses: Losses
    before: list[Tensor]
    found: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def due(
        handle: Handle, call: ModelCall, losses: Losses, forward_only: bool, finalize: bool
    ) -> Shadow | None:
        """A comparison, where this call ends a step whose turn it is.

        Raises:
            UnsupportedError: the stock model cannot run a whole sample on one rank.
        """
        every = handle.shadow_every
        if (
            not every
            or forward_only
            or not finalize
            or call.step.plan is None
            or handle.counts["steps"] % every
        ):
            return None
        size = handle.transformer_config.context_parallel_size
        if size > 1:
            raise UnsupportedError(
                "the stock model cannot run whole samples",
                values=f"context_parallel_size {size}",
                rule="stock attention cuts a sample over its context-parallel ranks",
                remedy="set shadow_every=0, or build the model with --context-parallel-size 1: AugTree plans "
                "over all data-parallel ranks",
            )
        return Shadow(call, losses, [g.clone() for g in _gradients(handle.model)])

    def run(self) -> None:
        """Play the stock model and compare; buffers end with the bits they began with."""
        handle = self.call.step.handle
        pool = handle.transport("pool")
        kept = [g.clone() for g in _gradients(handle.model)]
        for gradient, before in zip(_gradients(handle.model), self.before):
            gradient.sub_(before)
        found = _totals(handle.model, pool)
        for gradient in _gradients(handle.model):
            gradient.zero_()
        plain = self.losses.again()
        play_stock(self.call, plain, forward_only=False)
        squares = torch.zeros(3, dtype=torch.float64)
        for ours, theirs in zip(found, _totals(handle.model, pool)):
            squares += torch.stack(
                [(ours - theirs).square().sum(), ours.square().sum(), theirs.square().sum()]
            )
        for gradient, after in zip(_gradients(handle.model), kept):
            gradient.copy_(after)
        apart = [
            float((self.losses.collected[i] - plain.collected[i]).abs().max())
            for i in plain.collected
            if plain.collected[i].numel()
        ]
        worst = pool.total(torch.tensor(max(apart, default=0.0), dtype=torch.float64), "max")
        difference, ours, theirs = (math.sqrt(float(x)) for x in squares)
        scale = theirs or 1.0
        self.found = {
            "shadow/logprobs": float(worst),
            "shadow/gradient": difference / scale,
            "shadow/gradient_norm": abs(ours - theirs) / scale,
        }
        handle.shadows.append(dict(self.found))


def _totals(model: torch.nn.Module, pool: Transport) -> list[Tensor]:
    """Gradients of the whole pool, fp64; the buffers are not the same afterwards.

    Sequence parallelism cuts rows over tensor-parallel ranks, in another way for each run: what a rank adds
    to a norm's gradient is comparable only when these parts are added up, as Megatron does at the end.
    """
    group = tensor_parallel_group()
    for p in model.parameters() if group is not None else ():
        if p.requires_grad and getattr(p, "sequence_parallel", False):
            dist.all_reduce(getattr(p, "main_grad", p.grad), group=group)
    return [pool.total(gradient.double()).cpu() for gradient in _gradients(model)]


def _gradients(model: torch.nn.Module) -> list[Tensor]:
    """What gradients add up in: DDP's buffers, or the parameters' own."""
    ddp = inner_module(model, DistributedDataParallel)
    if ddp is not None:
        return [buffer.grad_data for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in trained]
