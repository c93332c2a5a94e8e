"""Runs the model for the API: over the rows of a pass, or over one whole sample where nothing is shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.attention.merge import accumulation_dtype
from megatron_augtree.config import AugTreeError
from megatron_augtree.mcore.api.batch import Sample
from megatron_augtree.mcore.api.heads import Head, Rows
from megatron_augtree.mcore.api.outputs import Columns
from megatron_augtree.mcore.api.step import StepPlan
from megatron_augtree.mcore.cpu import trimming
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from megatron_augtree.mcore.shards import padding_of
from megatron_augtree.runtime.buffers import to_device
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.layout import LocalRows
from megatron_augtree.runtime.tree_attention import PassContext


@dataclass(frozen=True)
class ModelCall:
    """One head on one plan's model.

    Attributes:
        step: the plan.
        head: what is kept of logits.
        columns: how its values lie in a tensor, the same on every rank.
        failures: what the head raised. Other ranks wait for values: they get some, and are told at the end.
    """

    step: StepPlan
    head: Head
    columns: Columns
    failures: list[Exception] = field(default_factory=list)

    @property
    def like(self) -> Tensor:
        """[0, k] tensor of the values' type, device and width."""
        return torch.empty((0, self.columns.width), dtype=self.columns.dtype, device=self.step.handle.device)

    def engine(self) -> Engine:
        """Plays the plan with this head; compiled programs are kept with the plan."""
        step = self.step
        if "engine" not in step.engines:
            step.engines["engine"] = Engine(
                step.plan,
                step.forest,
                self.run,
                step.transport,
                step.handle.kernel,
                step.handle.device,
                keep_attention=step.handle.config.keep_attention,
                trim=trimming(step.handle.config, step.handle.device),
            )
        engine = step.engines["engine"]
        engine.model = self.run
        return engine

    def run(self, local: LocalRows, context: PassContext) -> Tensor:
        """[n, k] values of the scored rows of a pass."""
        targets = torch.empty_like(local.positions)
        targets[local.scored] = local.targets
        heat: Tensor | float = self.step.heat
        if isinstance(heat, np.ndarray):
            heat = to_device(heat[local.rows], local.positions.device, torch.float64)

        def score(logits: Tensor, rows: Tensor) -> Tensor:
            warm = heat[rows] if isinstance(heat, Tensor) else heat
            return self._values(logits, Rows(rows, targets[rows], warm, local.pass_id))

        packed = AugTreePackedSeqParams(
            positions=local.positions,
            context=context,
            scored=local.scored,
            score=score,
            last_position=local.last_position,
        )
        output = self.step.handle.model(local.inputs.unsqueeze(0), None, None, packed_seq_params=packed)
        return output.squeeze(0)

    def stock(self, number: int) -> Tensor:
        """[C, k] values of an own sample's computed rows, by the stock model."""
        handle, sample = self.step.handle, self.step.samples[number]
        ids = to_device(sample.tokens[:-1], handle.device)
        ids = torch.nn.functional.pad(ids, (0, padding_of(len(ids), handle.transformer_config))).unsqueeze(0)
        logits = handle.model(ids, torch.arange(ids.shape[1], device=handle.device).unsqueeze(0), None)
        return self._values(*self._of_sample(logits[0], sample, number))

    def idle(self) -> Tensor:
        """[0, k] values of no row, connected to the stock model's parameters."""
        handle = self.step.handle
        rows = padding_of(0, handle.transformer_config)
        ids = torch.zeros((1, rows), dtype=torch.int64, device=handle.device)
        logits = handle.model(ids, torch.zeros_like(ids), None)
        none = ids.new_empty(0)
        return self._values(logits[0, :0], Rows(none, none, 1.0))

    def _values(self, logits: Tensor, rows: Rows) -> Tensor:
        """[n, k] values that the head keeps of logits [n, V / tp]."""
        try:
            values = self.head(logits, rows)
            _check_values(values, len(logits), self.columns)
            return self.columns.pack(values)
        except Exception as error:
            self.failures.append(error)
            return (logits[:, :1] * 0).to(self.columns.dtype).expand(-1, self.columns.width)

    def _of_sample(self, logits: Tensor, sample: Sample, number: int) -> tuple[Tensor, Rows]:
        row = to_device(np.flatnonzero(sample.computed), logits.device)
        targets = to_device(sample.tokens, logits.device)[row + 1]
        return logits.index_select(0, row), Rows(row, targets, sample.temperature, sample=number, row=row)


def model_call(step: StepPlan, head: Head) -> ModelCall:
    """Binds a head; asks it, without a row, what it will return.

    Raises:
        AugTreeError: something else than tensors with one entry a row.
    """
    handle = step.handle
    model = handle.language_model
    weight = getattr(model.output_layer, "weight", None)
    weight = model.shared_embedding_or_output_weight() if weight is None else weight
    dtype = handle.transformer_config.params_dtype
    logits = torch.empty((0, weight.shape[0]), dtype=dtype, device=handle.device)
    none = torch.empty(0, dtype=torch.int64, device=handle.device)
    with torch.no_grad():
        values: Any = head(logits, Rows(none, none, 1.0))
    _check_values(values, 0)
    return ModelCall(step, head, Columns.of(values, accumulation_dtype(dtype)))


def _check_values(values: Any, count: int, columns: Columns | None = None) -> None:
    """Fails where a head returned something else than entries of `count` rows, or than it did before."""
    good = (
        isinstance(values, dict)
        and values
        and all(isinstance(v, Tensor) and v.dim() and len(v) == count for v in values.values())
        and (columns is None or columns.fit(values))
    )
    if not good:
        raise AugTreeError(
            "a head returns something else than values of rows",
            values=f"{_said(values)}, for {count} rows",
            rule="head(logits [n, V], rows) -> {name: [n, ...]}, with the same names and shapes of a row for "
            "every n, also for n = 0",
            remedy="return a dictionary of tensors with one entry a row",
        )


def _said(values: Any) -> str:
    if not isinstance(values, dict):
        return type(values).__name__
    return (
        ", ".join(
            f"{k}: {list(v.shape) if isinstance(v, Tensor) else type(v).__name__}" for k, v in values.items()
        )
        or "an empty dictionary"
    )
