"""What RL frameworks and launchers call; see docs/adopt.md.

handle = prepare_model(model, AugTreeConfig())           # built model, before or after wrapping
step = plan(handle, batch)                                # collective: every rank gives its own samples
out = forward_backward(handle, batch, step, loss_fn, normalizer=tokens_of_the_pool)      # tier 2
for mb in microbatches(step): forward(handle, mb)         # tier 1, inside a forward_step of one's own
"""

from megatron_augtree.mcore.api.batch import Batch
from megatron_augtree.mcore.api.handle import Handle, prepare_model
from megatron_augtree.mcore.api.heads import (
    Head,
    Rows,
    built_in_head,
    logprobs_of_head,
    topk_head,
    value_head,
)
from megatron_augtree.mcore.api.micro import MicroBatch, forward, microbatches, num_microbatches
from megatron_augtree.mcore.api.outputs import LossFn, Outputs, StepOutput
from megatron_augtree.mcore.api.planning import plan
from megatron_augtree.mcore.api.play import forward_backward, forward_logprobs
from megatron_augtree.mcore.api.step import StepPlan
from megatron_augtree.planning.shared_cost import SharedCost, shared_cost

__all__ = [
    "Batch",
    "Handle",
    "Head",
    "LossFn",
    "MicroBatch",
    "Outputs",
    "Rows",
    "SharedCost",
    "StepOutput",
    "StepPlan",
    "built_in_head",
    "forward",
    "forward_backward",
    "forward_logprobs",
    "logprobs_of_head",
    "microbatches",
    "num_microbatches",
    "plan",
    "prepare_model",
    "shared_cost",
    "topk_head",
    "value_head",
]
