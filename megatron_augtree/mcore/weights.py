"""Parameters and gradients by megatron-core's own names: in from a file, out of a model.

Nothing here knows a plan; a file holds plain tensors that any tool reads.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.mcore.shards import gather_whole, shard_of, tensor_parallel_rank_and_size, whole_shape

#: Where a parameter is looked for, the first that is there wins: plain, after, before.
_PREFIXES = ("", "param1/", "param0/")


def parameters_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name, whole: every tensor-parallel rank calls it."""
    return {name: gather_whole(parameter, parameter).clone() for name, parameter in model.named_parameters()}


def load_weights(model: torch.nn.Module, path: str) -> None:
    """Fills a model's parameters from a file, rounded to their type.

    A file holds them by their names, or is a dump of ``scripts/replay.py``: then ``param1/<name>`` (after its
    steps) is taken, or ``param0/<name>`` where there is none. One way serves for all parameters. The file
    holds whole parameters: a tensor-parallel rank takes its slices.

    Args:
        model: a ``GPTModel`` that no optimizer has seen yet.
        path: a safetensors file.

    Raises:
        InputError: the file cannot be read, lacks a parameter, or has one of another shape.
    """
    parameters, (rank, size) = dict(model.named_parameters()), tensor_parallel_rank_and_size()
    shapes = {name: whole_shape(parameter, size) for name, parameter in parameters.items()}
    try:
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            prefix = next((p for p in _PREFIXES if any(p + name in present for name in parameters)), "")
            missing = [name for name in parameters if prefix + name not in present]
            tensors = {name: file.get_tensor(prefix + name) for name in parameters if name not in missing}
    except (OSError, SafetensorError) as error:
        raise InputError("cannot read weights", values=f"--load {path}: {error}",
                         rule="the file is a safetensors file",
                         remedy="correct the path, or write it again") from error
    wrong = [f"{name} {list(tensor.shape)} instead of {list(shapes[name])}"
             for name, tensor in tensors.items() if tensor.shape != shapes[name]]
    if missing or wrong:
        found = [f"{len(missing)} missing, for instance {missing[0]}"] if missing else []
        raise InputError("weights do not fit the model",
                         values=f"--load {path}: {'; '.join(found + wrong[:3])}",
                         rule="every parameter is in the file, by megatron-core's name and in its shape",
                         remedy="use the model flags that the weights were made with")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(shard_of(tensor, parameters[name], rank, size))


def reduced_gradients(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    """Copies of all reduced gradients by name, whole; every rank calls it. Frozen parameters have none.

    With the distributed optimizer a rank holds the reduced gradient of its shard of a bucket only, and its
    own share elsewhere: shards are gathered first, which does not touch what the optimizer reads.
    """
    if ddp.ddp_config.use_distributed_optimizer:
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                mine = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    return {name: gather_whole(parameter.main_grad, parameter).clone()
            for name, parameter in ddp.module.named_parameters() if parameter.requires_grad}


def check_output(path: str, flag: str) -> None:
    """Fail before the work whose result could not be written.

    Raises:
        InputError: the folder is not there or not writable.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError("a result cannot be written there", values=f"{flag} {path}",
                         rule="the path is a file in a folder that exists and can be written",
                         remedy="correct the path, or make the folder")


def check_folder(path: str, flag: str) -> None:
    """Make a folder, and fail before the work whose results could not be written into it.

    Args:
        path: the folder; empty where nothing is to be written.
        flag: what names it.

    Raises:
        InputError: the folder cannot be made or written.
    """
    if not path:
        return
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError("results cannot be written there", values=f"{flag} {path}: {error.strerror}",
                         rule="the path is a folder that exists or can be made, and can be written",
                         remedy="correct the path, or its permissions") from error


def save_dump(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Writes a safetensors file in one atomic rename.

    Args:
        path: the file; other processes see the old one or the new one.
        tensors: contiguous, none sharing memory.
        metadata: every value is written as JSON.

    Raises:
        InputError: the file cannot be written.
    """
    folder, base = os.path.split(os.path.realpath(path))
    # in the same folder, hence on the same file system, where a rename is atomic
    partial = os.path.join(folder, f".{base}.{secrets.token_hex(4)}.partial")
    try:
        save_file(dict(tensors), partial, {key: json.dumps(value) for key, value in metadata.items()})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise InputError("a dump cannot be written", values=f"{path}: {error}",
                         rule="the path is a file in a folder that can be written, with room for the dump",
                         remedy="correct the path, or free some space") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
