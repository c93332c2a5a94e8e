"""What of a training is state: weights, optimizer and random states, as plain tensors and numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_augtree.mcore.update import TorchOptimizer


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that an optimizer consists of, each with torch's own inside."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def torch_of(part: Any) -> torch.optim.Optimizer:
    """torch's (or Transformer Engine's) optimizer inside one of ``parts_of``."""
    return part.inner if isinstance(part, TorchOptimizer) else part.optimizer


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's tensors, each in memory of its own (DDP keeps them in one buffer)."""
    return {
        name: value.detach().clone().contiguous()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }


def shards_of(optimizer: Any) -> list[Any]:
    """The parts of Megatron's distributed optimizer; empty for an optimizer that every rank holds whole."""
    parts = getattr(optimizer, "chained_optimizers", [])
    return [part for part in parts if hasattr(part, "shard_fp32_groups")]


def shard_state(part: Any) -> dict[str, Any]:
    """This rank's shard: torch's state, and the fp32 parameters that it steps."""
    return {"inner": part.optimizer.state_dict(), "parameters": [p.detach().clone() for p in _stepped(part)]}


def _stepped(part: Any) -> list[Tensor]:
    return [p for group in part.optimizer.param_groups for p in group["params"]]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the flags decide of each of its groups."""
    return [{key: value for key, value in group.items() if key not in ("params", "step")}
            for group in optimizer.param_groups]


def set_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Undo what loading did to ``settings_of``."""
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


def load_optimizer(part: Any, saved: dict[str, Any], *, sharded: bool) -> None:
    """Put back what ``shard_state`` (sharded) or the part's own ``state_dict`` holds.

    Learning rates and the like stay as they are in ``part``.
    """
    settings = settings_of(torch_of(part))
    if sharded:
        part.optimizer.load_state_dict(saved["inner"])
        with torch.no_grad():
            for parameter, value in zip(_stepped(part), saved["parameters"], strict=True):
                parameter.copy_(value)
    else:
        # Megatron finds a group by its settings, in 0.19 also by its learning rates: the present ones count.
        for group, setting in zip(saved.get("optimizer", saved)["param_groups"], settings):
            group.update(setting)
        part.load_state_dict(saved)
    set_settings(torch_of(part), settings)


def random_state() -> dict[str, Any]:
    """All generators of this process, as tensors, numbers and lists of them."""
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": [version, list(numbers), gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The opposite of ``random_state``."""
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
