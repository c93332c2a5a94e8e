"""torch's CPU flash attention, forward and explicit backward.

The backward of ``aten::_scaled_dot_product_flash_attention_for_cpu`` rebuilds the softmax weights from the
log-sum-exp that it is given. Given the *merged* one, together with the merged output, it returns this
segment's exact share of the gradients, in float32 and float64. Grouped KV heads are never expanded.

The operator wants ``[B, H, T, D]`` but follows strides, so rows-first tensors go in as transposed views and
come back as such, without copies. It does NOT follow the stride of the last dimension (the result would be
garbage, silently), crashes the process on an empty segment, and refuses unequal key and value widths: all
three are dealt with here, the last by padding the narrower with zeros, which add nothing to scores and are
cut off outputs and gradients.

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
    pad_width,
)
from megatron_augtree.attention.merge import accumulation_dtype

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlashKernel:
    """See the module; the contract is ``protocol.Kernel``."""

    name = "cpu_flash"

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
        dtype, width = accumulation_dtype(q.dtype), max(k.shape[2], v.shape[2])
        heads = (_heads_first(x, dtype, width) for x in (q, k, v))
        out, lse = _flash_forward(*heads, 0.0, causal, scale=scale)
        return out[0].transpose(0, 1)[..., : v.shape[2]], lse[0].transpose(0, 1)

    def _backward(self, segment: SegmentGrad, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out, lse = segment
        check_segment(self.name, q, k, v, causal)
        if is_empty(q, k):
            return empty_backward(q, k, v)
        dtype, width = accumulation_dtype(q.dtype), max(k.shape[2], v.shape[2])
        # exp(score - inf) = 0: a row that saw nothing adds nothing. exp(score + inf) would be infinite.
        lse = lse.to(dtype).masked_fill(lse == -torch.inf, torch.inf).transpose(0, 1).unsqueeze(0)
        heads = (_heads_first(x, dtype, width) for x in (dout, q, k, v, out))
        grads = _flash_backward(*heads, lse, 0.0, causal, scale=scale)
        dq, dk, dv = (grad[0].transpose(0, 1)[..., : x.shape[2]] for grad, x in zip(grads, (q, k, v)))
        return dq, dk, dv


def _heads_first(x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """``[T, H, D]`` -> ``[1, H, T, width]``, a view unless the dtype, the last stride or the width forbid."""
    x = pad_width(x.to(dtype), width)
    if x.stride(2) != 1:
        x = x.contiguous()
    return x.transpose(0, 1).unsqueeze(0)
