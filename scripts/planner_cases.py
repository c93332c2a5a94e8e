"""What bench_planner.py and planner_quality.py share: steps, the machine, bars, the command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.data.groups import read_groups
from megatron_augtree.data.workloads import TREES, WORKLOADS, rollout_trees, workload
from megatron_augtree.planning import native
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.tools.lengths import Step, step_of_groups, step_of_lengths, step_of_rollouts
from megatron_augtree.tools.measure import commit, machine, write_json
from megatron_augtree.tools.models import model_shape

MODEL_NAME, CLUSTER = "qwen2.5-7b", "h100"
#: GiB above the model: what an H100 has left beside a 7B model with fp32 gradients; and where memory is no
#: question, for what is compared on one machine.
USUAL, AMPLE = 27, 200
MODEL = model_shape(MODEL_NAME)
PRESETS = (*WORKLOADS, TREES)
#: Real group files -> groups of a step.
FILES = {"tau_airline": 25, "kv_retrieval_75": 24, "gsm8k_solutions": 400}

T = TypeVar("T")


def config_of(budget_gib: float = USUAL, **fields: Any) -> AugTreeConfig:
    """Settings under which the planner chooses recompute itself."""
    return AugTreeConfig(**{"cluster": CLUSTER, "memory_budget_gib": budget_gib, **fields})


def step_of(preset: str, groups: int, seed: int = 0) -> Step:
    """Groups of a preset of `data/workloads.py`."""
    if preset == TREES:
        return step_of_rollouts(rollout_trees(groups, seed))
    return step_of_lengths(workload(preset, groups, seed))


def step_of_file(name: str, folder: Path) -> Step | None:
    """The groups of a real file; None where it is not there."""
    path = folder / f"{name}.jsonl.gz"
    if not path.is_file():
        return None
    return step_of_groups(list(read_groups(path, 0, FILES[name])), AugTreeConfig().min_shared_rows)


def one_tree(prompt: int, responses: int, tokens: int) -> Step:
    """A prompt and so many responses of so many tokens."""
    return step_of_lengths([(prompt, [tokens] * responses)])


def progress(items: Sequence[T], unit: str) -> Iterable[T]:
    """The items, with a bar on a terminal."""
    return tqdm(items, unit=unit, disable=None, file=sys.stderr)


@dataclass
class Bars:
    """What has to be shown.

    Attributes:
        missed: a line for each figure beyond its bar.
    """

    missed: list[str] = field(default_factory=list)

    def most(self, what: str, value: float, bar: float, unit: str = "") -> bool:
        """Notes whether a figure is at most its bar."""
        if value > bar:
            self.missed.append(f"{what}: {value:.4g}{unit}, bar {bar:g}{unit} ({value / bar:.2f} times)")
        return value <= bar

    def least(self, what: str, value: float, bar: float, unit: str = "") -> bool:
        """Notes whether a figure is at least its bar."""
        if value < bar:
            self.missed.append(f"{what}: {value:.4g}{unit}, bar at least {bar:g}{unit}")
        return value >= bar

    def holds(self, what: str, good: bool) -> bool:
        """Notes whether something holds."""
        if not good:
            self.missed.append(what)
        return good


#: Prints its table, notes its bars, returns its figures.
Section = Callable[[argparse.Namespace, Bars], dict]


def parse(doc: str, sections: Iterable[str]) -> argparse.Namespace:
    """The command line; `only` is a list of sections."""
    names = list(sections)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--only", default=",".join(names), help=f"sections: {', '.join(names)}; default all")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the best counts")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AUGTREE_DATA", default),
                        help="folder of the group files; default $AUGTREE_DATA, else ../shared/data")
    args = parser.parse_args()
    args.only, args.data_dir = args.only.split(","), Path(args.data_dir)
    unknown = [name for name in args.only if name not in names]
    if unknown or args.repeats < 1:
        parser.error(f"unknown section {', '.join(unknown)}" if unknown else "--repeats is at least 1")
    return args


def run(doc: str, sections: dict[str, Section]) -> None:
    """Runs what is asked for, writes the figures, and fails where a bar is missed."""
    args, bars = parse(doc, sections), Bars()
    cluster = cluster_of(CLUSTER)
    report: dict[str, Any] = {
        "machine": machine(), "commit": commit(), "core": native.core() is not None, "model": MODEL_NAME,
        "cluster": cluster.name, "cluster_digest": cluster.digest(), "sections": {},
    }
    for name in args.only:
        print(f"\n== {name} ==", flush=True)
        report["sections"][name] = sections[name](args, bars)
        report["missed"] = bars.missed
        if args.json:
            write_json(args.json, report)
    for line in bars.missed:
        print(f"MISSED  {line}")
    sys.exit(bool(bars.missed))
