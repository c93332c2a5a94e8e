"""Which jobs of a batch share passes, and on which of equally wide blocks: a bounded local search.

A pass costs launches and half-empty products whatever its rows, so small jobs are cheaper together. What a
job adds to a pass is not known before the pass is estimated; so from some arrangement on, the busiest rank's
passes are changed one at a time: two of a block are played as one, or a job goes to a pass of another block
of its width, alone or in exchange. The change that shortens the batch most is kept. The search ends where
none does, or when its effort is used up, counted in nodes of estimated passes and in changes looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING, NamedTuple

from megatron_augtree.planning.arrangement import Arrangement, Placed, arrange, mates_of
from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.offers import NEVER, Job, Offer

if TYPE_CHECKING:
    from megatron_augtree.planning.pool import Pool

#: Changes of one step that are estimated: those that promise most.
TRIED = 16

#: Nodes of a batch that is searched from many starts, and the effort of each of them.
FEW_NODES, EFFORT = 256, 1500

#: Where a single pass costs a fiftieth of the time whatever its rows, batches of up to so many nodes are
#: searched from so many starts, those that promise most, with so much effort a node.
MANY_NODES, STARTS, EFFORT_A_NODE = 1024, 4, 7

#: Blocks that a job may go to: the least busy ones.
TARGETS = 3

Nodes = tuple[int, ...]
#: Numbers of jobs, ascending.
Mates = tuple[int, ...]


class SharedPass(NamedTuple):
    """Jobs in one pass, or in the passes of one choice, on a block.

    Attributes:
        mates: which jobs.
        width, start: the block.
    """

    mates: Mates
    width: int
    start: int


class _Change(NamedTuple):
    """Passes that go and passes that come, and how busy their ranks may then be."""

    promise: int
    gone: tuple[SharedPass, ...]
    come: tuple[SharedPass, ...]


class Sharing:
    """The search on one pool.

    Args:
        jobs: prices of jobs.
        world: ranks of the pool.
        nodes: [job] its nodes; jobs may have nodes in common, which a pass then computes once.
    """

    def __init__(self, jobs: Jobs, world: int, nodes: Sequence[Nodes]) -> None:
        self.jobs, self.world, self.nodes, self.effort, self._cell = jobs, world, nodes, 0, 1
        self.launch_ns = jobs.floor((), 1)
        self._known: dict[tuple[Mates, int], Offer | None] = {}

    def run(self, passes: Sequence[SharedPass], effort: int) -> list[SharedPass] | None:
        """The passes after all changes that helped; None where one does not fit as it is.

        Args:
            passes: on which jobs share passes so far.
            effort: nodes that may be estimated, and eighths of changes that may be looked at.
        """
        self.effort = effort
        if any(self.offer(p) is None for p in passes):
            return None
        now, busy = list(passes), self._busy(passes)
        best = self._key(busy, now)
        while self.effort > 0:
            changes = sorted(self._changes(now, busy), key=lambda c: c.promise)
            self.effort -= len(changes) // 8
            found = None
            for change in changes[:TRIED]:
                come = [p for p in change.come if p.mates]
                if any(self.offer(p) is None for p in come):
                    continue
                then = list(busy)
                for p, sign in [*((p, -1) for p in change.gone), *((p, 1) for p in come)]:
                    self._add(then, p, sign)
                made = [p for p in now if p not in change.gone] + come
                key = self._key(then, made)
                if key < best:
                    best, found = key, (made, then)
            if found is None:
                break
            now, busy = found
        return now

    def promising(self, starts: Sequence[list[SharedPass]], time_ns: int) -> list[list[SharedPass]]:
        """Starts that fit and take less than a quarter more than `time_ns`, the shortest first."""
        fitting = [start for start in starts if all(self.offer(p) is not None for p in start)]
        times = [self.time_ns(start) for start in fitting]
        order = sorted(range(len(fitting)), key=times.__getitem__)
        return [fitting[i] for i in order if 4 * times[i] < 5 * time_ns]

    def offer(self, p: SharedPass) -> Offer | None:
        """The estimate of a pass; None where it does not fit."""
        key = p.mates, p.width
        if key not in self._known:
            nodes = self.nodes_of(p)
            self.effort -= len(nodes)
            self._known[key] = self.jobs.estimate(nodes, p.width)
        return self._known[key]

    def nodes_of(self, p: SharedPass) -> Nodes:
        """All its nodes, ascending."""
        return tuple(sorted({n for mate in p.mates for n in self.nodes[mate]}))

    def time_ns(self, passes: Sequence[SharedPass]) -> int:
        """When the last rank ends, by estimates; under a pipeline with what filling and draining it adds."""
        return self._key(self._busy(passes), passes)[0]

    def counted(
        self, passes: Sequence[SharedPass], time_ns: int, known: dict[tuple[Nodes, int], Offer]
    ) -> list[Placed] | None:
        """Passes counted rank by rank; None where one does not fit, or where a rank ends no earlier than
        `time_ns`: those on ranks that seem to be busy come first.

        Args:
            passes: which.
            time_ns: when the last rank has to end.
            known: (nodes, ranks) -> offers that are counted already.
        """
        busy = self._busy(passes)
        done, placed = [0] * len(busy), {}
        for p in sorted(passes, key=lambda p: -max(busy[cell] for cell in self._cells(p))):
            nodes = self.nodes_of(p)
            offer = known.get((nodes, p.width)) or self.jobs.best(nodes, p.width)
            if offer is None:
                return None
            for cell in self._cells(p):
                done[cell] += offer.time
                if done[cell] >= time_ns:
                    return None
            placed[p] = Placed(Job(nodes, 0, offer), p.start)
        return [placed[p] for p in passes]

    def _key(self, busy: Sequence[int], passes: Sequence[SharedPass]) -> tuple[int, int]:
        """(time, ranks that end last)."""
        last, drains = max(busy), self.jobs.prices.model.stages - 1
        slot = max(self._known[p.mates, p.width].slot for p in passes) if drains else 0
        return last + drains * slot, busy.count(last)

    def _busy(self, passes: Sequence[SharedPass]) -> list[int]:
        """[cell of neighbouring ranks that no block cuts] time of its passes."""
        self._cell = gcd(*(p.width for p in passes))
        busy = [0] * (self.world // self._cell)
        for p in passes:
            self._add(busy, p, 1)
        return busy

    def _add(self, busy: list[int], p: SharedPass, sign: int) -> None:
        time = sign * self._known[p.mates, p.width].time
        for cell in self._cells(p):
            busy[cell] += time

    def _cells(self, p: SharedPass) -> range:
        return range(p.start // self._cell, (p.start + p.width) // self._cell)

    def _changes(self, passes: Sequence[SharedPass], busy: Sequence[int]) -> Iterator[_Change]:
        """Changes of passes on the busiest rank."""
        last = busy.index(max(busy))
        blocks: dict[tuple[int, int], list[SharedPass]] = {}
        for p in passes:
            blocks.setdefault((p.width, p.start), []).append(p)
        for (width, start), mine in blocks.items():
            size, first = width // self._cell, start // self._cell
            if not first <= last < first + size:
                continue
            yield from self._joined(sorted(mine, key=self._time), busy[last])
            places = range(first % size, len(busy) - size + 1, size)
            loads = sorted((max(busy[at : at + size]), at) for at in places if at != first)
            for load, at in loads[:TARGETS]:
                theirs = blocks.get((width, at * self._cell), [])
                yield from self._dealt(mine, busy[last], theirs, load, at * self._cell)

    def _time(self, p: SharedPass) -> int:
        return self._known[p.mates, p.width].time

    def _joined(self, mine: Sequence[SharedPass], load: int) -> Iterator[_Change]:
        """Two passes of a block as one, the shortest first; or all."""
        sets = [(mine[i], mine[k]) for k in range(1, len(mine)) for i in range(k)][:TRIED]
        sets += [tuple(mine)] if len(mine) > 2 else []
        for gone in sets:
            # Memory adds up; where it then asks for more recompute, nothing is won.
            if sum(self.offer(p).peak for p in gone) <= self.jobs.room:
                mates = tuple(sorted(m for p in gone for m in p.mates))
                saved = (len(gone) - 1) * self.launch_ns
                yield _Change(load - saved, gone, (SharedPass(mates, gone[0].width, gone[0].start),))

    def _dealt(
        self, mine: Sequence[SharedPass], load: int, theirs: Sequence[SharedPass], other: int, where: int
    ) -> Iterator[_Change]:
        """A job to a pass of another block, to a pass of its own there, or in exchange for a smaller one."""
        new = SharedPass((), mine[0].width, where)
        for p in mine:
            for mate in p.mates:
                weight = self._weight(mate, p.width)
                left = p._replace(mates=tuple(m for m in p.mates if m != mate))
                freed = load - weight - (0 if left.mates else self.launch_ns)
                for q in (*theirs, new):
                    takes = other + weight + (0 if q.mates else self.launch_ns)
                    gone = (p, q) if q.mates else (p,)
                    if max(freed, takes) < load:
                        come = left, q._replace(mates=tuple(sorted((*q.mates, mate))))
                        yield _Change(max(freed, takes), gone, come)
                    for back in q.mates:
                        less = weight - self._weight(back, p.width)
                        if 0 < less < load - other:
                            kept = (*(m for m in q.mates if m != back), mate)
                            come = (
                                left._replace(mates=tuple(sorted((*left.mates, back)))),
                                q._replace(mates=tuple(sorted(kept))),
                            )
                            yield _Change(max(load - less, other + less), gone, come)

    def _weight(self, mate: int, width: int) -> int:
        """What a job adds to a pass, about."""
        offer = self.offer(SharedPass((mate,), width, 0))
        return self.jobs.ideal(self.nodes[mate], width) if offer is None else offer.time - self.launch_ns


def merged(jobs: Jobs, mates: Sequence[Placed]) -> Sequence[Placed]:
    """Jobs of one block in fewer passes: as many neighbours together as pays and fits."""
    best, size = mates, len(mates)
    while size > 1:
        made: list[Placed] = []
        for first in range(0, len(mates), size):
            part = mates[first : first + size]
            # Memory adds up; where it then asks for more recompute, nothing is won.
            if len(part) > 1 and sum(x.job.offer.peak for x in part) > jobs.room:
                break
            nodes = tuple(sorted({n for x in part for n in x.job.nodes}))
            offer = jobs.best(nodes, part[0].width) if len(part) > 1 else part[0].job.offer
            if offer is None:
                break
            made.append(Placed(Job(nodes, 0, offer), part[0].start))
        else:
            if sum(x.job.offer.cost for x in made) < sum(x.job.offer.cost for x in best):
                best = made
        size = (size + 1) // 2 if size > 2 else 1
    return best


def searched(pool: Pool, first: Arrangement) -> Iterator[Arrangement]:
    """What the search finds from an arrangement on, the best so far; and, where nodes are few or launches
    rule, from all trees of each block in one pass. Nothing where what passes cost whatever their rows is no
    fiftieth of the time.
    """
    world, trees, count = pool.world, pool.trees, len(pool.shape.rows)
    passes = max(sum(x.width for x in first.placed), len(trees)) // world + 1
    if len(trees) == 1 or 50 * pool.pass_ns * passes <= first.time_ns:
        return
    nodes = {x.job.nodes: index for index, x in enumerate(first.placed)}
    starts = [[SharedPass((nodes[x.job.nodes],), x.width, x.start) for x in first.placed]]
    few, effort, dealt = count <= FEW_NODES, EFFORT, []
    # A pass alone is a fiftieth, and a few ranks have several trees.
    launches = not few and count <= MANY_NODES and 4 * len(trees) >= world
    launches = launches and 50 * pool.pass_ns >= first.time_ns
    if few and pool.dealt or launches:
        known = [nodes.setdefault(tuple(tree), len(nodes)) for tree in trees]
        for degree, where in _dealings(pool):
            blocks = ((tuple(sorted(known[t] for t in x)), degree * where[x[0]]) for x in mates_of(where))
            dealt.append([SharedPass(mates, degree, start) for mates, start in blocks])
    sharing = Sharing(pool.jobs, world, list(nodes))
    if launches:
        dealt, effort = sharing.promising(dealt, first.time_ns)[:STARTS], EFFORT_A_NODE * count
    yield from _ends(pool, sharing, first, starts + dealt, effort)


def _ends(
    pool: Pool, sharing: Sharing, first: Arrangement, starts: Sequence[list[SharedPass]], effort: int
) -> Iterator[Arrangement]:
    """Where the search ends from several starts, if that may be before the first arrangement."""
    counted = {(x.job.nodes, x.width): x.job.offer for x in first.placed}
    tried: set[tuple[SharedPass, ...]] = set()
    for start in starts:
        found = sharing.run(start, effort)
        if found is None or 50 * sharing.time_ns(found) > 51 * first.time_ns:
            continue
        if tuple(sorted(found)) not in tried:
            tried.add(tuple(sorted(found)))
            placed = sharing.counted(found, first.time_ns if pool.stages == 1 else NEVER, counted)
            if placed is not None:
                yield arrange("shared passes, searched", placed, pool.world, pool.stages)


def _dealings(pool: Pool) -> Iterator[tuple[int, list[int]]]:
    """(degree, [tree] block): by work, by what trees cost with a pass each, and in turn."""
    for degree in pool.degrees():
        full = [0] * (pool.world // degree)
        offers = [pool.jobs.estimate(tree, degree) for tree in pool.trees]
        costs = [0 if x is None else x.cost for x in offers]
        seen = [longest_first(pool.ideals, full), longest_first(costs, full)]
        seen.append([group % len(full) for group in pool.tree_groups])
        for where in (x for i, x in enumerate(seen) if x not in seen[:i]):
            yield degree, where
