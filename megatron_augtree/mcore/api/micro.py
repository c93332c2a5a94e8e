"""Tier 1: micro-batches for a trainer's own forward_step, under Megatron's own schedules.

A micro-batch is one forward and its backward of a fused plan; all ranks have equally many, and a rank
without a pass in one runs a row of padding. Values travel to whoever gave the samples inside `forward`,
gradients back inside its backward: every rank takes part in both, also one that owns no sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.config import InputError, UnsupportedError
from megatron_augtree.mcore.api.handle import Handle
from megatron_augtree.mcore.api.heads import Head, choose_head
from megatron_augtree.mcore.api.model import ModelCall, model_call
from megatron_augtree.mcore.api.outputs import Outputs, make_outputs
from megatron_augtree.mcore.api.step import StepPlan
from megatron_augtree.runtime.layout import LocalRows
from megatron_augtree.runtime.routing import Courier, Exchange, pass_windows, rows_of_rank
from megatron_augtree.runtime.tree_attention import PassContext


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch.

    Attributes:
        plan: what it belongs to.
        number: 0, 1, ...; every rank calls `forward` in this order.
        passes: passes that this process runs; none on a rank that has nothing to do in it.
        index: samples of the batch whose values `forward` returns on this rank.
    """

    plan: StepPlan
    number: int
    passes: tuple[int, ...]
    index: tuple[int, ...]


def num_microbatches(plan: StepPlan) -> int:
    """How many micro-batches a plan has: what Megatron's schedules want to know. At least 1 on every rank."""
    if plan.plan is None:
        return max(plan.stock_micro_batches, 1)
    return max(len(plan.micro_routing.exchanges), 1)


def microbatches(plan: StepPlan) -> Iterator[MicroBatch]:
    """The plan's micro-batches; equally many on every rank.

    Raises:
        UnsupportedError: a phased plan: its backwards are not in the order of its forwards.
    """
    if plan.plan is None:
        yield from _stock_micro_batches(plan)
        return
    phased = [p for p in plan.plan.passes if p.kind != "fused"]
    if phased:
        raise UnsupportedError(
            "a phased plan has no micro-batches",
            values=f"{len(phased)} passes that are not fused ({plan.plan.note})",
            rule="Megatron's schedules run a micro-batch's backward before the next one's forward, or first "
            "in first out; a prompt's backward comes after all its waves'",
            remedy='plan with AugTreeConfig(force="phase=fused"), or call forward_backward',
        )
    windows = pass_windows(plan.plan)
    rank = plan.transport.rank
    first = plan.numbers.start
    for number in range(num_microbatches(plan)):
        mine = tuple(
            p
            for p, window in enumerate(windows)
            if window == number and plan.transport.hosts(plan.plan.passes[p].block)
        )
        exchanges = plan.micro_routing.exchanges
        reading = exchanges[number].readings.get(rank) if number < len(exchanges) else None
        index = tuple(s - first for s in reading.sequences) if reading is not None else ()
        yield MicroBatch(plan, number, mine, index)


def _stock_micro_batches(plan: StepPlan) -> Iterator[MicroBatch]:
    rank = plan.transport.rank
    own = [i for i, number in enumerate(plan.numbers) if plan.owners[number] == rank]
    for number in range(num_microbatches(plan)):
        yield MicroBatch(plan, number, (), (own[number],) if number < len(own) else ())


def forward(handle: Handle, mb: MicroBatch, *, head: Head | None = None, entropy: str = "off") -> Outputs:
    """Run the model on a micro-batch; differentiable.

    Call it once a micro-batch inside ``forward_step``. Every value belongs to exactly one rank, so the sum of
    the ranks' losses counts each sample once; scaling is the trainer's own. Where a rank owns no sample its
    loss is ``outputs.anchor`` (or anything computed from the values): a constant would leave its backward
    out, and the others waiting.

    Args:
        handle: the model, prepared again after it was wrapped.
        mb: of `microbatches`.
        head: replaces the built-in log-prob and entropy, see `heads`.
        entropy: ``"off"``, ``"metric"`` or ``"grad"``.

    Returns:
        The samples ``mb.index``, whole.

    Raises:
        Exception: whatever the head raised, on its rank.
        AugTreeError: a micro-batch of another model's plan, or the handle was restored.
    """
    if mb.plan.handle is not handle:
        raise InputError(
            "a micro-batch is run with another model",
            values=f"micro-batch {mb.number} of a plan that was made for another handle",
            rule="a plan, and its micro-batches, belong to one handle",
            remedy="plan(handle, batch, like=plan) gives another model the same placement",
        )
    handle.check_bound()
    call = _call(mb.plan, head, entropy)
    outputs = _stock(call, mb) if mb.plan.plan is None else _shared(call, mb)
    if call.failures:
        raise call.failures[0]
    return outputs


def _shared(call: ModelCall, mb: MicroBatch) -> Outputs:
    values = _Hosted.of(call, mb)
    exchanges = mb.plan.micro_routing.exchanges
    routed = values.local[:0]
    if mb.number < len(exchanges):
        routed = _Routed.apply(values.local, values, exchanges[mb.number])
    return make_outputs(mb.plan.samples, mb.index, routed, call.columns)


def _call(plan: StepPlan, head: Head | None, entropy: str) -> ModelCall:
    return model_call(plan, choose_head(head, entropy))


def _stock(call: ModelCall, mb: MicroBatch) -> Outputs:
    if mb.index and call.step.samples[mb.index[0]].computed.any():
        return make_outputs(call.step.samples, mb.index, call.stock(mb.index[0]), call.columns)
    # A row for nothing: the reduction of gradients waits for every rank's backward.
    return make_outputs(call.step.samples, mb.index, call.idle(), call.columns)


@dataclass
class _Hosted:
    """What this process computed in a micro-batch.

    Attributes:
        call: the model call.
        passes: passes run, one after the other in `local`.
        local: [n, k] values of all of them.
    """

    call: ModelCall
    passes: tuple[int, ...]
    local: Tensor

    @staticmethod
    def of(call: ModelCall, mb: MicroBatch) -> _Hosted:
        """Run the model on the micro-batch's passes, or on nothing."""
        engine = call.engine()
        parts = []
        for pass_id in mb.passes:
            p = mb.plan.plan.passes[pass_id]
            parts.append(engine.forward(p, {}, forward_only=not torch.is_grad_enabled()))
        if not parts:
            parts.append(call.run(*_nothing(engine.idle_context(), engine.device)))
        return _Hosted(call, mb.passes, torch.cat(parts))

    def courier(self) -> Courier:
        return Courier(self.call.step.transport, self.call.like)

    def rows(self, values: Tensor, pass_id: int, rank: int) -> Tensor:
        """[n, k] view of `values`, laid out like `local`: one pool rank's rows of one pass."""
        engine = self.call.engine()
        start = sum(self._size(p) for p in self.passes[: self.passes.index(pass_id)])
        return rows_of_rank(engine, values[start : start + self._size(pass_id)], pass_id, rank)

    def _size(self, pass_id: int) -> int:
        engine = self.call.engine()
        block = engine.plan.passes[pass_id].block
        return sum(engine.layouts[pass_id].counts[r] for r in engine.transport.hosts(block))


def _nothing(context: PassContext, device: torch.device) -> tuple[LocalRows, PassContext]:
    none = torch.empty(0, dtype=torch.int64, device=device)
    return LocalRows(-1, np.zeros(0, np.int64), none, none, none, none), context


class _Routed(torch.autograd.Function):
    """Values to their givers; in the backward, gradients to where the values were computed."""

    @staticmethod
    def forward(ctx, local: Tensor, hosted: _Hosted, exchange: Exchange) -> Tensor:
        ctx.hosted, ctx.exchange, ctx.shape = hosted, exchange, local.shape
        values = local.detach()
        found = hosted.courier().collect(exchange, lambda p, rank: hosted.rows(values, p, rank))
        ctx.givers = {giver: len(part) for giver, part in found.items()}
        return torch.cat([values[:0], *found.values()])

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        gradients = dict(zip(ctx.givers, gradient.split(list(ctx.givers.values())))) if ctx.givers else {}
        local = gradient.new_zeros(ctx.shape)
        ctx.hosted.courier().give_back(
            ctx.exchange, gradients, lambda p, rank: ctx.hosted.rows(local, p, rank)
        )
        return local, None, None
