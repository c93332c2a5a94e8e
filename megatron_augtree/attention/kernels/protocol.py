"""What every attention kernel computes, and the checks they share.

A kernel takes *segments*: independent pieces of attention, each a rectangle (every query row sees every
key row) or, with ``causal``, a triangle on as many keys as queries. One call handles segments of ONE mask
kind, so that a GPU kernel can make one variable-length launch of it; on CPU a call is a loop.

Tensors are rows first, without a batch dimension: ``[T, H, D]``. Query heads are a multiple of KV heads;
query head ``h`` reads KV head ``h // (Hq // Hkv)``. Results come in the accumulation dtype (float64 in
float64 runs, float32 otherwise). Kernels record no autograd graph: the caller runs ``backward`` itself,
with the FINAL output and log-sum-exp of a query row, of which the segment may have seen only a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_augtree.attention.merge import accumulation_dtype
from megatron_augtree.config import UnsupportedError


class Segment(NamedTuple):
    """One piece of attention: queries ``[Tq, Hq, Dk]``, keys ``[Tk, Hkv, Dk]``, values ``[Tk, Hkv, Dv]``."""

    q: Tensor
    k: Tensor
    v: Tensor


class SegmentGrad(NamedTuple):
    """What the backward of a segment reads.

    Attributes:
        dout: ``[Tq, Hq, Dv]`` gradient of the final output.
        q: ``[Tq, Hq, Dk]``.
        k: ``[Tk, Hkv, Dk]``.
        v: ``[Tk, Hkv, Dv]``.
        out: ``[Tq, Hq, Dv]`` final (merged) output, or ``merge.synthetic_out``.
        lse: ``[Tq, Hq]`` final (merged) natural logarithm of the sum of exponentials of scaled scores.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class Kernel(Protocol):
    """An attention kernel. Stateless: one object may serve any number of callers."""

    name: str

    def forward(self, segments: Sequence[Segment], causal: bool, scale: float) -> list[tuple[Tensor, Tensor]]:
        """Partial results of the segments, in their order.

        Args:
            segments: pieces of one mask kind; pieces without rows or without keys are allowed.
            causal: triangles (as many keys as queries) instead of rectangles.
            scale: factor on the scores.

        Returns:
            ``(out [Tq, Hq, Dv], lse [Tq, Hq])`` a segment; without keys ``out`` is 0 and ``lse`` is -inf.

        Raises:
            UnsupportedError: shapes that do not fit together, or that this kernel does not compute.
        """

    def backward(
        self, segments: Sequence[SegmentGrad], causal: bool, scale: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The segments' contributions ``(dq [Tq, Hq, Dk], dk [Tk, Hkv, Dk], dv [Tk, Hkv, Dv])``.

        Query rows whose final ``lse`` is -inf saw nothing: their contributions are 0.
        """


def check_segment(kernel: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Refuses shapes that do not fit together.

    Raises:
        UnsupportedError: naming the kernel and the shapes.
    """
    fits = q.shape[2] == k.shape[2] and k.shape[:2] == v.shape[:2] and q.shape[1] % k.shape[1] == 0
    if fits and (not causal or q.shape[0] == k.shape[0]):
        return
    raise UnsupportedError(
        "attention of tensors that do not fit together",
        values=f"kernel {kernel}, causal={causal}, q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        rule="q and k have one head width, k and v the same rows and heads, query heads are a multiple of KV "
        "heads, and a causal segment has as many keys as queries",
        remedy="cut the rows so that a causal segment is a square, and check the head counts of the model",
    )


def pad_width(x: Tensor, width: int) -> Tensor:
    """``[T, H, D]`` -> ``[T, H, width]``, zeros at the end; the tensor itself where it is that wide."""
    missing = width - x.shape[2]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether a segment has no pair to compute; such a segment never reaches a fused kernel."""
    return q.shape[0] == 0 or k.shape[0] == 0


def empty_forward(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """``(out = 0 [Tq, Hq, Dv], lse = -inf [Tq, Hq])``: the result of queries that meet no key."""
    dtype = accumulation_dtype(q.dtype)
    rows, heads = q.shape[:2]
    out = torch.zeros(rows, heads, v.shape[2], dtype=dtype, device=q.device)
    return out, torch.full((rows, heads), -torch.inf, dtype=dtype, device=q.device)


def empty_backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero ``(dq, dk, dv)`` in the accumulation dtype."""
    dq, dk, dv = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    return dq, dk, dv
