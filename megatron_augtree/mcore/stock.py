"""Stock Megatron: its own dense attention and its own schedule, one sequence a micro-batch, nothing shared.

What a launcher runs where no ``--context-parallel-mode`` was given. The pool's ranks are plain data-parallel
replicas and take the sequences in turn. Called as `AugTreeSchedule` is, with the same objective: the loss
sees one whole sequence at a time and divides by the denominators of the step, so the numbers are those of
every other mode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from torch import Tensor

from megatron_augtree.mcore.agreement import compare_ranks, compare_weights
from megatron_augtree.mcore.ddp import config_of
from megatron_augtree.mcore.sampler import StepBatch, sequences_of
from megatron_augtree.mcore.schedule import MicroBatch
from megatron_augtree.mcore.shards import padding_of, vocabulary_shard
from megatron_augtree.planning.tree import TokenSequence
from megatron_augtree.runtime.engine import LossFn, SequenceValues, reduce_metric
from megatron_augtree.runtime.logprob import row_values
from megatron_augtree.runtime.transport import DistTransport


@dataclass
class StockSchedule:
    """Plays steps on a stock `GPTModel` inside Megatron's DDP.

    Attributes:
        transport: the pool; None makes one on Megatron's data-parallel group with context parallelism.
        temperature: logits are divided by it.
        entropy: values hold a second column, the entropy of each row.
    """

    transport: DistTransport | None = None
    temperature: float = 1.0
    entropy: bool = False
    _compared: torch.nn.Module | None = None

    def __post_init__(self) -> None:
        if self.transport is None:
            self.transport = DistTransport(parallel_state.get_data_parallel_group(with_context_parallel=True))

    def __call__(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: Iterator[StepBatch],
        model: torch.nn.Module,
        **megatron: Any,
    ) -> list[dict]:
        """Play one step: forward, backward, and Megatron's gradient finalisation.

        Args:
            forward_step_func: as for `AugTreeSchedule`; called once a sequence.
            data_iterator: yields a `StepBatch`; the same on every rank. Its plan is not played.
            model: the model in DDP.
            megatron: what else Megatron passes to a schedule.

        Returns:
            A list of one dictionary: the loss and its metrics, the same on every rank.
        """
        batch = next(data_iterator)
        if self._compared is not model:
            compare_weights(self.transport, model)
            self._compared = model
        compare_ranks(self.transport, batch)
        sequences, _ = sequences_of(batch.groups)
        scored = [number for number, sequence in enumerate(sequences) if sequence.scored.any()]
        mine = scored[self.transport.rank :: self.transport.world]
        # The reduction in the last backward waits for all ranks: one without a sequence runs a row for 0.
        queue = iter(mine or [None])

        def step(iterator: Iterator, model: torch.nn.Module) -> tuple[Tensor, Callable]:
            number = next(queue)
            sequence = _NOTHING if number is None else sequences[number]
            ids = torch.from_numpy(sequence.tokens[:-1])
            ids = torch.nn.functional.pad(ids, (0, padding_of(len(ids), config_of(model)))).unsqueeze(0)
            logits, loss_fn = forward_step_func(iter([MicroBatch(ids, None)]), model)
            return logits, lambda logits: self._loss(logits, sequence, number, loss_fn)

        found = forward_backward_no_pipelining(
            forward_step_func=step,
            data_iterator=None,
            model=model,
            num_microbatches=max(len(mine), 1),
            seq_length=1,
            micro_batch_size=1,
        )
        return [self._total(found)]

    def _loss(
        self, logits: Tensor, sequence: TokenSequence, number: int | None, loss_fn: LossFn
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        """(share of the loss, tokens, metrics); 0 tokens: Megatron is to scale nothing."""
        uncounted = torch.zeros((), dtype=torch.int)
        if number is None:
            return logits.sum() * 0, uncounted, {}
        rows = torch.from_numpy(np.flatnonzero(sequence.scored))
        targets = torch.from_numpy(sequence.tokens)[rows + 1]
        values = row_values(
            logits[0].index_select(0, rows),
            targets,
            temperature=self.temperature,
            entropy=self.entropy,
            shard=vocabulary_shard(),
        )
        share, metrics = loss_fn(SequenceValues((number,), torch.tensor([0, len(rows)]), values))
        return (
            share,
            uncounted,
            {**{name: float(value) for name, value in metrics.items()}, "loss": float(share.detach())},
        )

    def _total(self, found: list[dict[str, float]]) -> dict[str, float]:
        """Metrics of all sequences of all ranks; smallest, largest or sum, as their names say."""
        total: dict[str, float] = {"loss": 0.0}
        for text in self.transport.same(json.dumps(found)):
            for metrics in json.loads(text):
                for name, value in metrics.items():
                    total[name] = reduce_metric(name, total.get(name), value)
        return total


_NOTHING = TokenSequence(np.zeros(2, np.int64), np.zeros(1, bool))
