"""What a step optimises: group files and `rl` losses, seen from whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.data.groups import Group
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.rl.advantages import group_advantages
from megatron_augtree.rl.losses import Denominators, LossConfig, SequenceRows, nll_loss, policy_loss
from megatron_augtree.runtime.engine import SequenceValues

OBJECTIVES = ("nll", "grpo")


@dataclass
class Objective:
    """The loss function of one step; pass it as `loss_fn`.

    Attributes:
        batch: the step.
        kind: ``nll`` (mean over all loss-bearing logical rows) or ``grpo`` (`loss` says which policy loss).
        loss: the policy loss.
        constant: divisor of the ``constant`` aggregation.
    """

    batch: StepBatch
    kind: str = "nll"
    loss: LossConfig = field(default_factory=LossConfig)
    constant: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise AugTreeError(
                "unknown objective",
                values=f"--objective {self.kind}",
                rule=f"one of {', '.join(OBJECTIVES)}",
                remedy="correct the spelling",
            )
        responses = [(group, i) for group in self.batch.groups for i in range(len(group.responses))]
        counts = [len(rows) for rows in self.batch.forest.logical]
        self._denominators = Denominators(sum(counts), sum(n > 0 for n in counts), self.constant)
        self._rows = {}
        if self.kind == "grpo":
            advantages = [a for group in self.batch.groups for a in advantages_of(group, self.loss.advantage)]
            for number, (group, index) in enumerate(responses):
                self._rows[number] = _per_row(group, index, advantages[number])

    def __call__(self, sequences: SequenceValues) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = sequences.values[:, 0]
        if self.kind == "nll":
            return nll_loss(logprobs, SequenceRows(sequences.offsets), self._denominators)
        entropy = sequences.values[:, 1] if sequences.values.shape[1] > 1 else None
        columns = {
            name: self._column(sequences.index, name, logprobs)
            for name in ("advantages", "old_logprobs", "ref_logprobs")
        }
        rows = SequenceRows(sequences.offsets, **columns)
        return policy_loss(logprobs, rows, self._denominators, self.loss, entropy)

    def _column(self, index: tuple[int, ...], name: str, like: Tensor) -> Tensor | None:
        """[N] one field of some sequences; None where no response of the step has it."""
        parts = [self._rows[number][name] for number in index]
        if all(part is None for part in parts):
            return None
        if any(part is None for part in parts):
            raise InputError(
                "some responses have a field and others do not",
                values=f"{name}",
                rule="within one step, either every response has it or none",
                remedy="write it for all of them, for instance with scripts/logprobs.py",
            )
        return torch.cat(parts).to(like.device)


def advantages_of(group: Group, how: str) -> list[float]:
    """A group's advantages: the file's where every response has one, otherwise from its rewards.

    Raises:
        InputError: a response has neither.
    """
    given = [r.advantage for r in group.responses]
    if all(a is not None for a in given):
        return given
    rewards = [r.reward for r in group.responses]
    if any(a is not None for a in given) or any(r is None for r in rewards):
        raise InputError(
            "a group has no advantages",
            values=f"group {group.name}",
            rule="every response has a reward, or every response has an advantage",
            remedy='add "reward" to the responses, or use --objective nll',
        )
    return group_advantages(rewards, how)


def _per_row(group: Group, index: int, advantage: float) -> dict[str, Tensor | None]:
    response = group.responses[index]
    mask = [i for i, wanted in enumerate(response.loss_mask) if wanted]

    def pick(values) -> Tensor | None:
        return None if values is None else torch.tensor([values[i] for i in mask], dtype=torch.float64)

    return {
        "advantages": torch.full((len(mask),), advantage, dtype=torch.float64),
        "old_logprobs": pick(response.old_logprobs),
        "ref_logprobs": pick(response.ref_logprobs),
    }
