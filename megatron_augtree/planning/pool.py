"""The batch over the pool: which block plays which trees.

Every tree is priced on blocks of every width (`jobs.py`), the joint schedule gives it one (`joint.py`). Every
uniform degree with longest-first balancing and with groups in turn, as data parallelism deals them, is an
arrangement too. In each of them, jobs of one block may then share passes: fewer and larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from megatron_augtree.planning.arrangement import (
    Arrangement,
    Placed,
    Seated,
    arrange,
    blocks_of,
    mates_of,
)
from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.candidates import cut_pool
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.joint import schedule
from megatron_augtree.planning.least import Least
from megatron_augtree.planning.logits import SmallWaves
from megatron_augtree.planning.offers import NEVER, SKIPPED, Job, Offer, cost_of
from megatron_augtree.planning.sharing import merged, searched
from megatron_augtree.planning.tree import ForestShape

#: So few trees are worth counting several choices each.
_FEW_TREES = 8
_MANY_TREES = 32

#: Of fewer rows a rank, estimates are far off.
_FEW_ROWS = 16

#: So many trees tell what all cost on a degree.
_SAMPLE = 16


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
        self._too_wide = world + 1  # blocks that are too slow with one pass each, by a tenth

    def arrangements(self) -> Iterator[Arrangement]:
        """All of them; of those that come near to the best also with waves that make their logits once."""
        best: int | None = None
        for made in self._fused_logits():
            yield made
            best = made.time_ns if best is None else min(best, made.time_ns)
            if self._makes_logits_twice and 50 * made.time_ns <= 51 * best:
                yield from self._with_small_waves(made)

    @property
    def _makes_logits_twice(self) -> bool:
        """Whether a rank has more scored rows than logits are made of at once."""
        most = self.jobs.prices.model.logit_rows
        return 0 < most * self.world < sum(self.shape.scored)

    def _with_small_waves(self, made: Arrangement) -> Iterator[Arrangement]:
        placed = []
        for x in made.placed:
            job = self._small_waves.of(x.job)
            placed.append(x if job is None else Placed(job, x.start))
        if any(new is not old for new, old in zip(placed, made.placed)):
            yield arrange(f"{made.name}, logits once", placed, self.world, self.stages)

    def _fused_logits(self) -> Iterator[Arrangement]:
        """The joint schedule and every uniform degree that estimates do not rule out, with and without shared
        passes."""
        best: int | None = None
        starts: list[Arrangement] = []
        for widths in self._ranges_of_widths():
            joint = self._joint(widths)
            if joint is None:
                continue
            starts.append(joint)
            best = joint.time_ns if best is None else min(best, joint.time_ns)
            yield joint
            for shared in self._with_shared(joint, best):
                best = min(best, shared.time_ns)
                yield shared
        for seated in sorted(self._uniform(best), key=lambda x: x.estimate_ns):
            for made in self._counted_if_near(seated, best):
                starts.append(made)
                best = made.time_ns if best is None else min(best, made.time_ns)
                yield made
        if starts and self.jobs.options.copies < 2:
            yield from searched(self, min(starts, key=lambda x: x.time_ns))

    def _counted_if_near(self, seated: Seated, best: int | None) -> Iterator[Arrangement]:
        """A seating's arrangements, where estimates, a few per cent off, come near to the best."""
        near = best is None or 50 * seated.estimate_ns <= 51 * best
        if near or self._shared_may_pay(seated.estimate_ns, max(width for width, _ in seated.where), best):
            made = self._place(seated)
            if made is not None:
                yield made
                least = made.time_ns if best is None else min(best, made.time_ns)
                for shared in self._with_shared(made, least):
                    yield shared
                    best = min(least, shared.time_ns)
                if near:
                    return
        offers = self._one_pass_each(seated, best)
        if offers is not None:
            placed = [Placed(Job(nodes, 0, offer), start) for nodes, start, offer in offers]
            yield arrange(f"{seated.name}, one pass a block", placed, self.world, self.stages)

    def _one_pass_each(
        self, seated: Seated, best: int | None
    ) -> list[tuple[tuple[int, ...], int, Offer]] | None:
        """(nodes, first rank, offer) of every block, its trees in one pass; None where one does not fit, or
        where estimates do not come near to the best: the fullest block says so first."""
        if self.jobs.options.copies > 1:
            return None
        blocks = [
            (self.jobs.ideal(nodes, width), nodes, width, start)
            for (width, start), nodes in self._blocks(seated).items()
        ]
        blocks.sort(key=lambda block: -block[0])
        for ideal, nodes, width, _ in blocks:
            if best is not None and (width >= self._too_wide or ideal + self.launch_ns >= best):
                return None
            if self._least.bytes(nodes) > self.jobs.room * width:
                return None
            few = sum(self.shape.rows[n] for n in nodes) < _FEW_ROWS * width
            offer = self.jobs.best(nodes, width) if few else self.jobs.estimate(nodes, width)
            if offer is None:
                return None
            if best is not None and 50 * offer.cost > 51 * best:
                # On wider blocks, each with as much more to do, only their fullest may be less full.
                if 10 * (offer.cost - ideal + self._floor) > 11 * best:
                    self._too_wide = width
                return None
        found = []
        for _, nodes, width, start in blocks:
            offer = self.jobs.best(nodes, width)
            if offer is None:
                return None
            found.append((nodes, start, offer))
        return found

    def _blocks(self, seated: Seated) -> dict[tuple[int, int], tuple[int, ...]]:
        """(ranks, first rank) -> nodes of all its trees."""
        trees: dict[tuple[int, int], list[int]] = {}
        for tree, place in enumerate(seated.where):
            trees.setdefault(place, []).append(tree)
        return {place: tuple(sorted(n for t in mine for n in self.trees[t])) for place, mine in trees.items()}

    def _with_shared(self, arrangement: Arrangement, best: int) -> Iterator[Arrangement]:
        """The arrangement with shared passes, where a block has several jobs and there is room for gain."""
        mates = blocks_of(arrangement)
        if self._floor < best and any(len(x) > 1 for x in mates):
            placed = [x for block in mates for x in merged(self.jobs, block)]
            yield arrange(f"{arrangement.name}, shared passes", placed, self.world, self.stages)

    # Trees on blocks.

    def widths(self) -> list[int]:
        """Powers of two up to the limit, and beyond it, up to the pool, for groups of blocks with a part of a
        tree on each; or the only degree, and its multiples by powers of two."""
        least, most = (self.degree, self.degree) if self.degree else (1, self.limit)
        most = self.world if self._in_parts else most
        return [least << i for i in range((most // least).bit_length())]

    @cached_property
    def _in_parts(self) -> bool:
        """Whether a tree may go on several blocks; where degree and copies are forced, the degree is that of
        all copies together."""
        options, leaves = self.jobs.options, sum(not children for children in self.shape.children)
        free = options.copies != 1 and not (self.degree and options.copies)
        return free and options.limit > 0 and leaves > len(self.trees)

    def _ranges_of_widths(self) -> list[list[int]]:
        """What joint schedules choose from: all widths; where these include groups of blocks, single blocks
        alone, too: more to choose from is not always better where the search is not exact."""
        widths = self.widths()
        single = [width for width in widths if width <= (self.degree or self.limit)]
        return [widths] if single == widths else [widths, single]

    def _joint(self, widths: Sequence[int]) -> Arrangement | None:
        if len(self.trees) == 1:
            return self._alone(widths)
        # Where many trees share the pool, none of those that end soon needs a wide block.
        many = len(self.trees) >= _MANY_TREES
        table = self.jobs.table(self.trees, widths, self._floor // (8 if many else 64), many)
        known = {(t, w): x for t, row in enumerate(table) for w, x in zip(widths, row) if x != SKIPPED}
        self.costs = known | self.costs
        while True:
            times = [[self.costs[t, w] if (t, w) in known else -1 for w in widths] for t in self._numbers]
            if any(max(row) < 0 for row in times):
                return None
            unit = widths[0]
            found = schedule(times, [width // unit for width in widths], self.world // unit)
            where = [(widths[i], start * unit) for i, start in zip(found.width_index, found.start)]
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
            ((self.costs[tree, width],),) = self.jobs.table((self.trees[tree],), (width,), 0, False)
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
            offer, choice = None, job.offer.choice
            if len(self.trees) > _FEW_TREES:
                offer = self.jobs.settle(job.nodes, choice)
            if offer is None or offer.peak > self.jobs.room:
                offer = self.jobs.best(job.nodes, choice.degree)
            if offer is None:
                return None
            settled.append(Job(job.nodes, job.offset, offer))
        return settled

    # Uniform degrees.

    def _uniform(self, best: int | None) -> Iterator[Seated]:
        """All trees on blocks of one degree, longest first and groups in turn."""
        for degree in self.degrees():
            # A fifth more: some passes may yet be shared.
            plain = best is None or (self._may_pay(degree) and 4 * self._work(degree) < 5 * best)
            if not plain and self._least_shared(degree) >= best:
                continue
            costs = self._plain_costs(degree, best) if plain else None
            plain = costs is not None
            if not plain:
                costs = self.ideals
            full = [block[0] for block in cut_pool(self.world, degree) if len(block) == degree]
            turns = [group % len(full) for group in self.tree_groups]
            dealt = {"": self._balanced(costs, len(full), plain, best, degree), ", groups in turn": turns}
            if sorted(mates_of(turns)) == sorted(mates_of(dealt[""])):
                del dealt[", groups in turn"]
            for name, where in dealt.items():
                loads = [0] * len(full)
                for cost, block in zip(costs, where):
                    loads[block] += cost
                finish = max(loads) if plain else NEVER
                yield Seated(f"degree {degree}{name}", [(degree, full[b]) for b in where], finish)

    def _balanced(
        self, costs: Sequence[int], blocks: int, plain: bool, best: int | None, degree: int
    ) -> list[int]:
        """[tree] block: longest first; where that comes near to the best, by the joint schedule's search."""
        where = longest_first(costs, [0] * blocks)
        share = sum(costs) // blocks
        if not plain or blocks == 1 or not self._shared_may_pay(share, degree, best):
            return where
        found = schedule([[cost] for cost in costs], [1], blocks, [([0] * len(costs), where)])
        return list(found.start)

    def _plain_costs(self, degree: int, best: int | None) -> list[int] | None:
        """[tree] estimated cost on a block of a degree; None where one does not fit there, or where the first
        trees, spread over all, say that the degree is slower than the best by a tenth."""
        order, done = self._spread, [0, 0]
        for count, tree in enumerate(order):
            cost = self.cost(tree, degree)
            if cost < 0:
                return None
            done = [done[0] + cost, done[1] + self.ideals[tree]]
            total = done[0] * sum(self.ideals) // max(1, done[1]) if count % 8 == 7 else 0
            if best is not None and count >= _SAMPLE and 10 * total * degree > 11 * best * self.world:
                return None
        return [self.cost(tree, degree) for tree in self._numbers]

    @cached_property
    def _spread(self) -> list[int]:
        """Trees so that the first few stand for all: by work, in strides."""
        order = sorted(self._numbers, key=lambda tree: self.ideals[tree])
        return [tree for first in range(_SAMPLE) for tree in order[first::_SAMPLE]]

    def _work(self, degree: int) -> int:
        """How long trees keep the pool busy on blocks of a degree, at the least, ns."""
        floors = (ideal + degree * self.launch_ns for ideal in self.ideals)
        costs = (degree * self.costs.get((tree, degree), 0) for tree in self._numbers)
        return sum(map(max, floors, costs)) // self.world

    @cached_property
    def ideals(self) -> list[int]:
        """[tree] what it takes on one rank without any fixed cost, ns."""
        return [self.jobs.ideal(nodes, 1) for nodes in self.trees]

    def degrees(self) -> list[int]:
        """Of uniform arrangements."""
        if self.degree:
            return [self.degree]
        divisors = {d for d in range(1, self.limit + 1) if self.world % d == 0} if self.world <= 64 else set()
        degrees = {*(w for w in self.widths() if w <= self.limit), *divisors, self.limit}
        # A single tree has been on every block of a power of two.
        return sorted(degrees.difference(self.widths()) if len(self.trees) == 1 else degrees)

    def _shared_may_pay(self, estimate_ns: int, degree: int, best: int | None) -> bool:
        """Whether it comes near to the best without what all passes of a block but one cost whatever their
        rows."""
        passes = -(-len(self.trees) // (self.world // degree))
        return best is None or 50 * (estimate_ns - (passes - 1) * self.pass_ns) <= 51 * best

    def _may_pay(self, degree: int) -> bool:
        """Whether the fixed costs of so few blocks leave a chance."""
        trees = -(-len(self.trees) // (self.world // degree))
        return degree in (self.limit, self.degree) or (trees - 1) * self.pass_ns <= 2 * self._floor

    # Shared passes.

    @cached_property
    def _least(self) -> Least:
        return Least(self.shape, self.jobs.prices, self.jobs.options)

    @cached_property
    def _small_waves(self) -> SmallWaves:
        return SmallWaves(self.jobs, self.launch_ns)

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
        rows, children = self.shape.rows, self.shape.children
        # Fewer rows do not reach every rank.
        inner = sum(bool(c) and r >= 2 * degree for r, c in zip(rows, children)) * degree // self.world
        inner = inner if degree > 1 else 0
        tiles = inner * c.tile_ns * (100 + c.attention_backward_pct) // 100 * -(-m.layers // m.stages)
        return self._floor + tiles + self.launch_ns
