"""Ranks of bench_measured.py: each on a core of its own, playing all modes over all links in turn."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.data.groups import Group
from megatron_augtree.data.records import Response
from megatron_augtree.mcore import build
from megatron_augtree.mcore.sampler import StepBatch, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.planning.cluster import Cluster, cluster_of
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.planner import configured, price
from megatron_augtree.runtime.throttle import ThrottledTransport
from megatron_augtree.runtime.transport import DistTransport, Transport
from megatron_augtree.tools.calibrate_measure import CPU
from megatron_augtree.tools.calibrate_ranks import Calibration
from megatron_augtree.tools.measure import write_json
from megatron_augtree.tools.updates import Updates

MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 512 --vocab-size 1024 "
    "--untie-embeddings-and-output-weights --dtype float32 --optimizer sgd --lr 1e-4"
).split()
#: What the calibration measures: this model, lengths to those of the workloads.
SIZES = replace(
    CPU,
    model="--hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 512 --vocab-size 1024 --dtype float32",
    sent=(1, 32, 128, 256, 512, 1024, 2048, 4096, 8192),
    queries=(1, 8, 32, 128, 512, 1024, 2048),
    keys=(64, 1024, 4096),
    squares=(16, 64, 192, 512, 1024, 2048, 4096),
    product_rows=(1, 4, 16, 64, 128, 256, 1024, 2048, 4096),
    model_rows=(2, 16, 64, 128, 384, 1024, 3072),
)
MODES = ("ring", "ring-reuse", "gather-reuse", "dynamic", "augtree")
#: Of these, the one that is cheapest by its price plays `ring-reuse`.
REUSE = ("ring-reuse", "ring-reuse-two-pass", "ring-reuse-per-response")
#: A step that waited longer for its core, a share of its time, is played again.
DISTURBED = 0.03
#: Draws of the null test; each constant is doubled or halved.
DRAWS = 50


@dataclass(frozen=True)
class Workload:
    """Groups of a file as one step.

    Attributes:
        file: its name; empty: made here, for the quick mode.
        groups: from, to.
        responses: the first so many of each group; 0: all.
    """

    file: str
    groups: tuple[int, int]
    responses: int = 0

    def read(self, updates: Updates, folder: Path) -> list[Group]:
        """The groups."""
        if not self.file:
            groups = [Group("quick", tuple(range(160)), tuple(_response(i) for i in range(4)))]
        else:
            groups = updates.groups(folder / f"{self.file}.jsonl.gz", *self.groups)
        kept = self.responses or None
        return [replace(group, responses=group.responses[:kept]) for group in groups]


def _response(index: int) -> Response:
    count = 16 * (index + 1)
    return Response(tuple(200 + index + i for i in range(count)), (True,) * count, advantage=index - 1.5)


@dataclass
class Played:
    """A plan that some modes agree on, over one link.

    Attributes:
        modes: those that chose it.
        run: plays it: schedule, step.
        model: sizes, as the settings run it.
        found: of every repeat: seconds of passes, of the whole step, share of it spent waiting for the core.
    """

    modes: list[str]
    run: tuple[AugTreeSchedule, StepBatch]
    model: object
    found: list[tuple[float, float, float]] = field(default_factory=list)


def wrong_clusters(right: Cluster) -> list[Cluster]:
    """The machine with every rate and cost doubled or halved at random; the same draws for every machine."""
    draw, found = random.Random(0), []
    ends = ("_flops", "_bytes_s", "_ns", "_pct", "_rows")
    names = [f.name for f in fields(Cluster) if f.name.endswith(ends)]
    for _ in range(DRAWS):
        wrong = {name: max(int(getattr(right, name) > 0), int(getattr(right, name) * draw.choice((0.5, 2))))
                 for name in names}  # fmt: skip
        found.append(replace(right, **wrong, overlap=right.overlap))
    return found


def plans(groups: Sequence[Group], updates: Updates, transport: Transport, cluster: str) -> list[Played]:
    """Every mode's plan as the launchers make it, each once."""
    played: list[Played] = []
    for mode in MODES:
        made = []
        for name in REUSE if mode == "ring-reuse" else (mode,):
            config = AugTreeConfig(mode=name, cluster=cluster)
            made.append((config, plan_step(groups, updates.shape, transport.world, config)))
        config, batch = min(made, key=lambda x: x[1].plan.seconds)
        same = [x for x in played if _same(x.run[1], batch)]
        label = mode if config.mode == mode else f"{mode} ({config.mode})"
        if same:
            same[0].modes.append(label)
        else:
            run = AugTreeSchedule(config, transport=transport), batch
            played.append(Played([label], run, configured(updates.shape, config)))
    return played


def _same(a: StepBatch, b: StepBatch) -> bool:
    return (a.forest.shape, a.plan.passes, a.plan.events) == (b.forest.shape, b.plan.passes, b.plan.events)


def waited() -> float:
    """Seconds in which this process's main thread could have run, and something else had its core."""
    with suppress(OSError, IndexError, ValueError):  # Linux tells
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def measure(updates: Updates, x: Played, most: int) -> tuple[float, float, float]:
    """One step of a plan, played up to so often where the core is taken away: the least disturbed counts."""
    tries = []
    while len(tries) < most and (not tries or tries[-1][2] > DISTURBED):
        before = waited()
        took = updates.play(*x.run)
        share = (waited() - before) / took.step
        worst = torch.tensor([took.passes, took.step, share], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        tries.append(tuple(worst.tolist()))
    return min(tries, key=lambda found: found[2])


def pin() -> None:
    """This rank, and all threads that it will start, on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    torch.set_num_threads(1)


def play(job: dict) -> None:
    """Plays everything; rank 0 writes what was found, by workload and link."""
    updates = Updates(MODEL)
    cases: dict[tuple[str, str], list[Played]] = {}
    for link, (rate, cluster) in job["links"].items():
        transport = ThrottledTransport(rate) if rate else DistTransport()
        for name, workload in job["workloads"].items():
            groups = Workload(**workload).read(updates, Path(job["data"]))
            cases[name, link] = plans(groups, updates, transport, cluster)
    rounds, first = job["repeats"] + 1, dist.get_rank() == 0
    total = rounds * sum(map(len, cases.values()))
    with tqdm(total=total, unit="step", disable=None if first else True, file=sys.stderr) as bar:
        for turn in range(rounds):
            for (name, link), played in cases.items():
                bar.set_postfix_str(f"{name}, {link}")
                for x in itertools.islice(itertools.cycle(played), turn % len(played), None):
                    if len(x.found) > turn:
                        break
                    x.found.append(measure(updates, x, job["tries"] if turn else 1))
                    bar.update()
    if first:
        write_json(job["out"], [_told(*key, played, job) for key, played in cases.items()])
    dist.barrier()
    build.destroy()


def _told(name: str, link: str, played: Sequence[Played], job: dict) -> dict:
    """What the first process makes its tables of; the first round warmed up."""
    right = cluster_of(job["links"][link][1])
    rows = []
    for x in played:
        plan = x.run[1].plan
        columns = list(zip(*x.found[1:]))
        rows.append({
            "modes": x.modes, "plays": plan.mode, "note": plan.note, "rows": plan.shape.total_rows,
            "predicted": plan.seconds, "passes": columns[0], "step": columns[1], "waited": columns[2],
            "wrong": [price(plan, Prices(x.model, wrong)).time_ns / 1e9 for wrong in wrong_clusters(right)],
        })  # fmt: skip
    return {"workload": name, "link": link, "digest": right.digest(),
            "unshared_rows": played[0].run[1].unshared_rows, "plans": rows}  # fmt: skip


def main() -> None:
    """One rank, under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", help="write a calibration to this file")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--job", help="file of what to play")
    args = parser.parse_args()
    pin()
    if args.calibrate:
        Calibration("cpu", time.time() + args.seconds, SIZES).run(args.calibrate)
    else:
        play(json.loads(Path(args.job).read_text()))


if __name__ == "__main__":
    main()
