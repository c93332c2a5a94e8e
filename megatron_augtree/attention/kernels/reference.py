"""The obvious kernel: scores, softmax, average, written out in the accumulation dtype.

It runs on any device, in any dtype and with any head widths, also key and value widths that differ. It
holds all scores of a segment (``Hq * Tq * Tk`` numbers) and expands grouped KV heads, so it is for tests
and for small inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_augtree.attention.kernels.protocol import (
    Segment,
    SegmentGrad,
    check_segment,
    empty_backward,
    empty_forward,
    is_empty,
)
from megatron_augtree.attention.merge import accumulation_dtype, delta_of


class ReferenceKernel:
    """See the module; the contract is ``protocol.Kernel``."""

    name = "reference"

    @torch.no_grad()
    def forward(self, segments: Sequence[Segment], causal: bool, scale: float) -> list[tuple[Tensor, Tensor]]:
        """``protocol.Kernel.forward``."""
        return [self._forward(segment, causal, scale) for segment in segments]

    @torch.no_grad()
    def backward(
        self, segments: Sequence[SegmentGrad], causal: bool, scale: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """``protocol.Kernel.backward``."""
        return [self._backward(segment, causal, scale) for segment in segments]

    def _forward(self, segment: Segment, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = segment
        check_segment(self.name, q, k, v, causal)
        if is_empty(q, k):
            return empty_forward(q, v)
        scores = _scores(q, k, causal, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return torch.einsum("hqk,khd->qhd", weights, _expanded(v, q)), lse.transpose(0, 1).contiguous()

    def _backward(self, segment: SegmentGrad, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = segment
        check_segment(self.name, q, k, v, causal)
        if is_empty(q, k):
            return empty_backward(q, k, v)
        dtype = accumulation_dtype(q.dtype)
        dout, lse = dout.to(dtype), lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf)
        weights = (_scores(q, k, causal, scale) - lse.transpose(0, 1).unsqueeze(-1)).exp()
        dweights = torch.einsum("qhd,khd->hqk", dout, _expanded(v, q))
        dscores = weights * (dweights - delta_of(dout, out).transpose(0, 1).unsqueeze(-1)) * scale
        dq = torch.einsum("hqk,khd->qhd", dscores, _expanded(k, q))
        dk = torch.einsum("hqk,qhd->khd", dscores, q.to(dtype))
        dv = torch.einsum("hqk,qhd->khd", weights, dout)
        return dq, _grouped(dk, k), _grouped(dv, v)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Scaled scores ``[Hq, Tq, Tk]``; -inf above the diagonal where causal."""
    scores = torch.einsum("qhd,khd->hqk", q.to(accumulation_dtype(q.dtype)), _expanded(k, q)) * scale
    if causal:
        above = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    return scores


def _expanded(x: Tensor, q: Tensor) -> Tensor:
    """``[Tk, Hkv, D]`` -> ``[Tk, Hq, D]`` in the accumulation dtype: one KV head for every query head."""
    return x.to(accumulation_dtype(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _grouped(grad: Tensor, x: Tensor) -> Tensor:
    """``[Tk, Hq, D]`` -> the sum over the query heads that share a KV head, ``[Tk, Hkv, D]``."""
    rows, heads, width = x.shape
    return grad.reshape(rows, heads, -1, width).sum(2)
