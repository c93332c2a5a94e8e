"""A trainer that works as slime and NeMo-RL do (tier 1).

A prompt's responses are dealt over data-parallel ranks. The loss is a mean over samples of means over
tokens. Megatron's schedule multiplies a loss of two values by cp / micro-batches, and DDP averages over
dp x cp, so the trainer multiplies by micro-batches, dp and 1 / batch beforehand. Lines of AugTree end in
"# AugTree".
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from megatron_augtree.config import AugTreeConfig  # AugTree
from megatron_augtree.mcore import api  # AugTree
from tests.mcore.conformance.rollouts import Rollout, policy_loss, stock_logprobs


class Trainer:
    """One rank's trainer.

    Args:
        model: the bare model.
        use_augtree: share prompts.
    """

    def __init__(self, model: torch.nn.Module, use_augtree: bool) -> None:
        model.config.calculate_per_token_loss = False
        model.config.finalize_model_grads_func = finalize_model_grads
        settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
        self.model = DistributedDataParallel(model.config, settings, model)
        model.config.no_sync_func = self.model.no_sync
        self.handle = None
        if use_augtree:  # AugTree
            self.handle = api.prepare_model(self.model, AugTreeConfig(min_shared_rows=4))  # AugTree

    def step(self, everything: list[Rollout]) -> None:
        """Gradients of one step."""
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        self.mine, self.global_batch = everything[rank::world], len(everything)
        count = max(len(everything[r::world]) for r in range(world))
        iterator = iter([[i] if i < len(self.mine) else [] for i in range(count)])
        if self.handle is not None:  # AugTree
            tokens, masks = [r.tokens for r in self.mine], [r.mask for r in self.mine]  # AugTree
            batch = api.Batch.from_responses(tokens, masks, group=[r.uid for r in self.mine])  # AugTree
            plan = api.plan(self.handle, batch)  # AugTree
            iterator, count = api.microbatches(plan), api.num_microbatches(plan)  # AugTree
        self.model.zero_grad_buffer()
        forward_backward_no_pipelining(
            forward_step_func=partial(self.forward_step, count), data_iterator=iterator, model=self.model,
            num_microbatches=count, seq_length=1, micro_batch_size=1)

    def forward_step(self, count: int, iterator, model):
        micro = next(iterator)
        if self.handle is not None:  # AugTree
            outputs = api.forward(self.handle, micro)  # AugTree
            rollouts, values = [self.mine[i] for i in micro.index], outputs.jagged_next()  # AugTree
            chosen = [(r, v[r.prompt - 1 : -1]) for r, v in zip(rollouts, values)]  # AugTree
            anchor = outputs.anchor  # AugTree
        else:
            chosen = [(self.mine[i], stock_logprobs(model, self.mine[i])) for i in micro]
            anchor = 0 if micro else model(torch.tensor([[0]]), torch.tensor([[0]]), None).sum() * 0
        return anchor, partial(self.loss, count, chosen)

    def loss(self, count: int, chosen: list, anchor):
        """(loss, metrics), scaled for what Megatron does to it."""
        total = anchor
        for rollout, logprobs in chosen:
            tokens = rollout.mask.sum().clamp(min=1)
            total = total + (policy_loss(logprobs, rollout) * rollout.mask).sum() / tokens
        cp = parallel_state.get_context_parallel_world_size()
        world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return total * count / self.global_batch * world / cp, {}
