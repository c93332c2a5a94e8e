"""Where does this response's token go? From a plan to the tensors of a rank, and back from rows to sequences.

`locate` answers for one token in words; `PassLayout` and `SequenceLayout` are its vectorised twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.planning.placement import Span, count
from megatron_augtree.planning.plan import Pass, Plan
from megatron_augtree.planning.tree import Forest, ForestShape
from megatron_augtree.runtime.buffers import to_device


class Place(NamedTuple):
    """Where a row lives: the pass, the pool rank, and the row's index among the rank's rows of that pass."""

    pass_id: int
    rank: int
    index: int


def locate(plan: Plan, forest: Forest, sequence: int, token: int) -> list[Place]:
    """The places of the row whose target is `token` of `sequence`, one a prompt copy.

    Args:
        plan, forest: the step.
        sequence: number in the caller's order.
        token: 1..T-1; token 0 is nobody's target.
    """
    row = forest.row_of(sequence, token)
    places = []
    for p in plan.passes:
        for rank, spans in zip(p.block, p.placement):
            index = np.flatnonzero(rows_of(forest.shape, spans) == row)
            places += [Place(p.id, rank, int(i)) for i in index]
    return places


def rows_of(shape: ForestShape, spans: Sequence[Span]) -> np.ndarray:
    """[T] global row numbers of some spans, in buffer order: by node (spine first), then by row."""
    first = np.array([shape.offsets[node] + lo for node, lo, _ in spans], np.int64)
    length = np.array([hi - lo for _, lo, hi in spans], np.int64)
    before = np.cumsum(length) - length
    return np.repeat(first - before, length) + np.arange(length.sum())


@dataclass(frozen=True)
class LocalRows:
    """The rows of a pass on some ranks, one rank after the other.

    Attributes:
        pass_id: the pass.
        rows: [T] global row numbers.
        inputs, positions: [T] int64.
        scored: [n] int64, which of the T rows carry a loss.
        targets: [n] int64, their targets.
        last_position: the largest position, known without asking the device; -1 without rows.
    """

    pass_id: int
    rows: np.ndarray
    inputs: Tensor
    positions: Tensor
    scored: Tensor
    targets: Tensor
    last_position: int = -1


class PassLayout:
    """Rows and scored rows of one pass on every rank of its block."""

    def __init__(self, p: Pass, forest: Forest) -> None:
        self.forest, self.pass_id = forest, p.id
        together = rows_of(forest.shape, [span for spans in p.placement for span in spans])
        self.rows = np.split(
            together, np.cumsum([count(spans) for spans in p.placement[:-1]], dtype=np.int64)
        )
        self.scored = [rows[forest.scored[rows]] for rows in self.rows]

    @property
    def counts(self) -> list[int]:
        """Scored rows of every block rank."""
        return [len(rows) for rows in self.scored]

    @cached_property
    def slots(self) -> np.ndarray:
        """[S] scored rows of the block, rank after rank: the order in which their values are shared."""
        return np.concatenate(self.scored)

    def span(self, rank: int) -> slice:
        """The slots of one block rank."""
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def local(self, ranks: list[int], device: torch.device) -> LocalRows:
        """The tensors of some block ranks, concatenated."""
        forest = self.forest
        rows = np.concatenate([self.rows[rank] for rank in ranks])
        scored = np.flatnonzero(forest.scored[rows])

        return LocalRows(
            self.pass_id,
            rows,
            to_device(forest.inputs[rows], device),
            to_device(forest.positions[rows], device),
            to_device(scored, device),
            to_device(forest.targets[rows[scored]], device),
            int(forest.positions[rows].max(initial=-1)),
        )


class SequenceLayout:
    """Which pass completes a sequence, and where the values of its logical rows are."""

    def __init__(self, plan: Plan, forest: Forest, passes: list[PassLayout]) -> None:
        self.forest = forest
        self.completed: list[list[int]] = [[] for _ in plan.passes]
        #: [job] -> its scored rows in order, and each one's pass and slot.
        self._where = [_where([(pass_id, passes[pass_id].slots) for pass_id in job]) for job in plan.jobs]
        self._job: dict[int, int] = {}
        for sequence, path in enumerate(forest.paths):
            if len(forest.logical[sequence]):
                self._job[sequence] = plan.job_of_node[path[-1]]
                self.completed[self._last_pass(plan, sequence)].append(sequence)

    def _last_pass(self, plan: Plan, sequence: int) -> int:
        job, path = self._job[sequence], set(self.forest.paths[sequence])
        return max(p for p in plan.jobs[job] if plan.passes[p].nodes & path)

    def places(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        """([R] pass, [R] slot) of a sequence's logical rows."""
        rows, (held, passes, slots) = self.forest.logical[sequence], self._where[self._job[sequence]]
        index = np.searchsorted(held, rows)
        if (index == len(held)).any() or (held[index] != rows).any():
            raise InputError(
                "a plan does not hold a sequence's rows",
                values=f"sequence {sequence}",
                rule="every scored row of a sequence is in its job's passes",
                remedy="plan from the same groups that are played",
            )
        return passes[index], slots[index]


def _where(passes: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows in order, each one's pass, its slot) of some passes' slots."""
    rows = np.concatenate([slots for _, slots in passes])
    pass_of = np.repeat([pass_id for pass_id, _ in passes], [len(slots) for _, slots in passes])
    slot_of = np.concatenate([np.arange(len(slots)) for _, slots in passes])
    order = np.argsort(rows, kind="stable")
    return rows[order], pass_of[order], slot_of[order]
