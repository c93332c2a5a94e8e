"""torch's CPU flash attention, forward and explicit backward.

The backward of ``aten::_scaled_dot_product_flash_attention_for_cpu`` rebuilds the softmax weights from the
log-sum-exp that it is given. Given the *merged* one, together with the merged output, it returns this
segment's exact share of the gradients, in float32 and float64. Grouped KV heads are never expanded.

The operator wants ``[B, H, T, D]`` but follows strides, so rows-first tensors go in as transposed views and
come back as such, without copies. It does NOT follow the stride of the last dimension (the result would be
garbage, silently), crashes the process on an empty segment, and refuses unequal key and value widths: all
three are dealt with here.

bfloat16 and float16 segments are computed in float32. The operator would round each partial result to
16 bits; widening costs nothing in the forward, is 2 to 4 times faster in the backward of short segments
and about 1.3 times slower in that of long ones.
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
from megatron_augtree.attention.merge import accumulation_dtype
from megatron_augtree.config import UnsupportedError

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlashKernel:
    """See the module; the contract is ``protocol.Kernel``."""

    name = "cpu_flash"

    @torch.no_grad()
    def forward(self, segments: Sequence[Segment], causal: bool, scale: float) -> list[tuple[Tensor, Tensor]]:
        """``protocol.Kernel.forward``.

        Raises:
            UnsupportedError: also for key and value widths that differ.
        """
        return [self._forward(segment, causal, scale) for segment in segments]

    @torch.no_grad()
    def backward(
        self, segments: Sequence[SegmentGrad], causal: bool, scale: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """``protocol.Kernel.backward``.

        Raises:
            UnsupportedError: also for key and value widths that differ.
        """
        return [self._backward(segment, causal, scale) for segment in segments]

    def _forward(self, segment: Segment, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = segment
        self._check(q, k, v, causal)
        if is_empty(q, k):
            return empty_forward(q, v)
        dtype = accumulation_dtype(q.dtype)
        q, k, v = (_heads_first(x, dtype) for x in (q, k, v))
        out, lse = _flash_forward(q, k, v, 0.0, causal, scale=scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def _backward(self, segment: SegmentGrad, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = segment
        self._check(q, k, v, causal)
        if is_empty(q, k):
            return empty_backward(q, k, v)
        dtype = accumulation_dtype(q.dtype)
        # exp(score - inf) = 0: a row that saw nothing adds nothing. exp(score + inf) would be infinite.
        lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf).transpose(0, 1).unsqueeze(0)
        dout, q, k, v, out = (_heads_first(x, dtype) for x in (dout, q, k, v, out))
        grads = _flash_backward(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
        return dq, dk, dv

    def _check(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        check_segment(self.name, q, k, v, causal)
        if k.shape[2] != v.shape[2]:
            raise UnsupportedError(
                "key and value heads of different widths",
                values=f"kernel {self.name}, key width {k.shape[2]}, value width {v.shape[2]}",
                rule="torch's CPU flash attention computes one width for queries, keys and values",
                remedy="choose the kernel `reference`",
            )


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``[T, H, D]`` -> ``[1, H, T, D]``, a view unless the dtype or the last stride forbids it."""
    x = x.to(dtype)
    if x.stride(2) != 1:
        x = x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)
