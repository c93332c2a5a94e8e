"""Rotary embedding at the rows' own positions.

Stock ``RotaryEmbedding.forward`` makes one table for positions 0, 1, 2, ... and, under context parallelism,
cuts it as zigzag. The rows of a pack stand at any positions, several rows at the same one. So for packs of
ours the bound forward takes the base module's table (all of its scaling and interleaving included; a partial
one is narrower than a head) at ``positions``; everything else falls through to the stock forward.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams


class PackSlot:
    """Holds the descriptor of the pack that the model is running, ``None`` between packs of ours.

    megatron-core hands the packed parameters neither to its rotary embedding nor to its output layer.
    Hooks on the model fill the slot before and empty it after every forward, also after one that fails.
    """

    def __init__(self) -> None:
        self.pack: AugTreePackedSeqParams | None = None


class RowRotary:
    """The forward of a bound rotary embedding.

    Args:
        base: the model's rotary embedding.
        slot: where the running pack is found.
    """

    def __init__(self, base: RotaryEmbedding, slot: PackSlot) -> None:
        self.stock, self.slot, self.base = base.forward, slot, base
        self.table: Tensor | None = None
        self.factor: tuple[float, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, float]:
        """Angles ``[T + padding, 1, 1, D]`` of the pack's rows; without a pack of ours, what stock returns.

        YaRN's come with its concentration factor, as the stock forward returns them.
        """
        pack = self.slot.pack
        if pack is None:
            return self.stock(*args, **kwargs)
        positions = torch.nn.functional.pad(pack.positions, (0, pack.padding))
        needed = max(pack.last_position, 0) + 1
        if self.table is None or self.table.shape[0] < needed:
            # Doubled, so that ever longer packs do not rebuild it each time. Not the stock forward: its
            # cache is keyed by arguments and would keep every table.
            grown = max(needed, 2 * (0 if self.table is None else self.table.shape[0]))
            with torch.no_grad():
                made = self.base.get_emb(grown)
            self.table, *factor = made if isinstance(made, tuple) else (made,)
            self.factor = tuple(factor)
        angles = self.table[positions.to(self.table.device)]
        return (angles, *self.factor) if self.factor else angles
