"""Variable-length attention by the reference kernel: what stand-ins for GPU operators compute with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_augtree.attention.kernels import Segment, SegmentGrad
from megatron_augtree.attention.kernels.reference import ReferenceKernel


def reference_forward(q: Tensor, k: Tensor, v: Tensor, q_lengths, k_lengths, causal: bool, scale: float) \
        -> tuple[Tensor, Tensor]:
    """``(out [Tq, Hq, W] in q's type, lse [Tq, Hq] float32)``."""
    pieces = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    results = ReferenceKernel().forward([Segment(*piece) for piece in pieces], causal, scale)
    return torch.cat([out for out, _ in results]).to(q.dtype), torch.cat([lse for _, lse in results])


def reference_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_lengths,
                       k_lengths, causal: bool, scale: float) -> list[Tensor]:
    """``[dq, dk, dv]`` in q's type."""
    sizes = (q_lengths, q_lengths, k_lengths, k_lengths, q_lengths, q_lengths)
    pieces = zip(*(x.split(size) for x, size in zip((dout, q, k, v, out, lse), sizes, strict=True)),
                 strict=True)
    grads = ReferenceKernel().backward([SegmentGrad(*piece) for piece in pieces], causal, scale)
    return [torch.cat(parts).to(q.dtype) for parts in zip(*grads, strict=True)]
