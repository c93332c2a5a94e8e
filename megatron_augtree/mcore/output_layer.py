"""The vocabulary projection, for the rows that carry a loss only, and chunk by chunk.

A pack of T rows has n <= T scored rows; prompt rows carry no loss. Logits of V entries a row are the largest
tensor of an update, so they are made for scored rows only, ``budget_bytes`` at a time, and reduced at once to
the k columns that the loss needs. With more than one chunk, backward recomputes each chunk's logits.

Under sequence parallelism the rows lie cut over the tensor-parallel ranks, and scored rows anywhere among
them: they are selected after the gather, so the projection runs as it does without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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
        """``[T, 1, H]`` -> ``([n, 1, k], None)`` for a pack of ours; otherwise what stock returns.

        Under sequence parallelism ``input_`` is ``[T / tp, 1, H]``.
        """
        pack = self.slot.pack
        if pack is None:
            return self.stock(input_, weight=weight, **kwargs)
        score = pack.score  # bound here: in backward the slot is empty
        rows = pack.scored.to(input_.device)
        hidden, share = self._gathered(input_)
        hidden = hidden.index_select(0, rows)

        def project(hidden: Tensor, rows: Tensor) -> Tensor:
            with self._rows_are_whole():
                logits, _ = self.stock(hidden, weight=weight, **kwargs)
            if share != 1.0:
                logits = _ScaledGradient.apply(logits, share)
            return score(logits.squeeze(1), rows)

        pieces = list(zip(*(t.split(self._rows_a_chunk(input_, weight)) for t in (hidden, rows)),
                          strict=True))
        if len(pieces) == 1:  # also without a scored row: the graph stays connected to every parameter
            columns = project(*pieces[0])
        else:
            # The projection draws no random number, so no generator state has to be kept.
            # Without the early stop: it ends `score` by an exception, which a score may take for its own.
            how = {"use_reentrant": False, "preserve_rng_state": False}
            with set_checkpoint_early_stop(False):
                columns = torch.cat([checkpoint(project, *piece, **how) for piece in pieces])
        return columns.unsqueeze(1), None

    def _gathered(self, hidden: Tensor) -> tuple[Tensor, float]:
        """All rows, and the part of the logits' gradient that is this rank's.

        A vocabulary-parallel layer sums its input's gradient over the ranks by itself. Any other layer (a
        value head) is replicated, and Megatron sums its gradients over the ranks: each counts only its part.
        """
        if not getattr(self.base, "sequence_parallel", False):
            return hidden, 1.0
        group = getattr(self.base, "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
        alone = not isinstance(self.base, ColumnParallelLinear)
        whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=alone, group=group)
        return whole, 1 / group.size() if alone else 1.0

    @contextmanager
    def _rows_are_whole(self) -> Iterator[None]:
        """The layer neither gathers its input nor scatters its input's gradient."""
        cut = getattr(self.base, "sequence_parallel", False)
        if not cut:
            yield
            return
        self.base.sequence_parallel = False
        try:
            yield
        finally:
            self.base.sequence_parallel = True

    def _rows_a_chunk(self, hidden: Tensor, weight: Tensor | None) -> int:
        weight = self.base.weight if weight is None else weight  # this rank's slice of the vocabulary
        # 16-bit logits are scored in fp32.
        row_bytes = weight.shape[0] * max(4, hidden.element_size())
        return max(1, self.budget_bytes // row_bytes)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, scale):
        ctx.scale = scale
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None
