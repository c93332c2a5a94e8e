"""What the chosen plan loses to the best peer when both are simulated, on seeded random batches.

    python scripts/simulate_regret.py [--batches 500] [--first 0] [--jobs 2] [--json simulate_regret.json]

A batch is one of scripts/never_slower.py (lengths, pool, machine, model, pipeline stages, limit of the
degree) on at most 64 ranks; two of three have 27 GiB a rank, the others ample memory. The plan is what the
launchers choose, by its price. Every peer is planned separately by its own choice, without recompute, and
with all layers recomputed where that does not fit; of peers those count whose simulated peak is within the
memory and whose blocks are within the limit of the degree. All are simulated (`planning/simulate.py`):
nothing is measured.

    regret = simulated(augtree) / min over all modes of simulated - 1

Bars: mean at most 1 %, worst at most 5 %. The script also says where the simulation differs from the price.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.baselines import BASELINES
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import configured, explain
from megatron_augtree.planning.search import budget_of
from megatron_augtree.planning.simulate import Simulated, simulate
from megatron_augtree.tools.cli.choose import choose_for
from megatron_augtree.tools.measure import commit, machine, write_json

#: Bars, shares.
MEAN, WORST = 0.01, 0.05
#: GiB above the model of two batches in three.
USUAL = 27
RANKS = 64
#: Seeds are shown down to this regret.
SHOWN = 0.02


class Side(NamedTuple):
    """A plan of a mode, priced and simulated.

    Attributes:
        mode, note: what it is.
        priced, simulated: seconds.
        busiest, exposed: seconds of the rank with most to compute, and what it waits for its own messages.
        peak_gib: simulated.
    """

    mode: str
    note: str
    priced: float
    simulated: float
    busiest: float
    exposed: float
    peak_gib: float

    @property
    def over_price(self) -> float:
        """What the price does not see."""
        return self.simulated / self.priced


class Figures(NamedTuple):
    """A batch: the chosen plan beside all peers that fit; `skipped` says why there is none."""

    seed: int
    about: dict
    chosen: Side | None
    peers: list[Side]
    skipped: str

    @property
    def best(self) -> Side:
        """The fastest of all, simulated; ties go to the chosen plan."""
        return min((self.chosen, *self.peers), key=lambda side: side.simulated)

    @property
    def regret(self) -> float:
        """See above."""
        return self.chosen.simulated / self.best.simulated - 1

    @property
    def reason(self) -> str:
        """Whether price and simulation order the two alike, and which of them moved."""
        mine, other = self.chosen, self.best
        if mine is other:
            return "the best"
        order = "also by its price" if other.priced <= mine.priced else "not by its price"
        return (f"{other.mode} ({other.note}) is faster, {order}: simulated over priced is "
                f"{mine.over_price:.3f} of the plan, {other.over_price:.3f} of the peer")


def batches_of() -> ModuleType:
    """scripts/never_slower.py as a module."""
    if "never_slower" not in sys.modules:
        path = Path(__file__).with_name("never_slower.py")
        spec = importlib.util.spec_from_file_location("never_slower", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules["never_slower"]


def figures_of(seed: int) -> Figures:
    """Plans and simulates the batch of a seed."""
    never_slower = batches_of()
    batch = never_slower.draw_batch(seed)
    budget = USUAL if seed % 3 else never_slower.AMPLE
    config = replace(batch.config, memory_budget_gib=budget)
    about = {"world": batch.world, "limit": batch.limit, "cluster": batch.cluster, "model": batch.model_name,
             "stages": batch.stages, "groups": batch.step.groups, "gib": budget}  # fmt: skip
    if not batch.step.single.shape.rows:
        return Figures(seed, about, None, [], "no rows")
    try:
        chosen = choose_for(batch.step, batch.model, batch.world, config)
    except InfeasiblePlanError:
        return Figures(seed, about, None, [], "nothing fits")
    mine = side_of(chosen.plan, "augtree", chosen.prices)
    peers = [peer for mode in BASELINES if (peer := peer_of(batch, mode, config)) is not None]
    return Figures(seed, about, mine, peers, "")


def peer_of(batch, mode: str, config: AugTreeConfig) -> Side | None:
    """A mode's own choice: without recompute, or with all layers recomputed, or None where neither fits."""
    trees = batch.step.trees(mode)
    room = budget_of(config, preset(batch.cluster))
    for recomputed in (0, batch.model.layers):
        own = replace(config, mode=mode, recompute="flags")
        model = configured(replace(batch.model, recomputed=recomputed), own)
        try:
            plan = explain(trees.shape, model, batch.world, own, tree_groups=trees.tree_groups, own=True)[0]
        except InfeasiblePlanError:
            return None
        if max(len(p.block) for p in plan.passes) > (batch.limit or batch.world):
            return None  # Megatron's rounds may give idle ranks to a sequence, beyond the limit
        if plan.peak_bytes <= room:
            side = side_of(plan, mode, Prices(model, preset(batch.cluster)))
            return side if side.peak_gib * GIB <= room else None
    return None


def side_of(plan: Plan, mode: str, prices: Prices) -> Side:
    """A plan simulated."""
    found: Simulated = simulate(plan, prices)
    busiest = max(range(plan.world), key=lambda rank: found.busy[rank])
    return Side(mode, f"{plan.mode}: {plan.note}", plan.seconds, found.makespan, found.busy[busiest],
                found.exposed[busiest], max(found.peak_bytes) / GIB)


def drawn(args: argparse.Namespace) -> list[int]:
    """The first seeds whose batch is on few enough ranks."""
    never_slower, seeds, seed = batches_of(), [], args.first
    while len(seeds) < args.batches:
        if never_slower.draw_batch(seed).world <= RANKS:
            seeds.append(seed)
        seed += 1
    return seeds


def played(seeds: Sequence[int], jobs: int) -> Iterator[Figures]:
    """The figures of all seeds in turn, by so many processes."""
    if jobs == 1:
        yield from map(figures_of, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(figures_of, seeds, chunksize=4)
        finally:
            pool.shutdown(cancel_futures=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """How some ratios lie."""
    return {"count": len(values), "mean": statistics.fmean(values), "median": statistics.median(values),
            "least": min(values), "worst": max(values)}  # fmt: skip


def report_of(found: Sequence[Figures]) -> dict:
    """All figures of all batches."""
    kept = [f for f in found if f.chosen is not None]
    ratios: dict[str, list[float]] = {}
    for f in kept:
        pipeline = "1F1B" if f.about["stages"] > 1 else "one stage"
        for side in (f.chosen, *f.peers):
            ratios.setdefault(f"{side.mode}, {pipeline}", []).append(side.over_price)
    worst = sorted(kept, key=lambda f: -f.regret)
    return {
        "batches": len(kept),
        "skipped": {why: sum(f.skipped == why for f in found) for why in {f.skipped for f in found} - {""}},
        "regret": spread([f.regret for f in kept]),
        "not_the_best": sum(f.regret > 0 for f in kept),
        "not_the_best_by_1_percent": sum(f.regret > 0.01 for f in kept),
        "simulated_over_priced": {kind: spread(values) for kind, values in sorted(ratios.items())},
        "worst": [
            {"seed": f.seed, "regret": f.regret, **f.about, "reason": f.reason, "chosen": f.chosen._asdict(),
             "best": f.best._asdict()}
            for f in worst if f.regret > SHOWN
        ],
    }  # fmt: skip


def show(report: dict) -> None:
    """Prints the figures."""
    regret, skipped = report["regret"], report["skipped"]
    told = ", ".join(f"{count} skipped: {why}" for why, count in skipped.items()) or "none skipped"
    print(f"{report['batches']} batches ({told}), simulated: regret mean {regret['mean']:.3%}, median "
          f"{regret['median']:.3%}, worst {regret['worst']:.2%}; a peer is faster on "
          f"{report['not_the_best']}, by more than 1 % on {report['not_the_best_by_1_percent']}")
    print("\nsimulated over priced seconds")
    print(f"{'plans of':<36}{'count':>7}{'mean':>8}{'median':>8}{'least':>8}{'worst':>8}")
    for kind, line in report["simulated_over_priced"].items():
        print(f"{kind:<36}{line['count']:7}{line['mean']:8.3f}{line['median']:8.3f}{line['least']:8.3f}"
              f"{line['worst']:8.3f}")
    for line in report["worst"]:
        where = f"{line['world']} ranks of {line['cluster']}, {line['model']}, {line['stages']} stages"
        print(f"\nseed {line['seed']}: regret {line['regret']:.2%} ({where}, {line['gib']:g} GiB)\n  "
              f"{line['chosen']['note']}: {line['reason']}")


def main() -> None:
    """Simulates, prints, and fails where a bar is missed."""
    args = parse()
    began = time.perf_counter()
    seeds = drawn(args)
    bar = {"total": len(seeds), "unit": "batch", "disable": None, "file": sys.stderr}
    found = list(tqdm(played(seeds, args.jobs), **bar))
    report = report_of(found)
    show(report)
    missed = [
        f"{what} regret {value:.3%}, bar {bar:.0%}"
        for what, value, bar in (("mean", report["regret"]["mean"], MEAN),
                                 ("worst", report["regret"]["worst"], WORST))
        if value > bar
    ]  # fmt: skip
    if args.json:
        clusters = {f.about["cluster"] for f in found}
        write_json(args.json, {
            "machine": machine(), "commit": commit(), "seconds": time.perf_counter() - began,
            "cluster_digests": {name: preset(name).digest() for name in sorted(clusters)},
            "first": args.first, "missed": missed, **report,
        })  # fmt: skip
    for line in missed:
        print(f"MISSED  {line}")
    sys.exit(bool(missed))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first batch")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    if args.batches < 1 or args.first < 0 or args.jobs < 1:
        parser.error("--batches and --jobs are at least 1, --first at least 0")
    return args


if __name__ == "__main__":
    main()
