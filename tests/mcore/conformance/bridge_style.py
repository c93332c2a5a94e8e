"""A trainer that works as Megatron-Bridge does (tier 2): a provider with a spec function, and pre-wrap hooks.

The model is built by a provider and wrapped by the framework; a recipe only sets `transformer_layer_spec` and
registers hooks. Its stock step is Megatron's schedule with a per-token loss. Lines of AugTree end in
"# AugTree".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from megatron_augtree.config import AugTreeConfig  # AugTree
from megatron_augtree.mcore import api  # AugTree
from megatron_augtree.mcore.layer_spec import augtree_spec  # AugTree
from tests.mcore.conformance.rollouts import Rollout, policy_loss, stock_logprobs


def _local_spec(config):
    return get_gpt_layer_local_spec(normalization=config.normalization)


@dataclass
class Provider:
    """Builds and wraps a model.

    Attributes:
        config: of the model.
        vocab_size: tokens.
        transformer_layer_spec: config -> spec.
        pre_wrap_hooks: called with the list of chunks before they are wrapped.
    """

    config: object
    vocab_size: int
    transformer_layer_spec: Callable = _local_spec
    pre_wrap_hooks: list[Callable] = field(default_factory=list)

    def provide_distributed_model(self) -> list[torch.nn.Module]:
        """The wrapped chunks."""
        chunks = [GPTModel(self.config, self.transformer_layer_spec(self.config), vocab_size=self.vocab_size,
                           max_sequence_length=4096, position_embedding_type="rope",
                           share_embeddings_and_output_weights=False).to(self.config.params_dtype)]
        for hook in self.pre_wrap_hooks:
            chunks = hook(chunks)
        settings = DistributedDataParallelConfig()
        return [DistributedDataParallel(self.config, settings, chunk) for chunk in chunks]


def prepare(chunks):  # AugTree
    api.prepare_model(chunks, AugTreeConfig(min_shared_rows=4))  # AugTree
    return chunks  # AugTree


class Trainer:
    """One rank's trainer.

    Args:
        model: whose configuration and weights are used.
        use_augtree: share prompts.
    """

    def __init__(self, model: torch.nn.Module, use_augtree: bool) -> None:
        model.config.calculate_per_token_loss = True
        model.config.finalize_model_grads_func = finalize_model_grads
        provider, self.handle = Provider(model.config, model.vocab_size), None
        provider.pre_wrap_hooks.append(partial(_load, model.state_dict()))
        if use_augtree:  # AugTree
            provider.transformer_layer_spec = lambda config: augtree_spec(_local_spec(config))  # AugTree
            provider.pre_wrap_hooks.append(prepare)  # AugTree
        (self.model,) = provider.provide_distributed_model()
        if use_augtree:  # AugTree
            self.handle = api.prepare_model(self.model, AugTreeConfig(min_shared_rows=4))  # AugTree

    def step(self, everything: list[Rollout]) -> None:
        """Gradients of one step: a mean over all tokens."""
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        mine = everything[rank::world]
        self.model.zero_grad_buffer()
        if self.handle is not None:  # AugTree
            tokens, masks = [r.tokens for r in mine], [r.mask for r in mine]  # AugTree
            batch = api.Batch.from_responses(tokens, masks, group=[r.uid for r in mine])  # AugTree
            plan = api.plan(self.handle, batch)  # AugTree
            count = sum(int(r.mask.sum()) for r in everything)  # AugTree
            loss = partial(self.loss_of_outputs, mine)  # AugTree
            api.forward_backward(self.handle, batch, plan, loss, normalizer=count)  # AugTree
            return  # AugTree
        forward_backward_no_pipelining(
            forward_step_func=self.forward_step, data_iterator=iter(mine), model=self.model,
            num_microbatches=len(mine), seq_length=1, micro_batch_size=1)

    def loss_of_outputs(self, mine: list[Rollout], outputs: api.Outputs):  # AugTree
        rollout = mine[int(outputs.index)]  # AugTree
        share, _, metrics = self.loss(rollout, outputs.jagged_next()[0][rollout.prompt - 1 : -1])  # AugTree
        return share, metrics  # AugTree

    def forward_step(self, iterator, model):
        rollout = next(iterator)
        return stock_logprobs(model, rollout), partial(self.loss, rollout)

    def loss(self, rollout: Rollout, logprobs):
        """(sum over tokens, tokens, metrics)."""
        return (policy_loss(logprobs, rollout) * rollout.mask).sum(), rollout.mask.sum().int(), {}


def _load(weights: dict, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    chunks[0].load_state_dict(weights)
    return chunks
