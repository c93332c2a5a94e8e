"""What a launcher tells of its steps: one line a step, TensorBoard, and a progress bar on a terminal."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass(frozen=True)
class StepRecord:
    """One step in numbers.

    Attributes:
        iteration: counted from 1.
        loss, grad_norm: the objective, and the gradient's norm before clipping.
        groups: groups of the step.
        rows, unshared_rows: rows computed by all ranks, prompt copies included, and what a run without
            sharing computes.
        note: why this plan, in a line.
        plan_seconds: time that trees and plan took, perhaps in a data worker while an earlier step ran.
        predicted_seconds: price of the plan, forward and backward; 0 where it has none.
        measured_seconds: time of the step: forward, backward, reduction and optimizer.
        metrics: of the objective.
    """

    iteration: int
    loss: float
    grad_norm: float
    groups: int
    rows: int
    unshared_rows: int
    note: str
    plan_seconds: float
    predicted_seconds: float
    measured_seconds: float
    metrics: dict[str, float] = field(default_factory=dict)

    def line(self, last: int) -> str:
        """The step as one line of text.

        Args:
            last: number of the run's last iteration.
        """
        saved = 1 - self.rows / self.unshared_rows if self.unshared_rows else 0.0
        cells = [
            f"iteration {self.iteration:>{len(str(last))}}/{last}",
            f"loss {self.loss:.6E}",
            f"grad norm {self.grad_norm:.4f}",
        ]
        cells += [
            f"{name.replace('_', ' ')} {self.metrics[name]:.4f}" for name in _IN_LINE if name in self.metrics
        ]
        cells += [
            f"groups {self.groups}",
            f"rows {self.rows} of {self.unshared_rows} ({saved:.1%} saved)",
            self.note,
            f"plan {_seconds(self.plan_seconds)}",
            f"predicted {_seconds(self.predicted_seconds)}",
            f"measured {_seconds(self.measured_seconds)}",
        ]
        return " | ".join(cell for cell in cells if cell)

    def scalars(self) -> dict[str, float]:
        """Everything as TensorBoard scalars, name -> value."""
        own = {
            "plan_seconds": self.plan_seconds,
            "measured_seconds": self.measured_seconds,
            "rows": self.rows,
            "unshared_rows": self.unshared_rows,
            "step_groups": self.groups,
        }
        if self.predicted_seconds:
            own["predicted_seconds"] = self.predicted_seconds
        rest = {
            "/".join(reversed(name.split("/"))): value
            for name, value in self.metrics.items()
            if name != "loss"
        }
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            **rest,
            **{f"augtree/{name}": value for name, value in own.items()},
        }


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
