"""What paper_table.py, pool_table.py and ablations.py share: plans with both their times, bounds, and where
time goes.

*Priced* seconds are the planner's closed forms (`planning/price.py`), *simulated* ones the event simulation
of the same plan (`planning/simulate.py`). Neither is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning import native
from megatron_augtree.planning.choose import choose
from megatron_augtree.planning.cluster import GIB, Cluster, preset
from megatron_augtree.planning.cost import NS, PassPrice, Prices
from megatron_augtree.planning.demand import Pair
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import configured, explain
from megatron_augtree.planning.simulate import compute_bound, simulate
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.tools.lengths import Step
from megatron_augtree.tools.measure import commit, machine, write_json
from megatron_augtree.tools.models import model_shape

MODEL_NAME = "qwen2.5-7b"
#: Both times of every plan, in the order of the tables.
COLUMNS = ("priced", "simulated")
#: Ratios this near to 1 are ties.
TIE = 0.001

_Case = TypeVar("_Case")
_Row = TypeVar("_Row")

#: Fixed costs, taken away; and links that never wait; and products and tiles without waste.
_NO_LAUNCHES = {"tile_ns": 0, "stage_ns": 0, "layer_ns": 0, "pass_ns": 0, "message_ns": 0}
_NO_TRAFFIC = {"link_bytes_s": 10**15, "nic_bytes_s": 10**15, "host_bytes_s": 10**15}
_NO_PADDING = {"gemm_half_rows": 0, "query_rows": 1, "tile_rows": 1}


@dataclass(frozen=True)
class Setup:
    """A pool, a machine, and Megatron's flags.

    Attributes:
        cluster: preset.
        world: ranks of the pool.
        stages: pipeline stages; 1 with all layers is what stages one after the other are worth.
        budget_gib: GiB a rank above the model; 0: the preset's.
        recompute: ``flags`` is full recompute, ``auto`` what ``augtree`` chooses for the budget.
    """

    cluster: str
    world: int
    stages: int = 1
    budget_gib: float = 0.0
    recompute: str = "flags"

    @property
    def config(self) -> AugTreeConfig:
        """Of ``augtree``, over the whole pool."""
        budget = self.budget_gib
        if self.recompute == "auto":  # which is for those who say their budget
            budget = budget or self.machine.memory_bytes / GIB
        return AugTreeConfig(cluster=self.cluster, memory_budget_gib=budget, recompute=self.recompute)

    @property
    def machine(self) -> Cluster:
        """Its constants."""
        return preset(self.cluster)

    @cached_property
    def model(self) -> ModelShape:
        """The model under full recompute."""
        return configured(replace(model_shape(MODEL_NAME, recomputed=True), stages=self.stages), self.config)

    @cached_property
    def prices(self) -> Prices:
        """Of the model on the machine."""
        return Prices(self.model, self.machine)

    def own(self, step: Step, mode: str, degree: int = 0) -> Plan:
        """What a peer chooses for itself."""
        trees, config = step.trees(mode), replace(self.config, mode=mode, degree=degree)
        ask = {"tree_groups": trees.tree_groups, "mode": mode, "own": True}
        return explain(trees.shape, self.model, self.world, config, **ask)[0]

    def ours(self, step: Step, force: str = "") -> Plan:
        """What the launchers choose.

        Raises:
            InfeasiblePlanError: a forced choice that there is not.
        """
        return choose(step.trees, self.model, self.world, replace(self.config, force=force)).plan

    def bound(self, shape: ForestShape) -> float:
        """Seconds that no plan under the flags is below: `compute_bound`, and the forward that full recompute
        does again, spread evenly."""
        m, prices = self.model, self.prices
        pairs = sum(shape.area(node) for node in range(len(shape.rows)))
        again = prices.linear.ns(shape.total_rows) + prices.beside.ns(shape.total_rows)
        again = (again + prices.attention.ns(pairs)) * m.recomputed
        return self.floor(shape) + again / (self.world * m.stages) / NS

    def floor(self, shape: ForestShape) -> float:
        """`compute_bound`: nothing recomputed."""
        return compute_bound(shape, self.prices, self.world)


class Timed(NamedTuple):
    """A plan's figures: what it is, seconds either way, GiB of its heaviest rank above the model (priced)."""

    note: str
    priced: float
    simulated: float | None
    peak_gib: float

    @staticmethod
    def of(plan: Plan, prices: Prices, *, play: bool = True) -> Timed:
        """Of a priced plan; `play`: simulate it."""
        simulated = simulate(plan, prices).makespan if play else None
        note = plan.note if plan.mode == "augtree" else f"{plan.mode}: {plan.note}"
        return Timed(note, plan.seconds, simulated, plan.peak_bytes / GIB)


# Where time goes.


def parts(plan: Plan, prices: Prices) -> dict[str, float]:
    """Where the priced seconds of a plan go; they add up to them.

    Returns:
        ``work``: `compute_bound` of the plan's own forest; ``uneven``: ranks that wait, prompt copies,
        merging; ``recompute``; ``padding``: products of few rows and masked parts of tiles; ``traffic`` that
        nothing hides; ``launches``: fixed costs of tiles, stages, layers, passes and messages; ``pipeline``:
        filling and draining it, and waiting in between. Each is what is saved when it is taken away after
        those behind it here.
    """
    where, nodes = plan.passes, prices.cluster.node_ranks
    loads = [PassLoads(plan.shape, p, [where[r].placement for r in p.reads], nodes) for p in where]

    def busiest(changes: dict[str, int], whole: bool = False) -> float:
        """Seconds of the busiest rank, on the last stage."""
        changed = Prices(prices.model, replace(prices.cluster, **changes))
        busy = [0] * plan.world
        for load in loads:
            made = PassPrice(changed, load, provides=False)
            pair = Pair(prices.model.layers, 0) if whole else changed.pair(load.p)
            for rank in load.p.block:
                busy[rank] += sum(made.time(pair))
        return max(busy) / NS

    full, light = busiest({}), busiest(_NO_LAUNCHES)
    quiet = busiest(_NO_LAUNCHES | _NO_TRAFFIC)
    dense = busiest(_NO_LAUNCHES | _NO_TRAFFIC | _NO_PADDING)
    once = busiest(_NO_LAUNCHES | _NO_TRAFFIC | _NO_PADDING, whole=True)
    work = compute_bound(plan.shape, prices, plan.world)
    return {
        "work": work,
        "uneven": once - work,
        "recompute": dense - once,
        "padding": quiet - dense,
        "traffic": light - quiet,
        "launches": full - light,
        "pipeline": plan.seconds - full,
    }


def shown(split: dict[str, float]) -> str:
    """Parts in per cent, what is not work largest first."""
    total = sum(split.values())
    rest = sorted((name for name in split if name != "work"), key=lambda name: -split[name])
    said = ["work", *(name for name in rest if abs(split[name]) >= 0.005 * total)]
    return ", ".join(f"{name} {100 * split[name] / total:.0f} %" for name in said)


# Ratios.


class Ratios(NamedTuple):
    """Other over ours, over some cases: above 1 ours is faster."""

    mean: float
    median: float
    least: float
    most: float
    cases: int
    ties: int
    slower: int

    @staticmethod
    def of(values: Sequence[float]) -> Ratios:
        """Of at least one ratio; those within `TIE` of 1 are ties."""
        return Ratios(
            statistics.mean(values), statistics.median(values), min(values), max(values), len(values),
            sum(abs(value - 1) <= TIE for value in values), sum(value < 1 - TIE for value in values),
        )  # fmt: skip


def print_ratios(of: dict[str, dict[str, Sequence[float]]], title: str) -> None:
    """Means, medians and ranges.

    Args:
        of: other -> column -> [case] its time over ours; none where nothing was simulated.
        title: of the table.
    """
    names = ("mean", "median", "range", "ties", "ours slower")
    lines = []
    for other, columns in of.items():
        line = [other]
        for values in columns.values():
            if not values:
                line += ["-"] * len(names)
                continue
            r = Ratios.of(values)
            line += [f"{r.mean:.2f}", f"{r.median:.2f}", f"{r.least:.2f}..{r.most:.2f}", f"{r.ties}",
                     f"{r.slower} of {r.cases}"]  # fmt: skip
        lines.append(line)
    columns = list(next(iter(of.values())))
    print(f"\n### {title}\n")
    print_table(["other", *(f"{column}: {name}" for column in columns for name in names)], lines)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table in Markdown, its columns even."""
    lines = [list(head), *map(list, rows)]
    wide = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in wide])
    for line in lines:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, wide)) + " |")


def seconds(value: float | None) -> str:
    """Three digits, or none where nothing was simulated."""
    return "-" if value is None else f"{value:#.3g}".rstrip(".")


# Bars.


@dataclass
class Bars:
    """What has to be shown, and what was.

    Attributes:
        checked: one entry a bar: what, value, bar, met.
    """

    checked: list[dict[str, Any]] = field(default_factory=list)

    def least(self, what: str, value: float, bar: float) -> bool:
        """At least the bar."""
        return self._note(what, value, bar, value >= bar, "at least")

    def most(self, what: str, value: float, bar: float) -> bool:
        """At most the bar."""
        return self._note(what, value, bar, value <= bar, "at most")

    def _note(self, what: str, value: float, bar: float, met: bool, rule: str) -> bool:
        self.checked.append({"what": what, "value": value, "bar": f"{rule} {bar:g}", "met": met})
        print(f"{'met   ' if met else 'MISSED'}  {what}: {value:.4g}, bar {rule} {bar:g}", flush=True)
        return met

    @property
    def missed(self) -> list[str]:
        """What was not."""
        return [bar["what"] for bar in self.checked if not bar["met"]]


# Running.


def parser_of(doc: str) -> argparse.ArgumentParser:
    """What every table's command line has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="a few small cases, no bars: a test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser


def run_cases(work: Callable[[_Case], _Row], cases: Sequence[_Case], jobs: int, unit: str) -> list[_Row]:
    """Every case's row, in order, by so many processes; with a bar on a terminal."""
    bar = {"total": len(cases), "unit": unit, "disable": None, "file": sys.stderr}
    return list(tqdm(_rows(work, cases, jobs), **bar))


def _rows(work: Callable[[_Case], _Row], cases: Sequence[_Case], jobs: int) -> Iterator[_Row]:
    if jobs == 1:
        yield from map(work, cases)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(work, cases)
        finally:
            pool.shutdown(cancel_futures=True)


def report_of(clusters: Sequence[str]) -> dict[str, Any]:
    """What every file of figures begins with."""
    return {
        "machine": machine(), "commit": commit(), "core": native.core() is not None, "model": MODEL_NAME,
        "clusters": {name: preset(name).digest() for name in clusters}, "columns": COLUMNS, "measured": False,
    }  # fmt: skip


def finish(args: argparse.Namespace, report: dict[str, Any], bars: Bars) -> None:
    """Writes the figures, and fails where a bar is missed."""
    report["bars"] = bars.checked
    if args.json:
        write_json(args.json, report)
    sys.exit(bool(bars.missed))
