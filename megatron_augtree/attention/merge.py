"""Exact combination of partial softmax results, and the algebra that a split backward needs.

A query row that meets its keys in several places gets one partial ``(out, lse)`` per place: ``out`` is the
softmax average of the values seen there, ``lse`` the natural logarithm of the sum of exponentials. Two
partials combine exactly:

    lse = log(exp(lse_a) + exp(lse_b))          out = out_a + sigmoid(lse_b - lse_a) * (out_b - out_a)

so a merge is one linear interpolation, one pass over the output. A partial that saw no key has
``lse = -inf`` and an ``out`` that means nothing: it is never read, whatever it holds. Where both sides saw
nothing the result is ``out = 0``, ``lse = -inf``.

Partials live in the *accumulation dtype*: float64 in float64 runs, float32 otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partials and of gradients being summed: float64 stays, every other is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a partial result into ``(out, lse)``, in place.

    ``out`` and ``lse`` may be row ranges (views) of larger tensors. Accumulators may start as
    ``lse = -inf`` with uninitialised ``out``: the first merge is then a plain copy.

    Args:
        out: ``[T, H, D]`` in the accumulation dtype, overwritten.
        lse: ``[T, H]`` in the accumulation dtype, overwritten.
        part_out: ``[T, H, D]``, any floating dtype.
        part_lse: ``[T, H]``, any floating dtype.
    """
    part_out, part_lse = part_out.to(out.dtype), part_lse.to(lse.dtype)
    if out.device.type != "cpu":
        _merge_without_looking_(out, lse, part_out, part_lse)
        return
    ahead = part_lse - lse
    # Looking for -inf costs a pass over [T, H], a D-th of the merge.
    if ahead.isfinite().all():
        torch.logaddexp(lse, part_lse, out=lse)
        out.lerp_(part_out, ahead.sigmoid_().unsqueeze(-1))
        return
    # Indices, not masks: masked_fill_ with a mask that broadcasts over D is slower than all the rest.
    unseen = (lse == -torch.inf).nonzero(as_tuple=True)
    part_unseen = (part_lse == -torch.inf).nonzero(as_tuple=True)
    if unseen[0].numel() == lse.numel():
        out.copy_(part_out)
        out[part_unseen] = 0.0
        lse.copy_(part_lse)
        return
    out[unseen] = 0.0
    if part_unseen[0].numel():
        part_out = part_out.clone()
        part_out[part_unseen] = 0.0
    weight = ahead.sigmoid_()
    weight[part_unseen] = 0.0  # also where -inf - -inf was NaN
    torch.logaddexp(lse, part_lse, out=lse)
    out.lerp_(part_out, weight.unsqueeze(-1))


def _merge_without_looking_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`merge_` on an accelerator, where looking at a value would make the host wait for the device."""
    unseen, part_unseen = lse == -torch.inf, part_lse == -torch.inf
    # Where one side saw nothing, the other's weight is 1; -inf - -inf, which is NaN, is never used.
    weight = (part_lse - lse).sigmoid_().masked_fill_(unseen, 1.0).masked_fill_(part_unseen, 0.0)
    out.masked_fill_(unseen.unsqueeze(-1), 0.0)
    part_out = part_out.masked_fill(part_unseen.unsqueeze(-1), 0.0)
    torch.logaddexp(lse, part_lse, out=lse)
    out.lerp_(part_out, weight.unsqueeze(-1))


def delta_of(dout: Tensor, out: Tensor) -> Tensor:
    """``delta = rowsum(dout * out)``, all that a flash backward needs to know of the final output.

    Args:
        dout: ``[T, H, D]`` gradient of the final output.
        out: ``[T, H, D]`` final output, as the kernels' backward is given it.

    Returns:
        ``[T, H]`` in the accumulation dtype.
    """
    dtype = accumulation_dtype(torch.promote_types(dout.dtype, out.dtype))
    return (dout.to(dtype) * out.to(dtype)).sum(-1)


def synthetic_out(dout: Tensor, delta: Tensor) -> Tensor:
    """An output with ``rowsum(dout * out') = delta``, so that a backward which wants ``out`` runs from delta.

    With final ``lse``, a flash backward reads ``out`` only through ``delta``. The receiver of
    ``(dout, delta, lse)`` therefore hands any stock kernel ``out' = dout * delta / |dout|^2``, which is no
    longer than the true output. ``dout`` is divided by its largest entry first: its square may underflow.

    Args:
        dout: ``[T, H, D]``.
        delta: ``[T, H]``, see ``delta_of``.

    Returns:
        ``[T, H, D]`` in the accumulation dtype; zero where ``dout`` is zero.
    """
    dtype = accumulation_dtype(torch.promote_types(dout.dtype, delta.dtype))
    dout, delta = dout.to(dtype), delta.to(dtype).unsqueeze(-1)
    # One temporary as large as dout. (vector_norm of order inf needs none, but is 20 times slower on CPU.)
    unit = dout.abs()
    largest = unit.amax(-1, keepdim=True)
    largest.masked_fill_(largest == 0.0, 1.0)
    torch.div(dout, largest, out=unit)
    square = torch.linalg.vector_norm(unit, dim=-1, keepdim=True).square_()  # in [1, D]; 0 where dout is 0
    square.masked_fill_(square == 0.0, 1.0)
    return unit.mul_(delta / largest / square)
