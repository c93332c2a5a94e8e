"""Recompute as a pass asks for it: how many of the model's layers run again in its backward.

Megatron has one setting of recompute for a model; a plan has one for each pass (`Pass.keep_layers`): a prompt
may be recomputed in full while its waves keep everything. megatron-core's layer stack reads the setting off
its configuration whenever it runs, so for the forward of such a pass the configuration says: ``full``,
``block``, the first L - keep_layers layers. The last ones keep everything.

- The setting is the model's again when the stack returns, also where it raises. Nothing else reads it while
  the stack runs: layers look at their own switches, which were set when they were built.
- A model that was built with selective recompute has such switches. In a pass that says its recompute they
  are off, in its forward and when a layer runs again: a layer keeps everything, or runs again once, in full.
- What attention gave is kept by `runtime/tree_attention.py`, for the first ``keep_attention`` of the layers
  that run again; in a hybrid model layers without attention do not count for it.
- Megatron recomputes where a model is in training mode. A plan was priced with recompute, so the stack also
  does in evaluation mode, where gradients are wanted; layers see the model's own mode.
- Without gradients nothing runs again and nothing is kept.

A pass with ``keep_layers`` -1 is played with the setting as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_augtree.config import AugTreeError, InputError, UnsupportedError
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from megatron_augtree.mcore.rotary import PackSlot
from megatron_augtree.planning.plan import Plan

#: What a layer recomputes by itself: (attribute that holds the module, or empty for the layer; its switch).
_SWITCHES = (
    ("self_attention", "checkpoint_core_attention"),
    ("", "recompute_input_layernorm"),
    ("", "recompute_pre_mlp_layernorm"),
    ("", "recompute_mlp"),
)


class PassRecompute:
    """The forward of a bound layer stack.

    Args:
        base: the model's stack.
        slot: where the running pack is found.
    """

    def __init__(self, base: torch.nn.Module, slot: PackSlot) -> None:
        self.stock, self.base, self.slot = base.forward, base, slot

    def layers_again(self) -> int | None:
        """Layers of the running pack that will run again; None where the model's own setting holds."""
        pack = self.slot.pack
        if pack is None or pack.context.keep_layers < 0:
            return None
        # A plan that is played with a smaller model (a critic, with like=) keeps all of its layers.
        again = max(len(self.base.layers) - pack.context.keep_layers, 0)
        return again if torch.is_grad_enabled() else 0

    def recomputes(self) -> bool:
        """Whether some layer of the running pack, or of a stock batch, will run again in full."""
        again = self.layers_again()
        if again is None:
            return self.base.config.recompute_granularity == "full" and self.base.training
        return again > 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stack returns; takes what it takes.

        Raises:
            UnsupportedError: the pack's plan was made for a model that could do what this one cannot.
        """
        again, pack = self.layers_again(), self.slot.pack
        if pack is not None:
            failure = _cannot(self.base, bool(again), pack.context.rest is not None, "the running pass")
            if failure is not None:
                raise failure
        if again is None:
            return self.stock(*args, **kwargs)
        setting = {
            "recompute_granularity": "full" if again else None,
            "recompute_method": "block" if again else None,
            "recompute_num_layers": again or None,
        }
        with _set(self.base.config, setting), _set(self.base, {"training": self.base.training or again > 0}):
            return self.stock(*args, **kwargs)


class WholeLayer:
    """The forward of a layer that was built to recompute parts of itself.

    Args:
        base: the layer.
    """

    def __init__(self, base: torch.nn.Module) -> None:
        self.stock, self.base = base.forward, base

    @staticmethod
    def needed(layer: torch.nn.Module) -> bool:
        """Whether a layer has a switch that is on."""
        return any(getattr(module, name) for module, name in _switches(layer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns; the stack hands it the pack also when it runs again."""
        pack = kwargs.get("packed_seq_params")
        if not isinstance(pack, AugTreePackedSeqParams) or pack.context.keep_layers < 0:
            return self.stock(*args, **kwargs)
        switches = _switches(self.base)
        before = [getattr(module, name) for module, name in switches]
        try:
            for module, name in switches:
                setattr(module, name, False)
            return self.stock(*args, **kwargs)
        finally:
            for (module, name), value in zip(switches, before):
                setattr(module, name, value)


def _switches(layer: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    found = [(getattr(layer, holder, None) if holder else layer, name) for holder, name in _SWITCHES]
    return [(module, name) for module, name in found if hasattr(module, name)]


@contextmanager
def _set(holder: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def can_recompute(stack: torch.nn.Module) -> bool:
    """Whether a layer stack recomputes a number of its first layers when it is told so.

    megatron-core's ``TransformerBlock`` does, and from 0.19 on the stack of hybrid models.
    """
    shared = hasattr(sys.modules[type(stack).__module__], "checkpointed_forward")
    return isinstance(stack, TransformerBlock) or shared


def can_offload(stack: torch.nn.Module) -> bool:
    """Whether what a model's forward saves may be taken away and given back.

    Fused accumulation of weight gradients leaves notes on the parameter that it saved; torch gives back
    another object for it wherever saved tensors go through hooks.
    """
    return not stack.config.gradient_accumulation_fusion


def cannot_play(model: torch.nn.Module, plan: Plan) -> AugTreeError | None:
    """What of a plan's recompute and offload a model cannot do, or None.

    Args:
        model: the bound model, bare or wrapped.
        plan: a plan made for it.
    """
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    layers = len(model.decoder.layers)
    for p in plan.passes:
        if p.keep_layers >= 0 and p.keep_layers + p.keep_attention > layers:
            return InputError(
                "a pass keeps more layers than the model has",
                values=f"pass {p.id}: keep_layers {p.keep_layers}, keep_attention {p.keep_attention}; "
                f"{layers} layers",
                rule="the last keep_layers of the layers keep everything, keep_attention of the others what "
                "attention gave",
                remedy="plan again for this model",
            )
        failure = _cannot(model.decoder, 0 <= p.keep_layers < layers, p.offload, f"pass {p.id}")
        if failure is not None:
            return failure
    return None


def _cannot(stack: torch.nn.Module, recompute: bool, offload: bool, where: str) -> UnsupportedError | None:
    """What a layer stack cannot do, or None."""
    if recompute and not can_recompute(stack):
        kind = type(stack)
        return UnsupportedError(
            "the model cannot recompute as a plan asks",
            values=f"{where} recomputes layers; they are in a {kind.__module__}.{kind.__qualname__}",
            rule="megatron-core's TransformerBlock recomputes its first layers, and from 0.19 on HybridStack",
            remedy="use a GPTModel or a later megatron-core, or a plan whose passes have keep_layers -1",
        )
    if offload and not can_offload(stack):
        return UnsupportedError(
            "activations cannot rest in host memory here",
            values=f"{where} has offload; gradient_accumulation_fusion = True",
            rule="fused accumulation of weight gradients loses sight of weights that went through hooks of "
            "saved tensors",
            remedy="add --no-gradient-accumulation-fusion, or use a plan without offload",
        )
    return None
