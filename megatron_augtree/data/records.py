"""What a group is: a prompt, its responses, and the rules that every instance keeps. Pure.

The dataclasses check lengths and finiteness when they are made, whoever makes them; ``parsing.py`` checks
what only a file can get wrong (types, missing and misspelt fields) and adds file and line to both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_augtree.config import InputError

#: Fields of a response with one entry a token, besides ``tokens`` itself.
PER_TOKEN = ("loss_mask", "old_logprobs", "ref_logprobs", "salt")


@dataclass(frozen=True)
class Response:
    """One sampled answer.

    Attributes:
        tokens: [R] ids; R may be 0.
        loss_mask: [R], True where the token carries loss.
        reward: finite, or None where unknown.
        advantage: finite, or None where it is to be computed from rewards.
        old_logprobs: [R], log-prob of each token under the policy that sampled it, or None. ``math.nan``
            stands for "not known" (null in a file) and is allowed where the token carries no loss.
        ref_logprobs: [R], the same under the reference policy.
        salt: [R], integers; rows are shared only where tokens and salts agree.

    Raises:
        InputError: lists of different lengths, or a number that is not finite; ``values`` begins with
            the field's name.
    """

    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    reward: float | None = None
    advantage: float | None = None
    old_logprobs: tuple[float, ...] | None = None
    ref_logprobs: tuple[float, ...] | None = None
    salt: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in PER_TOKEN:
            _check_length(field, getattr(self, field), self.tokens, "tokens")
        for field in ("reward", "advantage"):
            value = getattr(self, field)
            if value is not None and not math.isfinite(value):
                raise InputError("a number is not finite", values=f"{field}: {value}",
                                 rule="rewards and advantages are finite", remedy="correct the number")
        for field in ("old_logprobs", "ref_logprobs"):
            for index, value in enumerate(getattr(self, field) or ()):
                if math.isinf(value) or (math.isnan(value) and self.loss_mask[index]):
                    raise InputError(
                        "a log-prob is missing or infinite", values=f"{field}[{index}]: {value}",
                        rule="tokens that carry loss have finite log-probs; others may have null",
                        remedy="compute the log-prob, or take the token out of the loss")


@dataclass(frozen=True)
class Group:
    """One prompt and its responses.

    Attributes:
        name: a label for messages.
        prompt: [P] ids, P >= 1.
        responses: may be empty.
        prompt_salt: [P] integers, or None.

    Raises:
        InputError: an empty prompt, or a salt of another length; ``values`` begins with the field's name.
    """

    name: str
    prompt: tuple[int, ...]
    responses: tuple[Response, ...]
    prompt_salt: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InputError("the prompt is empty", values="prompt: 0 tokens", rule="a prompt has a token",
                             remedy="start the prompt with a begin-of-text token")
        _check_length("salt", self.prompt_salt, self.prompt, "prompt")


def _check_length(field: str, values: Sequence | None, tokens: Sequence[int], of: str) -> None:
    if values is not None and len(values) != len(tokens):
        raise InputError("lists differ in length",
                         values=f"{field}: {len(values)} entries, {of}: {len(tokens)}",
                         rule=f"{field} has one entry a token", remedy=f"correct {field} or {of}")
