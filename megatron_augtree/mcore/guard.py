"""A measured guard: plans of a kind that turn out slower than plain context parallelism give way to it.

The planner never picks what it *expects* to lose; the guard finds out. While a kind of plans is on trial its
steps alternate: one as planned, one by `ring` on the un-shared sequences, whose gradients are the same. Steps
differ, so each time is divided by one yardstick, what ring is predicted to take for the same step. Then

    slower   the median of the planned steps is above 1.05 x that of ring's (a margin for what is a tie), and
             of all pairs of a planned and a ring step the planned one is slower in 9 of 10 (a rank test, for
             noise), once as many steps of each are timed as --augtree-guard-steps says
    kept     as soon as two of each are there and every planned step beats every ring step by the margin: a
             plan that is clearly faster costs two slow steps. Otherwise when all steps are timed

A kind is judged once. The first planned and the first ring step of a run are not counted: connections and
memory pools are made in them. Times are the slowest rank's, by one small exchange, so that all ranks decide
alike. Nothing is saved: a run that resumes measures again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from megatron_augtree.mcore.agreement import warn
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.mcore.shards import tensor_parallel_group
from megatron_augtree.planning.plan import Plan
from megatron_augtree.runtime.transport import Transport

#: What is within it is a tie.
MARGIN = 1.05
#: Steps of each that are enough where a plan is clearly faster.
FEW = 2


def kind_of(plan: Plan) -> str:
    """What plans have in common that are judged together: phases, widest block, and what travels."""
    phased = any(p.kind != "fused" for p in plan.passes)
    degree = max((len(p.block) for p in plan.passes), default=1)
    moves = sorted({p.primitive for p in plan.passes if len(p.block) > 1})
    return ", ".join([plan.mode, "phased" if phased else "fused", f"degree {degree}", *moves])


@dataclass
class Trial:
    """What is known of a kind.

    Attributes:
        planned, stock: measured times over ring's predicted ones, of the steps that were timed.
        verdict: empty while it is on trial, then ``kept`` or ``slower``.
    """

    planned: list[float] = field(default_factory=list)
    stock: list[float] = field(default_factory=list)
    verdict: str = ""

    def judge(self, steps: int) -> None:
        """Decide, if `steps` of each, or clear ones, are there."""
        few = min(len(self.planned), len(self.stock)) >= FEW
        if few and max(self.planned) * MARGIN < min(self.stock):
            self.verdict = "kept"
        elif min(len(self.planned), len(self.stock)) >= steps:
            pairs = [a > b for a in self.planned for b in self.stock]
            slower = self.ratio > MARGIN and 10 * sum(pairs) >= 9 * len(pairs)
            self.verdict = "slower" if slower else "kept"

    @property
    def ratio(self) -> float:
        """Median of the planned steps over that of ring's."""
        return statistics.median(self.planned) / statistics.median(self.stock)


@dataclass
class Guard:
    """Chooses between a step's plan and ring's, and learns from the time that it took.

    Use: ``batch = guard.choose(batch)``, play it, ``guard.done(seconds)``.

    Attributes:
        steps: steps of each that a verdict needs.
        transport: the pool, whose slowest rank counts; None where times are those of all ranks.
        warn: told once of every kind that is given up.
        trials: kind -> what is known of it.
        fallback_steps: steps that ran by ring because their kind is slower.
        timed_steps: steps that ran by ring to be timed.
        why: why the last step chosen is ring's; empty where it is as planned.
    """

    steps: int
    transport: Transport | None = None
    warn: Callable[[str], None] = partial(warn, __name__)
    trials: dict[str, Trial] = field(default_factory=dict)
    fallback_steps: int = 0
    timed_steps: int = 0
    why: str = ""
    _pending: tuple[str, bool, float] | None = None
    _warmed: set[bool] = field(default_factory=set)

    def choose(self, batch: StepBatch) -> StepBatch:
        """The step as planned, or by ring; the same on every rank."""
        self._pending, self.why = None, ""
        if batch.stock is None or not batch.stock.plan.seconds:
            return batch
        kind = kind_of(batch.plan)
        trial = self.trials.setdefault(kind, Trial())
        if trial.verdict == "slower":
            self.fallback_steps += 1
            self.why = "its kind measured slower"
        elif not trial.verdict:
            stock = len(trial.stock) < min(len(trial.planned), self.steps)
            self._pending = kind, stock, batch.stock.plan.seconds
            self.timed_steps += stock
            self.why = "timed for the guard" if stock else ""
        return batch.stock if self.why else batch

    def done(self, seconds: float) -> None:
        """The chosen step has been played; collective where it is on trial.

        Args:
            seconds: forward, backward and reduction on this rank.
        """
        if self._pending is None:
            return
        (kind, stock, predicted), self._pending = self._pending, None
        seconds = slowest(self.transport, seconds) if self.transport is not None else seconds
        if stock not in self._warmed:
            self._warmed.add(stock)
            return
        trial = self.trials[kind]
        (trial.stock if stock else trial.planned).append(seconds / predicted)
        trial.judge(self.steps)
        if trial.verdict == "slower":
            planned, ring = (predicted * statistics.median(x) for x in (trial.planned, trial.stock))
            self.warn(
                f"AugTree's guard: plans of the kind '{kind}' take {trial.ratio:.2f} x the time of ring "
                f"({planned:.3f} s against {ring:.3f} s for a step like the last one; medians of "
                f"{len(trial.planned)} and {len(trial.stock)} steps). Such steps run by ring from now on"
            )


def slowest(transport: Transport, seconds: float) -> float:
    """The longest time of any rank, tensor-parallel ranks included; collective."""
    worst = transport.total(torch.tensor([seconds], dtype=torch.float64), "max")
    group = tensor_parallel_group()
    if group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst)
