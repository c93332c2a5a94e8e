"""GRPO and its kin, on the logical rows of whole sequences.

A loss here is one formula over one step, whatever the layout. The engine calls it once per set of whole
sequences, always with the denominators of the whole step, and adds up what the calls return:

    loss  =  sum over calls, passes and ranks of share
    share =  sum over this call's valid rows of  weight * (policy + kl_coef * kl - entropy_coef * entropy)

        aggregation           weight of a row
        token-mean            1 / tokens
        seq-mean-token-mean   1 / (sequences * valid rows of its sequence)
        seq-mean-token-sum    1 / sequences
        constant              1 / constant

No weight depends on the call, so a mean of means cannot arise: any partition of the sequences gives the same
sum, the same gradients and the same metrics.

    policy = -A * r, where r is replaced by    1 + clip_high   where A > 0 and r is above it    (high)
                                               1 - clip_low    where A < 0 and r is below it    (low)
                                               dual_clip       where A < 0 and r is above it    (dual)

which is max(-A r, -A clip(r)) of PPO, bounded as in dual-clip PPO. r is exp(log-prob - old log-prob) of the
row or, for GSPO, exp of the mean of that difference over the sequence's valid rows. Every row then has the
sequence's r as its value and r * d(own log-prob) as its gradient (GSPO-token, GSPO paper section 4.3): the
plain sequence gradient where a sequence has one advantage, and defined where they differ from row to row.

Rows that do not count are replaced *before* any arithmetic: a NaN times a mask of 0 is still a NaN, in the
value or in the gradient. Valid rows must be finite.

Large exponents: above ``EXPONENT_LIMIT`` exp goes on as its tangent. A k3 difference of 100 would be 2.7e43,
infinite in fp32, and the gradient norm NaN. Cutting the exponent off would leave only k3's linear term, whose
gradient points the wrong way. By the tangent, value and gradient stay finite, continuous and of the right
sign, and nothing changes for ratios below 4.9e8.

A step without a valid row has loss 0 and gradients of exactly 0 (tensors, not None). An optimizer with weight
decay or momentum still moves on such a step, as on any other step with zero gradients.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.rl.loss_config import AGGREGATIONS, KL_KINDS, PRESETS, RATIOS, LossConfig

__all__ = [
    "AGGREGATIONS", "KL_KINDS", "PRESETS", "RATIOS", "Denominators", "LossConfig", "SequenceRows",
    "count_valid", "nll_loss", "policy_loss",
]

#: Above it exp(x) continues as its tangent, exp(20) * (1 + x - 20).
EXPONENT_LIMIT = 20.0


@dataclass(frozen=True)
class SequenceRows:
    """What a loss knows about some whole sequences; N logical rows, concatenated in order.

    Nothing in it carries gradients. Entries at rows that do not count are never read.

    Attributes:
        offsets: [n + 1] int64; sequence i has rows ``offsets[i]`` to ``offsets[i + 1]``, perhaps none. On
            the CPU it costs no synchronisation with a device.
        advantages: [N] float, one a row; None only for ``nll_loss``.
        old_logprobs: [N] float, of the policy that sampled; None takes the current ones (ratio 1).
        ref_logprobs: [N] float, of the reference; needed only where ``kl_coef`` is not 0.
        mask: [N] bool, the rows that count; None counts all.

    Raises:
        InputError: shapes, offsets or types that do not fit together.
    """

    offsets: Tensor
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        cuts = self.offsets
        if cuts.dim() != 1 or cuts.dtype != torch.int64 or cuts.numel() == 0:
            raise _unfit(f"offsets {list(cuts.shape)} {cuts.dtype}", "offsets is [n + 1] int64")
        bounds = cuts.tolist()
        if bounds[0] != 0 or any(left > right for left, right in itertools.pairwise(bounds)):
            raise _unfit(f"offsets {bounds[:8]} ...", "offsets start at 0 and never decrease")
        for name in ("advantages", "old_logprobs", "ref_logprobs", "mask"):
            value = getattr(self, name)
            if value is not None and tuple(value.shape) != (bounds[-1],):
                raise _unfit(f"{name} {list(value.shape)}, {bounds[-1]} rows", f"{name} has one entry a row")
        if self.mask is not None and self.mask.dtype != torch.bool:
            raise _unfit(f"mask {self.mask.dtype}", "mask is bool")

    def valid(self, device: torch.device) -> Tensor:
        """[N] bool: the rows that count."""
        if self.mask is None:
            return torch.ones(int(self.offsets[-1]), dtype=torch.bool, device=device)
        return self.mask.to(device)

    def valid_counts(self, device: torch.device) -> Tensor:
        """[n] int64: the rows that count, by sequence."""
        running = torch.nn.functional.pad(self.valid(device).long().cumsum(0), (1, 0))
        return running[self.offsets.to(device)].diff()

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[n] -> [N]: a sequence's value at each of its rows."""
        lengths = self.offsets.diff().to(per_sequence.device)
        return per_sequence.repeat_interleave(lengths, output_size=int(self.offsets[-1]))


@dataclass(frozen=True)
class Denominators:
    """What the step is divided by: counts over *all* ranks, passes and replicas, never of one call.

    Attributes:
        tokens: valid logical rows of the step.
        sequences: sequences of the step with at least one valid row.
        constant: divisor of the ``constant`` aggregation; for Dr. GRPO, the number of sequences times the
            longest response allowed, in tokens.
    """

    tokens: int
    sequences: int
    constant: float = 1.0

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.sequences < 0 or not 0 < self.constant < math.inf:
            raise InputError(
                "a denominator of the loss is out of range",
                values=f"tokens = {self.tokens}, sequences = {self.sequences}, constant = {self.constant}",
                rule="counts are not negative, the constant is positive and finite",
                remedy="add up count_valid over every sequence of the step",
            )


def count_valid(rows: SequenceRows) -> tuple[int, int]:
    """Valid rows, and sequences with at least one: add them up over a step to get its ``Denominators``."""
    counts = rows.valid_counts(torch.device("cpu"))
    return int(counts.sum()), int((counts > 0).sum())


def policy_loss(
    logprobs: Tensor,
    rows: SequenceRows,
    denominators: Denominators,
    config: LossConfig,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This call's share of the policy loss of a step.

    Args:
        logprobs: [N] log-probs of the current policy, with gradients; computed in their type, at least fp32.
        rows: the sequences that ``logprobs`` belongs to.
        denominators: those of the whole step.
        config: which loss.
        entropy: [N] entropy of the current policy, nats; needed only where ``entropy_coef`` is not 0.

    Returns:
        The share (a scalar; shares add up to the loss) and metrics, fp64 scalars without gradients that add
        up likewise: ``loss``; the means over the step's valid rows ``ratio_mean``, ``clip_fraction_low``,
        ``clip_fraction_high``, ``clip_fraction_dual`` (if on), ``kl`` (if there is a reference), ``entropy``
        (if given); the counts ``tokens`` and ``sequences``. ``min/ratio`` and ``max/ratio`` are reduced by
        min and max instead, and are +inf and -inf where no row counts.

    Raises:
        InputError: shapes that do not fit, or advantages, reference or entropy missing where needed.
    """
    _check_inputs(logprobs, rows, config, entropy)
    valid = rows.valid(logprobs.device)
    current = _valid_only(logprobs, valid, logprobs)
    advantages = _valid_only(rows.advantages, valid, current).detach()

    ratio = _ratio(current, rows, valid, config)
    surrogate, clipped = _clipped(ratio, advantages, config)
    per_row = surrogate
    means = {"ratio_mean": ratio, **{f"clip_fraction_{side}": flags for side, flags in clipped.items()}}
    if rows.ref_logprobs is not None:
        means["kl"] = _kl(current - _valid_only(rows.ref_logprobs, valid, current).detach(), config.kl_kind)
        if config.kl_coef:
            per_row = per_row + config.kl_coef * means["kl"]
    if entropy is not None:
        means["entropy"] = _valid_only(entropy, valid, current)
        if config.entropy_coef:
            per_row = per_row - config.entropy_coef * means["entropy"]

    share = _weighted_sum(per_row, rows, valid, denominators, config.aggregation)
    metrics = _metrics(share, rows, valid, denominators, means)
    detached = ratio.detach().double()
    for name, fill in (("min", math.inf), ("max", -math.inf)):
        # One more entry, so that a call without rows has something to reduce.
        padded = torch.nn.functional.pad(torch.where(valid, detached, fill), (0, 1), value=fill)
        metrics[f"{name}/ratio"] = padded.amin() if name == "min" else padded.amax()
    return share, metrics


def nll_loss(
    logprobs: Tensor, rows: SequenceRows, denominators: Denominators, aggregation: str = "token-mean"
) -> tuple[Tensor, dict[str, Tensor]]:
    """This call's share of the negative log-likelihood of a step.

    Args:
        logprobs: [N] log-probs, with gradients; computed in their type, at least fp32.
        rows: the sequences; only offsets and mask are read.
        denominators: those of the whole step.
        aggregation: one of ``AGGREGATIONS``.

    Returns:
        The share and its metrics ``loss``, ``tokens``, ``sequences``, as for ``policy_loss``.

    Raises:
        InputError: shapes that do not fit.
        AugTreeError: an unknown aggregation.
    """
    config = LossConfig(aggregation=aggregation)
    _check_shape("logprobs", logprobs, rows)
    valid = rows.valid(logprobs.device)
    per_row = -_valid_only(logprobs, valid, logprobs)
    share = _weighted_sum(per_row, rows, valid, denominators, config.aggregation)
    return share, _metrics(share, rows, valid, denominators, {})


def _valid_only(values: Tensor, valid: Tensor, like: Tensor) -> Tensor:
    """[N] with 0 at rows that do not count, in the type the loss is computed in."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.where(valid, values.to(device=like.device, dtype=dtype), 0.0)


def _exp(exponent: Tensor) -> Tensor:
    """exp that continues as its tangent above ``EXPONENT_LIMIT``."""
    return exponent.clamp(max=EXPONENT_LIMIT).exp() + _tail(exponent)


def _tail(exponent: Tensor) -> Tensor:
    """What the tangent adds above the limit; 0 below."""
    return math.exp(EXPONENT_LIMIT) * torch.relu(exponent - EXPONENT_LIMIT)


def _ratio(current: Tensor, rows: SequenceRows, valid: Tensor, config: LossConfig) -> Tensor:
    """[N] ratio of the current policy to the one that sampled, 1 at rows that do not count."""
    if rows.old_logprobs is None:
        return _exp(current - current.detach())
    difference = current - _valid_only(rows.old_logprobs, valid, current).detach()
    if config.ratio == "token":
        return _exp(difference)
    lengths = rows.offsets.diff().to(current.device)
    # unsafe: no check of the lengths, which takes a synchronisation and fails on a call without sequences.
    sums = torch.segment_reduce(difference.detach(), "sum", lengths=lengths, initial=0.0, unsafe=True)
    mean = rows.spread(sums / rows.valid_counts(current.device).clamp(min=1))
    # Value: the sequence's ratio. Gradient: that ratio, at the row's own log-prob.
    return torch.where(valid, _exp(mean) * (1 + (current - current.detach())), 1.0)


def _clipped(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] clipped surrogate, and which rows each limit holds ([N] bool by side)."""
    limits = {
        "low": ((advantages < 0) & (ratio < 1 - config.clip_low), 1 - config.clip_low),
        "high": ((advantages > 0) & (ratio > 1 + config.clip_high), 1 + config.clip_high),
    }
    if config.dual_clip is not None:
        limits["dual"] = ((advantages < 0) & (ratio > config.dual_clip), config.dual_clip)
    for held, limit in limits.values():
        ratio = torch.where(held, limit, ratio)
    return -advantages * ratio, {side: held for side, (held, _) in limits.items()}


def _kl(difference: Tensor, kind: str) -> Tensor:
    """[N] KL estimate from log-prob minus reference log-prob; 0 where they are equal."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # expm1: in fp32, exp(-d) + d - 1 of a d of 1e-4 is all rounding.
    return torch.expm1((-difference).clamp(max=EXPONENT_LIMIT)) + _tail(-difference) + difference


def _weighted_sum(
    per_row: Tensor, rows: SequenceRows, valid: Tensor, denominators: Denominators, aggregation: str
) -> Tensor:
    """Sum of the valid rows by the weights of the module's table; 0 where nothing counts."""
    if aggregation == "constant":
        divisor: Tensor | float = denominators.constant
    elif aggregation == "token-mean":
        divisor = max(denominators.tokens, 1)
    else:
        divisor = max(denominators.sequences, 1)
    if aggregation == "seq-mean-token-mean":
        divisor = divisor * rows.spread(rows.valid_counts(per_row.device)).clamp(min=1)
    return (torch.where(valid, per_row, 0.0) / divisor).sum()


def _metrics(
    share: Tensor, rows: SequenceRows, valid: Tensor, denominators: Denominators, means: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Shares of the step's metrics, fp64 (fp32 would miscount tokens above 2^24)."""
    counts = rows.valid_counts(share.device)
    metrics = {
        "loss": share.detach().double(),
        "tokens": counts.sum().double(),
        "sequences": (counts > 0).sum().double(),
    }
    for name, values in means.items():
        total = torch.where(valid, values.detach().double(), 0.0).sum()
        metrics[name] = total / max(denominators.tokens, 1)
    return metrics


def _check_inputs(logprobs: Tensor, rows: SequenceRows, config: LossConfig, entropy: Tensor | None) -> None:
    _check_shape("logprobs", logprobs, rows)
    if entropy is not None:
        _check_shape("entropy", entropy, rows)
    needs = (
        ("advantages", rows.advantages, True, "a policy loss needs advantages"),
        ("ref_logprobs", rows.ref_logprobs, config.kl_coef, "kl_coef above 0 needs reference log-probs"),
        ("entropy", entropy, config.entropy_coef, "entropy_coef above 0 needs the entropy"),
    )
    for name, value, needed, rule in needs:
        if needed and value is None:
            raise InputError(
                "the loss lacks an input",
                values=f"{name} is None, kl_coef = {config.kl_coef}, entropy_coef = {config.entropy_coef}",
                rule=rule,
                remedy=f"give {name}, or choose a loss without it",
            )


def _check_shape(name: str, values: Tensor, rows: SequenceRows) -> None:
    if tuple(values.shape) != (int(rows.offsets[-1]),):
        values_text = f"{name} {list(values.shape)}, {int(rows.offsets[-1])} rows"
        raise _unfit(values_text, f"{name} has one entry a row")


def _unfit(values: str, rule: str) -> InputError:
    return InputError(
        "the rows of a loss do not fit together",
        values=values,
        rule=rule,
        remedy="concatenate whole sequences in one order, and give every field that order",
    )
