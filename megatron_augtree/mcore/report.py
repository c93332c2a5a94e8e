"""What a launcher tells of its steps: one line a step, TensorBoard, and a progress bar on a terminal."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from megatron_augtree.config import NO_CORE
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.planning import native
from megatron_augtree.planning.plan import Plan, counted


def slow_planning() -> list[str]:
    """What a launcher says at its start where plans take long: a line, or none."""
    return [NO_CORE] if native.core() is None else []


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What a step computed, by which plan, and how long that took.

    Attributes:
        groups: groups of the step.
        rows, unshared_rows: rows computed by all ranks, prompt copies included, and what a run without
            sharing computes.
        note: which plan, in a line.
        lanes: ranks of a lane -> leaves that are held by so many; empty where nothing is planned.
        idle: share of the ranks' time in which they wait, by the plan's prices.
        plan_seconds: time that trees and plan took, perhaps in a data worker while an earlier step ran.
        predicted_seconds: price of the plan, forward and backward; 0 where it has none.
        measured_seconds: time of the step: forward, backward, reduction, and in `examples/pretrain_gpt.py`
            the optimizer.
        fallback_steps: steps of the run so far that ran by ring because plans of their kind were measured
            slower; None where no guard measures.
    """

    groups: int
    rows: int
    unshared_rows: int
    note: str
    lanes: Mapping[int, int] = field(default_factory=dict)
    idle: float = 0.0
    plan_seconds: float = 0.0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    fallback_steps: int | None = None

    def cells(self) -> list[str]:
        """Parts of a line of text."""
        saved = 1 - self.rows / self.unshared_rows if self.unshared_rows else 0.0
        lanes = " + ".join(f"{leaves} x {ranks}" for ranks, leaves in sorted(self.lanes.items()))
        cells = [
            f"groups {self.groups}",
            f"rows {self.rows} of {self.unshared_rows} ({saved:.1%} saved)",
            self.note,
            f"lanes {lanes}" if lanes else "",
            f"idle {self.idle:.1%}" if lanes else "",
            f"plan {_seconds(self.plan_seconds)}",
            f"predicted {_seconds(self.predicted_seconds)}",
            f"measured {_seconds(self.measured_seconds)}",
            f"fallback {counted(self.fallback_steps, 'step')}" if self.fallback_steps else "",
        ]
        return [cell for cell in cells if cell]

    def plan_scalars(self) -> dict[str, float]:
        """The same as TensorBoard scalars, name -> value."""
        found = {
            "plan_seconds": self.plan_seconds,
            "measured_seconds": self.measured_seconds,
            "rows": self.rows,
            "unshared_rows": self.unshared_rows,
            "step_groups": self.groups,
        }
        if self.predicted_seconds:
            found |= {"predicted_seconds": self.predicted_seconds, "idle_share": self.idle}
        if self.lanes:
            leaves = sum(self.lanes.values())
            found["lane_ranks"] = sum(ranks * count for ranks, count in self.lanes.items()) / leaves
        if self.fallback_steps is not None:
            found["guard_fallback_steps"] = self.fallback_steps
        return {f"augtree/{name}": float(value) for name, value in found.items()}


def figures_of(schedule: AugTreeSchedule, measured_seconds: float) -> dict[str, Any]:
    """`StepFigures` of the step that a schedule has just played, as keyword arguments."""
    batch, guard = schedule.played, schedule.guard
    plan = batch.plan
    note = plan.note if plan.mode == schedule.config.mode else f"{plan.mode}, {plan.note}"
    return {
        "groups": len(batch.groups),
        "rows": plan.computed_rows,
        "unshared_rows": batch.unshared_rows,
        "note": f"{note} ({guard.why})" if guard is not None and guard.why else note,
        "lanes": lanes_of(plan),
        "idle": batch.idle,
        "plan_seconds": batch.plan_seconds,
        "predicted_seconds": plan.seconds,
        "measured_seconds": measured_seconds,
        "fallback_steps": None if guard is None else guard.fallback_steps,
    }


def lanes_of(plan: Plan) -> dict[int, int]:
    """Ranks of a lane -> leaves that are held by so many ranks, over all passes."""
    found: Counter[int] = Counter()
    for p in plan.passes:
        ranks = Counter(node for spans in p.placement for node in {span.node for span in spans})
        found.update(n for node, n in ranks.items() if not plan.shape.children[node])
    return dict(found)


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepFigures):
    """One step in numbers.

    Attributes:
        iteration: counted from 1.
        loss, grad_norm: the objective, and the gradient's norm before clipping.
        metrics: of the objective.
    """

    iteration: int
    loss: float
    grad_norm: float
    metrics: dict[str, float] = field(default_factory=dict)

    def line(self, last: int) -> str:
        """The step as one line of text.

        Args:
            last: number of the run's last iteration.
        """
        cells = [
            f"iteration {self.iteration:>{len(str(last))}}/{last}",
            f"loss {self.loss:.6E}",
            f"grad norm {self.grad_norm:.4f}",
        ]
        cells += [
            f"{name.replace('_', ' ')} {self.metrics[name]:.4f}" for name in _IN_LINE if name in self.metrics
        ]
        return " | ".join([*cells, *self.cells()])

    def scalars(self) -> dict[str, float]:
        """Everything as TensorBoard scalars, name -> value."""
        rest = {
            "/".join(reversed(name.split("/"))): value
            for name, value in self.metrics.items()
            if name != "loss"
        }
        return {"loss": self.loss, "grad_norm": self.grad_norm, **rest, **self.plan_scalars()}


_IN_LINE = ("kl", "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "entropy")


def _seconds(value: float) -> str:
    if not value:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


class Report:
    """Prints and logs steps; does so on one rank and is silent on the others.

    Args:
        first, last: iterations done before the run, and its last one.
        interval: iterations from one line to the next.
        speaks: whether this rank prints.
        tensorboard_dir: folder of event files; empty writes none.
    """

    def __init__(
        self, first: int, last: int, *, interval: int = 1, speaks: bool = True, tensorboard_dir: str = ""
    ) -> None:
        self.last, self.interval, self.speaks = last, interval, speaks
        self.writer = self.bar = None
        if speaks and tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter  # Megatron-LM's loop has a writer of its own

            os.makedirs(tensorboard_dir, exist_ok=True)
            # A run that resumes takes the place of what was logged beyond its checkpoint.
            self.writer = SummaryWriter(tensorboard_dir, purge_step=first + 1)
        if speaks and sys.stderr.isatty():
            self.bar = tqdm(
                total=last, initial=first, unit="step", file=sys.stderr, dynamic_ncols=True, leave=False
            )

    def say(self, text: str) -> None:
        """One line, above the progress bar."""
        if not self.speaks:
            return
        if self.bar is not None:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        else:
            print(text, flush=True)

    def step(self, record: StepRecord) -> None:
        """A step is done."""
        if record.iteration % self.interval == 0 or record.iteration == self.last:
            self.say(record.line(self.last))
        if self.writer is not None:
            for name, value in record.scalars().items():
                self.writer.add_scalar(name, value, record.iteration)
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        """Write out what is pending."""
        if self.writer is not None:
            self.writer.close()
        if self.bar is not None:
            self.bar.close()
