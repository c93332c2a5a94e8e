"""Which attention kernel runs where, and why.

On the CPU ``auto`` is ``cpu_flash``. On an NVIDIA GPU it is the first of ``te_fused`` and ``cuda_flash`` that
can run: both compute bfloat16 and float16 only. Everything else is ``reference``, which is exact in any type
on any device and slow: float32 and float64 on a GPU are for comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_augtree.attention.kernels import cuda_flash, te_fused
from megatron_augtree.attention.kernels.cpu_flash import CpuFlashKernel
from megatron_augtree.attention.kernels.protocol import Kernel, Segment, SegmentGrad
from megatron_augtree.attention.kernels.reference import ReferenceKernel

#: Kernel -> its class, fastest first.
KERNELS = {
    "te_fused": te_fused.TeFusedKernel,
    "cuda_flash": cuda_flash.CudaFlashKernel,
    "cpu_flash": CpuFlashKernel,
    "reference": ReferenceKernel,
}


class KernelChoice(NamedTuple):
    """A kernel's name, and why no faster one."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def why_not(name: str, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Why a kernel cannot run; empty where it can.

    Args:
        name: a key of ``KERNELS``.
        device: where the tensors are.
        dtype: of queries, keys and values.
        width: of the widest head.
    """
    if name == "te_fused":
        return te_fused.why_not(device, dtype, width)
    if name == "cuda_flash":
        return cuda_flash.why_not(device, dtype, width)
    if name == "cpu_flash" and device.type != "cpu":
        return f"the device is {device.type}"
    return ""


def choose_kernel(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, width: int = 128
) -> KernelChoice:
    """What ``auto`` takes; arguments as for ``why_not``."""
    device, passed_over = torch.device(device), []
    for name in KERNELS:
        told = why_not(name, device, dtype, width)
        if not told:
            return KernelChoice(name, "; ".join(passed_over) or "the fastest here")
        # Kernels of another kind of device are no news.
        if device.type == "cuda" and name != "cpu_flash":
            passed_over.append(f"no {name}: {told}")
    raise AssertionError("reference runs everywhere")


class AutoKernel:
    """``auto`` on an accelerator: chooses when it sees the first tensors of a type and width."""

    name = "auto"

    def __init__(self) -> None:
        self._known: dict[tuple[torch.device, torch.dtype, int], Kernel] = {}

    def kernel_for(self, q: Tensor, v: Tensor) -> Kernel:
        """The kernel for tensors like these."""
        key = q.device, q.dtype, max(q.shape[2], v.shape[2])
        if key not in self._known:
            self._known[key] = KERNELS[choose_kernel(*key).name]()
        return self._known[key]

    def forward(self, segments: Sequence[Segment], causal: bool, scale: float) -> list[tuple[Tensor, Tensor]]:
        """``protocol.Kernel.forward``."""
        if not segments:
            return []
        return self.kernel_for(segments[0].q, segments[0].v).forward(segments, causal, scale)

    def backward(
        self, segments: Sequence[SegmentGrad], causal: bool, scale: float
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """``protocol.Kernel.backward``."""
        if not segments:
            return []
        return self.kernel_for(segments[0].q, segments[0].v).backward(segments, causal, scale)
