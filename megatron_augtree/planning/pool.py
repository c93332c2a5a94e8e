"""The batch over the pool: which block plays which trees.

Every tree is priced on blocks of every width (`jobs.py`), the joint schedule gives it one (`joint.py`). Every
uniform degree with longest-first balancing and with groups in turn, as data parallelism deals them, is an
arrangement too (`uniform.py`). In each of them, jobs of one block may then share passes: fewer and larger
ones. Many trees are counted rank by rank only where their fullest block may end before the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from megatron_augtree.planning.arrangement import (
    Arrangement,
    Placed,
    Seated,
    arrange,
    blocks_of,
    busy_ranks,
)
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.joint import schedule
from megatron_augtree.planning.least import Least
from megatron_augtree.planning.logits import SmallWaves
from megatron_augtree.planning.offers import SKIPPED, Job, cost_of
from megatron_augtree.planning.sharing import merged, searched
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.planning.uniform import Uniform

#: So few trees are worth counting several choices each.
_FEW_TREES = 8
_MANY_TREES = 32

#: Of fewer rows a rank, estimates are far off.
FEW_ROWS = 16


class Pool:
    """Arrangements of a batch.

    Args:
        jobs: prices of its trees.
        world: ranks of the pool.
        limit: the most ranks a block may have.
        degree: the only degree, or 0.
        tree_groups: [tree] number of the group behind each root, for groups in turn.
        dealt: whether passes of few nodes are also shared from every degree on.

    Attributes:
        costs: (tree, ranks) -> what it is estimated to cost, -1 where it does not fit.
        too_wide: blocks of so many ranks are too slow with one pass each, by a tenth.
    """

    def __init__(
        self,
        jobs: Jobs,
        world: int,
        limit: int,
        degree: int,
        tree_groups: Sequence[int],
        dealt: bool = True,
    ) -> None:
        self.jobs, self.world, self.limit, self.degree, self.dealt = jobs, world, limit, degree, dealt
        self.shape: ForestShape = jobs.shape
        self.stages = jobs.prices.model.stages
        self.trees = self.shape.trees
        self.tree_groups = tree_groups
        self.costs: dict[tuple[int, int], int] = {}
        self._counted: dict[tuple[int, int], list[Job] | None] = {}
        self.too_wide = world + 1

    def arrangements(self) -> Iterator[Arrangement]:
        """All of them; of those that come near to the best also with waves that make their logits once."""
        best: int | None = None
        for made in self._fused_logits():
            yield made
            best = made.time_ns if best is None else min(best, made.time_ns)
            yield from self._if_logits_twice(made, best)

    def _if_logits_twice(self, made: Arrangement, best: int) -> Iterator[Arrangement]:
        """An arrangement near to the best in waves that make their logits once, where the busiest rank's jobs
        say that it may end before."""
        if self._makes_logits_twice and 50 * made.time_ns <= 51 * best:
            if self.stages > 1 or self._last_in_small_waves(made) < best:
                yield from self._with_small_waves(made)

    def _last_in_small_waves(self, made: Arrangement) -> int:
        """What the busiest rank's jobs then take, ns."""
        busy = busy_ranks(((x.start, x.width, x.job.offer.time) for x in made.placed), self.world)
        last = busy.index(max(busy))
        mine = [x.job for x in made.placed if x.start <= last < x.start + x.width]
        return sum((self._small_waves.of(job) or job).offer.time for job in mine)

    @cached_property
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
        first: Arrangement | None = None  # where passes are shared from, one change at a time
        for widths in self._ranges_of_widths():
            joint = self._joint(widths)
            if joint is None:
                continue
            first = _shorter(first, joint)
            best = joint.time_ns if best is None else min(best, joint.time_ns)
            yield joint
            for shared in self._with_shared(joint, best):
                best = min(best, shared.time_ns)
                yield shared
        uniform = Uniform(self)  # no attribute: a cycle would keep all of it until the collector comes
        for seated in uniform.seatings(best):
            for made in self._counted_if_near(uniform, seated, best, first and first.time_ns):
                first = _shorter(first, made)
                best = made.time_ns if best is None else min(best, made.time_ns)
                yield made
        if first is not None and self.jobs.options.copies < 2:
            yield from searched(self, first)

    def _counted_if_near(
        self, uniform: Uniform, seated: Seated, best: int | None, first: int | None
    ) -> Iterator[Arrangement]:
        """A uniform seating's arrangements, where estimates, a few per cent off, come near to the best; what
        ends no earlier than `first` is of no other use."""
        near = best is None or 50 * seated.estimate_ns <= 51 * best
        if near or self.shared_may_pay(seated.estimate_ns, seated.where[0][0], best):
            late = first is not None and self._ends_late(seated, best, first)
            if late and near:
                return
            made = None if late else self._place(seated)
            if made is not None:
                yield made
                best = made.time_ns if best is None else min(best, made.time_ns)
                for shared in self._with_shared(made, best):
                    yield shared
                    best = min(best, shared.time_ns)
                if near and not self._launches_rule(seated, best):
                    return
        made = self._one_pass_each(seated, best)
        if made is not None:
            yield made
            best = made.time_ns if best is None else min(best, made.time_ns)
        if best is None or not self._launches_rule(seated, best):
            return
        # Elsewhere only where one pass is a fiftieth: estimating all trees takes long.
        if near or made is not None or 50 * self.pass_ns >= best:
            for other in uniform.whole(seated):
                made = self._one_pass_each(other, best)
                if made is not None:
                    yield made
                    best = min(best, made.time_ns)

    def _ends_late(self, seated: Seated, best: int, first: int) -> bool:
        """Whether a uniform seating's fullest block alone, counted in every way, ends no earlier than the
        best and `first`; under a pipeline that does not rule it out, and few trees are counted anyway."""
        if self.stages > 1 or len(self.trees) <= _FEW_TREES:
            return False
        blocks = self._blocks(seated).items()
        (width, start), trees = max(blocks, key=lambda x: sum(self.cost(t, x[0][0]) for t in x[1]))
        placed = self._placed((tree, width, start) for tree in trees)
        if placed is None:
            return False
        made = arrange(seated.name, placed, self.world, 1)
        if made.time_ns < first:
            return False
        ways = [made, *self._with_shared(made, best)]
        small = [x for way in ways for x in self._if_logits_twice(way, best)]
        return min(x.time_ns for x in ways) >= first and all(x.time_ns >= best for x in small)

    def _launches_rule(self, seated: Seated, best: int) -> bool:
        """Whether what a block's passes cost whatever their rows is a fiftieth of the best."""
        return 50 * self._saved_ns(seated.where[0][0]) > best

    def _one_pass_each(self, seated: Seated, best: int | None) -> Arrangement | None:
        """Every block's trees in one pass; None where one does not fit, or where estimates do not come near
        to the best: the fullest block says so first."""
        if self.jobs.options.copies > 1:
            return None
        blocks = sorted(self._blocks(seated).items(), key=lambda x: -sum(self.ideals[t] for t in x[1]))
        found = []
        for (width, start), trees in blocks:
            nodes = tuple(n for tree in trees for n in self.trees[tree])
            ideal = self.jobs.ideal(nodes, width)
            if best is not None and (width >= self.too_wide or ideal + self.launch_ns >= best):
                return None
            if self._least.bytes(nodes) > self.jobs.room * width:
                return None
            few = sum(self.shape.rows[n] for n in nodes) < FEW_ROWS * width
            offer = self.jobs.best(nodes, width) if few else self.jobs.estimate(nodes, width)
            if offer is None:
                return None
            if best is not None and 50 * offer.cost > 51 * best:
                # On wider blocks, each with as much more to do, only their fullest may be less full.
                if 10 * (offer.cost - ideal + self.floor_ns) > 11 * best:
                    self.too_wide = width
                return None
            found.append((nodes, width, start))
        placed = []
        for nodes, width, start in found:
            offer = self.jobs.best(nodes, width)
            if offer is None:
                return None
            placed.append(Placed(Job(nodes, 0, offer), start))
        return arrange(f"{seated.name}, one pass a block", placed, self.world, self.stages)

    def _blocks(self, seated: Seated) -> dict[tuple[int, int], list[int]]:
        """(ranks, first rank) -> its trees, ascending."""
        trees: dict[tuple[int, int], list[int]] = {}
        for tree, place in enumerate(seated.where):
            trees.setdefault(place, []).append(tree)
        return trees

    def _with_shared(self, arrangement: Arrangement, best: int) -> Iterator[Arrangement]:
        """The arrangement with shared passes, where a block has several jobs and there is room for gain."""
        mates = blocks_of(arrangement)
        if self.floor_ns < best and any(len(x) > 1 for x in mates):
            parts = [merged(self.jobs, block) for block in mates]
            if any(part is not block for part, block in zip(parts, mates)):
                placed = [x for part in parts for x in part]
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
        table = self.jobs.table(self.trees, widths, self.floor_ns // (8 if many else 64), many)
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
        """One tree: widest first; a narrower block that cannot be faster even if all is even is left out. Of
        blocks that take as long the narrowest."""
        best: tuple[int, int] | None = None
        for width in reversed(widths):
            if best is None or self.jobs.ideal(self.trees[0], width) < best[0]:
                jobs = self.settled(0, width)
                if jobs is not None and (best is None or cost_of(jobs) <= best[0]):
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
    def floor_ns(self) -> int:
        """What the whole batch takes where everything is even."""
        return self.jobs.ideal(range(len(self.shape.rows)), self.world)

    def _place(self, seated: Seated) -> Arrangement | None:
        """Trees on their blocks, with jobs counted rank by rank; None where one then does not fit."""
        placed = self._placed((tree, *place) for tree, place in enumerate(seated.where))
        return None if placed is None else arrange(seated.name, placed, self.world, self.stages)

    def _placed(self, seats: Iterable[tuple[int, int, int]]) -> list[Placed] | None:
        """The jobs of some (tree, ranks, first rank)."""
        # All of them, so that all that do not fit are known at once.
        found = [(self.settled(tree, width), start) for tree, width, start in seats]
        if any(jobs is None for jobs, _ in found):
            return None
        return [Placed(job, start + job.offset) for jobs, start in found for job in jobs]

    def settled(self, tree: int, width: int) -> list[Job] | None:
        """A tree on a block, counted rank by rank; what then does not fit counts as impossible."""
        key = tree, width
        if key not in self._counted:
            jobs = self.jobs.with_copies(self.trees[tree], width) if self.cost(tree, width) >= 0 else None
            self._counted[key] = self._if_it_fits(tree, width) if jobs is None else self._settle(jobs)
            if self._counted[key] is None:
                self.costs[key] = -1
        return self._counted[key]

    def _if_it_fits(self, tree: int, width: int) -> list[Job] | None:
        """A tree that by the estimates does not fit a block, of a few trees: they are a little off."""
        one = width <= (self.degree or self.limit) and self.jobs.options.copies < 2
        offer = self.jobs.best(self.trees[tree], width) if one and len(self.trees) <= _FEW_TREES else None
        return None if offer is None else [Job(tuple(self.trees[tree]), 0, offer)]

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

    def shared_may_pay(self, estimate_ns: int, degree: int, best: int | None) -> bool:
        """Whether it comes near to the best without what all passes of a block but one cost whatever their
        rows."""
        return best is None or 50 * (estimate_ns - self._saved_ns(degree)) <= 51 * best

    def _saved_ns(self, degree: int) -> int:
        """What passes of a block cost whatever their rows, but the first one's, a pass a tree."""
        passes = -(-len(self.trees) // (self.world // degree))
        return (passes - 1) * self.pass_ns

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


def _shorter(best: Arrangement | None, made: Arrangement) -> Arrangement:
    """The one that ends first; ties go to the earlier."""
    return made if best is None or made.time_ns < best.time_ns else best
