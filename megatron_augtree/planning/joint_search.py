"""Many first schedules, improved by bounded local search: the joint schedule of a batch of any size.

1. First schedules: canonical options at the lower bound and at up to `limits` other time limits and every
   uniform width, each placed by `place`; and what the caller adds.
2. Descent: the best change of a job on the busiest rank, to another width or block, or by exchange of blocks
   (and widths) with another job, as long as one lowers the latest finish of the ranks it touches.
3. Resettling, from the best few: jobs of the busiest rank and of a less busy place are taken off together and
   put back by branch and bound (`joint_exact.Branch`).

Work is counted in blocks and jobs looked at, never timed, so the result is the same everywhere.
Twin: csrc/joint_search.cpp, the same order, ties and results. Callers use `planning/joint.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from megatron_augtree.planning.joint_blocks import (
    Batch,
    Blocks,
    Draft,
    canonical,
    limits_of,
    lower_bound,
    place,
)
from megatron_augtree.planning.joint_exact import Branch


class Effort(NamedTuple):
    """How far a search goes.

    Attributes:
        limits: time limits at which canonical options are tried.
        resettled: how many of the best schedules are resettled, at least 1.
        taken: jobs taken off together, at least 2.
        descent, resettling: blocks and jobs looked at, for every job and rank of the pool.
        branches: partial placements that one resettling may look at.
    """

    limits: int = 40
    resettled: int = 3
    taken: int = 6
    descent: int = 6000
    resettling: int = 1000
    branches: int = 200


class Change(NamedTuple):
    """Job `job` goes to `option` and `node`; job `other`, unless -1, takes its place."""

    after: int  # the latest finish of the ranks of both blocks, ns
    job: int
    option: int
    node: int
    other: int


def _inside(inner: int, outer: int) -> bool:
    """Whether a node is another one or lies in it."""
    apart = inner.bit_length() - outer.bit_length()
    return apart >= 0 and inner >> apart == outer


class Descent:
    """A schedule that gets better; `effort` is what may still be looked at."""

    def __init__(self, batch: Batch, draft: Draft, effort: int) -> None:
        self.batch, self.blocks, self.effort = batch, Blocks(batch), effort
        self.option, self.node, self.work = [0] * batch.jobs, [0] * batch.jobs, 0
        self.above, self.peak = [0] * (2 * batch.size), [0] * (2 * batch.size)
        for job, (option, start) in enumerate(zip(draft.option, draft.start)):
            self._put(job, option, self.blocks.node(option, start))
        self.effort -= 2 * batch.size + batch.jobs

    @property
    def makespan(self) -> int:
        """Latest finish of a rank, ns."""
        return self.blocks.best[1]

    def draft(self) -> Draft:
        """The schedule as it is now."""
        starts = [self.blocks.start(option, node) for option, node in zip(self.option, self.node)]
        return Draft(list(self.option), starts, self.makespan)

    def improve(self) -> bool:
        """Makes the best change of a job on the busiest rank; False where none helps.

        Every rank of both blocks then ends before the makespan, so fewer ranks end at it.
        """
        best = Change(self.makespan, -1, 0, 0, -1)
        for job in self._busiest():
            self.effort -= 2 * self.batch.size + self.batch.jobs
            best = self._swap(job, self._move(job, best))
        if best.job < 0:
            return False
        option, node = self.option[best.job], self.node[best.job]
        self._take(best.job)
        if best.other >= 0:
            self._take(best.other)
            self._put(best.other, option, node)
        self._put(best.job, best.option, best.node)
        return True

    def resettle(self, taken: int, floor: int, branches: int) -> bool:
        """Takes off jobs of the busiest rank, the longest first, with one other job, those around it and the
        least busy ones, `taken` in all, and puts them back better; other jobs are tried least busy first.

        Returns:
            False where nothing helped.
        """
        busy = sorted(self._busiest(), key=lambda j: -self._time(j))[: taken - 2]
        others = [job for job in range(self.batch.jobs) if job not in busy]
        others.sort(key=lambda j: self.peak[self.node[j]])
        if not others:
            return self._again(busy, floor, branches)
        for partner in others:
            if self.effort <= 0:
                return False
            rest = [job for job in others if job != partner]
            around = [_inside(self.node[partner], self.node[job]) for job in rest]
            rest = [job for job, a in zip(rest, around) if a] + [job for job, a in zip(rest, around) if not a]
            if self._again([*busy, partner, *rest][:taken], floor, branches):
                return True
        return False

    def _time(self, job: int) -> int:
        return self.batch.times[job][self.option[job]]

    def _put(self, job: int, option: int, node: int) -> None:
        self.option[job], self.node[job] = option, node
        self.work += self.batch.widths[option] * self._time(job)
        self.blocks.change(node, self._time(job), 1)

    def _take(self, job: int) -> None:
        self.work -= self.batch.widths[self.option[job]] * self._time(job)
        self.blocks.change(self.node[job], -self._time(job), -1)

    def _busiest(self) -> list[int]:
        """The jobs on the busiest rank (ties: the lowest). Brings `above` and `peak` up to date.

        above: [node] time of the jobs on the blocks around it; peak: [node] the latest finish of its ranks.
        """
        size, own, best = self.batch.size, self.blocks.own, self.blocks.best
        above, peak = self.above, self.peak
        self.effort -= 2 * size + self.batch.jobs
        peak[1] = best[1]
        for node in range(2, 2 * size):
            above[node] = above[node // 2] + own[node // 2]
            peak[node] = above[node] + best[node]
        rank = 1
        while rank < size:
            rank = 2 * rank + (best[2 * rank + 1] > best[2 * rank])
        return [job for job in range(self.batch.jobs) if _inside(rank, self.node[job])]

    def _beside(self, inner: int, outer: int) -> int:
        """The latest finish in a node but outside another one that lies in it."""
        found = 0
        while inner != outer:
            found = max(found, self.peak[inner ^ 1])
            inner //= 2
        return found

    def _move(self, job: int, best: Change) -> Change:
        """The better one of `best` and the best change of the job's width and block."""
        batch, peak, source = self.batch, self.peak, self.node[job]
        time, width = self._time(job), batch.widths[self.option[job]]
        left = peak[source] - time  # the latest finish in its block without it
        for option, (takes, wide) in enumerate(zip(batch.times[job], batch.widths)):
            if takes < 0 or max(left, takes) >= best.after:
                continue
            first = batch.size // wide
            # The nodes of that width in its block, or the one around it.
            low = source * (width // wide) if wide <= width else source // (wide // width)
            high = low + width // wide if wide <= width else low + 1
            for node in range(first, first + batch.pool // wide):
                if node == source:
                    continue
                load = peak[node]
                if low <= node < high:
                    load = load - time if wide < width else max(left, self._beside(source, node))
                after = max(load + takes, left)
                if after < best.after:
                    best = Change(after, job, option, node, -1)
        return best

    def _swap(self, job: int, best: Change) -> Change:
        """The better one of `best` and the best exchange of the job's width and block with another job's.

        Jobs on wider blocks around it are left out: they are on the busiest rank too, and look at it.
        """
        times, peak, source = self.batch.times, self.peak, self.node[job]
        for other in range(self.batch.jobs):
            node = self.node[other]
            there, here = times[job][self.option[other]], times[other][self.option[job]]
            if there < 0 or here < 0 or _inside(source, node):
                continue
            more, less = here - self._time(job), there - self._time(other)  # on all ranks of either block
            if _inside(node, source):
                after = max(self._beside(node, source), peak[node] + less) + more
            else:
                after = max(peak[source] + more, peak[node] + less)
            if after < best.after:
                best = Change(after, job, self.option[other], node, other)
        return best

    def _again(self, jobs: Sequence[int], floor: int, branches: int) -> bool:
        limit = self.makespan
        for job in jobs:
            self._take(job)
        branch = Branch(self.blocks, jobs, limit, floor, branches)
        found = branch.run(self.work)
        option, node = (branch.best_option, branch.best_node) if found else (self.option, self.node)
        for job in jobs:
            self._put(job, option[job], node[job])
        self.effort -= branch.looked + self.batch.jobs
        return found


def first_schedules(batch: Batch, limits: Sequence[int], floor: int, most: int) -> list[Draft]:
    """Canonical options at `floor` and at up to `most` limits below what that gives, then uniform widths."""
    found: list[Draft] = []

    def add(limit: int) -> None:
        option = [canonical(batch, job, limit) for job in range(batch.jobs)]
        if not found or option != found[-1].option:
            found.append(place(batch, option))

    add(floor)
    count = bisect_right(limits, found[0].makespan)
    steps = min(count, most)
    for step in range(steps):
        add(limits[step * (count - 1) // max(steps - 1, 1)])
    for option in range(batch.options):
        found.append(place(batch, [_nearest(row, option) for row in batch.times]))
    return found


def _nearest(row: Sequence[int], option: int) -> int:
    """The first possible option from `option` on; where there is none, the last one before it."""
    wider = [o for o in range(option, len(row)) if row[o] >= 0]
    return wider[0] if wider else max(o for o in range(option) if row[o] >= 0)


def search(batch: Batch, starts: Sequence[Draft], effort: Effort) -> Draft:
    """The shortest schedule found; of equal ones the first."""
    makespan = attrgetter("makespan")
    limits = limits_of(batch)
    floor, scale = lower_bound(batch, limits), batch.jobs + batch.pool
    found = sorted([*first_schedules(batch, limits, floor, effort.limits), *starts], key=makespan)
    if found[0].makespan == floor:
        return found[0]
    left = effort.descent * scale
    for i, draft in enumerate(found):
        if left <= 0:
            break
        descent = Descent(batch, draft, left)
        while descent.effort > 0 and descent.makespan > floor and descent.improve():
            pass
        found[i], left = descent.draft(), descent.effort
        if found[i].makespan == floor:
            return found[i]
    found = sorted(found, key=makespan)[: effort.resettled]
    left = effort.resettling * scale
    for i, draft in enumerate(found):
        if left <= 0:
            break
        descent = Descent(batch, draft, left)
        while (
            descent.effort > 0
            and descent.makespan > floor
            and descent.resettle(effort.taken, floor, effort.branches)
        ):
            pass
        found[i], left = descent.draft(), descent.effort
    return min(found, key=makespan)
