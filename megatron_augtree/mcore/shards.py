"""Tensor parallelism: which slice of a tensor a rank holds.

Megatron cuts a parameter along one axis into equal parts, one a rank. A gated MLP's first matrix is cut in
two strides, gate and up, so that every rank holds its part of both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_augtree.runtime.logprob import WHOLE, VocabularyShard


def tensor_parallel_group() -> dist.ProcessGroup | None:
    """The tensor-parallel ranks of this one; None where there are no others."""
    if not parallel_state.is_initialized() or parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    return parallel_state.get_tensor_model_parallel_group()


def vocabulary_shard() -> VocabularyShard:
    """The slice of the vocabulary that this rank's output layer holds."""
    group = tensor_parallel_group()
    return WHOLE if group is None else VocabularyShard(group)


def padding_of(rows: int, config: Any) -> int:
    """Rows to add behind some rows: a model runs at least one, and sequence parallelism cuts equal parts."""
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return -rows % parts if rows else parts


def tensor_parallel_rank_and_size() -> tuple[int, int]:
    """This rank's place among its tensor-parallel ranks, and how many there are."""
    group = tensor_parallel_group()
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def whole_shape(parameter: torch.nn.Parameter, size: int) -> torch.Size:
    """The shape that a parameter has without tensor parallelism."""
    shape = list(parameter.shape)
    if _is_cut(parameter):
        shape[parameter.partition_dim] *= size
    return torch.Size(shape)


def shard_of(whole: Tensor, parameter: torch.nn.Parameter, rank: int, size: int) -> Tensor:
    """This rank's slice of a whole parameter; replicated parameters are returned as they are.

    Args:
        whole: the parameter without tensor parallelism.
        parameter: the model's, which says how Megatron cuts it.
        rank, size: tensor-parallel rank, and how many there are.
    """
    if not _is_cut(parameter):
        return whole
    strides = whole.chunk(parameter.partition_stride, dim=parameter.partition_dim)
    return torch.cat([stride.chunk(size, parameter.partition_dim)[rank] for stride in strides],
                     dim=parameter.partition_dim)


def whole_of(parts: list[Tensor], parameter: torch.nn.Parameter) -> Tensor:
    """The whole of all ranks' slices: the inverse of `shard_of`."""
    if not _is_cut(parameter):
        return parts[0]
    axis = parameter.partition_dim
    strides = [part.chunk(parameter.partition_stride, axis) for part in parts]
    return torch.cat([torch.cat(stride, axis) for stride in zip(*strides)], axis)


def gather_whole(part: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """The whole of a parameter-shaped tensor (the parameter, its gradient), on every tensor-parallel rank."""
    group = tensor_parallel_group()
    if group is None or not _is_cut(parameter):
        return part.detach()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return whole_of(parts, parameter)


def counts_here(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts a parameter in a norm over the model: copies count once."""
    group = tensor_parallel_group()
    return group is None or _is_cut(parameter) or dist.get_rank(group) == 0


def _is_cut(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))
