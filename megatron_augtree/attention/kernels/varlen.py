"""What the variable-length GPU kernels share: segments become launches.

A launch takes the segments of one mask kind laid end to end, ``[sum T, H, D]``, with cumulative lengths that
say where each begins. Segments that already lie so in memory (the own triangles of all leaves of a rank) are
one view and cost nothing. Others have to be copied together, which pays for small ones only: a launch costs
about as much as copying ``COPY_LIMIT`` bytes, so longer runs are launched alone, from where they lie.

Heads narrower than a kernel takes, and keys and values of unequal widths, are padded with zeros: these add
nothing to a score, and what they add to an output or a gradient is cut off. The scale is always given.
Nothing here waits for the device: lengths are Python integers, and cumulative lengths are sent from pinned
memory once for all layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

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
from megatron_augtree.config import UnsupportedError

#: A run of segments of more bytes is launched alone rather than copied next to others.
COPY_LIMIT = 8 << 20

#: Types that fused GPU kernels compute.
DTYPES = (torch.bfloat16, torch.float16)


class Launch(NamedTuple):
    """One variable-length call.

    Attributes:
        q: ``[Tq, Hq, W]``.
        k, v: ``[Tk, Hkv, W]``.
        q_lengths, k_lengths: rows of each segment.
        cu_q, cu_k: ``[n + 1]`` int32 on the device, where each segment begins.
        causal: squares under a causal mask.
        scale: factor on the scores.
        dout, out: ``[Tq, Hq, W]`` in the type of q; backward only.
        lse: ``[Tq, Hq]`` float32, +inf where a row saw nothing; backward only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    cu_q: Tensor
    cu_k: Tensor
    causal: bool
    scale: float
    dout: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None


class VarlenKernel:
    """Base of the GPU kernels; the contract is ``protocol.Kernel``.

    Attributes:
        name: of the kernel.
        widest: largest head width that it computes.
        packed: tensors have to be contiguous; otherwise rows may be strided.
    """

    name: str
    widest = 256
    packed = False

    def _run_forward(self, launch: Launch) -> tuple[Tensor, Tensor]:
        """``(out [Tq, Hq, W], lse [Tq, Hq] float32)`` of one launch."""
        raise NotImplementedError

    def _run_backward(self, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)`` of one launch, shaped as its q, k and v."""
        raise NotImplementedError

    @torch.no_grad()
    def forward(self, segments: Sequence[Segment], causal: bool, scale: float) -> list[tuple[Tensor, Tensor]]:
        """``protocol.Kernel.forward``.

        Raises:
            UnsupportedError: also for types other than bfloat16 and float16, and heads that are too wide.
        """
        results: list = [empty_forward(s.q, s.v) for s in segments]
        for places, launch in self._launches(segments, causal, scale):
            out, lse = self._run_forward(launch)
            out = out[..., : segments[places[0]].v.shape[2]].to(torch.float32)
            parts = zip(out.split(launch.q_lengths), lse.split(launch.q_lengths))
            for place, part in zip(places, parts):
                results[place] = part
        return results

    @torch.no_grad()
    def backward(
        self, segments: Sequence[SegmentGrad], causal: bool, scale: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """``protocol.Kernel.backward``; errors as for ``forward``."""
        results: list = [empty_backward(s.q, s.k, s.v) for s in segments]
        for places, launch in self._launches(segments, causal, scale):
            first = segments[places[0]]
            grads = [
                grad[..., : x.shape[2]].to(torch.float32).split(lengths)
                for grad, x, lengths in zip(
                    self._run_backward(launch),
                    (first.q, first.k, first.v),
                    (launch.q_lengths, launch.k_lengths, launch.k_lengths),
                )
            ]
            for place, dq, dk, dv in zip(places, *grads):
                results[place] = dq, dk, dv
        return results

    def _launches(self, segments, causal: bool, scale: float) -> list[tuple[list[int], Launch]]:
        """Launches, each with the numbers of its segments; those without a pair are in none."""
        for segment in segments:
            self._check(segment.q, segment.k, segment.v, causal)
        live = [i for i, s in enumerate(segments) if not is_empty(s.q, s.k)]
        groups = [[live[i] for i in group] for group in group_runs([segments[i] for i in live])]
        return [(group, self._launch([segments[i] for i in group], causal, scale)) for group in groups]

    def _launch(self, segments, causal: bool, scale: float) -> Launch:
        q, k, v = (self._join([getattr(s, name) for s in segments], segments[0]) for name in ("q", "k", "v"))
        q_lengths = tuple(s.q.shape[0] for s in segments)
        k_lengths = tuple(s.k.shape[0] for s in segments)
        cu_q, cu_k = (cumulative(lengths, q.device) for lengths in (q_lengths, k_lengths))
        launch = Launch(q, k, v, q_lengths, k_lengths, cu_q, cu_k, causal, scale)
        if not isinstance(segments[0], SegmentGrad):
            return launch
        dout, out = (self._join([getattr(s, n) for s in segments], segments[0]) for n in ("dout", "out"))
        lse = join([s.lse for s in segments]).to(torch.float32)
        # exp(score - inf) = 0: a row that saw nothing adds nothing. exp(score + inf) would be infinite.
        return launch._replace(dout=dout, out=out, lse=lse.masked_fill(lse == -torch.inf, torch.inf))

    def _join(self, tensors: list[Tensor], segment) -> Tensor:
        """Rows of several segments as a kernel takes them: one type, one width, strides that it follows."""
        width = _width(segment.k, segment.v)
        x = pad_width(join(tensors).to(segment.q.dtype), width)
        if x.is_contiguous() and x.data_ptr() % 16 == 0:
            return x
        # Rows are read 16 bytes at a time.
        steps = [x.stride(dim) * x.element_size() for dim in (0, 1)]
        aligned = x.stride(2) == 1 and all(step > 0 and step % 16 == 0 for step in (*steps, x.data_ptr()))
        return x if aligned and not self.packed else x.clone(memory_format=torch.contiguous_format)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        check_segment(self.name, q, k, v, causal)
        if q.dtype in DTYPES and k.dtype == v.dtype == q.dtype and _width(k, v) <= self.widest:
            return
        raise UnsupportedError(
            "this attention kernel does not compute these tensors",
            values=f"kernel {self.name}, q {q.dtype}, k {k.dtype}, v {v.dtype}, key width {k.shape[2]}, "
            f"value width {v.shape[2]}",
            rule=f"it computes bfloat16 or float16, with heads of at most {self.widest}",
            remedy="choose the kernel `auto`, which takes `reference` for everything else",
        )


def why_not_varlen(device: torch.device, dtype: torch.dtype) -> str:
    """Why no variable-length GPU kernel can run with such tensors; empty where one may."""
    if device.type != "cuda":
        return f"the device is {device.type}, not an NVIDIA GPU"
    if torch.version.cuda is None:
        return "this torch was not built for NVIDIA GPUs"
    if dtype not in DTYPES:
        return f"it computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    return ""


def _width(k: Tensor, v: Tensor) -> int:
    return -(-max(k.shape[2], v.shape[2]) // 8) * 8


def group_runs(segments: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Numbers of segments that share a launch; see the module.

    Args:
        segments: tensors of each segment, none without rows.
    """
    runs: list[list[int]] = []
    for i, segment in enumerate(segments):
        if runs and all(_continues(a, b) for a, b in zip(segments[runs[-1][-1]], segment)):
            runs[-1].append(i)
        else:
            runs.append([i])
    sizes = [sum(x.numel() * x.element_size() for i in run for x in segments[i]) for run in runs]
    alone = [run for run, size in zip(runs, sizes) if size > COPY_LIMIT]
    together = [i for run, size in zip(runs, sizes) if size <= COPY_LIMIT for i in run]
    return [*alone, together] if together else alone


def _continues(a: Tensor, b: Tensor) -> bool:
    """Whether the rows of `b` begin in memory where those of `a` end."""
    return (
        a.dtype == b.dtype
        and a.shape[1:] == b.shape[1:]
        and a.stride() == b.stride()
        and a.stride(0) > 0
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.shape[0] * a.stride(0)
    )


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of tensors one after the other: a view where they lie so in memory, otherwise a copy."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    if all(_continues(a, b) for a, b in zip(tensors, tensors[1:])):
        rows = sum(x.shape[0] for x in tensors)
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    return torch.cat(list(tensors))


def cumulative(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """``[n + 1]`` int32 on the device: where each segment begins, and where the last ends."""
    # A copy belongs to the stream that sends it: on another one it might be read before it is there.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _cumulative(lengths, device, stream)


@functools.lru_cache(maxsize=1024)
def _cumulative(lengths: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
