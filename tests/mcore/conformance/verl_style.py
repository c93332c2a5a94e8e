"""A trainer that works as verl does (tier 1): padded batches, and Megatron's per-token loss.

Prompts are padded on the left, responses on the right. The loss function returns three values, a sum over
tokens and their number; Megatron adds the numbers up over ranks and divides. A token is counted where its
sample was given, wherever its row is computed. Lines of AugTree end in "# AugTree".
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
from torch import Tensor

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
        model.config.calculate_per_token_loss = True
        model.config.finalize_model_grads_func = finalize_model_grads
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        self.handle = None
        if use_augtree:  # AugTree
            self.handle = api.prepare_model(self.model, AugTreeConfig(min_shared_rows=4))  # AugTree

    def step(self, everything: list[Rollout]) -> None:
        """Gradients of one step."""
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        self.mine = everything[rank * len(everything) // world : (rank + 1) * len(everything) // world]
        self.pad()
        iterator, count = iter([[i] for i in range(len(self.mine))]), len(self.mine)
        if self.handle is not None:  # AugTree
            fields = {"starts": self.starts, "group": [r.uid for r in self.mine]}  # AugTree
            batch = api.Batch.from_padded(self.ids, self.lengths, self.loss_mask, **fields)  # AugTree
            plan = api.plan(self.handle, batch)  # AugTree
            iterator, count = api.microbatches(plan), api.num_microbatches(plan)  # AugTree
        self.model.zero_grad_buffer()
        forward_backward_no_pipelining(
            forward_step_func=self.forward_step, data_iterator=iterator, model=self.model,
            num_microbatches=count, seq_length=1, micro_batch_size=1)

    def pad(self) -> None:
        """ids [B, P + R], each prompt ending at P; loss_mask [B, P + R]; starts and lengths [B]."""
        prompt = max(r.prompt for r in self.mine)
        self.width, total = prompt, prompt + max(len(r.mask) for r in self.mine)
        self.ids = torch.zeros((len(self.mine), total), dtype=torch.int64)
        self.loss_mask = torch.zeros((len(self.mine), total), dtype=torch.bool)
        self.starts = torch.tensor([prompt - r.prompt for r in self.mine])
        self.lengths = torch.tensor([len(r.tokens) for r in self.mine])
        for row, mask, start, r in zip(self.ids, self.loss_mask, self.starts, self.mine):
            row[start : start + len(r.tokens)] = r.tokens
            mask[prompt : prompt + len(r.mask)] = r.mask

    def forward_step(self, iterator, model):
        micro = next(iterator)
        if self.handle is not None:  # AugTree
            outputs = api.forward(self.handle, micro)  # AugTree
            rollouts = [self.mine[i] for i in micro.index]  # AugTree
            values = outputs.padded_prev(max(outputs.lengths, default=1))  # AugTree
            logprobs = [v[r.prompt : len(r.tokens)] for r, v in zip(rollouts, values)]  # AugTree
            return outputs.anchor, partial(self.loss, micro.index, logprobs)  # AugTree
        logprobs = [stock_logprobs(model, self.mine[i]) for i in micro]
        return torch.zeros(()), partial(self.loss, micro, logprobs)

    def loss(self, index, logprobs: list[Tensor], anchor):
        """(sum over tokens, tokens, metrics)."""
        total, tokens = anchor, torch.tensor(0, dtype=torch.int)
        for i, values in zip(index, logprobs):
            mask = self.loss_mask[i, self.width :][: len(values)]
            total = total + (policy_loss(values, self.mine[i]) * mask).sum()
            tokens += mask.sum().int()
        return total, tokens, {}
