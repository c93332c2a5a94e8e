"""How good the joint schedule's heuristic is, over the optimum of small batches and a bound of large ones.

    python scripts/joint_quality.py --json joint.json [--instances 200] [--large 5]

Instances are random but fixed by their seed. A job's time on w ranks is work x (serial part + rest / w), made
ragged by a few percent for each width, plus an overhead for each doubling; in half of the instances large
jobs have no narrow width, as where memory is short. The optimum is branch and bound (`joint.exact`) without a
limit that matters: the script fails where it is not proven, or where a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable

from tqdm import tqdm

from megatron_augtree.planning import joint, native
from megatron_augtree.tools.measure import commit, machine, write_json

POOLS = (4, 8, 16, 24, 32, 64)
LARGE = ((64, 64), (64, 1024), (512, 1024), (512, 8))  # jobs, pool
#: Heuristic over optimum.
MEDIAN_BAR, WORST_BAR = 1.005, 1.06
BRANCHES = 10_000_000


def instance(seed: int, jobs: int, pool: int) -> tuple[list[list[int]], list[int], int]:
    """Times in ns, widths and pool, as `joint.schedule` takes them."""
    draw = random.Random(seed)
    widths = [1 << i for i in range(pool.bit_length())]
    spread, serial = draw.choice((0.3, 0.7, 1.1, 1.5)), draw.uniform(0.002, 0.03)
    overhead, tight = 1e8 * math.exp(draw.uniform(math.log(0.002), math.log(0.04))), draw.random() < 0.5
    times = []
    for _ in range(jobs):
        work = draw.lognormvariate(0, spread)
        narrowest = min(int(0.7 * math.log2(work)), len(widths) - 1) if tight and work > 1 else 0
        row = []
        for i, width in enumerate(widths):
            ragged = 1 + (draw.uniform(0, 0.04) + 0.01 * i if i else 0)
            seconds = work * (serial + (1 - serial) / width) * ragged
            row.append(-1 if i < narrowest else int(1e8 * seconds + overhead * i * draw.uniform(0.6, 1)))
        times.append(row)
    return times, widths, pool


def small(seed: int) -> tuple[int, float, float]:
    """Jobs of an instance, and heuristic over optimum: the search, and its first schedules alone."""
    jobs = 5 + seed % 4
    batch = instance(seed, jobs, POOLS[seed // 4 % len(POOLS)])
    found = joint.search(*batch)
    first = joint.search(*batch, effort=joint.Effort(descent=0, resettling=0))
    best = joint.exact(*batch, found, BRANCHES)
    if not best.optimal:
        sys.exit(f"instance {seed}: not proven optimal within {BRANCHES} branches")
    return jobs, found.makespan / best.makespan, first.makespan / best.makespan


def large(seed: int, jobs: int, pool: int) -> tuple[float, float]:
    """Makespan over lower bound, and milliseconds of `joint.schedule`."""
    batch = instance(seed, jobs, pool)
    began = time.process_time()
    found = joint.schedule(*batch)
    spent = time.process_time() - began
    return found.makespan / joint.lower_bound(*batch), 1e3 * spent


def main() -> None:
    """Measures, prints two tables, and fails where a bar is missed."""
    args = parse()
    figures = {"machine": machine(), "commit": commit(), "core": native.core() is not None,
               "small": small_table(args.instances), "large": large_table(args.large)}
    if args.json:
        write_json(args.json, figures)
    found = figures["small"]["all"]
    if found["median"] > MEDIAN_BAR or found["worst"] > WORST_BAR:
        sys.exit(f"a bar is missed: median {MEDIAN_BAR}, worst {WORST_BAR}")


def small_table(instances: int) -> dict[str, dict[str, float]]:
    """Prints and returns makespans over the optimum, by the number of jobs."""
    rows = [small(seed) for seed in progress(instances)]
    print("over the optimum         heuristic          first schedules alone")
    print(f"{'jobs':>6}{'instances':>11}{'median':>9}{'worst':>9}{'median':>16}{'worst':>9}")
    table = {}
    for jobs in sorted({row[0] for row in rows}) + ["all"]:
        part = [row for row in rows if jobs in (row[0], "all")]
        found, first = [row[1] for row in part], [row[2] for row in part]
        line = {"instances": len(part), "median": statistics.median(found), "worst": max(found),
                "first_median": statistics.median(first), "first_worst": max(first)}
        table[str(jobs)] = line
        print(f"{jobs:>6}{len(part):11}{line['median']:9.4f}{line['worst']:9.4f}"
              f"{line['first_median']:16.4f}{line['first_worst']:9.4f}")
    return table


def large_table(instances: int) -> dict[str, dict[str, float]]:
    """Prints and returns makespans over the lower bound, and times, by size."""
    print("\nover the lower bound         makespan        planning, ms")
    print(f"{'jobs':>6}{'pool':>6}{'instances':>11}{'mean':>7}{'worst':>9}{'median':>9}{'worst':>9}")
    table = {}
    for jobs, pool in LARGE:
        runs = [large(seed, jobs, pool) for seed in progress(instances)]
        ratios, spent = [run[0] for run in runs], [run[1] for run in runs]
        line = {"instances": instances, "mean": statistics.mean(ratios), "worst": max(ratios),
                "ms_median": statistics.median(spent), "ms_worst": max(spent)}
        table[f"{jobs} jobs, {pool} ranks"] = line
        print(f"{jobs:6}{pool:6}{instances:11}{line['mean']:7.3f}{line['worst']:9.3f}"
              f"{line['ms_median']:9.2f}{line['ms_worst']:9.2f}")
    return table


def progress(instances: int) -> Iterable[int]:
    """Seeds, with a bar on a terminal."""
    return tqdm(range(instances), unit="instance", disable=None, file=sys.stderr)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--instances", type=int, default=200, help="small batches, of 5 to 8 jobs")
    parser.add_argument("--large", type=int, default=5, help="large batches of each size")
    args = parser.parse_args()
    if min(args.instances, args.large) < 1:
        parser.error("--instances and --large are at least 1")
    return args


if __name__ == "__main__":
    main()
