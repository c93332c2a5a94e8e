"""Attention kernels: one file a backend, one protocol.

``get_kernel(name, device)`` is the only place that chooses among them; ``choose_kernel`` says what ``auto``
takes, and why.
"""

from __future__ import annotations

import torch

from megatron_augtree.attention.kernels.choice import (
    KERNELS,
    AutoKernel,
    KernelChoice,
    choose_kernel,
    why_not,
)
from megatron_augtree.attention.kernels.cpu_flash import CpuFlashKernel
from megatron_augtree.attention.kernels.protocol import Kernel, Segment, SegmentGrad
from megatron_augtree.config import AugTreeError, UnsupportedError

__all__ = [
    "KERNEL_NAMES",
    "CpuFlashKernel",
    "Kernel",
    "KernelChoice",
    "Segment",
    "SegmentGrad",
    "choose_kernel",
    "get_kernel",
]

#: What ``get_kernel`` takes, in the order the documentation lists them.
KERNEL_NAMES = ("auto", "reference", "cpu_flash", "cuda_flash", "te_fused")


def get_kernel(name: str, device: torch.device | str) -> Kernel:
    """The kernel of that name; ``auto`` is the fastest one of the device.

    Args:
        name: one of ``KERNEL_NAMES``.
        device: where the tensors are.

    Raises:
        AugTreeError: the name is unknown.
        UnsupportedError: the kernel does not run on the device.
    """
    device = torch.device(device)
    if name not in KERNEL_NAMES:
        raise AugTreeError(
            "unknown attention kernel",
            values=f"kernel {name!r}",
            rule=f"the kernel is one of {', '.join(KERNEL_NAMES)}",
            remedy="correct the name; `auto` chooses by device",
        )
    if name == "auto":
        # On an accelerator types and widths matter too, and the tensors have them.
        return CpuFlashKernel() if device.type == "cpu" else AutoKernel()
    told = why_not(name, device, torch.bfloat16, 128)
    if told:
        raise UnsupportedError(
            "no such attention kernel on this device",
            values=f"kernel {name!r}, device {device}: {told}",
            rule="`reference` runs on any device, `cpu_flash` on the CPU, `cuda_flash` and `te_fused` on "
            "NVIDIA GPUs",
            remedy="choose `auto`, which takes the fastest that runs",
        )
    return KERNELS[name]()
