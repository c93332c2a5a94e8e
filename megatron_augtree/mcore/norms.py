"""torch's norms under sequence parallelism, for models that run without Transformer Engine or Apex.

Every tensor-parallel rank normalises its own part of the rows, so the norms' gradients have to be summed over
those ranks. Megatron does so for parameters that are marked; its wrapper of torch's norms refuses instead.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

_NORMS = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class SequenceParallelNorm:
    """Builds torch's norm of ``config.normalization`` with marked parameters."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = _NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm


def sequence_parallel_spec(layer: ModuleSpec, layers: int) -> TransformerBlockSubmodules:
    """A block of `layers` copies of a layer spec, whose norms are `SequenceParallelNorm`.

    Norms of queries and keys see all rows but only their rank's heads: their gradients are summed as well.
    """
    layer = copy.deepcopy(layer)
    attention = layer.submodules.self_attention.submodules
    for holder, name in ((layer.submodules, "input_layernorm"), (layer.submodules, "pre_mlp_layernorm"),
                         (attention, "q_layernorm"), (attention, "k_layernorm")):
        if getattr(holder, name) not in (None, IdentityOp):
            setattr(holder, name, SequenceParallelNorm)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=SequenceParallelNorm)
