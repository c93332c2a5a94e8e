"""What each choice of the planner is worth, priced and simulated: nothing is measured.

    python scripts/ablations.py [--json ablations.json] [--quick] [--jobs 2]

families    one family of plans forced on all ranks, beside the automatic choice, on named trees (the paper's
            Fig. 13 forces a primitive or all lanes on two of them): what a wrong family costs
phases      one pass against prompt first, then waves; under full recompute, and with recompute chosen
joint       a batch planned together, against its trees one at a time, each on all ranks
group size  8 to 64 responses of one prompt, beside ring and the paper's own seconds

Every layer is recomputed, but where recompute is said to be chosen.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from paper_table import lengths_of
from planner_cases import USUAL
from table_cases import (
    COLUMNS,
    TIE,
    Bars,
    Setup,
    Timed,
    finish,
    parser_of,
    parts,
    print_table,
    report_of,
    run_cases,
    seconds,
    shown,
)

from megatron_augtree.config import InfeasiblePlanError
from megatron_augtree.data.workloads import workload
from megatron_augtree.planning.plan import Plan
from megatron_augtree.tools.lengths import Step, step_of_lengths

PAPER, H100 = Setup("paper", 8), Setup("h100", 8, budget_gib=USUAL)


class Tree(NamedTuple):
    """A named tree: a prompt, so many responses of so many tokens, and the pool."""

    name: str
    setup: Setup
    prompt: int
    responses: int
    tokens: int

    @property
    def step(self) -> Step:
        """As a step."""
        return step_of_lengths([(self.prompt, [self.tokens] * self.responses)])


TREES = (
    Tree("OpenThoughts 16k, paper", PAPER, 141, 8, 1907),
    Tree("LongAlign 16k, paper", PAPER, 1952, 8, 96),
    Tree("8k + 8 x 512", H100, 8192, 8, 512),
    Tree("8k + 8 x 512, 4 nodes", replace(H100, world=32), 8192, 8, 512),
    Tree("32k + 64 x 1k", H100, 32768, 64, 1024),
    Tree("128k + 8 x 512", H100, 131072, 8, 512),
    Tree("1k + 16 x 8k", H100, 1024, 16, 8192),
)

#: Family -> what is forced, beside a block of all ranks; copies a rank have ranks of their own.
FAMILIES = {
    "one pass, gather": "phase=fused,primitive=gather_kv",
    "one pass, ring of keys": "phase=fused,primitive=move_kv",
    "phased, gather": "phase=phased,primitive=gather_kv",
    "phased, ring of keys": "phase=phased,primitive=move_kv",
    "phased, queries": "phase=phased,primitive=move_q",
    "8 waves": "waves=8",
    "whole responses on ranks": "lane_degree=1",
    "a prompt copy a rank": "copies={world}",
}
#: The worst family costs at least so many times the automatic choice, on some tree.
WORST = 4.0

#: Presets planned together and one at a time: groups, on a pool of H100s.
JOINT = ("longreward", "docqa-rl", "openthoughts", "lmsys")
JOINT_GROUPS, JOINT_POOL = 16, replace(H100, world=64)
GROUP_SIZES = {8: 17, 16: 36, 32: 73, 64: 146}


class Case(NamedTuple):
    """A row: which table, and which of its inputs."""

    table: str
    which: Any


def row_of(case: Case) -> dict[str, Any]:
    """All plans of a row."""
    return {"table": case.table, **ROWS[case.table](case.which)}


def family_row(tree: Tree) -> dict[str, Any]:
    """A tree's automatic plan, forced ones, and what shares nothing."""
    step, setup = tree.step, tree.setup
    automatic, forced = setup.ours(step), {}
    for name, keys in FAMILIES.items():
        keys = keys.format(world=setup.world)
        forced[name] = timed_force(step, setup, f"{keys},degree={setup.world}")
    forced["ring, nothing shared"] = timed(setup.own(step, "ring", setup.world), setup)
    return {
        "name": tree.name, "automatic": timed(automatic, setup), "forced": forced,
        "parts": parts(automatic, setup.prices), "bound": setup.bound(step.merged.shape),
    }  # fmt: skip


def phase_row(tree: Tree) -> dict[str, Any]:
    """A tree in one pass and phased, either way of recompute."""
    found = {}
    for recompute in ("flags", "auto"):
        setup = replace(tree.setup, recompute=recompute)
        for phase in ("fused", "phased"):
            found[f"{phase}, {recompute}"] = timed_force(tree.step, setup, f"phase={phase}")
    return {"name": tree.name, "plans": found}


def joint_row(preset: str) -> dict[str, Any]:
    """A batch together, and the sum of its trees alone."""
    groups = workload(preset, JOINT_GROUPS, 0)
    together = timed(JOINT_POOL.ours(step_of_lengths(groups)), JOINT_POOL)
    alone = [timed(JOINT_POOL.ours(step_of_lengths([group])), JOINT_POOL) for group in groups]
    sums = {column: sum(one[column] for one in alone) for column in COLUMNS}
    bound = JOINT_POOL.bound(step_of_lengths(groups).merged.shape)
    return {"name": preset, "together": together, "alone": sums, "bound": bound}


def group_row(size: int) -> dict[str, Any]:
    """LongAlign at 32k with more responses of its lengths."""
    prompt, tokens = lengths_of("inferred", "LongAlign", 32)
    step = step_of_lengths([(prompt, [tokens] * size)])
    modes = "ring", "dcp-fused", "paper"
    plans = {mode: timed(PAPER.own(step, mode, PAPER.world), PAPER) for mode in modes}
    plans["augtree"] = timed(PAPER.ours(step), PAPER)
    return {"name": f"{prompt} + {size} x {tokens}", "size": size, "plans": plans,
            "bound": PAPER.bound(step.merged.shape)}  # fmt: skip


#: Table -> the row of one of its inputs.
ROWS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "families": family_row, "phases": phase_row, "joint": joint_row, "group size": group_row,
}  # fmt: skip


def timed(plan: Plan, setup: Setup) -> dict[str, Any]:
    """A plan's figures."""
    return Timed.of(plan, setup.prices)._asdict()


def timed_force(step: Step, setup: Setup, force: str) -> dict[str, Any] | None:
    """Those of a forced plan; None where there is none."""
    try:
        return timed(setup.ours(step, force), setup)
    except InfeasiblePlanError:
        return None


# Printing.


def of(plan: dict[str, Any] | None, column: str, ours: float = 0.0) -> str:
    """Seconds, or a ratio to ours; "-" where there is no such plan."""
    if plan is None:
        return "-"
    return f"{plan[column] / ours:.2f}" if ours else seconds(plan[column])


def print_families(rows: Sequence[dict]) -> None:
    """Forced over automatic."""
    for column in COLUMNS:
        print(f"\n### Forced families, times as long as the automatic choice: {column}\n")
        head = ["tree", "automatic, s", "over bound", *FAMILIES, "ring, nothing shared", "automatic plan"]
        lines = []
        for row in rows:
            ours = row["automatic"][column]
            cells = [of(plan, column, ours) for plan in row["forced"].values()]
            over = f"{ours / row['bound']:.2f}"
            lines.append([row["name"], seconds(ours), over, *cells, row["automatic"]["note"]])
        print_table(head, lines)


def print_phases(rows: Sequence[dict]) -> None:
    """One pass beside prompt first."""
    for column in COLUMNS:
        print(f"\n### One pass (fused) against prompt first, then waves (phased): {column} seconds\n")
        head = ["tree"]
        for said in ("full recompute", "recompute chosen"):
            head += [f"fused, {said}", f"phased, {said}", "phased / fused"]
        lines = []
        for row in rows:
            cells = []
            for recompute in ("flags", "auto"):
                pair = [row["plans"][f"{phase}, {recompute}"] for phase in ("fused", "phased")]
                ratio = "-" if None in pair else f"{pair[1][column] / pair[0][column]:.2f}"
                cells += [*(of(plan, column) for plan in pair), ratio]
            lines.append([row["name"], *cells])
        print_table(head, lines)


def print_joint(rows: Sequence[dict]) -> None:
    """Together, and one at a time."""
    pool = f"{JOINT_GROUPS} groups on {JOINT_POOL.world} H100s"
    print(f"\n### {pool}: together, and one tree at a time, seconds\n")
    lines = []
    for row in rows:
        cells = []
        for column in COLUMNS:
            pair = row["together"][column], row["alone"][column]
            cells += [*map(seconds, pair), f"{pair[1] / pair[0]:.2f}"]
        lines.append([row["name"], *cells, seconds(row["bound"])])
    named = [f"{column}: {what}" for column in COLUMNS for what in ("together", "one at a time", "ratio")]
    print_table(["preset", *named, "bound"], lines)


def print_groups(rows: Sequence[dict]) -> None:
    """Seconds by group size."""
    print("\n### Group size: the preset `paper`, 8 ranks, LongAlign at 32k, seconds\n")
    modes = list(rows[0]["plans"])
    lines = []
    for row in rows:
        cells = [of(row["plans"][mode], column) for mode in modes for column in COLUMNS]
        lines.append([row["name"], *cells, seconds(row["bound"]), f"{GROUP_SIZES[row['size']]}"])
    named = [f"{mode}, {column}" for mode in modes for column in COLUMNS]
    print_table(["prompt + responses", *named, "bound", "MegaN as printed in the paper"], lines)


PRINTS = {
    "families": print_families, "phases": print_phases, "joint": print_joint, "group size": print_groups,
}  # fmt: skip


def check(tables: dict[str, list[dict]], bars: Bars) -> None:
    """The worst family costs enough for the choice to matter, and no forced plan is faster than automatic."""
    rows = tables["families"]
    for column in COLUMNS:
        ratios = {
            (row["name"], family): plan[column] / row["automatic"][column]
            for row in rows for family, plan in row["forced"].items()
            if plan is not None and family in FAMILIES
        }  # fmt: skip
        worst = max(ratios, key=ratios.__getitem__)
        bars.least(f"{column}: the worst family ({worst[1]}, {worst[0]})", ratios[worst], WORST)
        best = min(ratios, key=ratios.__getitem__)
        met = bars.least(f"{column}: the best family ({best[1]}, {best[0]})", ratios[best], 1 - TIE)
        if not met:
            for row in rows:
                print(f"        {row['name']}: {shown(row['parts'])}")


def cases_of(args: argparse.Namespace) -> list[Case]:
    """All rows; under --quick one of each table."""
    inputs = {"families": TREES, "phases": TREES, "joint": JOINT, "group size": tuple(GROUP_SIZES)}
    few = 1 if args.quick else None
    return [Case(table, which) for table, every in inputs.items() for which in every[:few]]


def main() -> None:
    """Prints all tables, then the bars."""
    args = parser_of(__doc__).parse_args()
    rows, bars = run_cases(row_of, cases_of(args), args.jobs, "row"), Bars()
    tables: dict[str, list[dict]] = {}
    for row in rows:
        tables.setdefault(row["table"], []).append(row)
    for name, table in tables.items():
        PRINTS[name](table)
    print()
    if not args.quick:
        check(tables, bars)
    finish(args, {**report_of(["paper", "h100"]), "budget_gib": USUAL, "tables": tables}, bars)


if __name__ == "__main__":
    main()
