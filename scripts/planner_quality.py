"""How good plans are by their own prices: over bounds and peers, under memory, with parts of it fixed.

    python scripts/planner_quality.py --json quality.json [--only quality,idle,memory,regret]

quality  the joint schedule's heuristic over the optimum of 200 small batches (`joint_quality.py`); and for 64
         groups of every preset on 64 ranks the chosen plan beside the moldable lower bound (no schedule of a
         pass a tree ends earlier at these prices), every uniform degree, and every peer at its best degree.
idle     for the real group files and the presets on 64 ranks, the share of the step in which the most idle
         rank has nothing to do; more than a tenth only where the plan is at its lower bound.
memory   one tree on a node of 8, the budget from ample down to the least that has a plan: what recompute and
         phases the planner chooses, and what that costs. The bar is for a tight budget, the same for all
         trees; the least one, a tree's own, is printed beside it and has no bar: there the host link or
         recompute of everything decides.
regret   one tree on 8 and on 32 ranks: parts of the choice forced, and every speed of the machine wrong by a
         factor of two (planned with the wrong one, paid at the right one).

All for qwen2.5-7b in bf16 on H100s. The script fails where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import joint_quality
from planner_cases import (
    AMPLE,
    CLUSTER,
    FILES,
    MODEL,
    PRESETS,
    USUAL,
    Bars,
    config_of,
    one_tree,
    progress,
    run,
    step_of,
    step_of_file,
)

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning import joint
from megatron_augtree.planning.baselines import BASELINES, FREE
from megatron_augtree.planning.cluster import GIB, Cluster, cluster_of, document
from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.offers import Options, cost_of
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import make_plan, pairs_per_row, price
from megatron_augtree.planning.timeline import timeline
from megatron_augtree.tools.lengths import Step, Trees

RANKS, GROUPS = 64, 64
PRICES = Prices(MODEL, cluster_of(CLUSTER))


def planned(step: Step, ranks: int, config: AugTreeConfig, mode: str = "augtree") -> Plan | None:
    """The plan of a step, or None where there is none."""
    trees = step.trees(mode)
    try:
        return make_plan(trees.shape, MODEL, ranks, config, tree_groups=trees.tree_groups, mode=mode)
    except InfeasiblePlanError:
        return None


def least_seconds(trees: Trees, ranks: int, budget_gib: float) -> float:
    """The moldable lower bound of jobs of a tree each, at the planner's own prices."""
    shape, room = trees.shape, int(budget_gib * GIB) - PRICES.cluster.base_bytes
    unit = pairs_per_row(MODEL, PRICES.cluster)
    jobs, widths = make_jobs(shape, PRICES, unit, room, Options(), world=ranks), powers(ranks)
    offers = [[jobs.with_copies(shape.subtree(root), width) for width in widths] for root in shape.roots]
    times = [[-1 if found is None else cost_of(found) for found in row] for row in offers]
    return joint.lower_bound(times, widths, ranks) / NS


def powers(ranks: int) -> list[int]:
    """Widths of blocks."""
    return [1 << i for i in range(ranks.bit_length())]


# Quality.


def quality(args: argparse.Namespace, bars: Bars) -> dict:
    """The joint heuristic, and chosen plans beside bounds, uniform degrees and peers."""
    found = joint_quality.small_table(200)
    bars.most("joint heuristic over the optimum, median", found["all"]["median"], joint_quality.MEDIAN_BAR)
    bars.most("joint heuristic over the optimum, worst", found["all"]["worst"], joint_quality.WORST_BAR)
    print(f"\n{GROUPS} groups, {RANKS} ranks{'':8}seconds   /bound  best uniform/ours  best peer/ours")
    table = {}
    for name in progress(PRESETS, "preset"):
        row = beside(step_of(name, GROUPS), config_of(AMPLE))
        table[name] = row
        bars.least(f"{name}: best uniform degree over the plan", row["uniform_ratio"], 1)
        bars.least(f"{name}: best peer over the plan", row["peer_ratio"], 1)
        print(f"{name:22}{row['seconds']:12.4f}{row['over_bound']:9.3f}{row['uniform_ratio']:10.4f} at "
              f"{row['uniform_degree']:<5}{row['peer_ratio']:10.4f} {row['peer']}", flush=True)
    over = [row["over_bound"] for row in table.values()]
    print(f"over the bound: mean {statistics.mean(over):.3f}, worst {max(over):.3f}")
    return {"joint": found, "presets": table}


def beside(step: Step, config: AugTreeConfig) -> dict:
    """The chosen plan's time over a bound, and what others take over it."""
    ours = planned(step, RANKS, config).seconds
    degrees = powers(RANKS)
    uniform, peers = {}, {}
    for degree in degrees:
        plan = planned(step, RANKS, replace(config, force=f"degree={degree}"))
        uniform |= {degree: plan.seconds} if plan is not None else {}
    for mode in BASELINES:
        for degree in [0] if mode in FREE else degrees:
            plan = planned(step, RANKS, replace(config, degree=degree), mode)
            peers |= {f"{mode}, degree {degree or 'any'}": plan.seconds} if plan is not None else {}
    degree, peer = min(uniform, key=uniform.get), min(peers, key=peers.get)
    return {"seconds": ours, "over_bound": ours / least_seconds(step.merged, RANKS, config.memory_budget_gib),
            "uniform_degree": degree, "uniform_ratio": uniform[degree] / ours, "peer": peer,
            "peer_ratio": peers[peer] / ours, "uniform_seconds": uniform, "peer_seconds": peers}


# Idle ranks.

IDLE_BAR = 0.1
#: A plan is at its bound where no schedule is shorter by more than a twentieth.
AT_BOUND = 1.05


def idle(args: argparse.Namespace, bars: Bars) -> dict:
    """The most idle rank of each step, and whether the bound allows better."""
    steps = {name: step_of_file(name, args.data_dir) for name in FILES}
    for name in [name for name, step in steps.items() if step is None]:
        print(f"{name}: skipped, no {name}.jsonl.gz in {args.data_dir}")
        del steps[name]
    steps |= {name: step_of(name, GROUPS) for name in PRESETS}
    print(f"{'step':22}{'trees':>6}{'seconds':>10}{'worst rank':>12}{'between jobs':>14}{'mean':>8}"
          f"{'/bound':>8}")
    table = {}
    for name, step in progress(list(steps.items()), "step"):
        row = idle_of(step)
        table[name] = row
        forced = row["over_bound"] <= AT_BOUND
        if not forced:
            bars.most(f"{name}: idle share of the worst rank, bound {row['bound']:.4f} s below the plan's "
                      f"{row['seconds']:.4f} s", row["worst"], IDLE_BAR)
        excuse = "  at the bound" if forced and row["worst"] > IDLE_BAR else ""
        print(f"{name:22}{row['trees']:6}{row['seconds']:10.4f}{row['worst']:12.1%}{row['between']:14.1%}"
              f"{row['mean']:8.1%}{row['over_bound']:8.3f}{excuse}", flush=True)
    return table


def idle_of(step: Step) -> dict:
    """Idle shares of a step's plan, and its time over the lower bound."""
    plan = planned(step, RANKS, config_of())
    work, busy = [0.0] * RANKS, [0.0] * RANKS
    end = 0.0
    for bar in timeline(plan, PRICES):
        work[bar.rank] += bar.work
        busy[bar.rank] += bar.duration
        end = max(end, bar.start + bar.duration)
    bound = least_seconds(step.merged, RANKS, USUAL)
    return {"trees": len(step.merged.shape.roots), "seconds": plan.seconds, "worst": 1 - min(work) / end,
            "between": 1 - min(busy) / end, "mean": 1 - sum(work) / RANKS / end, "bound": bound,
            "over_bound": plan.seconds / bound, "plan": plan.note}


# Memory.

NODE = 8
TREES = {f"{p // 1024}k, {g} x {r}": (p, g, r) for p in (32768, 131072)
         for g, r in ((8, 512), (8, 4096), (64, 1024))}
BUDGETS = (200, 120, 80, 60, 40, 27, 20, 16, 12, 10, 8, 6, 5, 4, 3, 2, 1)
#: GiB that are tight for all of `TREES`: keeping everything takes three to twenty times as much, and of the
#: trees of 128k two have no plan below 8.
TIGHT = 10
TIGHT_BAR, MIXED_BAR = 1.25, 1.1


def memory(args: argparse.Namespace, bars: Bars) -> dict:
    """The plan's shape and time under shrinking budgets."""
    table = {}
    for name, tree in progress(list(TREES.items()), "tree"):
        step = one_tree(*tree)
        least = least_budget(step)
        rows = {}
        print(f"{name}: least budget {least:.2f} GiB")
        for budget in [*(b for b in BUDGETS if b > least), least]:
            plan = planned(step, NODE, config_of(budget))
            rows[f"{budget:g}"] = {"seconds": plan.seconds, "peak_gib": plan.peak_bytes / GIB,
                                   "shape": shape_of(plan), "plan": plan.note}
        ample = rows[f"{BUDGETS[0]}"]["seconds"]
        for budget, row in rows.items():
            print(f"  {float(budget):7.2f} GiB {row['seconds']:9.4f} s {row['seconds'] / ample:7.3f}  "
                  f"{row['shape']:24}{row['plan']}", flush=True)
        full = planned(step, NODE, config_of(force="keep_layers=0,keep_attention=0"))
        gain = full.seconds / rows[f"{USUAL}"]["seconds"]
        print(f"  full recompute at {USUAL} GiB: {gain:.3f} times the plan's time")
        tight, over = (rows[f"{budget:g}"]["seconds"] / ample for budget in (TIGHT, least))
        print(f"  over ample: {tight:.3f} times at {TIGHT} GiB, {over:.3f} times at the least, {least:g} GiB")
        bars.most(f"{name}: {TIGHT} GiB over ample", tight, TIGHT_BAR)
        bars.least(f"{name}: full recompute over the plan at {USUAL} GiB", gain, MIXED_BAR)
        shapes = [row["shape"] for row in rows.values()]
        seen = shapes[0] == "none", any("mixed" in s for s in shapes), any("phased" in s for s in shapes)
        bars.holds(f"{name}: the plan changes from none to mixed to phased", all(seen))
        times = [row["seconds"] for row in rows.values()]
        worse = [b for b, first, then in zip(list(rows)[1:], times, times[1:]) if then < first]
        bars.holds(f"{name}: less memory is never faster, but at {', '.join(worse)} GiB", not worse)
        table[name] = {"least_gib": least, "least_over_ample": over, "budgets": rows, "full_over_plan": gain}
    return table


def least_budget(step: Step) -> float:
    """The least budget that has a plan, to an eighth of a GiB."""
    low, high = 0, 8 * BUDGETS[0]
    while high - low > 1:
        middle = (low + high) // 2
        if planned(step, NODE, config_of(middle / 8)) is None:
            low = middle
        else:
            high = middle
    return high / 8


def shape_of(plan: Plan) -> str:
    """Recompute and phases of a plan, in a word or two."""
    pairs = {PRICES.pair(p) for p in plan.passes}
    kind = "mixed"
    if len(pairs) == 1:
        (pair,) = pairs
        kind = "none" if pair.whole == MODEL.layers else "full" if sum(pair) == 0 else "mixed"
    words = [kind] + ["phased"] * any(p.reads for p in plan.passes)
    return " ".join(words + ["offloaded"] * any(p.offload for p in plan.passes))


# Regret.

#: (prompt, responses, tokens of each): prompt-heavy to response-heavy.
SHAPES = [(p, g, r) for p in (2048, 8192, 32768, 131072) for g, r in ((8, 512), (8, 4096), (64, 1024))]
SHAPES += [(1024, 16, 8192), (512, 64, 2048), (8192, 8, 128), (32768, 64, 128), (131072, 8, 128)]
SHAPES += [(256, 8, 8192)]
DEGREES = (8, 32)
FORCED = ("phase=fused", "phase=phased", "primitive=gather_kv", "primitive=move_kv",
          "phase=phased,primitive=move_kv", "primitive=move_q", "waves=8", "copies=2", "lane_degree=1",
          "lane_degree={degree}", "pieces=1", "keep_layers=0")
REGRET_BAR = 0.02
#: Fields of `Cluster` that are no speeds.
NO_SPEEDS = ("name", "node_ranks", "memory_bytes", "base_bytes", "overlap")


def regret(args: argparse.Namespace, bars: Bars) -> dict:
    """Forced against automatic, and wrong constants against right ones."""
    steps = [(one_tree(*shape), degree) for degree in DEGREES for shape in SHAPES]
    table = {}
    for budget in (AMPLE, USUAL):
        right = [planned(step, ranks, config_of(budget)) for step, ranks in progress(steps, "tree")]
        kept = [(step, ranks, plan.seconds) for (step, ranks), plan in zip(steps, right) if plan is not None]
        print(f"{len(kept)} of {len(steps)} trees have a plan within {budget} GiB")
        table[str(budget)] = {"forced": forced(kept, budget, bars), "wrong": wrong(kept, budget, bars)}
    return table


Kept = Sequence[tuple[Step, int, float]]


def forced(steps: Kept, budget: float, bars: Bars) -> dict:
    """Time with a part of the choice forced, over automatic."""
    table = {}
    print(f"{'forced':34}{'trees':>6}{'mean':>8}{'median':>8}{'worst':>8}   at {budget} GiB")
    for force in progress(FORCED, "key"):
        ratios = []
        for step, ranks, seconds in steps:
            plan = planned(step, ranks, config_of(budget, force=force.format(degree=ranks)))
            ratios += [plan.seconds / seconds] if plan is not None else []
        row = {"trees": len(ratios), "mean": statistics.mean(ratios), "median": statistics.median(ratios),
               "worst": max(ratios), "best": min(ratios)}
        table[force] = row
        bars.least(f"{force} at {budget} GiB: forced over automatic, at its best", row["best"], 1)
        print(f"{force:34}{row['trees']:6}{row['mean']:8.3f}{row['median']:8.3f}{row['worst']:8.2f}",
              flush=True)
    return table


def wrong(steps: Kept, budget: float, bars: Bars) -> dict:
    """Regret of planning with each speed halved and doubled."""
    table, names = {}, [f.name for f in fields(Cluster) if f.name not in NO_SPEEDS]
    print(f"{'wrong by 2x':34}{'mean':>8}{'worst':>8}   at {budget} GiB")
    for name in progress(names, "speed"):
        found = []
        for half in (True, False):
            value = getattr(PRICES.cluster, name)
            cluster = replace(PRICES.cluster, **{name: max(1, value // 2) if half else 2 * value})
            found += regrets(steps, budget, cluster)
        table[name] = {"mean": statistics.mean(found), "worst": max(found)}
        print(f"{name:34}{table[name]['mean']:8.2%}{table[name]['worst']:8.1%}", flush=True)
        bars.most(f"{name} wrong by 2x at {budget} GiB: mean regret", table[name]["mean"], REGRET_BAR)
    return table


def regrets(steps: Kept, budget: float, cluster: Cluster) -> list[float]:
    """[tree] what planning for another machine costs on this one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "wrong.json"
        path.write_text(json.dumps(document(cluster, {})))
        config = config_of(budget, cluster=str(path))
        plans = [(planned(step, ranks, config), seconds) for step, ranks, seconds in steps]
    return [price(plan, PRICES).time_ns / NS / seconds - 1 for plan, seconds in plans]


if __name__ == "__main__":
    run(__doc__, {"quality": quality, "idle": idle, "memory": memory, "regret": regret})
