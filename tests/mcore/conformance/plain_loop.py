"""A whole training loop with AugTree (tier 2), and no framework around it."""

import torch

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore import api
from megatron_augtree.mcore.update import TorchOptimizer, wrap_model
from tests.mcore.conformance.rollouts import policy_loss


# The loop: 30 lines.
def train(model, sampler, steps, lr, rank, world):
    ddp = wrap_model(model)
    handle = api.prepare_model(ddp, AugTreeConfig(min_shared_rows=4))
    optimizer = TorchOptimizer(torch.optim.SGD(model.parameters(), lr=lr))
    losses = []
    for step in range(steps):
        everything = sampler(step)
        mine = everything[rank::world]
        batch = api.Batch.from_responses(
            tokens=[r.tokens for r in mine],
            masks=[r.mask for r in mine],
            group=[r.uid for r in mine],
        )

        def loss_fn(outputs, mine=mine):
            rollout = mine[int(outputs.index)]
            response = outputs.jagged_next()[0][rollout.prompt - 1 : -1]
            loss = (policy_loss(response, rollout) * rollout.mask).sum()
            return loss, {"tokens": rollout.mask.sum()}

        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = sum(int(r.mask.sum()) for r in everything)
        plan = api.plan(handle, batch)
        found = api.forward_backward(handle, batch, plan, loss_fn, normalizer=tokens)
        optimizer.step()
        losses.append(found.loss)
    return losses
