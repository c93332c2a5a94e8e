"""Which policy loss: the settings, and the named ones as their papers have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_augtree.config import AugTreeError
from megatron_augtree.rl.advantages import HOWS

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")
KL_KINDS = ("k1", "k2", "k3")
RATIOS = ("token", "sequence")

#: Named losses as their papers have them: what differs from the fields' defaults.
PRESETS: dict[str, dict] = {
    # DeepSeekMath, eq. 3: one weight a sequence, k3 inside the loss.
    "grpo": {"aggregation": "seq-mean-token-mean", "kl_coef": 0.04},
    # Dr. GRPO: neither the length nor the deviation normalises.
    "dr_grpo": {"aggregation": "constant", "advantage": "mean"},
    # DAPO: asymmetric clip, one weight a token, no reference.
    "dapo": {"aggregation": "token-mean", "clip_high": 0.28},
    # GSPO: one ratio a sequence, hence the much narrower clip.
    "gspo": {"aggregation": "seq-mean-token-mean", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
}


@dataclass(frozen=True)
class LossConfig:
    """Which loss; ``LossConfig.preset`` gives the named ones.

    Attributes:
        ratio: ``token`` (a ratio a row) or ``sequence`` (GSPO).
        clip_low: the ratio is held above ``1 - clip_low`` where the advantage is negative.
        clip_high: the ratio is held below ``1 + clip_high`` where the advantage is positive.
        dual_clip: upper limit of the ratio where the advantage is negative; None leaves it open.
        kl_coef: weight of the KL term (beta); 0 needs no reference log-probs.
        kl_kind: estimator, with d = log-prob - reference: ``k1`` d, ``k2`` d^2 / 2, ``k3`` exp(-d) + d - 1.
        entropy_coef: weight of the entropy bonus; 0 needs no entropy.
        aggregation: one of ``AGGREGATIONS``.
        advantage: how the advantages were made, one of ``advantages.HOWS``. Recorded, not applied here.
        temperature: by which the logits of current, old and reference log-probs alike were divided. Recorded,
            not applied here: it acts once, where log-probs are made.
    """

    ratio: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    entropy_coef: float = 0.0
    aggregation: str = "token-mean"
    advantage: str = "mean_std"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        choices = {"ratio": RATIOS, "kl_kind": KL_KINDS, "aggregation": AGGREGATIONS, "advantage": HOWS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                self._refuse(name, f"one of {', '.join(allowed)}")
        self._check("clip_low", lambda x: 0 <= x <= 1, "a number from 0 to 1")
        self._check("clip_high", lambda x: x >= 0, "a finite number, not negative")
        self._check("kl_coef", lambda x: x >= 0, "a finite number, not negative")
        self._check("entropy_coef", lambda x: x >= 0, "a finite number, not negative")
        self._check("temperature", lambda x: x > 0, "a finite number above 0")
        if self.dual_clip is not None:
            self._check("dual_clip", lambda x: x > 1, "None or a finite number above 1")

    @classmethod
    def preset(cls, name: str, **overrides) -> LossConfig:
        """A loss by its paper's name, with single fields replaced.

        Args:
            name: one of ``PRESETS``.
            **overrides: fields of ``LossConfig``.

        Raises:
            AugTreeError: an unknown preset or field, or a value out of range.
        """
        if name not in PRESETS:
            raise AugTreeError(
                "unknown loss",
                values=f"{name!r}",
                rule=f"one of {', '.join(PRESETS)}",
                remedy="correct the spelling",
            )
        unknown = sorted(set(overrides) - set(cls.__dataclass_fields__))
        if unknown:
            raise AugTreeError(
                "unknown setting of a loss",
                values=", ".join(f"{key} = {overrides[key]!r}" for key in unknown),
                rule=f"one of {', '.join(cls.__dataclass_fields__)}",
                remedy="correct the spelling",
            )
        return cls(**{**PRESETS[name], **overrides})

    def _check(self, name: str, holds: Callable[[float], bool], rule: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and holds(value)):
            self._refuse(name, rule)

    def _refuse(self, name: str, rule: str) -> None:
        raise AugTreeError(
            "a setting of the loss cannot be used",
            values=f"{name} = {getattr(self, name)!r}",
            rule=f"{name} is {rule}",
            remedy=f"correct {name}",
        )
