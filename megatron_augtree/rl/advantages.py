"""Advantages from rewards: plain numbers in, plain numbers out.

Every rank knows the rewards of every group, so nothing here communicates and every rank computes the same
bits: sums are exact (``math.fsum``), hence independent of the order of the samples.

    mean_std        (r - mean) / (deviation + eps)      GRPO
    mean            r - mean                            Dr. GRPO
    leave_one_out   r - mean of the others              RLOO
    none            r

Except under ``none``, a group of one and a group of equal rewards give exactly 0: they carry no preference.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from megatron_augtree.config import AugTreeError, InputError

#: Ways of turning a group's rewards into advantages.
HOWS = ("mean_std", "mean", "leave_one_out", "none")

#: Largest reward: squares of it, and sums of those, stay finite in double precision.
REWARD_LIMIT = 1e150


def group_advantages(
    rewards: Sequence[float], how: str = "mean_std", *, unbiased: bool = False, eps: float = 1e-8
) -> list[float]:
    """Advantages of the samples of one group.

    Args:
        rewards: one reward a sample; may be empty.
        how: one of ``HOWS``.
        unbiased: divide by the sample deviation (n - 1) rather than the population deviation (n, the
            default). Rewards 1 and 3 give -1 and +1 by the population's, -0.707 and +0.707 by the sample's.
        eps: added to the deviation, so that differences that are mere rounding do not become advantages of
            1. Positive, in units of reward.

    Returns:
        One advantage a sample, in the order of ``rewards``.

    Raises:
        InputError: a reward that is not a finite number.
        AugTreeError: an unknown ``how``, or an ``eps`` that is not positive.
    """
    _check_settings(how, eps)
    values = [_finite(reward, f"reward {index}") for index, reward in enumerate(rewards)]
    return _advantages(values, how, unbiased, eps)


def advantages_by_group(
    rewards: Sequence[float],
    group_ids: Sequence[Hashable],
    how: str = "mean_std",
    *,
    unbiased: bool = False,
    eps: float = 1e-8,
) -> list[float]:
    """Advantages of samples whose groups may be interleaved.

    Args:
        rewards: one reward a sample.
        group_ids: one group a sample; samples with equal ids form a group, wherever they stand.
        how, unbiased, eps: as for ``group_advantages``.

    Returns:
        One advantage a sample, in the order of ``rewards``.

    Raises:
        InputError: different numbers of rewards and ids, or a reward that is not a finite number.
        AugTreeError: as for ``group_advantages``.
    """
    _check_settings(how, eps)
    _check_lengths("rewards", rewards, "group_ids", group_ids)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    values = [_finite(reward, f"reward {index}") for index, reward in enumerate(rewards)]
    advantages = [0.0] * len(values)
    for indices in members.values():
        group = _advantages([values[index] for index in indices], how, unbiased, eps)
        for index, advantage in zip(indices, group):
            advantages[index] = advantage
    return advantages


def whiten(
    values: Sequence[float], mask: Sequence[bool] | None = None, *, unbiased: bool = False, eps: float = 1e-8
) -> list[float]:
    """Values shifted to mean 0 and scaled to deviation 1 over everything that counts.

    Give it the values of *all* ranks, one a token: one rank's share has other statistics than the step.

    Args:
        values: one value a token.
        mask: which tokens count; all if left out. What stands at the others is not read and may be NaN.
        unbiased, eps: as for ``group_advantages``.

    Returns:
        One value a token; 0 where the mask is off, and everywhere if the values that count are all equal.

    Raises:
        InputError: different numbers of values and mask entries, or a counting value that is not finite.
        AugTreeError: an ``eps`` that is not positive.
    """
    _check_settings("mean_std", eps)
    if mask is None:
        mask = [True] * len(values)
    _check_lengths("values", values, "mask", mask)
    kept = [index for index, counts in enumerate(mask) if counts]
    numbers = [_finite(values[index], f"value {index}") for index in kept]
    whitened = [0.0] * len(values)
    for index, value in zip(kept, _advantages(numbers, "mean_std", unbiased, eps)):
        whitened[index] = value
    return whitened


def _advantages(values: list[float], how: str, unbiased: bool, eps: float) -> list[float]:
    """The formulas, on numbers already checked."""
    if how == "none":
        return list(values)
    # Without this, 0.1 three times over would leave the rounding of its mean, divided by a tiny deviation.
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    count, total = len(values), math.fsum(values)
    if how == "leave_one_out":
        return [value - math.fsum((total, -value)) / (count - 1) for value in values]
    centred = [value - total / count for value in values]
    if how == "mean":
        return centred
    square = math.fsum(value * value for value in centred) / (count - 1 if unbiased else count)
    return [value / (math.sqrt(square) + eps) for value in centred]


def _finite(value: float, name: str) -> float:
    """``value`` as a float, or the error that names it."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= REWARD_LIMIT:
        raise InputError(
            "a value that advantages are made from is not a finite number",
            values=f"{name}: {value!r}",
            rule=f"rewards and values are numbers of magnitude at most {REWARD_LIMIT:g}",
            remedy="correct the reward function, or leave the sample out (mask it, for whitening)",
        )
    return number


def _check_settings(how: str, eps: float) -> None:
    if how not in HOWS:
        raise AugTreeError(
            "unknown kind of advantage",
            values=f"how = {how!r}",
            rule=f"one of {', '.join(HOWS)}",
            remedy="correct the spelling",
        )
    if not (0 < eps < math.inf):
        raise AugTreeError(
            "eps is out of range",
            values=f"eps = {eps!r}",
            rule="eps is positive and finite",
            remedy="give a small positive number, such as 1e-8",
        )


def _check_lengths(name: str, one: Sequence, other_name: str, other: Sequence) -> None:
    if len(one) != len(other):
        raise InputError(
            f"{name} and {other_name} differ in number",
            values=f"{len(one)} {name}, {len(other)} {other_name}",
            rule="one entry of each a sample",
            remedy=f"give both lists the same length (those of all ranks, for {name} of all ranks)",
        )
