"""Calls the trainer's loss function with whole samples, and keeps its shares, metrics and gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.mcore.api.outputs import Columns, LossFn, make_outputs
from megatron_augtree.mcore.api.step import StepPlan
from megatron_augtree.runtime.engine import Shares, reduce_metric


class Losses:
    """The loss of one playing, on the samples that this rank evaluates.

    Args:
        step: the plan.
        columns: names of the values' columns.
        loss_fn: None only collects values.
        scale: factor on gradients; 0 asks for none.
        by_group: samples of a group go to one call.

    Attributes:
        shares: this rank's, of loss and metrics.
        collected: own sample -> [C, k] values of its computed rows.
        failure: what the loss function raised, or None; it is not called again after that.
    """

    def __init__(
        self, step: StepPlan, columns: Columns, loss_fn: LossFn | None, scale: float, *, by_group: bool
    ) -> None:
        self.step, self.columns, self.loss_fn, self.scale, self.by_group = (
            step,
            columns,
            loss_fn,
            scale,
            by_group,
        )
        self.shares = Shares()
        self.collected: dict[int, Tensor] = {}
        self.failure: Exception | None = None

    def again(self) -> Losses:
        """The same loss, for another playing of the same samples."""
        return Losses(self.step, self.columns, self.loss_fn, self.scale, by_group=self.by_group)

    def calls(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Own samples, by call of the loss function."""
        together: dict[int, list[int]] = {}
        for i in indices:
            together.setdefault(self.step.groups[self.step.numbers[i]] if self.by_group else i, []).append(i)
        yield from together.values()

    def evaluate(self, indices: Sequence[int], values: Tensor) -> Tensor | None:
        """Gradient [N, k] of some whole samples' values [N, k]; None where it is zero.

        Args:
            indices: own samples.
            values: of their computed rows, one sample after the other.
        """
        parts = dict(zip(indices, values.split([int(self.step.samples[i].computed.sum()) for i in indices])))
        self.collected |= parts
        if self.loss_fn is None:
            return None
        gradients = {}
        for called in self.calls(indices):
            part = torch.cat([parts[i] for i in called]).requires_grad_(self.scale != 0)
            gradient = self._call(called, part)
            gradients |= dict(zip(called, gradient.split([len(parts[i]) for i in called])))
        return torch.cat([gradients[i] for i in indices])

    def _call(self, called: list[int], part: Tensor) -> Tensor:
        """One call; a failure is kept for all ranks to raise together, when none waits for another."""
        if self.failure is None:
            try:
                return self._differentiate(called, part)
            except Exception as error:
                self.failure = error
        return torch.zeros_like(part)

    def _differentiate(self, called: list[int], part: Tensor) -> Tensor:
        found = [*called, *self._without_rows(called)]
        with torch.set_grad_enabled(self.scale != 0):
            outputs = make_outputs(self.step.samples, found, part, self.columns)
            result: Any = self.loss_fn(outputs)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            given = result if isinstance(result, tuple) else (result,)
            raise AugTreeError(
                "a loss function returned something else than a loss and metrics",
                values=f"{len(given)} values: {', '.join(type(value).__name__ for value in given)}",
                rule="it returns (additive share of the loss, a tensor; metrics): AugTree divides by the "
                "normalizer, and scales nothing by tokens",
                remedy="drop the token count, and pass the pool's as normalizer=",
            )
        loss, metrics = result
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise AugTreeError(
                "a loss function's metrics have no names",
                values=type(metrics).__name__
                + (f" with keys {list(metrics)[:4]}" if isinstance(metrics, Mapping) else ""),
                rule="metrics is a dictionary: name -> scalar",
                remedy="return (loss, {}) where there are none",
            )
        self.shares.add(loss, metrics)
        if self.scale == 0 or not loss.requires_grad:
            return torch.zeros_like(part)
        (gradient,) = torch.autograd.grad(loss * self.scale, part, allow_unused=True)
        return torch.zeros_like(part) if gradient is None else gradient

    def _without_rows(self, called: list[int]) -> list[int]:
        """Samples of the called group in which nothing is scored: they take part with no rows."""
        if not self.by_group:
            return []
        group = self.step.groups[self.step.numbers[called[0]]]
        return [
            i
            for i, number in enumerate(self.step.numbers)
            if self.step.groups[number] == group and i not in called
        ]

    def to_json(self) -> str:
        """What `total` reads."""
        failure = "" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
        loss, metrics = self.shares.read()
        return json.dumps({"loss": loss, "metrics": metrics, "error": failure})

    @staticmethod
    def total(shares: Sequence[dict[str, Any]]) -> tuple[float, dict[str, float]]:
        """Loss and metrics of all ranks' shares."""
        metrics: dict[str, float] = {}
        for share in shares:
            for name, value in share["metrics"].items():
                metrics[name] = reduce_metric(name, metrics.get(name), value)
        return sum(share["loss"] for share in shares), metrics


def check_groups(step: StepPlan) -> None:
    """Fail on every rank where a group cannot be evaluated in one call.

    Raises:
        InputError: its samples were given by different ranks, or are complete at different times.
    """
    owners: dict[int, set[int]] = {}
    for group, rank in zip(step.groups, step.owners):
        owners.setdefault(group, set()).add(rank)
    if step.plan is None and step.scope == "pool":
        # Nothing is planned together, so this rank knows the groups of its own samples only.
        own = json.dumps(sorted({sample.group for sample in step.samples if sample.group >= 0}))
        owners = {}
        for rank, text in enumerate(step.transport.same(own)):
            for group in json.loads(text):
                owners.setdefault(group, set()).add(rank)
    apart = [ranks for ranks in owners.values() if len(ranks) > 1]
    if apart:
        raise InputError(
            "a group's samples were given by different ranks",
            values=f"{len(apart)} groups, one by ranks {sorted(apart[0])}",
            rule='loss_scope="group" calls the loss once for a group, where its samples were given',
            remedy='give a group\'s samples to one rank, or use loss_scope="sequence"',
        )
    if step.plan is None:
        return
    times: dict[int, set[int]] = {}
    for window, exchange in enumerate(step.routing.exchanges):
        for reading in exchange.readings.values():
            for sequence in reading.sequences:
                times.setdefault(step.groups[sequence], set()).add(window)
    late = sum(len(windows) > 1 for windows in times.values())
    if late:
        raise InputError(
            "a group's samples are complete at different times",
            values=f"{late} of {len(times)} groups; plan: {step.plan.note}",
            rule="a phased plan computes a group's responses in waves, and each wave's gradients at once",
            remedy='plan with AugTreeConfig(force="phase=fused"), or use loss_scope="sequence"',
        )
