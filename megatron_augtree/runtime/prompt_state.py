"""Keys and values that a pass keeps for later passes, and the ports that put their gradients back.

A later pass reads the kept keys and values and adds its dK, dV to accumulators beside them. When the backward
of the pass that owns the rows reaches a layer's keys and values, the *port* (an identity in the forward) adds
what has accumulated. So prompt gradients need no second graph, and a port works inside activation recompute:
the forward may run twice, it writes the same values; the backward runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_augtree.attention.merge import accumulation_dtype
from megatron_augtree.config import AugTreeError


@dataclass
class PromptState:
    """One pass's kept keys and values.

    Attributes:
        layers: (layer, block rank) -> fields k, v [T, Hkv, D] and dk, dv (accumulation dtype).
        alone: nothing else keeps a layer's activations on the device: keys and values that are a part of
            something larger (a layer's QKV) are copied out of it, so that it can go.
    """

    layers: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    alone: bool = False
    _memory: set[int] = field(default_factory=set)

    def keep(self, layer: int, rank: int, k: Tensor, v: Tensor) -> None:
        """Keep the rows of a rank; a recomputed forward keeps what is there, gradients included."""
        if not self.has(layer, rank):
            self.layers[(layer, rank)] = {"k": k.detach(), "v": v.detach()}
            self._memory |= {k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()}

    def has(self, layer: int, rank: int) -> bool:
        """Whether a rank's layer is kept."""
        return (layer, rank) in self.layers

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was kept; asked before the backward takes anything."""
        return tensor.untyped_storage().data_ptr() in self._memory

    def read(self, layer: int, rank: int) -> dict[str, Tensor]:
        """Fields k, v of a rank.

        Raises:
            AugTreeError: the pass has not run, or its backward has already taken them.
        """
        if not self.has(layer, rank):
            raise AugTreeError(
                "prompt state is not there",
                values=f"layer {layer}, block rank {rank}",
                rule="a pass's keys and values live from its forward to its backward",
                remedy="play the plan's events in order",
            )
        return self.layers[(layer, rank)]

    def read_gradients(self, layer: int, rank: int) -> dict[str, Tensor]:
        """Fields k, v, dk, dv of a rank; the accumulators start at zero."""
        fields = self.read(layer, rank)
        for name in ("k", "v"):
            if "d" + name not in fields:
                fields["d" + name] = torch.zeros_like(
                    fields[name], dtype=accumulation_dtype(fields[name].dtype)
                )
        return fields

    def take_gradients(self, layer: int, rank: int) -> tuple[Tensor, Tensor] | None:
        """Accumulated dk, dv, or None where nothing arrived; the state of this rank's layer ends."""
        fields = self.layers.pop((layer, rank), {})
        return (fields["dk"], fields["dv"]) if "dk" in fields else None


class _Port(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, v, state, layer, ranks, sizes, alone):
        ctx.state, ctx.layer, ctx.ranks, ctx.sizes = state, layer, ranks, sizes
        if alone and not state.has(layer, ranks[0]):
            k, v = _by_itself(k), _by_itself(v)
        for rank, k_rank, v_rank in zip(ranks, k.split(sizes), v.split(sizes)):
            state.keep(layer, rank, k_rank, v_rank)
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dk, dv):
        dk, dv = dk.clone(), dv.clone()
        for rank, dk_rank, dv_rank in zip(ctx.ranks, dk.split(ctx.sizes), dv.split(ctx.sizes)):
            arrived = ctx.state.take_gradients(ctx.layer, rank)
            if arrived is not None:
                dk_rank += arrived[0]
                dv_rank += arrived[1]
        return dk, dv, None, None, None, None, None


def _by_itself(tensor: Tensor) -> Tensor:
    """The tensor, in memory of its own size."""
    own = tensor.numel() * tensor.element_size()
    return tensor.clone() if tensor.untyped_storage().nbytes() > own else tensor


def port(
    k: Tensor, v: Tensor, state: PromptState, layer: int, ranks: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Keep keys and values for later passes, and let their gradients in at this point of the graph.

    Args:
        k, v: [T, Hkv, D], the hosted ranks' rows one after the other.
        state: where they are kept.
        layer: layer number.
        ranks: hosted block ranks.
        sizes: rows of each.
    """
    # Without gradients a layer keeps nothing, or runs again.
    alone = state.alone or not torch.is_grad_enabled()
    return _Port.apply(k, v, state, layer, tuple(ranks), list(sizes), alone)
