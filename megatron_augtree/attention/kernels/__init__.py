"""Attention kernels: one file a backend, one protocol.

``get_kernel(name, device)`` is the only place that chooses among them.
"""

from __future__ import annotations

import torch

from megatron_augtree.attention.kernels.cpu_flash import CpuFlashKernel
from megatron_augtree.attention.kernels.protocol import Kernel, Segment, SegmentGrad
from megatron_augtree.attention.kernels.reference import ReferenceKernel
from megatron_augtree.config import AugTreeError, UnsupportedError

__all__ = ["KERNEL_NAMES", "Kernel", "Segment", "SegmentGrad", "get_kernel"]

#: What ``get_kernel`` takes, in the order the documentation lists them.
KERNEL_NAMES = ("auto", "reference", "cpu_flash")


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
    if name == "reference":
        return ReferenceKernel()
    if device.type != "cpu":
        raise UnsupportedError(
            "no such attention kernel on this device",
            values=f"kernel {name!r}, device {device}",
            rule="`auto` and `cpu_flash` run on the CPU, `reference` on any device",
            remedy="choose `reference`, or run on the CPU",
        )
    return CpuFlashKernel()
