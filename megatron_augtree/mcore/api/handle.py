"""The bound model behind the API: what it is wrapped in, its pool, and what has been done with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.attention.kernels.protocol import Kernel
from megatron_augtree.config import NO_CORE, AugTreeConfig, AugTreeError, InputError, UnsupportedError
from megatron_augtree.mcore import layer_spec
from megatron_augtree.mcore.agreement import compare_weights, said_by_all, warn
from megatron_augtree.mcore.ddp import changing_modules, config_of, inner_module, no_sync, only_chunk
from megatron_augtree.mcore.recompute import can_recompute
from megatron_augtree.mcore.sampler import model_shape
from megatron_augtree.planning import native
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.runtime.transport import DistTransport, LocalTransport, Transport


@dataclass
class Handle:
    """A model that AugTree runs; made by `prepare_model`.

    Attributes:
        model: the outermost wrapper seen so far (DDP, Float16Module), or the bare model.
        config: mode and limits of plans.
        fallback: why the model runs stock instead, or None; see `prepare_model`.
        shadow_every: every so many optimizer steps also run un-shared; 0 never.
    """

    model: torch.nn.Module
    config: AugTreeConfig
    fallback: str | None = None
    shadow_every: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    shadows: list[dict[str, float]] = field(default_factory=list)
    _bound: layer_spec.Handle | None = None
    _groups: Any = None
    _transports: dict[str, Transport] = field(default_factory=dict)
    _compared: bool = False

    @property
    def language_model(self) -> Any:
        """The megatron-core model inside all wrappers."""
        return _unwrapped(self.model)

    @property
    def transformer_config(self) -> Any:
        return config_of(self.model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def kernel(self) -> Kernel:
        return get_kernel(self.config.kernel, self.device)

    @property
    def model_shape(self) -> ModelShape:
        """The planner's view of the model."""
        shape = model_shape(self.transformer_config, self.language_model.vocab_size)
        return replace(shape, can_recompute=can_recompute(self.language_model.decoder))

    def transport(self, scope: str) -> Transport:
        """``"pool"``: data- and context-parallel ranks; ``"cp"``: CP ranks. Its first call is collective."""
        if scope not in self._transports:
            self._transports[scope] = self._make_transport(scope)
        return self._transports[scope]

    def _make_transport(self, scope: str) -> Transport:
        if not dist.is_initialized():
            return LocalTransport(1)
        given = getattr(self._groups, "dp_cp" if scope == "pool" else "cp", None)
        if given is not None:
            return DistTransport(given)
        if scope == "pool":
            return DistTransport(parallel_state.get_data_parallel_group(with_context_parallel=True))
        return DistTransport(parallel_state.get_context_parallel_group())

    def compare_scopes(self, scope: str) -> None:
        """Fail on every rank where scopes differ: ranks would wait for each other in different groups.

        In the first plan, which all ranks of the pool make together; later ones with ``scope="cp"`` are the
        context-parallel peers' own affair.

        Raises:
            InputError: names the ranks.
        """
        if self._compared:
            return
        everyone, _ = said_by_all(self.transport("pool"), scope)
        lowest = min(everyone)
        others = sorted(rank for rank, said in everyone.items() if said != everyone[lowest])
        if others:
            raise InputError(
                "ranks plan with different scopes",
                values=f"ranks {others} with scope={everyone[others[0]]!r}, rank {lowest} with "
                f"{everyone[lowest]!r}",
                rule="every rank of the pool plans with the same scope",
                remedy="pass one scope everywhere",
            )

    def compare_weights(self) -> None:
        """Once: ranks of the pool that begin with different weights are an error on all of them."""
        if not self._compared:
            compare_weights(self.transport("pool"), self.model)
            self._compared = True

    def root_scale(self, normalizer: float) -> float:
        """Factor on a loss share's gradient, so that reduced gradients are those of sum / normalizer.

        Undoes what Megatron's DDP multiplies gradients with (1 / ranks, unless the loss is per token), and
        applies `grad_scale_func` (fp16).

        Raises:
            AugTreeError: a model in a wrapper that the handle has not seen.
        """
        scale = getattr(self.transformer_config, "grad_scale_func", None)
        grad_scale = float(scale(torch.ones(1, device=self.device))) if scale is not None else 1.0
        return grad_scale / (normalizer * self._reduction_factor()) if normalizer else 0.0

    def _reduction_factor(self) -> float:
        ddp = inner_module(self.model, DistributedDataParallel)
        if ddp is None:
            if any(hasattr(p, "main_grad") for p in self.model.parameters()):
                raise AugTreeError(
                    "the handle does not know the model's DDP wrapper",
                    values=f"model = {type(self.model).__name__}, with main_grad on its parameters",
                    rule="gradients are scaled and reduced by the wrapper",
                    remedy="call prepare_model again with the wrapped model: it returns the same handle",
                )
            return 1.0
        factors = {float(b.gradient_scaling_factor) for b in (*ddp.buffers, *ddp.expert_parallel_buffers)}
        if len(factors) > 1:
            raise UnsupportedError(
                "gradients are scaled differently from parameter to parameter",
                values=f"gradient_scaling_factor {sorted(factors)}",
                rule="one factor is undone for all",
                remedy="use a dense model",
            )
        averaged = ddp.dp_cp_group.size() if ddp.ddp_config.average_in_collective else 1
        return (factors.pop() if factors else 1.0) / averaged

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Stock micro-batches inside add their gradients to the step's, and finalise nothing.

        For a mix: `forward_backward(..., finalize=False)`, then Megatron's schedule inside this, then
        `forward_backward(..., finalize=True)`, in any order as long as the last one finalises.
        """
        config = self.transformer_config
        kept = {name: getattr(config, name, None) for name in ("finalize_model_grads_func", "no_sync_func")}
        config.finalize_model_grads_func, config.no_sync_func = None, None
        try:
            with no_sync(self.model):
                yield
        finally:
            for name, value in kept.items():
                setattr(config, name, value)

    def report(self) -> dict[str, Any]:
        """What was done: plans by mode, rows with and without sharing, fallbacks by reason, shadow runs."""
        fallbacks = {k.split("/", 1)[1]: n for k, n in self.counts.items() if k.startswith("fallback/")}
        plain = {k: n for k, n in self.counts.items() if not k.startswith("fallback/")}
        return {**plain, "fallback": fallbacks, "shadow": list(self.shadows)}

    def check_bound(self) -> None:
        """Fail where the model runs packs of ours no more.

        Raises:
            AugTreeError: the handle was restored.
        """
        if getattr(self.language_model, "augtree_api", None) is not self:
            raise AugTreeError(
                "the handle was restored",
                values=f"handle of a {type(self.language_model).__name__}",
                rule="restore() takes everything off the model, which is stock again",
                remedy="call prepare_model again, and use the handle that it returns",
            )

    def restore(self) -> None:
        """Take everything off the model again; a second call does nothing."""
        if self._bound is not None:
            with changing_modules(self.model):  # it may have been wrapped since
                self._bound.restore()
        if getattr(self.language_model, "augtree_api", None) is self:
            del self.language_model.augtree_api


def prepare_model(
    chunks: torch.nn.Module | Sequence[torch.nn.Module],
    config: AugTreeConfig,
    *,
    pg_collection: Any = None,
    fallback: bool = False,
    shadow_every: int = 0,
    transport: Transport | None = None,
) -> Handle:
    """Bind a built model: attention, rotary embedding and output layer run packs of ours, all else is stock.

    Call it before or after wrapping in DDP or Float16Module; where it was called before, call it again
    afterwards, with the same config, so that the handle knows the wrapper: the same handle is returned.

    Args:
        chunks: the model, or a list of one.
        config: mode and limits of plans.
        pg_collection: process groups (``dp_cp``, ``cp``); None takes Megatron's parallel state.
        fallback: a model that AugTree refuses runs stock, sample by sample, where it was given; every plan
            counts it with the reason (`Handle.report`). Otherwise it is an error.
        shadow_every: every so many optimizer steps also run un-shared and compare (`Handle.report`).
        transport: the pool; tests play all ranks in one process with a `LocalTransport`.

    Raises:
        UnsupportedError: the model has something that AugTree does not compute exactly.
        AugTreeError: several chunks, settings that only launchers use, or other settings than before.
    """
    model = only_chunk(chunks)
    inner = _unwrapped(model)
    handle = getattr(inner, "augtree_api", None)
    if handle is not None:
        _check_again(handle, config)
        handle.model = model if model is not inner else handle.model
        return handle
    _check_settings(config)
    bound, reason = None, None
    try:
        bound = layer_spec.prepare_model(model, logit_chunk_mib=config.logit_chunk_mib)
    except UnsupportedError as error:
        if not fallback:
            raise
        reason = str(error)
    handle = Handle(
        model, config, fallback=reason, shadow_every=shadow_every, _bound=bound, _groups=pg_collection
    )
    if transport is not None:
        handle._transports = {"pool": transport, "cp": transport}
    if native.core() is None:
        warn(__name__, NO_CORE)
    # A plain attribute of the module: no parameter, no state-dict key. The handle is no module.
    inner.augtree_api = handle
    return handle


def _check_settings(config: AugTreeConfig) -> None:
    given = {name: getattr(config, name) for name in ("plan_path", "trace_dir", "guard_steps")}
    unused = [f"{name}={value!r}" for name, value in given.items() if value]
    if unused:
        raise AugTreeError(
            "a setting that the API does not use",
            values=", ".join(unused),
            rule="plans from files, traces and the guard belong to launchers",
            remedy="leave it out",
        )


def _check_again(handle: Handle, config: AugTreeConfig) -> None:
    """A second call only tells the handle of a wrapper: it may not seem to change settings."""
    if config != handle.config:
        raise AugTreeError(
            "a model is prepared a second time with other settings",
            values=f"{config}, before {handle.config}",
            rule="the second call returns the first one's handle",
            remedy="give the same settings, or call restore() on the handle first",
        )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model
