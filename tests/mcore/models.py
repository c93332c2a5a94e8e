"""Models beyond the plain ``GPTModel``, made of megatron-core's own modules: for tests of binding."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_augtree.mcore import build
from megatron_augtree.mcore.layer_spec import HybridModel, augtree_spec, prepare_model


def stack_module() -> Any:
    """megatron-core's module that holds the layer stack of hybrid models; renamed in 0.19."""
    try:
        return importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    except ImportError:
        return importlib.import_module("megatron.core.ssm.mamba_block")


class MambaLayer(MegatronModule):
    """Stands for a recurrent layer, whose real one needs CUDA kernels."""

    def __init__(self, config: Any, layer_number: int = 1, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number


def hybrid_spec(args: argparse.Namespace) -> ModuleSpec:
    """A stack's spec: the halves of megatron-core's local GPT layer as layers of their own."""
    whole = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    attention = dataclasses.replace(whole.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp,
                                    mlp_bda=IdentityFuncOp)
    mlp = dataclasses.replace(whole.submodules, input_layernorm=IdentityOp, self_attention=IdentityOp,
                              self_attn_bda=IdentityFuncOp, mlp_bda=get_bias_dropout_add)
    module = stack_module()
    return ModuleSpec(module=module.MambaStack, submodules=module.MambaStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer), mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        attention_layer=ModuleSpec(module=whole.module, submodules=attention)))


def build_hybrid(args: argparse.Namespace, *, augtree: bool, seed: int = 3,
                 pattern: str = "**-*-") -> torch.nn.Module:
    """A hybrid model; its stack's final norm has to be replaced where there is no Transformer Engine."""
    args = argparse.Namespace(**{**vars(args), "num_layers": len(pattern)})
    spec = hybrid_spec(args)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HybridModel(
            build.build_config(args), augtree_spec(spec) if augtree else spec, args.vocab_size,
            args.max_position_embeddings, hybrid_override_pattern=pattern,
            position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base)
    return _finished(model, args, augtree)


class NarrowValues(SelfAttention):
    """Self attention whose values are half as wide as its keys; megatron-core's own are never unequal."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        core = getattr(self.core_attention, "stock", self.core_attention)
        core.hidden_size_per_partition //= 2  # the width of its output, and of what follows
        weight = self.linear_proj.weight
        self.linear_proj.weight = torch.nn.Parameter(weight.detach()[:, : weight.shape[1] // 2].clone())

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple:
        query, key, value, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return (query, key, value[..., : value.shape[-1] // 2].contiguous(), *rest)


def build_gpt(args: argparse.Namespace, *, augtree: bool, seed: int = 3, attention: type = SelfAttention,
              **fields: Any) -> torch.nn.Module:
    """A ``GPTModel`` with another attention module, or with fields of its configuration that have no flag."""
    config = build.build_config(args)
    for name, value in fields.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    spec.submodules.self_attention.module = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTModel(config, augtree_spec(spec) if augtree else spec, args.vocab_size,
                         args.max_position_embeddings, position_embedding_type="rope")
    return _finished(model, args, augtree)


def _finished(model: torch.nn.Module, args: argparse.Namespace, augtree: bool) -> torch.nn.Module:
    model.to(getattr(torch, args.dtype))
    if augtree:
        prepare_model(model)
    return model


def local_final_norm(monkeypatch: Any) -> None:
    """Hybrid stacks always take Transformer Engine's norm; torch's takes its place here."""
    monkeypatch.setattr(stack_module(), "TENorm", WrappedTorchNorm)
