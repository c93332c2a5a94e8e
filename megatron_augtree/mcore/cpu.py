"""Shims that let megatron-core run on CPU over gloo; opt-in, reversible, refused where CUDA works.

megatron-core asks CUDA for its device, its random states and some scratch tensors even where every module
that it builds would run on a CPU. Each shim below answers one such question and says who asks it. Nothing is
changed at import: :func:`install` changes, :func:`restore` undoes, :func:`cpu_shims` does both.

The trap that shaped this list: with the CUDA random states merely queued (torch's lazy initialisation never
happens on a CPU) the trackers are never seeded, training seems to work, and replicas differ. So the two
functions by which megatron-core reads and writes a random state are replaced themselves, and act at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as megatron_random

from megatron_augtree.config import AugTreeConfig, UnsupportedError

_CPU = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange")


@dataclass(frozen=True)
class Shim:
    """One replaced attribute.

    Attributes:
        owner: module or class that holds it.
        name: name of the attribute.
        make: original attribute -> replacement.
        reason: who needs it, and for what.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    reason: str


class _Stream:
    """The one stream of a CPU: whatever was issued before has already happened."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _to_cpu(device: Any) -> Any:
    """A CUDA device, however it is written (an integer is one), becomes the CPU; others pass."""
    if device is None:
        return None
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return _CPU
    return device


def _factory(original: Callable) -> Callable:
    @functools.wraps(original)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):  # pinning needs a CUDA context
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return on_cpu


def _cuda_type_name(original: Callable) -> Callable:
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        asked = not args and not kwargs
        return result.replace("torch.", "torch.cuda.", 1) if asked and "cuda" not in result else result

    return type_name


def _get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _allocating(original: Callable) -> Callable:
    @functools.wraps(original)
    def sharded_state_dict(self: Any, weights: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        if is_loading:  # Megatron's own function makes the moments, but not the step beside them
            self.init_state_fn(self.optimizer, self.config)
            for state in self.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
        return original(self, weights, is_loading, **kwargs)

    return sharded_state_dict


def _with_step(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_states(self: Any, model_param: Any, tensors: dict) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        original(self, model_param, {**tensors, "step": state["step"]})

    return set_states


def _unsharing(original: Callable) -> Callable:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _same(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


SHIMS: tuple[Shim, ...] = (
    Shim(torch.cuda, "current_device", _always(lambda: _CPU),
         "every module and buffer is created on torch.cuda.current_device()"),
    *(Shim(torch, name, _factory, 'scratch tensors are created with device="cuda", a device number or pinned')
      for name in _FACTORIES),
    Shim(torch.Tensor, "cuda", _always(_same), "stock rotary tables under CP move tensors with .cuda()"),
    Shim(torch.Tensor, "type", _cuda_type_name, "the optimizers accept parameters by names such as "
         "'torch.cuda.FloatTensor'"),
    Shim(torch.cuda, "manual_seed", _always(torch.manual_seed), "seeds the random-state trackers"),
    Shim(torch.cuda, "get_rng_state", _always(_get_state), "read when a tracker adds a state"),
    Shim(torch.cuda, "set_rng_state", _always(_set_state), "restores a saved state when training resumes"),
    Shim(megatron_random, "_get_cuda_rng_state", _always(_get_state), "every fork of a tracker reads one"),
    Shim(megatron_random, "_set_cuda_rng_state", _always(_set_state),
         "every fork writes one; torch would only queue the write, see the trap above"),
    Shim(DistributedOptimizer, "sharded_state_dict", _allocating,
         "torch's Adam, which stands in for Transformer Engine's, has no state before its first step"),
    Shim(DistributedOptimizer, "load_state_dict", _unsharing,
         "one tensor is loaded as every parameter's step, and torch's Adam would count it up for each"),
    Shim(DistributedOptimizer, "_set_main_param_and_optimizer_states", _with_step,
         "loading asks every tensor for torch's step, which is saved, and was loaded, once for all"),
    Shim(torch.cuda, "current_stream", _always(lambda *args: _Stream()), "megatron-core 0.19 asks for it"),
    Shim(torch.cuda, "synchronize", _always(lambda *args: None), "timers and 0.19's gradient reduction"),
)

_MISSING = object()
_saved: list[tuple[Shim, Any]] = []


def installed() -> bool:
    """Whether the shims are in place."""
    return bool(_saved)


def install() -> None:
    """Puts every shim in place; a second call changes nothing.

    Raises:
        UnsupportedError: CUDA works here, and the shims would hide it.
    """
    if installed():
        return
    if torch.cuda.is_available():
        raise UnsupportedError(
            "the CPU shims would hide a working CUDA device",
            values=f"torch.cuda.device_count() = {torch.cuda.device_count()}",
            rule="the shims are for machines, or processes, without CUDA",
            remedy="run without the shims, or hide the devices with CUDA_VISIBLE_DEVICES=''",
        )
    for shim in SHIMS:
        # Inherited attributes (Tensor.cuda) are restored by deleting the replacement.
        _saved.append((shim, vars(shim.owner).get(shim.name, _MISSING)))
        setattr(shim.owner, shim.name, shim.make(getattr(shim.owner, shim.name)))


def restore() -> None:
    """Takes every shim away again; without :func:`install` it does nothing."""
    while _saved:
        shim, original = _saved.pop()
        if original is _MISSING:
            delattr(shim.owner, shim.name)
        else:
            setattr(shim.owner, shim.name, original)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_heap() -> bool:
    """Let glibc keep freed memory instead of handing every large tensor back to the kernel.

    Otherwise each large activation is a fresh mapping whose pages are touched anew in every layer and step;
    in an update of 22,000 rows that was 10 to 15 % of the time. Every mode gains alike. For the rest of the
    process; like a device's caching allocator, it trades the smallest resident size for speed.

    Returns:
        Whether there is a glibc to tell.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def trim_heap() -> None:
    """Give pages of freed memory back to the kernel, also those between what is in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def trimming(config: AugTreeConfig, device: torch.device) -> Callable[[], None] | None:
    """What an engine on a device calls between passes to stay within a memory budget, if it has one.

    A kept heap does not return what one pass freed around what it keeps for its backward, and the next pass
    may find no use for the holes. A device's caching allocator empties itself before it gives up.
    """
    return trim_heap if device.type == "cpu" and config.memory_budget_gib > 0 else None


@contextlib.contextmanager
def cpu_shims() -> Iterator[None]:
    """The shims for the length of a block; a block inside another leaves them to the outer one."""
    outer = installed()
    install()
    try:
        yield
    finally:
        if not outer:
            restore()
