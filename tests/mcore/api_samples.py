"""Samples and handles that tests of the public API share."""

from __future__ import annotations

import torch

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore import api
from megatron_augtree.runtime.transport import LocalTransport
from tests.numerics import fixtures as f

#: Fused on two ranks, in waves, and in waves on one rank.
FORCED = ("degree=2,lane_degree=1", "degree=2,phase=phased,chunks=2,waves=2,primitive=move_q",
          "degree=1,phase=phased,waves=2")


def make_handle(lab: f.Lab, force: str = FORCED[0], world: int = 2, model=None, **how) -> api.Handle:
    """A prepared model whose pool of `world` ranks is played in this process."""
    model = f.build_model(lab.args, augtree=False) if model is None else model
    return api.prepare_model(model, AugTreeConfig(min_shared_rows=4, force=force),
                             transport=LocalTransport(world), **how)


def samples(temperature=1.0, salt=None, **fields) -> api.Batch:
    """A group of four ragged responses with masked tokens, and a nested one."""
    prompt = f.tokens(1, 9)
    answers = [f.tokens(50 + i, n) for i, n in enumerate((5, 1, 9, 4))] + [f.tokens(52, 9)[:3]]
    tokens = [torch.tensor([*prompt, *a]) for a in answers]
    masks = [torch.tensor([i % 4 != 2 for i in range(len(a))]) for a in answers]
    return api.Batch.from_responses(tokens, masks, temperature=temperature, salt=salt,
                                    group=["g"] * len(answers), **fields)


def total(outputs: api.Outputs):
    """A loss function: the sum of log-probs, without metrics."""
    return outputs.values["logprobs"].sum(), {}
