"""More shims than `mcore/cpu.py`: what Megatron-LM's own training scripts need to run on CPU over gloo.

megatron-core runs with the shims of `mcore/cpu.py`; ``megatron.training`` around it also asks for streams,
events, memory statistics and device properties, builds CUDA extensions, and chooses NCCL. The same rules: no
shim is placed at import, all are taken away again, refused where CUDA works. They answer questions and change
no number, and both stock runs and AugTree's are run with them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_augtree.mcore import cpu
from megatron_augtree.mcore.patches import Patch, Registry


class _Stream:
    """The one stream of a CPU."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds: none."""
        return 0.0


_MEMORY = 1 << 40  # bytes
_PROPERTIES = types.SimpleNamespace(
    name="cpu", major=10, minor=0, multi_processor_count=1, total_memory=_MEMORY
)


def _constant(value: Any) -> Callable[[Any], Callable]:
    return lambda original: lambda *args, **kwargs: value


def _gloo(original: Callable) -> Callable:
    @functools.wraps(original)
    def on_gloo(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original("gloo", *args, **kwargs)

    return on_gloo


def _without_devices(original: Callable) -> Callable:
    @functools.wraps(original)
    def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return barrier


def _without_cuda(original: Callable) -> Callable:
    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_megatron


def _cuda(name: str, value: Any, reason: str) -> Patch:
    return Patch(f"cuda-{name}", "torch.cuda", name, reason, _constant(value))


_TRAINING = "megatron.training"

SHIMS: tuple[Patch, ...] = (
    Patch("device-count", "torch.cuda", "device_count",
          "parallel state is only set up where there are devices",
          lambda original: lambda: int(os.environ.get("WORLD_SIZE", "1"))),
    _cuda("set_device", None, "every rank chooses its device"),
    _cuda("get_device_properties", _PROPERTIES, "rules for old GPUs are checked by architecture"),
    _cuda("get_device_name", "cpu", "logged"),
    _cuda("mem_get_info", (_MEMORY, _MEMORY), "memory is reported after the first step"),
    Patch("cuda-memory_stats", "torch.cuda", "memory_stats", "memory is reported after the first step",
          lambda original: lambda *args, **kwargs: defaultdict(int)),
    *(_cuda(name, 0, "memory is reported after the first step")
      for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")),
    _cuda("reset_peak_memory_stats", None, "memory is reported after the first step"),
    _cuda("empty_cache", None, "between training and evaluation"),
    Patch("cuda-Stream", "torch.cuda", "Stream", "DDP is built on a stream of its own",
          lambda original: lambda *args, **kwargs: _Stream()),
    Patch("cuda-stream", "torch.cuda", "stream", "DDP is built on a stream of its own",
          lambda original: lambda stream: contextlib.nullcontext()),
    Patch("cuda-Event", "torch.cuda", "Event", "timers and the straggler detector", lambda original: _Event),
    Patch("nvtx-push", "torch.cuda.nvtx", "range_push", "ranges for profilers", _constant(None)),
    Patch("nvtx-pop", "torch.cuda.nvtx", "range_pop", "ranges for profilers", _constant(None)),
    Patch("gloo", "torch.distributed", "init_process_group", "scripts ask for NCCL", _gloo),
    Patch("barrier", "torch.distributed", "barrier", "barriers name a device", _without_devices),
    Patch("no-cuda", f"{_TRAINING}.initialize", "initialize_megatron", "it asserts that CUDA is there",
          _without_cuda),
    Patch("no-warm-up", f"{_TRAINING}.initialize", "_warmup_jit_function", "nothing is compiled",
          _constant(None)),
    Patch("no-build", "megatron.core.datasets.utils", "compile_helpers",
          "the wheel holds the built helpers, not their Makefile", _constant(None)),
    Patch("no-fused", "megatron.legacy.fused_kernels", "load", "it builds CUDA extensions", _constant(None),
          releases=("0.16",)),
)

#: Megatron-LM 0.19 is written for Python 3.12; the tests run it on older ones.
_PYTHON = Patch("override", "typing", "override", "Python before 3.12 has no typing.override",
                lambda original: original or (lambda method: method), optional=True)

_early, _late = Registry([_PYTHON]), Registry(SHIMS)


@contextlib.contextmanager
def script_shims() -> Iterator[None]:
    """The shims of `mcore/cpu.py` and of this file for the length of a block.

    ``megatron.training`` can be imported by then (`script.py` puts its folder on the path).

    Raises:
        UnsupportedError: CUDA works here, or a target is missing.
    """
    cpu.install()
    cpu.keep_heap()
    try:
        _early.apply()
        _late.apply()
        # torch.compile would ask for the device that the shims make up.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _late.restore()
        _early.restore()
        cpu.restore()
