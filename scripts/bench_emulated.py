"""Are plans as fast as they are priced? Emulated: many ranks, real executor and messages, sleeping kernels.

    python scripts/bench_emulated.py --json emulated.json [--ranks 4,8,16] [--quick]

Every time here is EMULATED (`scripts/emulation.py` says how), none is measured on an accelerator: two layers
of a 7B model on an H100 cluster of the planner's own constants, dilated. So this tests the *structure* that
the planner assumes (what overlaps, what waits for whom, which links are shared, how uneven stages are), and
says nothing about the constants. Each mode plays its cheapest plan at any degree; modes that agree on a plan
play it once. A step that other work on this machine delayed by more than 2 % is played again, at most twice;
what remains is in its figure and in the column `lag`.

Shown are emulated against priced seconds, whether both order the modes alike (Kendall's tau), and regret: the
emulated time of the plan that the planner chose over that of the best mode. The null test prices the same
plans with constants that are wrong by random factors of up to 4: if that passes too, nothing was shown.

The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from emulation import check_plan
from emulation_ranks import Case, Played, emulate
from planner_cases import Bars
from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.choose import choose, merging
from megatron_augtree.planning.cluster import Cluster, document, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import configured, explain, price
from megatron_augtree.planning.tree import Forest, from_sequences, sequence_of
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.prompt_state import PromptState
from megatron_augtree.runtime.transport import LocalTransport
from megatron_augtree.tools.measure import commit, machine, write_json
from megatron_augtree.tools.models import model_shape

#: `ring-reuse-two-pass` and `dcp-phased` play waves on prompt state; the others are mostly fused.
MODES = ("ring", "ring-reuse", "ring-reuse-two-pass", "gather-reuse", "dcp-phased", "dcp-fused", "augtree")
MODEL_NAME, LAYERS = "qwen2.5-7b", 2
#: Ranks -> how much slower than real: as slow as it takes to hide host work of so many processes on 2 cores.
DILATION = {4: 20, 8: 50, 16: 100, 32: 200, 64: 400}
#: Bars: mean error of prices, Kendall's tau, regret.
ERROR, TAU, REGRET = 0.20, 0.8, 1.05
#: Two modes whose times differ by less are tied.
TIED = 0.02
#: Wrong constants of the null test: all rates, and the costs of a stage, a layer, a tile.
WRONG = ("gemm_flops", "attention_flops", "row_bytes_s", "link_bytes_s", "nic_bytes_s", "stage_ns",
         "layer_ns", "tile_ns")  # fmt: skip
DRAWS = 50


def clusters() -> dict[str, Cluster]:
    """H100 nodes of 8, and the same with links so thin that traffic shows."""
    h100 = preset("h100")
    return {"h100": h100, "thin": replace(h100, name="thin", link_bytes_s=10**10, nic_bytes_s=5 * 10**9)}


def shapes(ranks: int) -> dict[str, list[tuple[int, list[int]]]]:
    """(prompt, responses) in tokens: one prompt-heavy tree, one response-heavy tree, a ragged batch."""
    draw = random.Random(0)
    batch = [
        (min(8192, round(2000 * draw.lognormvariate(0, 0.8))),
         [min(2048, round(400 * draw.lognormvariate(0, 0.8))) for _ in range(8)])
        for _ in range(max(4, ranks // 4))
    ]  # fmt: skip
    return {
        "prompt-heavy": [(8192, [512] * 8)],
        "response-heavy": [(512, [256 * (i + 1) for i in range(8)])],
        "batch": batch,
    }


def forest_of(groups: Sequence[tuple[int, Sequence[int]]], mode: str, min_shared_rows: int) -> Forest:
    """The trees of a mode; tokens that differ from each response's (and prompt's) first on."""
    sequences, numbers = [], []
    for number, (prompt, responses) in enumerate(groups):
        for index, tokens in enumerate(responses):
            response = [index] * tokens
            sequences.append(sequence_of([100 + number] * prompt, response, [True] * tokens))
            numbers.append(number)
    return from_sequences(sequences, groups=numbers, **merging(mode, min_shared_rows))


def plan_case(name: str, groups, cluster: Cluster, ranks: int, dilation: float, folder: Path) -> Case:
    """Every mode's cheapest plan, its programs compiled."""
    path = folder / f"{cluster.name}.json"
    path.write_text(json.dumps(document(cluster, {})))
    config = AugTreeConfig(cluster=str(path))
    model = configured(replace(model_shape(MODEL_NAME), layers=LAYERS), config)
    played: list[Played] = []
    for mode in MODES:
        if mode == "augtree":
            chosen = choose(lambda m: forest_of(groups, m, config.min_shared_rows), model, ranks, config)
            forest, plan = chosen.trees, chosen.plan
        else:
            forest = forest_of(groups, mode, config.min_shared_rows)
            ask = {"tree_groups": forest.tree_groups, "mode": mode}
            plan = explain(forest.shape, model, ranks, config, **ask)[0]
        check_plan(plan, LAYERS)
        same = [x for x in played if (x.plan.passes, x.plan.events) == (plan.passes, plan.events)]
        if same:
            same[0].modes.append(mode)
        else:
            played.append(Played([mode], _engine(plan, forest), []))
    return Case(name, cluster.name, ranks, dilation, Prices(model, cluster), played)


def _engine(plan: Plan, forest: Forest) -> Engine:
    """An engine whose programs, both ways, are compiled before processes fork; they set what it runs on."""
    engine = Engine(plan, forest, None, LocalTransport(plan.world), None)
    for p in plan.passes:
        engine.context(p, {read: PromptState() for read in p.reads})
    return engine


# Figures.


def tau(times: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau of (priced, emulated) over pairs that neither ties; None where all are tied."""
    agree = differ = 0
    for (a, b), (c, d) in itertools.combinations(times, 2):
        if min(abs(a / c - 1), abs(c / a - 1), abs(b / d - 1), abs(d / b - 1)) >= TIED:
            agree, differ = agree + ((a < c) == (b < d)), differ + ((a < c) != (b < d))
    return (agree - differ) / (agree + differ) if agree + differ else None


def figures(case: Case) -> dict:
    """A case's times, errors, tau and regret."""
    times = case.times
    found = tau(list(times.values()))
    best = min(emulated for _, emulated in times.values())
    rows = [
        {"modes": x.modes, "note": x.plan.note, "priced": x.plan.seconds, "emulated": x.median,
         "repeats": x.seconds, "error": x.plan.seconds / x.median - 1, "lag": x.lag, "host_cores": x.host,
         "sent_bytes": x.sent}
        for x in case.played
    ]  # fmt: skip
    return {"case": case.name, "cluster": case.cluster, "digest": case.prices.cluster.digest(),
            "ranks": case.ranks, "dilation": case.dilation, "plans": rows, "tau": found,
            "regret": times["augtree"][1] / best}  # fmt: skip


def table(case: Case) -> str:
    """A case as text, milliseconds."""
    found = figures(case)
    order = "all tied" if found["tau"] is None else f"{found['tau']:.2f}"
    lines = [f"\n{case.ranks} ranks, {case.cluster}, {case.name} (EMULATED, dilated {case.dilation:g}x): "
             f"tau {order}, regret {found['regret']:.3f}"]  # fmt: skip
    lines.append(f"{'modes':34}{'priced ms':>10}{'emulated':>10}{'error':>8}{'lag':>7}{'host':>6}  plan")
    for row in found["plans"]:
        lines.append(
            f"{', '.join(row['modes']):34}{row['priced'] * 1e3:10.2f}{row['emulated'] * 1e3:10.2f}"
            f"{row['error']:8.1%}{row['lag']:7.1%}{row['host_cores']:6.2f}  {row['note'][:60]}"
        )
    return "\n".join(lines)


def summary(cases: Sequence[Case], bars: Bars) -> dict:
    """Figures over all cases, and the null test."""
    errors = {(c.name, c.cluster, c.ranks, *x.modes): x.plan.seconds / x.median - 1
              for c in cases for x in c.played}  # fmt: skip
    taus = [t for c in cases if (t := tau(list(c.times.values()))) is not None]
    found = {
        "points": len(errors),
        "mean_error": statistics.mean(map(abs, errors.values())),
        "median_error": statistics.median(map(abs, errors.values())),
        "bias": statistics.mean(errors.values()),
        "tau_mean": statistics.mean(taus) if taus else None,
        "tau_median": statistics.median(taus) if taus else None,
        "tau_least": min(taus, default=None),
        "regret_largest": max(figures(c)["regret"] for c in cases),
        "lag_largest": max(x.lag for c in cases for x in c.played),
        "null": null_test(cases),
    }
    bars.most("mean absolute error of prices", found["mean_error"], ERROR)
    if taus:
        bars.least("Kendall's tau, mean over cases", found["tau_mean"], TAU)
    for case in cases:
        where = f"regret, {case.ranks} ranks, {case.cluster}, {case.name}"
        bars.most(where, figures(case)["regret"], REGRET)
    return found


def null_test(cases: Sequence[Case]) -> dict:
    """The same plans priced with wrong constants: how often that would pass."""
    draw, errors, taus = random.Random(0), [], []
    for _ in range(DRAWS):
        factors = {name: 4 ** draw.uniform(-1, 1) for name in WRONG}
        wrong, orders = [], []
        for case in cases:
            c = case.prices.cluster
            off = replace(c, **{name: max(1, round(getattr(c, name) * f)) for name, f in factors.items()})
            prices = Prices(case.prices.model, off)
            priced = [(price(x.plan, prices).time_ns / 1e9, x) for x in case.played]
            wrong += [abs(seconds / x.median - 1) for seconds, x in priced]
            orders.append(tau([(seconds, x.median) for seconds, x in priced for _ in x.modes]))
        errors.append(statistics.mean(wrong))
        taus.append(statistics.mean([t for t in orders if t is not None] or [0.0]))
    return {
        "draws": DRAWS,
        "median_error": statistics.median(errors),
        "median_tau": statistics.median(taus),
        "pass_error": sum(e <= ERROR for e in errors) / DRAWS,
        "pass_tau": sum(t >= TAU for t in taus) / DRAWS,
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default="4,8,16", help="of 4, 8, 16, 32, 64; default 4,8,16")
    parser.add_argument("--cases", default="", help="shapes, by name; default all")
    parser.add_argument("--clusters", default="", help="h100, thin; default both")
    parser.add_argument("--repeats", type=int, default=3, help="of every plan; the median counts")
    parser.add_argument("--dilation", type=float, default=0, help="instead of that of the number of ranks")
    parser.add_argument("--quick", action="store_true",
                        help="4 ranks, thin links, a small tree, once: seconds")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args(words)
    known = {"ranks": map(str, DILATION), "cases": shapes(4), "clusters": clusters()}
    for name, all_ in known.items():
        asked = [x for x in getattr(args, name).split(",") if x]
        if set(asked) - (all_ := set(all_)):
            parser.error(f"--{name}: of {', '.join(sorted(all_))}")
        setattr(args, name, asked)
    args.ranks = [4] if args.quick else sorted(map(int, args.ranks))
    return args


def make_cases(args: argparse.Namespace, ranks: int, folder: Path) -> Iterator[Case]:
    """The cases that are asked for on so many ranks."""
    dilation = args.dilation or (3 if args.quick else 1) * DILATION[ranks]
    if args.quick:  # so short a step is slowed down more
        groups = [(2048, [64, 128, 192, 256])]
        yield plan_case("quick", groups, clusters()["thin"], ranks, dilation, folder)
        return
    for cluster in args.clusters or clusters():
        for name in args.cases or shapes(ranks):
            yield plan_case(name, shapes(ranks)[name], clusters()[cluster], ranks, dilation, folder)


def main() -> None:
    """Plans, emulates, prints, and fails where a bar is missed."""
    args, bars, done = parse(), Bars(), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the ranks, too
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    report = {"kind": "emulated", "machine": machine(), "commit": commit(), "model": MODEL_NAME,
              "layers": LAYERS, "cases": []}  # fmt: skip
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            cases = list(make_cases(args, ranks, Path(folder)))
        repeats = 1 if args.quick else args.repeats
        total = repeats * sum(len(case.played) for case in cases)
        with tqdm(total=total, unit="step", desc=f"{ranks} ranks", disable=None, file=sys.stderr) as bar:
            for case, x in emulate(cases, repeats):
                bar.update()
                if x is case.played[-1] and len(x.seconds) == repeats:
                    print(table(case), flush=True)
        done += cases
        report["cases"] += [figures(case) for case in cases]
        if args.json:
            write_json(args.json, report)
    report["summary"] = summary(done, bars)
    report["missed"] = bars.missed
    print(f"\nEMULATED  {json.dumps(report['summary'], indent=1)}")
    if args.json:
        write_json(args.json, report)
    for line in bars.missed:
        print(f"MISSED  {line}")
    sys.exit(bool(bars.missed))


if __name__ == "__main__":
    main()
