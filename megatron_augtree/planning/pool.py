"""The batch over the pool: which block plays which trees.

Every tree is priced on blocks of every width (`jobs.py`), the joint schedule gives it one (`joint.py`). Every
uniform degree with longest-first balancing and with groups in turn, as data parallelism deals them, is an
arrangement too. In each of them, jobs of one block may then share passes: fewer and larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.candidates import cut_pool, job_recipes
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.joint import schedule
from megatron_augtree.planning.offers import Job, cost_of
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


#: So few trees are worth counting several choices each.
_FEW_TREES = 8
_MANY_TREES = 32

#: An estimate that no seating comes near to.
_NEVER = 1 << 61


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
        time_ns: finish of the last rank; under a pipeline with what filling and draining it adds.
        peak_bytes: of the heaviest rank, above what a step needs whatever its rows.
    """

    name: str
    placed: tuple[Placed, ...]
    time_ns: int
    peak_bytes: int

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
    busy = [0] * world
    for x in placed:
        for rank in range(x.start, x.start + x.width):
            busy[rank] += x.job.offer.time
    slot = max((x.job.offer.slot for x in placed), default=0)
    time = max(busy, default=0) + (stages - 1) * slot
    peak = max((x.job.offer.peak for x in placed), default=0)
    order = sorted(range(len(placed)), key=lambda i: (-placed[i].width, placed[i].start, i))
    return Arrangement(name, tuple(placed[i] for i in order), time, peak)


class Pool:
    """Arrangements of a batch.

    Args:
        jobs: prices of its trees.
        world: ranks of the pool.
        limit: the most ranks a block may have.
        degree: the only degree, or 0.
        tree_groups: [tree] number of the group behind each root, for groups in turn.

    Attributes:
        costs: (tree, ranks) -> what it is estimated to cost, -1 where it does not fit.
    """

    def __init__(self, jobs: Jobs, world: int, limit: int, degree: int, tree_groups: Sequence[int]) -> None:
        self.jobs, self.world, self.limit, self.degree = jobs, world, limit, degree
        self.shape: ForestShape = jobs.shape
        self.stages = jobs.prices.model.stages
        self.trees = self.shape.trees
        self.tree_groups = tree_groups
        self.costs: dict[tuple[int, int], int] = {}
        self._counted: dict[tuple[int, int], list[Job] | None] = {}

    def arrangements(self) -> Iterator[Arrangement]:
        """The joint schedule and every uniform degree that estimates do not rule out, with and without shared
        passes."""
        best, joint = None, self._joint()
        if joint is not None:
            best = joint.time_ns
            yield joint
            for shared in self._with_shared(joint, best):
                best = min(best, shared.time_ns)
                yield shared
        for seated in sorted(self._uniform(best), key=lambda x: x.estimate_ns):
            for made in self._counted_if_near(seated, best):
                best = made.time_ns if best is None else min(best, made.time_ns)
                yield made

    def _counted_if_near(self, seated: Seated, best: int | None) -> Iterator[Arrangement]:
        """A seating's arrangements, where estimates, a few per cent off, come near to the best."""
        if best is None or 50 * seated.estimate_ns <= 51 * best:
            made = self._place(seated)
            if made is not None:
                yield made
                least = made.time_ns if best is None else min(best, made.time_ns)
                yield from self._with_shared(made, least)
                return
        blocks = self._blocks(seated)
        estimates = [self.jobs.estimate(nodes, width) for (width, _), nodes in blocks.items()]
        if best is None or None in estimates or 50 * max(x.cost for x in estimates) > 51 * best:
            return
        offers = [self.jobs.best(nodes, width) for (width, _), nodes in blocks.items()]
        if None not in offers:
            jobs = zip(blocks.items(), offers)
            placed = [Placed(Job(nodes, 0, offer), start) for ((_, start), nodes), offer in jobs]
            yield arrange(f"{seated.name}, one pass a block", placed, self.world, self.stages)

    def _blocks(self, seated: Seated) -> dict[tuple[int, int], tuple[int, ...]]:
        """(ranks, first rank) -> nodes of all its trees."""
        trees: dict[tuple[int, int], list[int]] = {}
        for tree, place in enumerate(seated.where):
            trees.setdefault(place, []).append(tree)
        return {place: tuple(sorted(n for t in mine for n in self.trees[t])) for place, mine in trees.items()}

    def _with_shared(self, arrangement: Arrangement, best: int) -> Iterator[Arrangement]:
        """The arrangement with shared passes, where a block has several jobs and there is room for gain."""
        mates = self._mates(arrangement)
        if self._floor < best and any(len(x) > 1 for x in mates):
            yield self._shared(arrangement, mates)

    # Trees on blocks.

    def widths(self) -> list[int]:
        """Powers of two up to the limit."""
        if self.degree:
            return [self.degree] if self.degree & (self.degree - 1) == 0 else []
        return [1 << i for i in range(self.limit.bit_length())]

    def _joint(self) -> Arrangement | None:
        widths = self.widths()
        if not widths:
            return None
        if len(self.trees) == 1:
            return self._alone(widths)
        # Where many trees share the pool, none of those that end soon needs a wide block.
        enough = self._floor // (8 if len(self.trees) >= _MANY_TREES else 64)
        table = self.jobs.table(self.trees, widths, enough)
        for tree, row in enumerate(table):
            for width, cost in zip(widths, row):
                self.costs.setdefault((tree, width), cost)
        while True:
            times = [[self.costs[tree, w] for w in widths[: len(row)]] for tree, row in enumerate(table)]
            times = [row + [-1] * (len(widths) - len(row)) for row in times]
            if any(max(row) < 0 for row in times):
                return None
            found = schedule(times, widths, self.world)
            where = [(widths[i], start) for i, start in zip(found.width_index, found.start)]
            made = self._place(Seated("joint", where, found.makespan))
            if made is not None:  # otherwise a block has turned out too small: once for each at most
                return made

    def _alone(self, widths: Sequence[int]) -> Arrangement | None:
        """One tree: widest first; a narrower block that cannot be faster even if all is even is left out."""
        best: tuple[int, int] | None = None
        for width in reversed(widths):
            if best is None or self.jobs.ideal(self.trees[0], width) < best[0]:
                jobs = self.settled(0, width)
                if jobs is not None and (best is None or cost_of(jobs) < best[0]):
                    best = cost_of(jobs), width
        return None if best is None else self._place(Seated("one tree", [(best[1], 0)], best[0]))

    def cost(self, tree: int, width: int) -> int:
        """What a tree costs on a block, estimated once; -1 where nothing fits."""
        if (tree, width) not in self.costs:
            jobs = self.jobs.with_copies(self.trees[tree], width)
            self.costs[tree, width] = -1 if jobs is None else cost_of(jobs)
        return self.costs[tree, width]

    @property
    def _numbers(self) -> range:
        return range(len(self.trees))

    @cached_property
    def _floor(self) -> int:
        """What the whole batch takes where everything is even."""
        return self.jobs.ideal(range(len(self.shape.rows)), self.world)

    def _place(self, seated: Seated) -> Arrangement | None:
        """Trees on their blocks, with jobs counted rank by rank; None where one then does not fit."""
        # All of them, so that all that do not fit are known at once.
        jobs = [self.settled(tree, width) for tree, (width, _) in enumerate(seated.where)]
        if None in jobs:
            return None
        starts = [start for _, start in seated.where]
        placed = [Placed(job, start + job.offset) for mine, start in zip(jobs, starts) for job in mine]
        return arrange(seated.name, placed, self.world, self.stages)

    def settled(self, tree: int, width: int) -> list[Job] | None:
        """A tree on a block, counted rank by rank; what then does not fit counts as impossible."""
        key = tree, width
        if key not in self._counted:
            jobs = self.jobs.with_copies(self.trees[tree], width) if self.cost(tree, width) >= 0 else None
            self._counted[key] = None if jobs is None else self._settle(jobs)
            if self._counted[key] is None:
                self.costs[key] = -1
        return self._counted[key]

    def _settle(self, jobs: Sequence[Job]) -> list[Job] | None:
        settled = []
        for job in jobs:
            offer = self.jobs.settle(job.nodes, job.offer.choice)
            if offer.peak > self.jobs.room or len(self.trees) <= _FEW_TREES:
                offer = self.jobs.best(job.nodes, job.offer.choice.degree)
            if offer is None:
                return None
            settled.append(Job(job.nodes, job.offset, offer))
        return settled

    # Uniform degrees.

    def _uniform(self, best: int | None) -> Iterator[Seated]:
        """All trees on blocks of one degree, longest first and groups in turn."""
        for degree in self._degrees():
            # A fifth more: some passes may yet be shared.
            plain = best is None or (self._may_pay(degree) and 4 * self._work(degree) < 5 * best)
            if not plain and self._least_shared(degree) >= best:
                continue
            if plain:
                costs = [self.cost(tree, degree) for tree in self._numbers]
                plain = min(costs) >= 0
            if not plain:
                costs = self.ideals
            full = [block[0] for block in cut_pool(self.world, degree) if len(block) == degree]
            turns = [group % len(full) for group in self.tree_groups]
            for name, where in (("", longest_first(costs, [0] * len(full))), (", groups in turn", turns)):
                loads = [0] * len(full)
                for cost, block in zip(costs, where):
                    loads[block] += cost
                finish = max(loads) if plain else _NEVER
                yield Seated(f"degree {degree}{name}", [(degree, full[b]) for b in where], finish)

    def _work(self, degree: int) -> int:
        """How long trees keep the pool busy on blocks of a degree, at the least, ns."""
        floors = (ideal + degree * self.launch_ns for ideal in self.ideals)
        costs = (degree * self.costs.get((tree, degree), 0) for tree in self._numbers)
        return sum(map(max, floors, costs)) // self.world

    @cached_property
    def ideals(self) -> list[int]:
        """[tree] what it takes on one rank without any fixed cost, ns."""
        return [self.jobs.ideal(nodes, 1) for nodes in self.trees]

    def _degrees(self) -> list[int]:
        if self.degree:
            return [self.degree]
        divisors = {d for d in range(1, self.limit + 1) if self.world % d == 0} if self.world <= 64 else set()
        return sorted({*self.widths(), *divisors, self.limit})

    def _may_pay(self, degree: int) -> bool:
        """Whether the fixed costs of so few blocks leave a chance."""
        trees = -(-len(self.trees) // (self.world // degree))
        return degree in (self.limit, self.degree) or (trees - 1) * self.pass_ns <= 2 * self._floor

    # Shared passes.

    @cached_property
    def launch_ns(self) -> int:
        """What the launches of a pass take."""
        return self.jobs.floor((), 1)

    @cached_property
    def pass_ns(self) -> int:
        """What a pass costs whatever its rows: launches, and matrices that are too small."""
        prices = self.jobs.prices
        c, m = prices.cluster, prices.model
        small = prices.linear.ns(c.gemm_half_rows) * (200 + c.gemm_backward_pct) // 100
        layers = -(-m.layers // m.stages) * (4 * c.layer_ns + 4 * c.tile_ns + small)
        return layers + 2 * c.pass_ns + 3 * prices.vocabulary.ns(c.gemm_half_rows)

    def _least_shared(self, degree: int) -> int:
        """What all trees take on blocks of a degree, a pass a block, at least, ns: every rank has a tile of
        its own of every inner node on its block."""
        c, m = self.jobs.prices.cluster, self.jobs.prices.model
        inner = sum(map(bool, self.shape.children)) * degree // self.world if degree > 1 else 0
        tiles = inner * c.tile_ns * (100 + c.attention_backward_pct) // 100 * -(-m.layers // m.stages)
        return self._floor + tiles + self.launch_ns

    def _mates(self, arrangement: Arrangement) -> list[list[Placed]]:
        """Jobs of the same block."""
        blocks: dict[tuple[int, int], list[Placed]] = {}
        for x in arrangement.placed:
            blocks.setdefault((x.start, x.width), []).append(x)
        return list(blocks.values())

    def _shared(self, arrangement: Arrangement, mates: Sequence[list[Placed]]) -> Arrangement:
        """Jobs of one block in fewer passes, as many together as pays and fits."""
        placed = [x for block in mates for x in self._merged(block)]
        return arrange(f"{arrangement.name}, shared passes", placed, self.world, self.stages)

    def _merged(self, mates: list[Placed]) -> list[Placed]:
        best, size = mates, len(mates)
        while size > 1:
            made: list[Placed] = []
            for first in range(0, len(mates), size):
                part = mates[first : first + size]
                # Memory adds up; where it then asks for more recompute, nothing is won.
                if len(part) > 1 and sum(x.job.offer.peak for x in part) > self.jobs.room:
                    break
                nodes = tuple(sorted({n for x in part for n in x.job.nodes}))
                offer = self.jobs.best(nodes, part[0].width) if len(part) > 1 else part[0].job.offer
                if offer is None:
                    break
                made.append(Placed(Job(nodes, 0, offer), part[0].start))
            else:
                if sum(x.job.offer.cost for x in made) < sum(x.job.offer.cost for x in best):
                    best = made
            size = (size + 1) // 2 if size > 2 else 1
        return best
