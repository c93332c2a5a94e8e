"""How long planning takes, on one core: lengths to plan, and what the winner's passes cost to prepare.

    python scripts/bench_planner.py --json planner.json [--only latency,compile] [--repeats 5]

latency  from the lengths of a step to its plan, peers priced, by the C++ core: one tree of 8192 blocks of 512
         tokens on 128 ranks (arXiv 2609.33133 reports 1.7 ms for its planner), 64 groups on 64 ranks, 64 and
         512 groups on 1024 ranks. `decision` ends when the passes are known as recipes; `plan` includes
         placing and checking every row, and is what a step waits for if nothing hides it. A small case also
         without the core.
compile  of one pass of 64 ranks and 64 leaves, every leaf over all ranks: its program, the reversed program,
         the check of both, and the layout of the step.

The best of some runs counts, and of short work the best of 0.2 s of them; the process's time is compared with
the bars, wall time stands beside it. The script fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from planner_cases import AMPLE, MODEL, USUAL, Bars, config_of, one_tree, progress, run, step_of

from megatron_augtree.planning import native, planner
from megatron_augtree.planning.compiler import compile_pass
from megatron_augtree.planning.lanes import place
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.schedule import reverse
from megatron_augtree.planning.tree import Forest, from_groups
from megatron_augtree.planning.verify import check
from megatron_augtree.runtime.layout import PassLayout, SequenceLayout
from megatron_augtree.tools.lengths import Step

BLOCK = 512
RAGGED = ("docqa-rl", "code-ocr", "rag")
#: Seconds that runs of short work take together, at least.
SHORT = 0.2


class Case(NamedTuple):
    """A step to plan.

    Attributes:
        name: in the table.
        step: what is planned.
        ranks: of the pool.
        bar: milliseconds from lengths to the decision.
        budget_gib: memory of a rank.
    """

    name: str
    step: Step
    ranks: int
    bar: float
    budget_gib: float = USUAL


class Took(NamedTuple):
    """Milliseconds of the best of some runs: the process's, and on the clock."""

    process: float
    wall: float


SLOW = Case("8k + 8 x 512 tokens", one_tree(8192, 8, 512), 8, 0)


def best_of(repeats: int, work: Callable[[], object]) -> Took:
    """Times some work after one run to warm up and one collection of garbage: so many runs, and of short work
    more, until they take `SHORT` seconds together. Collecting before every run would time cold caches."""
    work()
    gc.collect()
    runs: list[tuple[float, float]] = []
    while len(runs) < repeats or sum(wall for _, wall in runs) < SHORT:
        began = time.process_time(), time.perf_counter()
        work()
        runs.append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return Took(*(1e3 * min(column) for column in zip(*runs)))


def cases() -> list[Case]:
    """The steps whose planning has a bar."""
    found = []
    for prompt, tokens in ((7168, 128), (8184, 1)):
        step = one_tree(prompt * BLOCK, 8, tokens * BLOCK)
        found.append(Case(f"{prompt} + 8 x {tokens} blocks", step, 128, 0.5, AMPLE))
    for groups, ranks, bar in ((64, 64, 20), (64, 1024, 100), (512, 1024, 200)):
        found += [Case(f"{groups} of {name}", step_of(name, groups), ranks, bar) for name in RAGGED]
    return found


def latency(args: argparse.Namespace, bars: Bars) -> dict:
    """Lengths to plan."""
    print(f"{'step':26}{'ranks':>6}{'bar':>7}{'decision ms':>13}{'plan ms':>10}{'wall':>9}  plan")
    table = {}
    for case in progress(cases(), "case"):
        decision, whole, plan = timed(case, args.repeats)
        name = f"{case.name}, {case.ranks} ranks"
        bars.most(f"decision, {name}", decision.process, case.bar, " ms")
        table[name] = {"bar_ms": case.bar, "decision_ms": decision.process, "decision_wall_ms": decision.wall,
                       "plan_ms": whole.process, "plan_wall_ms": whole.wall, "plan": plan.note}
        print(f"{case.name:26}{case.ranks:6}{case.bar:7g}{decision.process:13.2f}{whole.process:10.2f}"
              f"{whole.wall:9.2f}  {plan.note[:60]}", flush=True)
    case = SLOW
    with native.without_core():
        decision, whole, _ = timed(case, 1)
    print(f"{case.name:26}{case.ranks:6}{'':7}{decision.process:13.2f}{whole.process:10.2f}"
          f"{whole.wall:9.2f}  without the core")
    slow = {"decision_ms": decision.process, "plan_ms": whole.process}
    return {**table, f"without the core: {case.name}, {case.ranks} ranks": slow}


def timed(case: Case, repeats: int) -> tuple[Took, Took, Plan]:
    """(decision, whole plan, the plan) of a case."""
    trees, config = case.step.merged, config_of(case.budget_gib)
    ask = {"model": MODEL, "world": case.ranks, "config": config, "tree_groups": trees.tree_groups}
    decision = best_of(repeats, lambda: planner.decide(trees.shape, **ask))
    whole = best_of(repeats, lambda: planner.make_plan(trees.shape, **ask))
    return decision, whole, planner.make_plan(trees.shape, **ask)


COMPILE_BAR = 300


def wide(ranks: int) -> tuple[Plan, Forest]:
    """One pass of as many leaves as ranks, each over all of them, with the tokens of its step."""
    tokens = 4 * ranks
    answers = [(np.array([1000 + i, *range(tokens - 1)]), [True] * tokens) for i in range(ranks)]
    step = from_groups([(range(16 * ranks + 1), answers)])
    leaves = list(range(1, ranks + 1))
    placement = place(step.shape, [0], leaves, ranks, lane_degree=ranks, wide=0, pairs_per_row=50)
    p = Pass(0, 0, "fused", tuple(range(ranks)), placement)
    return Plan(ranks, "augtree", step.shape, (p,), (Event("forward", 0), Event("backward", 0))), step


def compiling(args: argparse.Namespace, bars: Bars) -> dict:
    """The parts of preparing one pass."""
    plan, step = wide(64)
    p, shape = plan.passes[0], plan.shape
    area = sum(shape.area(*span) for spans in p.placement for span in spans)
    program = compile_pass(shape, p.placement)
    back = reverse(program, keep=True)
    parts = {
        "compile": lambda: compile_pass(shape, p.placement),
        "reverse": lambda: reverse(program, keep=True),
        "check": lambda: (check(program, area), check(back, area)),
        "layout": lambda: SequenceLayout(plan, step, [PassLayout(p, step)]),
    }
    table = {name: best_of(args.repeats, part) for name, part in parts.items()}
    table["all four"] = Took(*map(sum, zip(*table.values())))
    print(f"{'part':12}{'ms':>9}{'wall':>9}")
    for name, took in table.items():
        print(f"{name:12}{took.process:9.1f}{took.wall:9.1f}")
    print(f"bar for all four {COMPILE_BAR} ms")
    bars.most("compile, reverse, check and layout, 64 ranks x 64 leaves", table["all four"].process,
              COMPILE_BAR, " ms")
    return {name: {"ms": took.process, "wall_ms": took.wall} for name, took in table.items()}


if __name__ == "__main__":
    run(__doc__, {"latency": latency, "compile": compiling})
