"""A `forward_backward_func` with Megatron's signature that plays a plan instead of a list of micro-batches.

The data iterator yields a `StepBatch`. `forward_step_func` is called once for every pass of this rank, with
an iterator that yields one `MicroBatch`; it runs the model on it and returns (output, loss function), as
everywhere in Megatron. The loss function sees whole sequences (`SequenceValues`) and returns its additive
share and metrics.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.mcore.agreement import compare_ranks, compare_weights
from megatron_augtree.mcore.cpu import trimming
from megatron_augtree.mcore.ddp import config_of, finalize_gradients, gather_parameters, no_sync, only_chunk
from megatron_augtree.mcore.guard import Guard
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from megatron_augtree.mcore.recompute import cannot_play
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.mcore.shards import vocabulary_shard
from megatron_augtree.runtime.clocks import clock_of
from megatron_augtree.runtime.engine import Engine, LossFn, ModelFn, SequenceValues, StepResult
from megatron_augtree.runtime.layout import LocalRows
from megatron_augtree.runtime.logprob import row_values
from megatron_augtree.runtime.trace import Trace, planned_events, write_events
from megatron_augtree.runtime.transport import DistTransport, Transport
from megatron_augtree.runtime.tree_attention import PassContext


@dataclass(frozen=True)
class MicroBatch:
    """What the model is called with for one pass.

    Attributes:
        input_ids: [1, T] ids of this rank's rows.
        packed: rides through the model as `packed_seq_params`.
    """

    input_ids: Tensor
    packed: AugTreePackedSeqParams


def forward_step(
    data_iterator: Iterator[MicroBatch], model: torch.nn.Module, loss_fn: LossFn | None = None
) -> tuple[Tensor, LossFn | None]:
    """The plain forward step: bind `loss_fn` with functools.partial."""
    batch = next(data_iterator)
    output = model(batch.input_ids, None, None, packed_seq_params=batch.packed)
    return output, loss_fn


@dataclass
class AugTreeSchedule:
    """Plays steps. Call it as Megatron's `forward_backward_func`.

    Attributes:
        config: mode and settings.
        temperature: logits are divided by it.
        entropy: values hold a second column, the entropy of each row.
        transport: the pool; None makes one on Megatron's data-parallel group with context parallelism.
        last: the result of the last step played.
        played: the last step, as it was played: as planned, or by ring where the guard said so.
        seconds: its forward, backward and reduction on this rank.
        trace: spans of the last step, where `config.trace_dir` asks for them; see `write_trace`.
        guard: measures plans against ring, where `config.guard_steps` asks for it.
    """

    config: AugTreeConfig
    temperature: float = 1.0
    entropy: bool = False
    transport: Transport | None = None
    last: StepResult | None = None
    played: StepBatch | None = None
    seconds: float = 0.0
    trace: Trace | None = None
    guard: Guard | None = None
    _known: tuple[StepBatch, Engine] | None = None
    _compared: torch.nn.Module | None = None

    def __post_init__(self) -> None:
        if self.transport is None:
            self.transport = DistTransport(parallel_state.get_data_parallel_group(with_context_parallel=True))
        if self.config.guard_steps:
            self.guard = Guard(self.config.guard_steps, self.transport)

    def __call__(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: Iterator[StepBatch],
        model: Any,
        forward_only: bool = False,
        collect: bool = False,
        **megatron: Any,
    ) -> list[dict]:
        """Play one step: forward, backward, and Megatron's gradient finalisation.

        Args:
            forward_step_func: see the module's docstring.
            data_iterator: yields a `StepBatch`; the same on every rank.
            model: the model, or a list of one (no virtual pipeline).
            forward_only: no backward.
            collect: keep the values of all logical rows in `last.values`.
            megatron: what else Megatron passes to a schedule: the plan says what it would.

        Returns:
            A list of one dictionary: the loss and its metrics, the same on every rank.
        """
        chunk = only_chunk(model)
        batch = next(data_iterator)
        if self.guard is not None and not forward_only:
            batch = self.guard.choose(batch)
        device = next(chunk.parameters()).device
        call = _PassCall(self, forward_step_func, chunk)
        if self._compared is not chunk:
            compare_weights(self.transport, chunk)
            self._compared = chunk
        if self._known is None or self._known[0] is not batch:
            compare_ranks(self.transport, batch, cannot_play(chunk, batch.plan))
        started = self._now(device)
        if self.config.trace_dir:
            self.trace = self.trace or Trace(clock_of(device))
            self.trace.begin()
        engine = self._engine(batch, call.run, device)
        if not any(self.transport.hosts(p.block) for p in batch.plan.passes):
            gather_parameters(chunk)  # the others' forwards wait for it
        with no_sync(chunk):
            self.last = engine.play(
                call.loss, forward_only=forward_only, collect=collect, scale=_grad_scale(chunk)
            )
        if not forward_only:
            with self._span("reduction"):
                finalize_gradients(chunk, self.transport)
        self.played, self.seconds = batch, self._now(device) - started
        if self.guard is not None and not forward_only:
            self.guard.done(self.seconds)
        return [{"loss": self.last.loss, **self.last.metrics}]

    def _now(self, device: torch.device) -> float:
        """The time, seconds; where a guard times steps, after all work that the device was given."""
        if self.guard is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _span(self, name: str) -> AbstractContextManager:
        """Around what belongs to no pass."""
        rank = self.transport.hosts(range(self.transport.world))[0]
        return self.trace.span(rank, name, "step") if self.trace is not None else nullcontext()

    def write_trace(self) -> None:
        """Write the last step as a Chrome trace, planned and measured, where `config.trace_dir` asks for it.

        A file a process, with the ranks that it hosts.
        """
        if self.trace is None or self.played is None:
            return
        os.makedirs(self.config.trace_dir, exist_ok=True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        here = self.transport.hosts(range(self.transport.world))
        planned = planned_events(bar for bar in self.played.bars if bar.rank in here)
        path = os.path.join(self.config.trace_dir, f"rank-{rank:05d}.json")
        write_events(path, [*planned, *self.trace.events()])

    def _engine(self, batch: StepBatch, model: ModelFn, device: torch.device) -> Engine:
        """The engine of a step; the one that was played last keeps its compiled programs."""
        if self._known is not None and self._known[0] is batch:
            self._known[1].model = model
            return self._known[1]
        engine = Engine(
            batch.plan,
            batch.forest,
            model,
            self.transport,
            get_kernel(self.config.kernel, device),
            device,
            self.trace,
            keep_attention=self.config.keep_attention,
            trim=trimming(self.config, device),
        )
        self._known = batch, engine
        return engine


@dataclass
class _PassCall:
    """Connects Megatron's forward step to the engine for one step."""

    schedule: AugTreeSchedule
    forward_step_func: Callable
    model: torch.nn.Module
    loss_fn: LossFn | None = None

    def run(self, local: LocalRows, context: PassContext) -> Tensor:
        """[n, k] values of the scored rows of a pass."""
        targets = torch.empty_like(local.positions)
        targets[local.scored] = local.targets

        def score(logits: Tensor, rows: Tensor) -> Tensor:
            return row_values(
                logits,
                targets[rows],
                temperature=self.schedule.temperature,
                entropy=self.schedule.entropy,
                shard=vocabulary_shard(),
            )

        packed = AugTreePackedSeqParams(
            positions=local.positions,
            context=context,
            scored=local.scored,
            score=score,
            last_position=local.last_position,
        )
        micro = MicroBatch(local.inputs.unsqueeze(0), packed)
        output, self.loss_fn = self.forward_step_func(iter([micro]), self.model)
        return output.squeeze(0)

    def loss(self, values: SequenceValues) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss function that the forward step returned; none gives zero."""
        if self.loss_fn is None:
            return values.values.sum() * 0, {}
        result = self.loss_fn(values)
        if not isinstance(result, tuple) or len(result) != 2:
            count = len(result) if isinstance(result, tuple) else 1
            raise AugTreeError(
                "a loss function returned the wrong number of values",
                values=f"{count} values",
                rule="it returns (additive share of the loss, metrics): normalise by global "
                "denominators, AugTree scales nothing by tokens",
                remedy="divide by rl.losses.Denominators and drop the token count",
            )
        return result


def _grad_scale(model: torch.nn.Module) -> float:
    scale = getattr(config_of(model), "grad_scale_func", None)
    # Not [1]: the scale may be a tensor on another device.
    return float(scale(torch.ones(()))) if scale is not None else 1.0
