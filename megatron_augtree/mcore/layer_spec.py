"""AugTree's core attention, and how it gets into a model: by spec, or into a model already built.

Two ways lead to the same modules. ``augtree_spec`` takes any layer or block spec and puts
``AugTreeAttention`` around its core attention; ``prepare_model`` does so on a built model and binds rotary
embedding and output layer too, which a spec does not reach. A model built from an AugTree spec still needs
``prepare_model`` (attention says so if it is forgotten). No parameter and no state-dict key is added, and
whatever is not a pack of ours runs through the stock modules.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterable
from typing import Any

import megatron.core
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor

from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore.arguments import check_config
from megatron_augtree.mcore.ddp import changing_modules
from megatron_augtree.mcore.output_layer import ScoredProjection
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from megatron_augtree.mcore.recompute import PassRecompute, WholeLayer
from megatron_augtree.mcore.rotary import PackSlot, RowRotary
from megatron_augtree.mcore.selfcheck import check_release
from megatron_augtree.mcore.shards import padding_of
from megatron_augtree.runtime.tree_attention import tree_attention

try:
    from megatron.core.models.hybrid.hybrid_model import HybridModel
except ImportError:  # its former name
    from megatron.core.models.mamba import MambaModel as HybridModel

Model = GPTModel | HybridModel

#: Core attentions that compute plain causal softmax attention, by class name: Transformer Engine's class
#: cannot be imported without it. Any other may cap, bias or window its scores, and is refused.
PLAIN_ATTENTION = ("DotProductAttention", "TEDotProductAttention")


#: Mask types, by name, that let a row see itself and what stands before it.
CAUSAL_MASKS = ("causal", "padding_causal")


class AugTreeAttention(MegatronModule):
    """Core attention that runs packs of ours through ``tree_attention`` and all else through ``stock``.

    Args:
        config: the model's configuration.
        layer_number: Megatron's, counted from 1.
        stock: a built core attention, or what builds one (a class or a spec) from the remaining arguments.
        attn_mask_type: handed to ``stock``.
        attention_type: ``"self"``; cross attention is refused.
        softmax_scale: factor of the scores; ``None`` means 1 / sqrt(head width).
        kwargs: handed to ``stock``.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any = None,
                 attention_type: str = "self", softmax_scale: float | None = None, *, stock: Any,
                 **kwargs: Any) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise UnsupportedError(
                "only self attention can share a prompt",
                values=f"attention_type={attention_type!r} in layer {layer_number}",
                rule="rows of a tree attend to their own ancestors",
                remedy="use a decoder-only model",
            )
        self.layer, self.softmax_scale = layer_number - 1, softmax_scale
        self.bound = False
        if not isinstance(stock, torch.nn.Module):
            stock = stock(config=config, layer_number=layer_number, attn_mask_type=attn_mask_type,
                          attention_type=attention_type, softmax_scale=softmax_scale, **kwargs)
        _check_plain(type(stock).__name__)
        self.stock = stock
        self.register_load_state_dict_post_hook(_name_as_stock)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                attn_mask_type: Any = None, attention_bias: Tensor | None = None,
                packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        """Attention of the local rows.

        Args:
            query: ``[T, 1, Hq, D]``, rotated.
            key: ``[T, 1, Hkv, D]``, rotated.
            value: ``[T, 1, Hkv, Dv]``; Dv is D in megatron-core's own modules.
            attention_mask: ``None`` for a pack of ours: the tree is the mask.
            attn_mask_type: handed to ``stock``.
            attention_bias: ``None`` for a pack of ours.
            packed_seq_params: an ``AugTreePackedSeqParams``, or anything that ``stock`` takes.
            kwargs: handed to ``stock``.

        Returns:
            ``[T, 1, Hq * Dv]``.

        Raises:
            UnsupportedError: a batch, a mask, a bias or cross attention.
            AugTreeError: the model was not prepared, so its rotary embedding would be wrong.
        """
        pack = packed_seq_params
        if not isinstance(pack, AugTreePackedSeqParams):
            return self.stock(query, key, value, attention_mask, attn_mask_type=attn_mask_type,
                              attention_bias=attention_bias, packed_seq_params=pack, **kwargs)
        self._check(query, key, value, attention_mask, attention_bias)
        scale = 1 / math.sqrt(query.shape[-1]) if self.softmax_scale is None else self.softmax_scale
        rows = query.shape[0] - pack.padding
        # Also without rows: other ranks wait for this rank's part in the exchange.
        out = tree_attention(query[:rows, 0], key[:rows, 0], value[:rows, 0], pack.context, self.layer, scale)
        out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, pack.padding))
        return out.reshape(out.shape[0], 1, out.shape[1] * out.shape[2])

    def _check(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
               bias: Tensor | None) -> None:
        if not self.bound:
            raise AugTreeError(
                "a pack reached a model that is not prepared",
                values=f"attention layer {self.layer + 1}",
                rule="rotary embedding and output layer have to be bound as well as attention",
                remedy="call prepare_model(model) once the model is built",
            )
        rules = (
            (query.shape[1] == 1, f"batch of {query.shape[1]}", "a pack is one batch entry of T rows"),
            (query.shape[0] == key.shape[0] == value.shape[0],
             f"{query.shape[0]} queries, {key.shape[0]} keys", "queries and keys are the same rows"),
            (mask is None, "attention_mask", "the tree is the mask"),
            (bias is None, "attention_bias", "scores carry no bias"),
        )
        broken = [(found, rule) for holds, found, rule in rules if not holds]
        if broken:
            raise UnsupportedError(
                "attention cannot run this pack", values="; ".join(found for found, _ in broken),
                rule="; ".join(rule for _, rule in broken),
                remedy="pass one pack a forward, with attention_mask=None and without a bias",
            )

    # The stock module's keys stay where they were: this wrapper does not show in a state dict.

    def state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """The stock core attention's, under this module's prefix."""
        return self.stock.state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        """The stock core attention's, under this module's prefix."""
        return sharded_state_dict_default(self.stock, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}stock.{name[len(prefix):]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _name_as_stock(module: AugTreeAttention, incompatible: Any) -> None:
    """Tells keys by the stock module's names, and lets its own hooks see them under these.

    Transformer Engine's hook forgives, by name, the extra states that checkpoints of others lack.
    """
    for keys in incompatible:
        keys[:] = [key.replace("core_attention.stock.", "core_attention.") for key in keys]
    for hook in module.stock._load_state_dict_post_hooks.values():
        hook(module.stock, incompatible)


def _check_plain(name: str) -> None:
    if name not in PLAIN_ATTENTION:
        raise UnsupportedError(
            "AugTree cannot replace this core attention", values=f"core_attention = {name}",
            rule=f"it computes plain causal softmax attention: {' or '.join(PLAIN_ATTENTION)}; another "
            "class may cap, bias or window its scores",
            remedy="use a model with plain attention, or leave --context-parallel-mode out",
        )


def augtree_spec(base_spec: Any) -> Any:
    """A copy of a spec whose self attentions are ``AugTreeAttention`` around what stood there.

    Args:
        base_spec: a layer's ``ModuleSpec``, a block's ``TransformerBlockSubmodules``, or any spec nested
            like them. It is not changed.

    Raises:
        UnsupportedError: a core attention that is not plain, or no core attention at all.
    """
    spec = copy.deepcopy(base_spec)
    if not _wrap(spec):
        raise UnsupportedError(
            "the layer spec has no self attention", values=f"spec = {type(base_spec).__name__}",
            rule="AugTree shares prompts in self attention", remedy="pass a GPT layer or block spec",
        )
    return spec


def _wrap(spec: Any) -> int:
    """Wraps every core attention below ``spec`` in place; returns how many there are."""
    if isinstance(spec, (list, tuple)):
        return sum(_wrap(item) for item in spec)
    if isinstance(spec, ModuleSpec):
        return _wrap(spec.submodules)
    if not hasattr(spec, "__dataclass_fields__"):
        return 0
    found = sum(_wrap(getattr(spec, name)) for name in spec.__dataclass_fields__ if name != "core_attention")
    stock = getattr(spec, "core_attention", None)
    if stock is None:
        return found
    if not _wraps_already(stock):
        module = stock.module if isinstance(stock, ModuleSpec) else stock
        _check_plain(module[1] if isinstance(module, tuple) else getattr(module, "__name__", repr(module)))
        spec.core_attention = functools.partial(AugTreeAttention, stock=stock)
    return found + 1


def _wraps_already(stock: Any) -> bool:
    return isinstance(stock, functools.partial) and stock.func is AugTreeAttention


class Handle:
    """What ``prepare_model`` changed in a model, and the way back.

    Attributes:
        model: the ``GPTModel`` or hybrid model inside any wrappers.
    """

    def __init__(self, model: Model, logit_chunk_bytes: int, wrapped: torch.nn.Module | None = None) -> None:
        self.model, self.slot, self._wrapped = model, PackSlot(), model if wrapped is None else wrapped
        base = GPTModel if isinstance(model, GPTModel) else HybridModel
        self._arguments = tuple(inspect.signature(base.forward).parameters)[1:]
        self._attentions, self._added = [], []
        for layer in model.decoder.layers:
            if _attends(layer):
                self._bind_attention(layer)
        self._stack = PassRecompute(model.decoder, self.slot)
        self._forwards = [(model.decoder, self._stack)]
        self._forwards += [(layer, WholeLayer(layer)) for layer in model.decoder.layers
                           if WholeLayer.needed(layer)]
        if hasattr(model, "rotary_pos_emb"):  # a model without positions has none
            self._forwards.append((model.rotary_pos_emb, RowRotary(model.rotary_pos_emb, self.slot)))
        if model.post_process:
            self._forwards.append(
                (model.output_layer, ScoredProjection(model.output_layer, self.slot, logit_chunk_bytes)))
        for module, bound in self._forwards:
            # On the instance: module tree, parameters and state-dict keys stay as they are.
            module.forward = bound.forward
        self._hooks = [model.decoder.register_forward_pre_hook(self._connect, with_kwargs=True),
                       model.register_forward_pre_hook(self._enter, with_kwargs=True),
                       model.register_forward_hook(self._leave, always_call=True)]

    def _bind_attention(self, layer: torch.nn.Module) -> None:
        attention = layer.self_attention
        if not isinstance(attention.core_attention, AugTreeAttention):
            stock = attention.core_attention
            attention.core_attention = AugTreeAttention(
                stock.config, layer.layer_number, softmax_scale=attention.config.softmax_scale, stock=stock)
            self._added.append(attention)
        attention.core_attention.bound = True
        # Key of the prompt state. Not Megatron's number: layer kinds of a hybrid model count differently.
        attention.core_attention.layer = len(self._attentions)
        self._attentions.append(attention.core_attention)

    def _enter(self, model: Model, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = dict(zip(self._arguments, args, strict=False), **kwargs)
        pack = given.get("packed_seq_params")
        if not isinstance(pack, AugTreePackedSeqParams):
            return args, kwargs
        _check_pack(pack, given)
        self.slot.pack, ids = pack, given.get("input_ids")
        pack.padding = padding_of(pack.positions.numel(), model.config)
        if pack.padding and ids is not None:
            given["input_ids"] = torch.nn.functional.pad(ids, (0, pack.padding))
        return (), given

    def _connect(self, decoder: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Full recompute drops all gradients behind an input without one (a frozen embedding)."""
        hidden = kwargs.get("hidden_states")
        recomputed = self._stack.recomputes()
        if self.slot.pack is not None and recomputed and torch.is_grad_enabled() and not hidden.requires_grad:
            kwargs["hidden_states"] = hidden.detach().requires_grad_()
        return args, kwargs

    def _leave(self, *_: Any) -> None:
        self.slot.pack = None

    def restore(self) -> None:
        """Takes everything off the model that ``prepare_model`` put on it; a second call does nothing."""
        if getattr(self.model, "augtree_handle", None) is not self:
            return
        for hook in self._hooks:
            hook.remove()
        for module, _ in self._forwards:
            del module.forward
        for attention in self._attentions:
            attention.bound = False
        with changing_modules(self._wrapped):
            for attention in self._added:
                attention.core_attention = attention.core_attention.stock
        del self.model.augtree_handle


def _check_pack(pack: AugTreePackedSeqParams, given: dict) -> None:
    ids, position_ids = given.get("input_ids"), given.get("position_ids")
    rows = None if pack.positions is None else pack.positions.numel()
    rules = (
        (rows is not None and pack.scored is not None and pack.score is not None,
         "positions, scored or score is None", "a pack says where its rows stand, which are scored, and how"),
        (ids is None or rows is None or tuple(ids.shape) == (1, rows),
         f"input_ids {None if ids is None else list(ids.shape)}, {rows} positions",
         "input_ids is [1, T], one batch entry, with T positions"),
        (position_ids is None or rows is None or position_ids.numel() == rows,
         f"position_ids {None if position_ids is None else list(position_ids.shape)}, {rows} rows",
         "a row has one position, and the pack's counts: position_ids is None or [1, T]"),
        (given.get("labels") is None, "labels", "log-probs come from score, not from labels"),
        (given.get("attention_mask") is None, "attention_mask", "the tree is the mask"),
        (given.get("output_processor") is None, "output_processor", "log-probs come from score"),
        (given.get("inference_context") is None, "inference_context", "packs are not decoded step by step"),
    )
    broken = [(found, rule) for holds, found, rule in rules if not holds]
    if broken:
        raise UnsupportedError(
            "the model cannot run this pack", values="; ".join(found for found, _ in broken),
            rule="; ".join(rule for _, rule in broken),
            remedy="call model(ids [1, T], None, None, packed_seq_params=pack)",
        )


def prepare_model(model: torch.nn.Module, *, logit_chunk_mib: int = 256) -> Handle:
    """Binds attention, rotary embedding and output layer of a built model; a second call changes nothing.

    Args:
        model: a ``GPTModel`` or a hybrid model of attention and MLP layers, bare or inside DDP and
            ``Float16Module``.
        logit_chunk_mib: logits kept at once by the output layer, MiB (``AugTreeConfig.logit_chunk_mib``).

    Returns:
        the handle whose ``restore()`` brings the stock model back.

    Raises:
        UnsupportedError: the model has something that AugTree does not compute exactly.
    """
    wrapped = model
    while not isinstance(model, (GPTModel, HybridModel)):
        if not isinstance(getattr(model, "module", None), torch.nn.Module):
            raise UnsupportedError(
                "AugTree cannot bind to this model", values=f"model = {type(model).__name__}",
                rule="it is a megatron-core GPTModel or hybrid model, bare or wrapped",
                remedy="pass the language model",
            )
        model = model.module
    handle = getattr(model, "augtree_handle", None)
    if handle is not None:
        return handle
    check_release(megatron.core.__version__)
    check_config(model.config, model=model)
    _check_layers(model.decoder.layers)
    with changing_modules(wrapped):
        model.augtree_handle = Handle(model, logit_chunk_mib << 20, wrapped)
    return model.augtree_handle


def _attends(layer: torch.nn.Module) -> bool:
    """Whether a checked layer has attention; MLP layers of a hybrid model have none, and mix no rows."""
    return not isinstance(layer.self_attention, IdentityOp)


def _check_layers(layers: Iterable[torch.nn.Module]) -> None:
    broken = []
    for number, layer in enumerate(layers, 1):
        attention = getattr(layer, "self_attention", None)
        core = getattr(attention, "core_attention", None)
        crosses = not isinstance(getattr(layer, "cross_attention", IdentityOp()), IdentityOp)
        mask = getattr(getattr(attention, "attn_mask_type", None), "name", "causal")
        if crosses or (core is None and not isinstance(attention, IdentityOp)):
            kind = "" if core is not None or attention is None else f" with {type(attention).__name__}"
            broken.append(f"layer {number} is a {type(layer).__name__}{kind}")
        elif mask not in CAUSAL_MASKS:
            broken.append(f"layer {number} has attn_mask_type {mask}")
        elif core is not None and not isinstance(core, AugTreeAttention):
            _check_plain(type(core).__name__)
    if broken:
        raise UnsupportedError(
            "some layers are neither causal self attention nor MLP", values="; ".join(broken),
            rule="a prompt is shared as keys and values: the state of a recurrent layer, or another "
            "sequence's keys, are not",
            remedy="use a decoder-only model of attention and MLP layers (hybrid layer pattern: * and -)",
        )
