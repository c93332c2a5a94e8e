"""What a step optimises: group files and `rl` losses, seen from whole sequences."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.data.groups import Group
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.rl.advantages import HOWS, group_advantages
from megatron_augtree.rl.losses import (
    AGGREGATIONS,
    KL_KINDS,
    PRESETS,
    Denominators,
    LossConfig,
    SequenceRows,
    nll_loss,
    policy_loss,
)
from megatron_augtree.runtime.engine import SequenceValues

OBJECTIVES = ("nll", "grpo")

#: Flag -> (field of `LossConfig`, type, choices): what replaces a field of the preset.
LOSS_FLAGS = {
    "--clip-low": ("clip_low", float, None),
    "--clip-high": ("clip_high", float, None),
    "--dual-clip": ("dual_clip", float, None),
    "--kl-coef": ("kl_coef", float, None),
    "--kl-kind": ("kl_kind", str, KL_KINDS),
    "--entropy-coef": ("entropy_coef", float, None),
    "--loss-aggregation": ("aggregation", str, AGGREGATIONS),
    "--advantage": ("advantage", str, HOWS),
    "--temperature": ("temperature", float, None),
}


def add_loss_arguments(parser: argparse.ArgumentParser, *, preset: str = "grpo") -> None:
    """Adds the flags of the objective.

    Args:
        parser: a launcher's parser.
        preset: the policy loss where ``--loss-preset`` is left out; empty is ``LossConfig()``.
    """
    group = parser.add_argument_group("objective")
    group.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default="nll",
        help="nll: mean over all loss-bearing tokens; grpo: a policy loss, see --loss-preset",
    )
    group.add_argument(
        "--loss-preset",
        choices=tuple(PRESETS),
        default=None,
        help="the loss as its paper has it; default "
        f"{preset or 'clipping and a mean over tokens, without KL'}; the flags below replace single settings",
    )
    parser.set_defaults(loss_without_preset=preset)
    for flag, (field_name, kind, choices) in LOSS_FLAGS.items():
        group.add_argument(
            flag,
            type=kind,
            choices=choices,
            default=None,
            help=f"{field_name} of rl.losses.LossConfig; default the preset's",
        )
    group.add_argument(
        "--loss-constant",
        type=float,
        default=None,
        help="divisor of --loss-aggregation constant; default the sequences of the step times the "
        "longest response of the data, tokens",
    )


def loss_config(args: argparse.Namespace) -> LossConfig:
    """The loss that the arguments ask for.

    Raises:
        AugTreeError: a value out of range, or flags that would do nothing: of a policy loss under another
            objective, of one aggregation under another.
    """
    flags = {
        flag: getattr(args, flag.lstrip("-").replace("-", "_"))
        for flag in ("--loss-preset", *LOSS_FLAGS, "--loss-constant")
    }
    given = {flag: value for flag, value in flags.items() if value is not None}
    if args.objective != "grpo":
        if given:
            raise AugTreeError(
                "flags of a policy loss without one",
                values=", ".join(f"{flag} {value}" for flag, value in given.items()),
                rule=f"under --objective {args.objective} they do nothing",
                remedy="add --objective grpo, or remove them",
            )
        return LossConfig()
    fields = {LOSS_FLAGS[flag][0]: value for flag, value in given.items() if flag in LOSS_FLAGS}
    preset = args.loss_preset or args.loss_without_preset
    loss = LossConfig.preset(preset, **fields) if preset else LossConfig(**fields)
    constant = args.loss_constant
    if constant is not None and (loss.aggregation != "constant" or not 0 < constant < math.inf):
        raise AugTreeError(
            "a divisor of the loss cannot be used",
            values=f"--loss-constant {constant}, aggregation {loss.aggregation}",
            rule="only --loss-aggregation constant (as in --loss-preset dr_grpo) divides by it, and it is "
            "positive and finite",
            remedy="correct it, choose that aggregation, or leave --loss-constant out",
        )
    return loss


def loss_constant(args: argparse.Namespace, groups: Sequence[Group], longest: int) -> float:
    """Divisor of the ``constant`` aggregation for one step.

    Args:
        args: of `add_loss_arguments`.
        groups: of the step.
        longest: the longest response of the data, tokens.
    """
    if args.loss_constant is not None:
        return args.loss_constant
    return float(max(sum(len(group.responses) for group in groups) * longest, 1))


def longest_response(groups: Sequence[Group]) -> int:
    """Tokens of the longest response of the data."""
    return max((len(r.tokens) for group in groups for r in group.responses), default=0)


def check_groups(groups: Sequence[Group], kind: str, loss: LossConfig) -> None:
    """Fail before the first step where an objective lacks something of the groups.

    Raises:
        InputError: names the group and the field.
    """
    if kind != "grpo":
        return
    scored = [(group, r) for group in groups for r in group.responses if any(r.loss_mask)]
    for group in groups:
        advantages_of(group, loss.advantage)
    for name, needed in (("old_logprobs", False), ("ref_logprobs", loss.kl_coef > 0)):
        without = [group.name for group, response in scored if getattr(response, name) is None]
        if without and (needed or len(without) < len(scored)):
            raise InputError(
                "the loss lacks a field of the groups"
                if needed
                else "some responses have a field and others do not",
                values=f"{name}: {len(without)} of {len(scored)} responses have none, the first in group "
                f"{without[0]}" + (f"; kl_coef {loss.kl_coef}" if needed else ""),
                rule="a KL term needs reference log-probs" if needed else "every response has it or none",
                remedy="write it for all of them with scripts/logprobs.py"
                + (", or use --kl-coef 0" if needed else ""),
            )


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
        # Before any exchange, and for the whole step: a call sees only some of its sequences.
        check_groups(self.batch.groups, self.kind, self.loss)
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
        """[N] one field of some sequences; None where no scored response of the step has it."""
        parts = [self._rows[number][name] for number in index]
        return None if parts[0] is None else torch.cat(parts).to(like.device)


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
