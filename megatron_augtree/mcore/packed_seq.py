"""The pack's descriptor as it rides through the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

#: ``score(logits [n, V], rows [n]) -> [n, k]``: what is kept of the logits of local rows ``rows``.
#: It may run twice (its inputs are recomputed chunk by chunk in backward), so it has no side effects.
Score = Callable[[Tensor, Tensor], Tensor]


@dataclass
class AugTreePackedSeqParams(PackedSeqParams):
    """One pass's local rows, handed to ``GPTModel.forward(packed_seq_params=...)``.

    megatron-core passes the object on untouched, so every bound module finds here what it needs, also when
    a layer runs again. ``qkv_format`` is ``"sbhd"``: megatron-core then leaves the rows as they lie, without
    its zigzag or per-sequence rotary logic.

    Attributes:
        positions: the rows' own positions, int64 ``[T]``.
        context: the pass's runtime context, handed to ``tree_attention``.
        scored: local rows that carry a loss, int64 ``[n]``; only they reach the vocabulary projection.
        score: see ``Score``; the model returns ``[1, n, k]``.
        last_position: the largest position, -1 without rows; where it is left out, the device is asked.
        padding: rows behind the T rows that belong to no plan, and which no row attends to. A bound model
            sets it: megatron-core cannot run a pack of no rows, and sequence parallelism cuts equal parts.
    """

    positions: Tensor | None = None
    context: Any = None
    scored: Tensor | None = None
    score: Score | None = None
    last_position: int | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        inherited = getattr(super(), "__post_init__", None)  # from megatron-core 0.17 on
        if inherited is not None:
            inherited()
        self.qkv_format = "sbhd"
        if self.positions is not None:
            self.max_seqlen_q = self.max_seqlen_kv = self.positions.numel()
            if self.last_position is None:
                self.last_position = int(self.positions.max()) if self.positions.numel() else -1
