"""Checkpoints by megatron-core's dist_checkpointing: resumed on any number of ranks, in any mode.

    state = {"model": the model's sharded_state_dict, "optimizer": the optimizer's,
             "rng_state": one object a tensor-parallel rank}

Tensors are cut and named as Megatron's own trainer cuts and names them (``torch_dist``), so that it reads
the weights of such a folder, and nothing in it tells that AugTree wrote it: the wrapper around attention
holds no state, and the plan is not part of what is trained.

The distributed optimizer saves each parameter whole (``fully_reshardable``): its shards follow buckets, which
another number of ranks would cut elsewhere.
"""

from __future__ import annotations

import queue
from itertools import chain
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_augtree.mcore.training_state import parts_of, set_settings, settings_of, torch_of
from megatron_augtree.mcore.update import TorchOptimizer

#: Where a launcher's random states stand.
RANDOM_KEY = "rng_state"


def content() -> dict[str, Any]:
    """How states are cut, as ``sharded_state_dict(metadata=...)`` takes it; a new one for each call."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def save_state(folder: str, model: torch.nn.Module, optimizer: Any, random_state: dict[str, Any]) -> None:
    """Write all that training needs; every rank calls it.

    Args:
        folder: empty, on a file system that all ranks see.
        model: the model inside DDP.
        optimizer: Megatron's, or ``TorchOptimizer``.
        random_state: of this rank; tensors, numbers and lists of them.

    Raises:
        OSError, RuntimeError: a rank cannot write; told on every rank.
    """
    write(_state(model, optimizer, random_state, loading=False), folder)


def write(state: dict[str, Any], folder: str) -> None:
    """megatron-core's ``save``, which is waited for; every rank calls it.

    Results are handed over within this process. Megatron's own queue, made for saves in the background, is a
    process: it imports the launcher's script again, which takes seconds, and outlives a rank that is killed.
    """
    theirs, filesystem_async._results_queue = filesystem_async._results_queue, queue.SimpleQueue()
    try:
        dist_checkpointing.save(state, folder)
    finally:
        filesystem_async._results_queue = theirs


def load_weights(folder: str, model: torch.nn.Module) -> None:
    """Put the weights, and nothing else, into a model; every rank calls it.

    Raises:
        CheckpointingException, RuntimeError: the folder lacks a tensor of the model, or it has another shape.
    """
    wanted = {"model": model.sharded_state_dict(metadata=content())}
    loaded = dist_checkpointing.load(wanted, folder, strict=StrictHandling.RAISE_UNEXPECTED)
    model.load_state_dict(loaded["model"])


def load_state(folder: str, model: torch.nn.Module, optimizer: Any, *,
               tensor_parallel: int) -> dict[str, Any] | None:
    """Put weights and optimizer states back, strictly: all of the folder is used; every rank calls it.

    Args:
        folder: of ``save_state``.
        model: the model inside DDP.
        optimizer: of the kind that saved.
        tensor_parallel: tensor-parallel ranks that saved.

    Learning rates and the like stay as they are in ``optimizer``.

    Returns:
        This rank's random states; ``None`` where another number of tensor-parallel ranks saved them.

    Raises:
        CheckpointingException, RuntimeError: names or shapes are not those of the folder.
    """
    same = tensor_parallel == parallel_state.get_tensor_model_parallel_world_size()
    wanted = _state(model, optimizer, {} if same else None, loading=True)
    strict = StrictHandling.RAISE_ALL if same else StrictHandling.RAISE_UNEXPECTED
    loaded = dist_checkpointing.load(wanted, folder, strict=strict)
    model.load_state_dict(loaded["model"])
    parts, saved = parts_of(optimizer), loaded["optimizer"]
    saved = [saved] if len(parts) == 1 else [saved[index] for index in range(len(parts))]
    for part, state in zip(parts, saved, strict=True):
        inner, settings = torch_of(part), settings_of(torch_of(part))
        # Megatron finds a group by its settings, in 0.19 also by its learning rates: the present ones count.
        for group, setting in zip(state.get("optimizer", state)["param_groups"], settings, strict=True):
            group.update(setting)
        if isinstance(part, TorchOptimizer):
            _load_torch(part, state)
        else:
            part.load_state_dict(state)
        set_settings(inner, settings)
    return loaded.get(RANDOM_KEY)


def _state(model: torch.nn.Module, optimizer: Any, random_state: dict[str, Any] | None, *,
           loading: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict(metadata=content())
    if isinstance(optimizer, TorchOptimizer):
        moments = _torch_state(optimizer, weights, loading=loading)
    else:
        moments = optimizer.sharded_state_dict(weights, is_loading=loading, metadata=content())
    state = {"model": weights, "optimizer": moments}
    if random_state is not None:
        state[RANDOM_KEY] = ShardedObject(
            RANDOM_KEY, random_state, (parallel_state.get_tensor_model_parallel_world_size(),),
            (parallel_state.get_tensor_model_parallel_rank(),),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True))
    return state


def _torch_state(optimizer: TorchOptimizer, weights: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The sharded state of one of torch's optimizers, as Megatron's fp32 optimizer lays it out."""
    if loading:
        _allocate(optimizer.inner)
    state = optimizer.inner.state_dict()
    steps = [values["step"] for values in state["state"].values() if "step" in values]
    cut = get_param_id_to_sharded_param_map(
        weights, chain.from_iterable(group["params"] for group in optimizer.inner.param_groups))
    optim_state_to_sharding_state(state, cut, exclude_keys=("step",))
    if steps:  # one number: all parameters step together
        state["common_step"] = steps[0]
    return state


def _allocate(inner: torch.optim.Optimizer) -> None:
    """Make the state that is to be loaded into: an optimizer makes it in its first step."""
    adam = isinstance(inner, torch.optim.Adam)  # AdamW is one
    for group in inner.param_groups:
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if group["momentum"] else ()
        for parameter in group["params"]:
            state = inner.state[parameter]
            for name in names:
                state.setdefault(name, torch.zeros_like(parameter))
            if adam:
                state.setdefault("step", torch.tensor(0.0))


def _load_torch(optimizer: TorchOptimizer, state: dict[str, Any]) -> None:
    step = state.pop("common_step", None)
    if step is not None:
        for values in state["state"].values():
            values["step"] = step.clone()
    optimizer.inner.load_state_dict(state)
