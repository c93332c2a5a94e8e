"""Ragged batches on pools of 8 to 1024 H100s, priced and simulated: nothing is measured.

    python scripts/pool_table.py [--json pool_table.json] [--quick] [--jobs 2] [--only 64x64,1024x64]

Qwen2.5-7B, 27 GiB a rank above the model, the presets of `data/workloads.py`, two seeds (1024x512: one).
Every layer is recomputed, as Megatron's flags say to peers and, in the first set of ratios, to `augtree` too:
what planning alone is worth, and what the bars are about. In the second set `augtree` chooses recompute for
its memory.

dcp at its best degree     dcp-fused (balanced blocks, one gather), its own choice at each degree, the best of
                           them: chosen in hindsight, which no run could
dcp at 8, longest first    blocks of 8 ranks, trees longest first
dcp at 8, groups in turn   the same, as data parallelism deals groups out
ring at its best degree    nothing shared
dynamic, dynamic-reuse     Megatron's dynamic degrees, for responses and for whole groups
two-pass ring, paper       each at its best degree of up to 16

`bound` is the work spread evenly over all ranks; `job bound` what no schedule of one job a tree is below,
with jobs as the planner estimates them (`moldable`). The bars are about the first.

All peers choose, also in hindsight, by price, and only among what fits in memory where something does.
Degrees are tried from 1 on, until one takes twice as long as the best. A plan whose simulation would take
minutes (wide blocks, many passes) has no simulated seconds ("-").
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from planner_cases import PRESETS, USUAL, step_of
from table_cases import (
    COLUMNS,
    NS,
    Bars,
    Setup,
    Timed,
    finish,
    parser_of,
    parts,
    print_ratios,
    print_table,
    report_of,
    run_cases,
    seconds,
    shown,
)

from megatron_augtree.planning.baselines import Costs, variants
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.offers import Options, cost_of
from megatron_augtree.planning.plan import Plan, with_note
from megatron_augtree.planning.planner import pairs_per_row, price_recipes
from megatron_augtree.planning.recipe import plan_of
from megatron_augtree.planning.search import Search, budget_of
from megatron_augtree.tools.lengths import Step, Trees
from megatron_augtree.tools.measure import write_json

CLUSTER = "h100"
#: (ranks, groups).
POOLS = ((8, 32), (64, 64), (256, 64), (1024, 64), (1024, 512))
SEEDS = (0, 1)
#: Pools with one seed only: a batch takes a minute.
ONE_SEED = ((1024, 512),)
#: Two-pass ring and paper are looked at up to this degree: pricing wider ones takes minutes.
WIDEST = 16
#: Wider blocks are not looked at once one takes this many times the best that fits.
TOO_WIDE = 2
#: A plan is simulated where that takes about so many seconds at the most, by its passes and their pairs of
#: ranks. Ours always is.
MOST_TO_PLAY, PASSES_A_SECOND, PAIRS_A_SECOND = 3, 600, 10_000

#: Pool -> (other, least mean ratio) and the most of ours over the bound.
BARS = {
    (64, 64): ({"dcp at its best degree": 1.05, "dcp at 8, groups in turn": 1.25}, 1.10),
    (1024, 64): ({"dcp at its best degree": 1.2, "dcp at 8, groups in turn": 3.0}, 1.25),
}


class Case(NamedTuple):
    """A batch on a pool."""

    ranks: int
    groups: int
    preset: str
    seed: int

    @property
    def pool(self) -> tuple[int, int]:
        """(ranks, groups)."""
        return self.ranks, self.groups

    @property
    def setup(self) -> Setup:
        """Under Megatron's flags."""
        return Setup(CLUSTER, self.ranks, budget_gib=USUAL)


class Peers:
    """Plans of the peers for one batch.

    Args:
        setup: pool and machine.
        step: the batch.
    """

    def __init__(self, setup: Setup, step: Step) -> None:
        self.setup, self.step = setup, step
        self.unit = pairs_per_row(setup.model, setup.machine)
        self.budget = budget_of(setup.config, setup.machine)

    def all(self) -> Iterator[tuple[str, Plan]]:
        """Every peer's plan."""
        powers = [1 << i for i in range(self.setup.world.bit_length())]
        few = [degree for degree in powers if degree <= WIDEST]
        yield "dcp at its best degree", self.best("dcp-fused", powers)
        for dealt in ("longest first", "groups in turn"):
            yield f"dcp at 8, {dealt}", self.best("dcp-fused", [8], lambda note, d=dealt: note.endswith(d))
        yield "ring at its best degree", self.best("ring", powers)
        yield "dynamic", self.best("dynamic", [0])
        yield "dynamic-reuse", self.best("dynamic-reuse", [0])
        yield "two-pass ring", self.best("ring-reuse-two-pass", few)
        yield "paper", self.best("paper", few)

    def best(
        self, mode: str, degrees: Sequence[int], wanted: Callable[[str], bool] | None = None
    ) -> Plan:
        """The cheapest of what a mode runs at some degrees.

        Args:
            mode: a peer.
            degrees: of which the best counts.
            wanted: of a mode's choices at a degree those whose note is wanted; the first where none is (a
                dealing that is the same as another stands only once). None: the one that it runs.
        """
        trees, setup = self.step.trees(mode), self.setup
        jobs = make_jobs(trees.shape, setup.prices, self.unit, 0, Options(), world=setup.world)

        def price_of(_, recipes, events) -> tuple[int, int]:
            return price_recipes(jobs, recipes, events, setup.world)

        costs = Costs(self.unit, price_of, self.budget, setup.model, setup.machine)
        best, least, last = None, None, 0
        for degree in degrees:
            if least is not None and not least[0] and last > TOO_WIDE * least[1]:
                break
            last = 0
            found = variants(mode, trees.shape, trees.tree_groups, setup.world, costs, [degree])
            made = [next(found)] if wanted is None else list(found)
            for recipes, events, note in [x for x in made if wanted is None or wanted(x[2])] or made[:1]:
                time_ns, peak = price_of(trees.shape, recipes, events)
                last = max(last, time_ns)
                if least is None or (peak > self.budget, time_ns) < least:
                    best, least = (recipes, events, note, time_ns, peak), (peak > self.budget, time_ns)
        recipes, events, note, time_ns, peak = best
        rules = {"mode": mode, "shape": trees.shape, "world": setup.world, "pairs_per_row": self.unit}
        plan = plan_of(recipes, events, **rules)
        return with_note(plan, note, time_ns / NS, peak, setup.machine.digest())


def row_of(case: Case) -> dict[str, Any]:
    """Every plan of a batch."""
    setup, step = case.setup, step_of(case.preset, case.groups, case.seed)
    prices, shape = setup.prices, step.trees("augtree").shape
    flags, auto = setup.ours(step), replace(setup, recompute="auto").ours(step)
    peers = {name: timed(plan, setup) for name, plan in Peers(setup, step).all()}
    # Joined groups may be less work; a tree of hundreds of them takes minutes to price at every width.
    forests = [step.single, step.merged][: 1 if case.pool in ONE_SEED else 2]
    return {
        **case._asdict(), "peers": peers, "ours": timed(flags, setup, always=True),
        "ours_auto": timed(auto, setup, always=True), "parts": parts(flags, prices),
        "bound": setup.bound(shape), "bound_auto": setup.floor(shape),
        "moldable": min(moldable(setup, trees) for trees in forests),
    }  # fmt: skip


def moldable(setup: Setup, trees: Trees) -> float:
    """Seconds that no schedule of one job a tree is below, on blocks of powers of two, jobs as estimated: the
    smallest limit within which every tree has a width, and least works that add up to the pool's.

    The bound of even work takes no account of what a tree costs on the ranks that the others leave it; this
    one does. Plans that play several trees in one pass may be below it.
    """
    search = Search(trees.shape, setup.prices, setup.world, setup.config, trees.tree_groups)
    room = search.budget - setup.machine.base_bytes
    rules = search.unit, room, search.asked.options()
    jobs = make_jobs(trees.shape, setup.prices, *rules, world=setup.world)
    widths = [1 << i for i in range(setup.world.bit_length())]
    options = []
    for nodes in trees.shape.trees:
        found = [(width, jobs.with_copies(nodes, width)) for width in widths]
        options.append([(cost_of(made), cost_of(made) * width) for width, made in found if made is not None])
    limits = sorted({cost for tree in options for cost, _ in tree})

    def works(limit: int) -> int | None:
        """The least work within a limit, or None where a tree takes longer."""
        least = [min((w for cost, w in tree if cost <= limit), default=None) for tree in options]
        return None if None in least else sum(least)

    best = None
    for limit in limits:
        work = works(limit)
        if work is not None:
            # Until the next limit the works stay what they are.
            least = max(limit, -(-work // setup.world))
            best = least if best is None else min(best, least)
    return float("inf") if best is None else best / NS


def timed(plan: Plan, setup: Setup, *, always: bool = False) -> dict[str, Any]:
    """A plan's figures, and whether its memory is there; `always`: simulate it whatever it takes."""
    pairs = sum(len(p.block) ** 2 for p in plan.passes)
    effort = len(plan.passes) / PASSES_A_SECOND + pairs / PAIRS_A_SECOND
    made = Timed.of(plan, setup.prices, play=always or effort <= MOST_TO_PLAY)
    return {**made._asdict(), "fits": plan.peak_bytes <= budget_of(setup.config, setup.machine)}


# Printing.


def peers_of(rows: Sequence[dict]) -> list[str]:
    """Their names."""
    return list(rows[0]["peers"])


def values_of(rows: Sequence[dict], other: str, column: str, ours: str = "ours") -> list[float]:
    """[row] another's time over ours (for the bound ours over it); rows that were not simulated left out."""
    found = []
    for row in rows:
        mine = row[ours][column]
        if other == "bound":
            found.append(mine / row[other if ours == "ours" else "bound_auto"])
        elif row["peers"][other][column] is not None and mine is not None:
            found.append(row["peers"][other][column] / mine)
    return found


def print_pool(rows: Sequence[dict]) -> None:
    """One pool: seconds of every batch, then ratios."""
    name, names = f"{rows[0]['ranks']} ranks, {rows[0]['groups']} groups", peers_of(rows)
    for column in COLUMNS:
        print(f"\n### {name}: {column} seconds\n")
        head = ["preset, seed", *names, "ours", "ours, own recompute", "bound", "ours / bound", "job bound",
                "ours / job bound"]  # fmt: skip
        lines = []
        for row in rows:
            peers = row["peers"].values()
            cells = [seconds(x[column]) if x["fits"] else f"({seconds(x[column])})" for x in peers]
            ours = row["ours"][column]
            cells += [seconds(ours), seconds(row["ours_auto"][column])]
            for bound in ("bound", "moldable"):
                cells += [seconds(row[bound]), f"{ours / row[bound]:.2f}"]
            lines.append([f"{row['preset']}, {row['seed']}", *cells])
        print_table(head, lines)
    print("\n(in brackets: more memory than there is)")
    for ours, said in (("ours", "full recompute for all"), ("ours_auto", "augtree chooses its recompute")):
        of = {other: {c: values_of(rows, other, c, ours) for c in COLUMNS} for other in names}
        of["(ours / bound)"] = {c: values_of(rows, "bound", c, ours) for c in COLUMNS}
        if ours == "ours":
            of["(ours / job bound)"] = {c: [r["ours"][c] / r["moldable"] for r in rows] for c in COLUMNS}
        print_ratios(of, f"{name}: times as long as ours; {said}")


def check(pool: tuple[int, int], rows: Sequence[dict], bars: Bars) -> None:
    """A pool's bars, if it has some, under full recompute for all, on both columns; misses batch by batch."""
    others, most = BARS.get(pool, ({}, None))
    for column in COLUMNS if others else ():
        name = f"{pool[0]} x {pool[1]}, {column}"
        for other, bar in others.items():
            values = values_of(rows, other, column)
            if not bars.least(f"{name}: mean over {other}", statistics.mean(values), bar):
                explain_mean(rows, other, column)
                explain_rows(rows, other, column)
        values = values_of(rows, "bound", column)
        if not bars.most(f"{name}: mean of ours / bound", statistics.mean(values), most):
            explain_rows(rows, "bound", column)


def explain_mean(rows: Sequence[dict], other: str, column: str) -> None:
    """What a mean ratio would be if ours took no longer than either bound."""
    played = [row for row in rows if row["peers"][other][column] is not None]
    even, jobs = (
        statistics.mean(row["peers"][other][column] / row[bound] for row in played)
        for bound in ("bound", "moldable")
    )
    print(f"        had ours taken no longer than the bound:  {even:.3f}, than that of one job a tree "
          f"{jobs:.3f}")  # fmt: skip


def explain_rows(rows: Sequence[dict], other: str, column: str) -> None:
    """Where ours goes, batch by batch; what is not work is why it is not nearer to the bound."""
    for row in rows:
        ratio, over = values_of([row], other, column), values_of([row], "bound", column)[0]
        said = f"{ratio[0]:.3f}" if ratio else "not simulated"
        jobs = row["ours"][column] / row["moldable"]
        print(f"        {row['preset']}, {row['seed']}, {other}: {said}; ours {over:.2f} of the bound, "
              f"{jobs:.2f} of the bound of one job a tree: {shown(row['parts'])}")  # fmt: skip


def cases_of(args: argparse.Namespace) -> Iterator[list[Case]]:
    """The batches of each pool; under --quick two presets on 8 ranks."""
    if args.quick:
        yield [Case(8, 4, name, 0) for name in ("longreward", "multi-turn")]
        return
    only = args.only.split(",") if args.only else [f"{ranks}x{groups}" for ranks, groups in POOLS]
    for pool in POOLS:
        seeds = 1 if pool in ONE_SEED else len(SEEDS)
        if f"{pool[0]}x{pool[1]}" in only:
            yield [Case(*pool, name, seed) for name in PRESETS for seed in SEEDS[:seeds]]


def main() -> None:
    """Prints each pool's tables, and its bars, when it is done."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="pools, as 64x64,1024x64; default all")
    args, bars = parser.parse_args(), Bars()
    report = {**report_of([CLUSTER]), "budget_gib": USUAL, "rows": []}
    for cases in cases_of(args):
        rows = run_cases(row_of, cases, args.jobs, "batch")
        report["rows"] += rows
        print_pool(rows)
        check(cases[0].pool, rows, bars)
        report["bars"] = bars.checked
        if args.json:  # what is done is done
            write_json(args.json, report)
    finish(args, report, bars)


if __name__ == "__main__":
    main()
