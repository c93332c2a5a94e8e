"""Branch and bound over options and blocks, for a whole small batch or for a few jobs of a large one.

Twin: csrc/joint_exact.cpp, the same order, ties and results. Callers use `planning/joint.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_augtree.planning.joint_blocks import Batch, Blocks, Draft, limits_of, lower_bound


class Branch:
    """Places jobs on top of what `blocks` carries, so that the latest finish of a rank they use is smallest.

    Jobs go in order of least work, largest first. A branch ends where

    - a remaining job finds no block on which it ends before the limit,
    - the remaining jobs' least work, over the widths that still have such a block, exceeds the room that the
      pool has below the limit. (Room is right where every rank ends before the limit, as in `exact`; where
      other ranks end later, as in a search, it is a little too small, which only ends branches early.)

    Of two halves of a block that hold no job, only the left one is tried: exchanging them changes nothing.

    Args:
        blocks: the other jobs' blocks; changed during `run`, restored behind it.
        jobs: which to place.
        limit: a placement counts only where all of `jobs` end before it; falls with every better one, ns.
        floor: no makespan is below it; reaching it ends the search, ns.
        branches: how many partial placements to look at, at most.

    Attributes:
        best_option, best_node: [job of the batch] the best placement; empty where there is none.
        looked: blocks looked at.
    """

    def __init__(self, blocks: Blocks, jobs: Sequence[int], limit: int, floor: int, branches: int) -> None:
        self.blocks, self.batch = blocks, blocks.batch
        self.limit, self.floor, self.branches, self.looked = limit, floor, branches, 0
        batch = self.batch
        works = [[w * t for w, t in zip(batch.widths, batch.times[job]) if t >= 0] for job in jobs]
        self.order = [job for _, job in sorted((-min(options), job) for options, job in zip(works, jobs))]
        self.option, self.node = [0] * batch.jobs, [0] * batch.jobs
        self.lowest = [0] * batch.options
        self.best_option: list[int] = []
        self.best_node: list[int] = []

    def run(self, work: int) -> bool:
        """Whether a placement was found. `work`: width x time of all jobs that `blocks` carries."""
        self._visit(0, work, 0)
        return bool(self.best_option)

    def complete(self) -> bool:
        """Whether nothing better exists, rather than `branches` being used up."""
        return self.branches >= 0 or self.limit <= self.floor

    def _visit(self, depth: int, work: int, finish: int) -> None:
        if depth == len(self.order):
            self.best_option, self.best_node, self.limit = list(self.option), list(self.node), finish
            return
        self.branches -= 1
        if self.branches < 0:
            return
        batch, job = self.batch, self.order[depth]
        choices: list[tuple[int, int, int]] = []  # finish, option, node
        self.lowest = [self.limit] * batch.options
        self._walk(job, 1, batch.size, batch.options - 1, 0, choices)
        if self._hopeless(depth, work):
            return
        for ends, option, node in sorted(choices):
            later, time = max(finish, ends), batch.times[job][option]
            if self.branches < 0 or self.limit <= self.floor or later >= self.limit:
                return
            self.option[job], self.node[job] = option, node
            self.blocks.change(node, time, 1)
            self._visit(depth + 1, work + batch.widths[option] * time, later)
            self.blocks.change(node, -time, -1)

    def _walk(self, job: int, node: int, width: int, option: int, above: int, choices: list) -> None:
        """Collects a job's choices inside a node, and the lowest load of each width.

        `option` is the widest that is not wider than the node, `above` the time of the blocks around it.
        """
        self.looked += 1
        batch, blocks = self.batch, self.blocks
        start, inside = node * width - batch.size, above + blocks.own[node]
        if start >= batch.pool or inside >= self.limit:
            return
        whole = start + width <= batch.pool
        if batch.widths[option] == width:
            if whole:
                load, time = above + blocks.best[node], batch.times[job][option]
                self.lowest[option] = min(self.lowest[option], load)
                if time >= 0 and load + time < self.limit:
                    choices.append((load + time, option, node))
            option -= 1
            if option < 0:
                return
        self._walk(job, 2 * node, width // 2, option, inside, choices)
        if not whole or blocks.count[2 * node] + blocks.count[2 * node + 1] > 0:
            self._walk(job, 2 * node + 1, width // 2, option, inside, choices)

    def _hopeless(self, depth: int, work: int) -> bool:
        batch = self.batch
        room = batch.pool * (self.limit - 1) - work
        for job in self.order[depth:]:
            works = [
                width * time
                for width, time, load in zip(batch.widths, batch.times[job], self.lowest)
                if time >= 0 and load + time < self.limit
            ]
            if not works:
                return True
            room -= min(works)
        return room < 0


def exact(batch: Batch, incumbent: Draft, branches: int) -> tuple[Draft, bool]:
    """The best schedule, starting from a known one, and whether it is proven optimal within `branches`."""
    blocks = Blocks(batch)
    floor = lower_bound(batch, limits_of(batch))
    branch = Branch(blocks, range(batch.jobs), incumbent.makespan, floor, branches)
    if branch.run(0):
        starts = [blocks.start(option, node) for option, node in zip(branch.best_option, branch.best_node)]
        incumbent = Draft(branch.best_option, starts, branch.limit)
    return incumbent, branch.complete()
