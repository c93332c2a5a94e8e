"""Megatron's DDP around any number of passes: gradients reduced once a step, parameters gathered everywhere.

Megatron's overlapped reduction counts backwards: it starts a bucket's reduction when every parameter has been
through as many backwards as in its first step. Here ranks run different numbers of passes from step to step,
some none, so a count would start it too early or never. All passes run without counting instead (`no_sync`),
and the reductions of all buckets are started together, behind the last backward, in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_augtree.config import AugTreeError
from megatron_augtree.mcore.shards import tensor_parallel_group
from megatron_augtree.runtime.transport import Transport


def only_chunk(chunks: Any) -> Any:
    """The model of a list of one, or a model that is given as it is.

    Raises:
        AugTreeError: several chunks.
    """
    if not isinstance(chunks, Sequence):
        return chunks
    if len(chunks) != 1:
        raise AugTreeError(
            "several model chunks",
            values=f"{len(chunks)} chunks",
            rule="pipeline parallelism is not supported",
            remedy="use one chunk",
        )
    return chunks[0]


def inner_module(model: torch.nn.Module, kind: type) -> torch.nn.Module | None:
    """The wrapper (or model) of a kind among a model's wrappers."""
    while model is not None and not isinstance(model, kind):
        model = getattr(model, "module", None)
    return model


def config_of(model: torch.nn.Module) -> Any:
    """The `TransformerConfig` of a model, however it is wrapped."""
    while not hasattr(model, "config"):
        model = model.module
    return model.config


def _bucket_groups(ddp: DistributedDataParallel) -> Iterator[Any]:
    yield from ddp.bucket_groups
    yield from ddp.expert_parallel_bucket_groups


def no_sync(model: torch.nn.Module) -> AbstractContextManager:
    """Backwards inside do not count for Megatron's overlapped reduction."""
    ddp = inner_module(model, DistributedDataParallel)
    return ddp.no_sync() if ddp is not None else nullcontext()


@contextmanager
def changing_modules(model: torch.nn.Module) -> Iterator[None]:
    """Modules may be put into the model and taken out: DDP's overlapped gather has a hook for each."""
    ddp = inner_module(model, DistributedDataParallel)
    hooked = ddp is not None and bool(ddp.remove_forward_pre_hook_handles)
    if hooked:
        ddp.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        if hooked:
            ddp.enable_forward_pre_hook()


def gather_parameters(model: torch.nn.Module) -> None:
    """Take part in the overlapped gather of parameters, on a rank whose model does not run in this step.

    Elsewhere the forward's hooks do this, bucket after bucket from the first layer's on: in the same order.
    """
    ddp = _gathers_late(model)
    if ddp is None:
        return
    for groups in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups):
        for group in reversed(groups):
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def gather_parameters_now(model: torch.nn.Module) -> None:
    """All parameters as the last optimizer step left them, on every rank; all ranks call it."""
    ddp = _gathers_late(model)
    if ddp is not None:
        ddp.start_param_sync(force_sync=True)


def _gathers_late(model: torch.nn.Module) -> DistributedDataParallel | None:
    """The DDP whose parameters are gathered during the next forward, if so."""
    ddp = inner_module(model, DistributedDataParallel)
    late = ddp is not None and ddp.ddp_config.overlap_param_gather and ddp.remove_forward_pre_hook_handles
    return ddp if late else None


def finalize_gradients(model: torch.nn.Module, transport: Transport) -> None:
    """Megatron's own finalisation where the model has one; otherwise sum the gradients over the ranks.

    Args:
        model: the model; every backward of the step ran inside `no_sync`.
        transport: the pool.
    """
    finalize = getattr(config_of(model), "finalize_model_grads_func", None)
    if finalize is not None:
        ddp = inner_module(model, DistributedDataParallel)
        if ddp is not None and ddp.ddp_config.overlap_grad_reduce:
            for group in _bucket_groups(ddp):
                group.start_grad_sync()
        finalize([model], None)
        return
    tensor_parallel = tensor_parallel_group()
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Each of these ranks saw its own part of the rows (sequence parallelism).
            if tensor_parallel is not None and getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=tensor_parallel)
            parameter.grad.copy_(transport.total(parameter.grad))
