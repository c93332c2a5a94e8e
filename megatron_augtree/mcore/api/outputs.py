"""What the API returns: values of whole samples in the caller's order, in the layouts of frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.mcore.api.batch import Sample
from megatron_augtree.runtime.buffers import to_device


@dataclass
class Outputs:
    """Values of some whole samples, one after the other, in the caller's order.

    Attributes:
        index: [n] int64, which samples of the batch.
        values: name -> [N, ...]: ``logprobs`` (and ``entropy``, if asked for), or whatever the head returns.
            fp32 (fp64 in fp64 runs); 0 at rows that are held but not computed; never NaN because of a mask.
        offsets: [n + 1] int64; sample i holds values ``offsets[i]`` to ``offsets[i + 1]``. On the CPU.
        rows: [N] int64, the row t of each value: its target is token t + 1. On the CPU.
        lengths: tokens of each sample, T_i.
        anchor: a scalar 0 that is connected to this rank's part of the graph. In tier 1 the backward of
            *every* rank has to run, also of one that owns no sample: add it to the loss. (Values of N = 0
            rows are connected as well; a constant 0 is not.)
    """

    index: Tensor
    values: dict[str, Tensor]
    offsets: Tensor
    rows: Tensor
    lengths: tuple[int, ...]
    anchor: Tensor

    def as_list(self, name: str = "logprobs") -> list[Tensor]:
        """A tensor [R_i, ...] a sample: the values of the rows that it holds."""
        return list(self.values[name].split(self.offsets.diff().tolist()))

    def jagged_next(self, name: str = "logprobs") -> list[Tensor]:
        """A tensor [T_i, ...] a sample: entry t is row t's, about token t + 1; 0 elsewhere, as at the end."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        flat = self._spread(name, int(starts[-1]), lambda i, rows: starts[i] + rows)
        return list(flat.split(list(self.lengths)))

    def padded_next(self, size: int, name: str = "logprobs") -> Tensor:
        """[n, size - 1, ...]: entry [i, t] is sample i's row t, about token t + 1; 0 elsewhere."""
        flat = self._spread(name, len(self.lengths) * (size - 1), lambda i, rows: i * (size - 1) + rows, size)
        return flat.reshape(len(self.lengths), size - 1, *flat.shape[1:])

    def padded_prev(self, size: int, name: str = "logprobs") -> Tensor:
        """[n, size, ...]: entry [i, t] is about token t, given those before; 0 elsewhere, t = 0 included."""
        flat = self._spread(name, len(self.lengths) * size, lambda i, rows: i * size + rows + 1, size)
        return flat.reshape(len(self.lengths), size, *flat.shape[1:])

    def zigzag(self, rank: int, size: int, name: str = "logprobs") -> Tensor:
        """[M, ...]: what a context-parallel rank holds of samples packed as Megatron packs them.

        Every sample's `jagged_next` is padded with 0 to a multiple of 2 `size` and cut into 2 `size` equal
        chunks; the rank holds chunks `rank` and 2 `size` - 1 - `rank`, sample after sample.
        """
        parts = []
        for sample in self.jagged_next(name):
            padded = torch.cat([sample, sample.new_zeros((-len(sample) % (2 * size), *sample.shape[1:]))])
            chunks = padded.chunk(2 * size) if len(padded) else [padded] * (2 * size)
            parts += [chunks[rank], chunks[2 * size - 1 - rank]]
        return torch.cat(parts) if parts else self.values[name][:0]

    def _spread(
        self, name: str, total: int, place: Callable[[int, np.ndarray], np.ndarray], size: int | None = None
    ) -> Tensor:
        """Values written to places of a tensor of zeros; differentiable."""
        if size is not None and max(self.lengths, default=0) > size:
            raise InputError(
                "a sample is longer than the padded size",
                values=f"{max(self.lengths)} tokens, size={size}",
                rule="every sample has at most size tokens",
                remedy="pad to the longest sample of the batch, or more",
            )
        values, cuts = self.values[name], self.offsets.tolist()
        where = [place(i, self.rows[a:b].numpy()) for i, (a, b) in enumerate(zip(cuts, cuts[1:]))]
        index = to_device(np.concatenate([np.zeros(0, np.int64), *where]), values.device)
        return values.new_zeros((total, *values.shape[1:])).index_copy(0, index, values)


#: Takes whole samples, returns this call's *additive* share of the loss (a scalar) and of scalar metrics.
#: Metrics whose names begin with ``min/`` or ``max/`` are reduced so, all others are added.
LossFn = Callable[[Outputs], tuple[Tensor, dict[str, Any]]]


@dataclass
class StepOutput:
    """What a step gave.

    Attributes:
        loss: sum of the loss function's shares over all calls and ranks of the plan's scope, divided by the
            normalizer: what was differentiated.
        metrics: its metrics, reduced over the same calls.
        outputs: values of this rank's samples, without gradients.
        stats: of the plan, and of the shadow run where there was one.
    """

    loss: float
    metrics: dict[str, float]
    outputs: Outputs | None
    stats: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Columns:
    """How named values lie in the columns of one tensor.

    Attributes:
        names, shapes, dtypes: of every value: its name, shape of a row, and type in the outputs.
        dtype: of the tensor: fp32, fp64 in fp64 runs.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype

    @staticmethod
    def of(values: dict[str, Tensor], dtype: torch.dtype) -> Columns:
        """The columns of what a head returns."""
        kinds = [dtype if v.is_floating_point() else v.dtype for v in values.values()]
        return Columns(tuple(values), tuple(tuple(v.shape[1:]) for v in values.values()), tuple(kinds), dtype)

    @property
    def sizes(self) -> list[int]:
        return [int(np.prod(shape)) for shape in self.shapes]

    @property
    def width(self) -> int:
        return sum(self.sizes)

    def fit(self, values: dict[str, Tensor]) -> bool:
        """Whether values have these names, shapes of a row and kinds of numbers."""
        given = {k: (tuple(v.shape[1:]), v.is_floating_point()) for k, v in values.items()}
        kinds = [kind.is_floating_point for kind in self.dtypes]
        return given == dict(zip(self.names, zip(self.shapes, kinds)))

    def pack(self, values: dict[str, Tensor]) -> Tensor:
        """name -> [n, ...] as [n, width]."""
        return torch.cat(
            [
                values[name].to(self.dtype).flatten(1) if shape else values[name].to(self.dtype).unsqueeze(1)
                for name, shape in zip(self.names, self.shapes)
            ],
            dim=1,
        )

    def unpack(self, packed: Tensor) -> dict[str, Tensor]:
        """[n, width] as name -> [n, ...]."""
        parts = packed.split(self.sizes, dim=1)
        return {
            name: part.reshape(len(part), *shape).to(kind)
            if kind.is_floating_point
            else part.reshape(len(part), *shape).round().to(kind)
            for name, shape, kind, part in zip(self.names, self.shapes, self.dtypes, parts)
        }


def make_outputs(
    samples: Sequence[Sample], index: Sequence[int], computed: Tensor, columns: Columns
) -> Outputs:
    """Outputs of some samples.

    Args:
        samples: of the batch.
        index: which of them.
        computed: [C, k] values of their computed rows, one sample after the other.
        columns: names of the k columns.
    """
    chosen = [samples[i] for i in index]
    counts = [int(s.held.sum()) for s in chosen]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    places = np.concatenate([np.zeros(0, np.int64), *[o + s.kept for o, s in zip(offsets, chosen)]])
    anchor = computed[:0].sum()
    if len(places) != int(offsets[-1]):
        where = to_device(places, computed.device)
        computed = computed.new_zeros((int(offsets[-1]), computed.shape[1])).index_copy(0, where, computed)
    rows = np.concatenate([np.zeros(0, np.int64), *[s.rows for s in chosen]])
    return Outputs(
        index=torch.as_tensor(list(index), dtype=torch.int64),
        values=columns.unpack(computed),
        offsets=torch.from_numpy(offsets),
        rows=torch.from_numpy(rows),
        lengths=tuple(len(s.tokens) for s in chosen),
        anchor=anchor,
    )
