"""Jobs on the pool: which block plays which, and when the last rank ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from megatron_augtree.planning.candidates import Choice, job_recipes
from megatron_augtree.planning.offers import Job
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.recipe import Recipe
from megatron_augtree.planning.tree import ForestShape


@dataclass(frozen=True)
class Placed:
    """A job and the pool rank that its block begins with."""

    job: Job
    start: int

    @property
    def width(self) -> int:
        return self.job.offer.choice.degree


class Seated(NamedTuple):
    """Trees on blocks, before their jobs are counted.

    Attributes:
        name: how it came about.
        where: [tree] (ranks, first rank).
        estimate_ns: finish of the last rank, by estimates.
    """

    name: str
    where: list[tuple[int, int]]
    estimate_ns: int


@dataclass(frozen=True)
class Arrangement:
    """All jobs of a batch on the pool, widest first.

    Attributes:
        name: how it came about.
        placed: the jobs.
        time_ns: finish of the last rank; in a pipeline, until it is played, with (stages - 1) longest passes.
        peak_bytes: of the heaviest rank, above what a step needs whatever its rows.
    """

    name: str
    placed: tuple[Placed, ...]
    time_ns: int
    peak_bytes: int

    @cached_property
    def seats(self) -> tuple[tuple[int, tuple[int, ...], Choice], ...]:
        """(first rank, nodes, choice) of each job: what the plan is made of, however jobs were compared."""
        return tuple((x.start, x.job.nodes, x.job.offer.choice) for x in self.placed)

    def recipes(self, shape: ForestShape, pairs_per_row: int) -> tuple[list[Recipe], list[Event]]:
        """Passes and events, job after job."""
        recipes: list[Recipe] = []
        events: list[Event] = []
        for number, placed in enumerate(self.placed):
            job, first = placed.job, len(recipes)
            made, played = job_recipes(
                job.offer.choice, shape, job.nodes, placed.start, number, first, pairs_per_row
            )
            recipes += made
            events += played
        return recipes, events


def arrange(name: str, placed: Sequence[Placed], world: int, stages: int) -> Arrangement:
    """An arrangement with its time: a rank's finish is the sum of the jobs that cover it, since wide ones
    come first and blocks are nested."""
    busy = busy_ranks(((x.start, x.width, x.job.offer.time) for x in placed), world)
    slot = max((x.job.offer.slot for x in placed), default=0)
    time = max(busy, default=0) + (stages - 1) * slot
    peak = max((x.job.offer.peak for x in placed), default=0)
    # In a pipeline passes of one length follow each other best: a long one fills it for the next.
    slots = [x.job.offer.slot if stages > 1 else 0 for x in placed]
    order = sorted(range(len(placed)), key=lambda i: (-placed[i].width, placed[i].start, -slots[i], i))
    return Arrangement(name, tuple(placed[i] for i in order), time, peak)


def differing(made: Iterable[Arrangement]) -> list[Arrangement]:
    """The first of those with the same plan."""
    found: dict[tuple, Arrangement] = {}
    for x in made:
        found.setdefault(x.seats, x)
    return list(found.values())


def busy_ranks(blocks: Iterable[tuple[int, int, int]], world: int) -> list[int]:
    """[rank] what it has to do.

    Args:
        blocks: (first rank, ranks, ns) of jobs.
        world: ranks of the pool.
    """
    steps = [0] * (world + 1)
    for start, width, time in blocks:
        steps[start] += time
        steps[start + width] -= time
    return list(accumulate(steps[:-1]))


def mates_of(where: Sequence[int]) -> list[list[int]]:
    """Trees of each bin."""
    found: dict[int, list[int]] = {}
    for tree, taker in enumerate(where):
        found.setdefault(taker, []).append(tree)
    return list(found.values())


def same_mates(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two assignments put the same trees together, on whichever bins."""
    return len(set(zip(one, other))) == len(set(one)) == len(set(other))


def blocks_of(arrangement: Arrangement) -> list[list[Placed]]:
    """Jobs of the same block."""
    blocks: dict[tuple[int, int], list[Placed]] = {}
    for x in arrangement.placed:
        blocks.setdefault((x.start, x.width), []).append(x)
    return list(blocks.values())
