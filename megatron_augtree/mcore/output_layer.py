"""The vocabulary projection, for the rows that carry a loss only, and chunk by chunk.

A pack of T rows has n <= T scored rows; prompt rows carry no loss. Logits of V entries a row are the largest
tensor of an update, so they are made for scored rows only, ``budget_bytes`` at a time, and reduced at once to
the k columns that the loss needs. With more than one chunk, backward recomputes each chunk's logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_augtree.mcore.rotary import PackSlot


class ScoredProjection:
    """The forward of a bound output layer.

    Args:
        base: the model's output layer.
        slot: where the running pack is found.
        budget_bytes: logits kept at once, bytes; at least one row is projected.
    """

    def __init__(self, base: torch.nn.Module, slot: PackSlot, budget_bytes: int) -> None:
        self.stock, self.slot, self.base = base.forward, slot, base
        self.budget_bytes = budget_bytes

    def forward(self, input_: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """``[T, 1, H]`` -> ``([n, 1, k], None)`` for a pack of ours; otherwise what stock returns."""
        pack = self.slot.pack
        if pack is None:
            return self.stock(input_, weight=weight, **kwargs)
        score = pack.score  # bound here: in backward the slot is empty
        rows = pack.scored.to(input_.device)
        hidden = input_.index_select(0, rows)

        def project(hidden: Tensor, rows: Tensor) -> Tensor:
            logits, _ = self.stock(hidden, weight=weight, **kwargs)
            return score(logits.squeeze(1), rows)

        pieces = list(zip(*(t.split(self._rows_a_chunk(input_, weight)) for t in (hidden, rows)),
                          strict=True))
        if len(pieces) == 1:  # also without a scored row: the graph stays connected to every parameter
            columns = project(*pieces[0])
        else:
            # The projection draws no random number, so no generator state has to be kept.
            columns = torch.cat([checkpoint(project, *piece, use_reentrant=False, preserve_rng_state=False)
                                 for piece in pieces])
        return columns.unsqueeze(1), None

    def _rows_a_chunk(self, hidden: Tensor, weight: Tensor | None) -> int:
        weight = self.base.weight if weight is None else weight
        # 16-bit logits are scored in fp32.
        row_bytes = weight.shape[0] * max(4, hidden.element_size())
        return max(1, self.budget_bytes // row_bytes)
