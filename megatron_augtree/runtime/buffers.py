"""Row buffers: named groups of tensors with one row per entry; reading and writing ranges of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.planning.schedule import Rows

#: buffer name -> field -> tensor [rows, ...]
Buffers = dict[str, dict[str, Tensor]]


def to_device(numbers: np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of the host on the device; the host does not wait for the copy."""
    host = torch.as_tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def take(tensor: Tensor, rows: Rows) -> Tensor:
    """Rows of a tensor: a view of one range, a copy of several."""
    if len(rows.ranges) == 1:
        lo, hi = rows.ranges[0]
        return tensor[lo:hi]
    return torch.cat([tensor[lo:hi] for lo, hi in rows.ranges])


def add_(tensor: Tensor, rows: Rows, part: Tensor) -> None:
    """Add `part` [rows.count, ...] to rows of a tensor."""
    for piece, (lo, hi) in pieces(rows, part):
        tensor[lo:hi] += piece


def copy_(tensor: Tensor, rows: Rows, part: Tensor) -> None:
    """Write `part` [rows.count, ...] to rows of a tensor."""
    for piece, (lo, hi) in pieces(rows, part):
        tensor[lo:hi] = piece


def pieces(rows: Rows, part: Tensor):
    """`part` [rows.count, ...] cut along the ranges of `rows`, each piece with its range."""
    offset = 0
    for lo, hi in rows.ranges:
        yield part[offset : offset + hi - lo], (lo, hi)
        offset += hi - lo


def pack(fields: list[Tensor]) -> Tensor:
    """One byte vector of several tensors, in the given order."""
    if len(fields) == 1:
        return _bytes(fields[0])
    return torch.cat([_bytes(f) for f in fields])


def _bytes(tensor: Tensor) -> Tensor:
    return (
        tensor.contiguous().view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


def unpack(message: Tensor, layouts: list[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Views of the tensors in a byte vector; wider types come first, so every view is aligned."""
    views, offset = [], 0
    for size, dtype in layouts:
        length = dtype.itemsize
        for dim in size:
            length *= dim
        views.append(message[offset : offset + length].view(dtype).view(size))
        offset += length
    return views


def by_width(names: Mapping[str, torch.dtype], fields: tuple[str, ...]) -> list[str]:
    """Fields of a payload in the order in which they are packed: wider types first."""
    return sorted(fields, key=lambda name: -names[name].itemsize)
