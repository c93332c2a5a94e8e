"""Whether the chosen plan is ever predicted to be slower than a peer's, on seeded random batches.

    python scripts/never_slower.py [--batches 10000] [--first 0] [--jobs 2] [--json never_slower.json]

A batch is drawn from its seed: groups of a workload or of lengths from a few tokens to tens of thousands, a
pool, a machine, a model, pipeline stages, and sometimes a limit of the degree; memory is ample. Three in ten
are multi-turn instead: groups whose rollouts branch again and again, under one policy. The plan is
what the launchers choose (`tools/cli/choose.py`). Peers are priced by the same prices: what every mode
chooses for itself at the largest degree, and, where every tree is one job, all its other choices at every
degree. The script fails where one of them is faster. On few ranks the other choices of dcp and the paper's
planner are compared, too (other degrees, more rounds than its score asks for): "beside" in the table.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.data.workloads import WORKLOADS, workload
from megatron_augtree.planning import native
from megatron_augtree.planning.baselines import BASELINES, FREE, Costs, modes, variants
from megatron_augtree.planning.baselines.hybrid import widths
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import configured, pairs_per_row, price_recipes
from megatron_augtree.tools.cli.choose import choose_for
from megatron_augtree.tools.lengths import Step, step_of_lengths, step_of_rollouts
from megatron_augtree.tools.measure import commit, machine, write_json
from megatron_augtree.tools.models import model_shape

CLUSTERS = ("h100", "a100", "paper", "cpu")
MODELS = ("qwen2.5-7b", "llama-3.1-8b", "qwen2.5-0.5b", "smollm2-135m")
#: On so many ranks the other choices of every mode are priced.
FEW_RANKS = 4
#: Where memory is not the question, GiB.
AMPLE = 1e6
NS = 1e9


class Peer(NamedTuple):
    """A peer's plan.

    Attributes:
        mode, note: its mode, and what it is in a line.
        time_ns: its time.
        beside: no plan that the mode makes by itself, see above.
    """

    mode: str
    note: str
    time_ns: int
    beside: bool

    @property
    def kind(self) -> str:
        """Its line in the table."""
        return f"{self.mode}, beside" if self.beside else self.mode


class Outcome(NamedTuple):
    """The chosen plan, its time in ns, and the fastest plan of every kind of peer."""

    batch: Batch
    plan: Plan
    time_ns: int
    peers: dict[str, Peer]

    @property
    def ratios(self) -> dict[str, float]:
        """Kind -> the chosen plan's time over that of its fastest plan: at most 1, but for those beside."""
        return {kind: self.time_ns / peer.time_ns for kind, peer in self.peers.items()}

    @property
    def faster(self) -> list[Peer]:
        """Peers that are faster."""
        return [peer for peer in self.peers.values() if peer.time_ns < self.time_ns]

    @property
    def violations(self) -> list[Peer]:
        """Those of them that must not be."""
        return [peer for peer in self.faster if not peer.beside]


@dataclass(frozen=True)
class Batch:
    """What is planned.

    Attributes:
        groups: (prompt, responses) in tokens; none of a multi-turn batch.
        world: ranks of the pool.
        limit: the most ranks of a block; 0 is the pool.
        cluster, model_name, stages: machine, model and its pipeline stages.
        rollouts: of a multi-turn batch, [group] its nodes, see `step_of_rollouts`.
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    world: int
    limit: int
    cluster: str
    model_name: str
    stages: int
    rollouts: tuple[tuple[tuple[int, int], ...], ...] = ()

    @cached_property
    def step(self) -> Step:
        """Its trees."""
        return step_of_rollouts(self.rollouts) if self.rollouts else step_of_lengths(self.groups)

    @cached_property
    def config(self) -> AugTreeConfig:
        """The planner's settings."""
        return AugTreeConfig(degree=self.limit, cluster=self.cluster, memory_budget_gib=AMPLE)

    @cached_property
    def model(self) -> ModelShape:
        """Sizes of the model as the settings run it."""
        shape = replace(model_shape(self.model_name), stages=self.stages)
        return configured(shape, self.config)

    @cached_property
    def prices(self) -> Prices:
        """Prices of the model on the machine."""
        return Prices(self.model, preset(self.cluster))

    def choose(self) -> Plan:
        """What the launchers choose."""
        return choose_for(self.step, self.model, self.world, self.config).plan


def draw_batch(seed: int) -> Batch:
    """The batch of a seed."""
    draw = random.Random(seed)
    count = draw.randint(1, 12)
    if draw.random() < 0.3:
        groups = workload(draw.choice(sorted(WORKLOADS)), count, seed)
    else:
        prompts, answers = draw.choice((3, 100, 2000, 50000)), draw.choice((3, 100, 2000, 20000))
        groups = [_group(draw, prompts, answers) for _ in range(count)]
    world = draw.choice((1, 2, 2, 4, 4, 8, 8, 16, 64, draw.choice((3, 6, 24))))
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    batch = Batch(
        groups=tuple((prompt, tuple(responses)) for prompt, responses in groups),
        world=world,
        limit=draw.choice(divisors) if draw.random() < 0.25 else 0,
        cluster=draw.choice(CLUSTERS),
        model_name=draw.choice(MODELS),
        stages=draw.choice((1, 1, 1, 1, 2, 4)),
    )
    return replace(batch, groups=(), rollouts=_rollouts(draw)) if draw.random() < 0.3 else batch


def _rollouts(draw: random.Random) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Random trees of turns: a policy of all groups, a task of each, then turns below any turn of the last
    chain, so that nodes are numbered depth first."""
    usual = draw.choice((3, 30, 1000, 10000))
    policy, groups = max(2, round(usual * draw.lognormvariate(0, 1))), []
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        nodes, chain = [(-1, policy)], [0]
        for _ in range(draw.randint(1, 14)):
            keep = draw.randint(2, len(chain)) if len(chain) > 1 else 1
            del chain[keep:]
            nodes.append((chain[-1], max(1, round(usual * draw.lognormvariate(0, 1)))))
            chain.append(len(nodes) - 1)
        groups.append(tuple(nodes))
    return tuple(groups)


def _group(draw: random.Random, prompts: int, answers: int) -> tuple[int, list[int]]:
    """Lengths around the given ones; every third group has one response that is much longer."""
    size = draw.choice((1, 2, 4, 8, 16))
    responses = [max(1, round(answers * draw.lognormvariate(0, 0.7))) for _ in range(size)]
    if draw.random() < 0.3:
        responses[0] *= draw.choice((4, 16))
    return max(1, round(prompts * draw.lognormvariate(0, 1))), responses


def peers_of(batch: Batch) -> Iterator[Peer]:
    """Every mode's plans within the limit: those of the largest degree, and all of what is cheap to list."""
    largest = batch.limit or batch.world
    for mode in BASELINES:
        trees = batch.step.trees(mode)
        if not trees.shape.rows:
            continue
        costs = costs_of(batch, trees.shape)
        seated = mode in modes.SEATED
        degrees = [d for d in range(1, largest + 1) if batch.world % d == 0]
        if mode in FREE:
            degrees = [d for d in widths(batch.world) if d <= largest]
        for degree in degrees if seated or batch.world <= FEW_RANKS else [largest]:
            beside = not seated and degree < largest
            for made in variants(mode, trees.shape, trees.tree_groups, batch.world, costs, [degree]):
                # Megatron's rounds may give idle ranks to a sequence, beyond the limit.
                if max(recipe.width for recipe in made[0]) <= largest:
                    yield Peer(mode, made[2], costs.price(trees.shape, *made[:2])[0], beside)
                beside = not seated


def costs_of(batch: Batch, shape) -> Costs:
    """What peers choose by: the price of their whole plan of a forest."""
    unit = pairs_per_row(batch.model, batch.prices.cluster)
    jobs = make_jobs(shape, batch.prices, unit, 0, Options(), world=batch.world)

    def of(_, recipes, events) -> tuple[int, int]:
        return price_recipes(jobs, recipes, events, batch.world)

    return Costs(unit, of, 0, batch.model, batch.prices.cluster)


def compare(batch: Batch) -> Outcome:
    """The chosen plan beside every mode's fastest."""
    fastest: dict[str, Peer] = {}
    for peer in peers_of(batch):
        if peer.kind not in fastest or peer.time_ns < fastest[peer.kind].time_ns:
            fastest[peer.kind] = peer
    plan = batch.choose()
    return Outcome(batch, plan, round(plan.seconds * NS), fastest)


class Figures(NamedTuple):
    """What is kept of a batch: kind of peer -> ratio, and a line for each plan that is faster."""

    ratios: dict[str, float]
    faster: list[dict]


def figures_of(seed: int) -> Figures:
    """Compares the batch of a seed."""
    outcome = compare(draw_batch(seed))
    chosen = {"chosen_ns": outcome.time_ns, "chosen": f"{outcome.plan.mode}: {outcome.plan.note}"}
    return Figures(outcome.ratios, [{"seed": seed, **peer._asdict(), **chosen} for peer in outcome.faster])


def compared(seeds: Sequence[int], jobs: int) -> Iterator[Figures]:
    """The figures of all seeds in turn, by so many processes."""
    if jobs == 1:
        yield from map(figures_of, seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(figures_of, seeds, chunksize=4)
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> None:
    """Compares, prints a line a mode, and fails where a peer is faster."""
    args = parse()
    began, batches, faster = time.perf_counter(), 0, []
    ratios: dict[str, list[float]] = {}
    seeds = range(args.first, args.first + args.batches)
    bar = {"total": len(seeds), "unit": "batch", "disable": None, "file": sys.stderr}
    for figures in tqdm(compared(seeds, args.jobs), **bar):
        batches += 1
        for kind, ratio in figures.ratios.items():
            ratios.setdefault(kind, []).append(ratio)
        for line in figures.faster:
            faster.append(line)
            kind = f"{line['mode']}, beside" if line["beside"] else line["mode"]
            tqdm.write(f"seed {line['seed']}: {kind} ({line['note']}) takes {line['time_ns']} ns, "
                       f"{line['chosen']} {line['chosen_ns']}", file=sys.stderr)
        if args.seconds and time.perf_counter() - began > args.seconds:
            break
    table = table_of(ratios)
    print_table(table)
    violated = {line["seed"] for line in faster if not line["beside"]}
    worst = max((line["worst"] for kind, line in table.items() if "beside" not in kind), default=0.0)
    print(f"{batches} batches, {len(violated)} with a faster peer; worst ratio {worst:.6f}")
    if args.json:
        write_json(args.json, {
            "machine": machine(), "commit": commit(), "core": native.core() is not None,
            "calibration": {name: preset(name).digest() for name in CLUSTERS}, "first": args.first,
            "batches": batches, "violations": len(violated), "worst": worst, "modes": table,
            "faster": faster,
        })
    if violated:
        sys.exit("a peer is predicted to be faster")


def table_of(ratios: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Kind -> how often it was priced, how often it ties or is faster, mean and worst ratio."""
    return {
        kind: {
            "batches": len(values),
            "ties": sum(value == 1 for value in values),
            "faster": sum(value > 1 for value in values),
            "mean": sum(values) / len(values),
            "worst": max(values),
        }
        for kind, values in sorted(ratios.items())
    }


def print_table(table: dict[str, dict[str, float]]) -> None:
    """A line a mode."""
    print("chosen plan's time over that of each mode's fastest plan")
    print(f"{'mode':<26}{'batches':>8}{'ties':>7}{'faster':>8}{'mean':>9}{'worst':>11}")
    for kind, line in table.items():
        print(f"{kind:<26}{line['batches']:8}{line['ties']:7}{line['faster']:8}{line['mean']:9.4f}"
              f"{line['worst']:11.6f}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first batch")
    parser.add_argument("--seconds", type=float, default=0, help="stop after the batch in which they end")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    if args.batches < 1 or args.first < 0 or args.jobs < 1:
        parser.error("--batches and --jobs are at least 1, --first at least 0")
    return args


if __name__ == "__main__":
    main()
