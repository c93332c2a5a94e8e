"""Jobs, the blocks of a pool, and the two things every joint schedule starts from: `place` and `lower_bound`.

Twin: csrc/joint_blocks.cpp, the same order, ties and results. Callers use `planning/joint.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


class Batch:
    """The jobs of a step.

    Attributes:
        times: [job][option] ns on a block of `widths[option]` ranks, -1 where impossible.
        widths: [option] ranks, ascending powers of two.
        pool: ranks.
        size: the smallest power of two that holds the pool.
    """

    def __init__(self, times: Sequence[Sequence[int]], widths: Sequence[int], pool: int) -> None:
        self.times, self.widths, self.pool = times, widths, pool
        self.jobs, self.options = len(times), len(widths)
        self.size = 1 << (pool - 1).bit_length()


@dataclass
class Draft:
    """A schedule under construction: [job] option, [job] first rank of its block, and the makespan in ns."""

    option: list[int]
    start: list[int]
    makespan: int = 0


class Blocks:
    """The aligned blocks of the pool as a binary tree: node 1 is the root, 2n and 2n + 1 are the halves of n.

    Blocks are nested and wider jobs are played first, so no rank ever waits, and a rank ends when the jobs of
    its node and of all nodes around it have been played.

    Attributes:
        own: [node] time of the jobs on exactly that block.
        best: [node] the latest finish of its ranks, without the jobs of wider blocks.
        count: [node] jobs on it and inside it.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.own, self.best, self.count = ([0] * (2 * batch.size) for _ in range(3))

    def node(self, option: int, start: int) -> int:
        """The node of the block of `widths[option]` ranks from rank `start` on."""
        return (self.batch.size + start) // self.batch.widths[option]

    def start(self, option: int, node: int) -> int:
        """The first rank of a node whose width is `widths[option]`."""
        return node * self.batch.widths[option] - self.batch.size

    def change(self, node: int, time: int, jobs: int) -> None:
        """Adds a job's time to its block; negative numbers take it off again."""
        own, best, count = self.own, self.best, self.count
        own[node] += time
        best[node] += time
        count[node] += jobs
        node //= 2
        while node > 0:
            best[node] = own[node] + max(best[2 * node], best[2 * node + 1])
            count[node] += jobs
            node //= 2


def place(batch: Batch, option: Sequence[int]) -> Draft:
    """Widest jobs first, then longest, each on the least loaded block of its width (ties: lowest start)."""
    times, widths = batch.times, batch.widths
    order = sorted(range(batch.jobs), key=lambda j: (-option[j], -times[j][option[j]], j))
    result = Draft(list(option), [0] * batch.jobs)
    loads: list[int] = []
    heap: list[tuple[int, int]] = []  # load, index of the block
    now = -1
    for job in order:
        if option[job] != now:
            width = widths[option[job]]
            parts = 1 if now < 0 else widths[now] // width
            wider = loads
            # Blocks behind the last wider one carry nothing: no wider block reaches them.
            loads = [
                wider[block // parts] if block // parts < len(wider) else 0
                for block in range(batch.pool // width)
            ]
            heap = [(load, block) for block, load in enumerate(loads)]
            heapq.heapify(heap)
            now = option[job]
        block = heap[0][1]
        loads[block] += times[job][now]
        heapq.heapreplace(heap, (loads[block], block))
        result.start[job] = block * widths[now]
        result.makespan = max(result.makespan, loads[block])
    return result


def canonical(batch: Batch, job: int, limit: int) -> int:
    """The option of least work (width x time) among those that take at most `limit`; -1 where none does.

    Ties go to the narrowest. Where work does not shrink with width it is the narrowest that is fast enough.
    """
    found, least = -1, 0
    for option, (time, width) in enumerate(zip(batch.times[job], batch.widths)):
        if 0 <= time <= limit and (found < 0 or width * time < least):
            found, least = option, width * time
    return found


def limits_of(batch: Batch) -> list[int]:
    """The limits at which canonical options change: distinct times, ascending, that every job can keep to."""
    least = max(min(time for time in row if time >= 0) for row in batch.times)
    return sorted({time for row in batch.times for time in row if time >= least})


def lower_bound(batch: Batch, limits: Sequence[int]) -> int:
    """The smallest makespan at which the jobs' least work fits into the pool: no schedule is shorter.

    A schedule of makespan T gives every job an option of at most T, so the sum over jobs of the least work
    among such options is at most pool x T. That sum only falls as T grows, so the smallest T is found by
    bisection. It is at least the longest job's shortest time, and the least work of all jobs over the pool.
    """

    def work(limit: int) -> int:
        chosen = [canonical(batch, job, limit) for job in range(batch.jobs)]
        return sum(batch.widths[option] * row[option] for option, row in zip(chosen, batch.times))

    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        if work(limits[middle]) <= batch.pool * limits[middle]:
            high = middle
        else:
            low = middle + 1
    if low == 0:
        return limits[0]
    share = -(-work(limits[low - 1]) // batch.pool)  # between two limits options, and so work, stay the same
    return min(limits[low], share) if low < len(limits) else share
