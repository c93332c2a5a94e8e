"""The joint schedule: every job of a step gets a width and a block of the pool, so that all end early.

A job runs on 1, 2, 4, ... ranks, in a time that is known for each width (or not at all, for want of memory).
Its block is aligned: the first rank is a multiple of the width. Blocks are therefore nested or disjoint, and
wider jobs are played first, so no rank waits between jobs: it ends when the jobs that cover it have been
played, and the makespan is the largest such sum.

    ranks   0 1 2 3 4 5 6 7
    job a   [=============]     width 8
    job b   [=====]             width 4, first rank 0
    job c           [=]         width 2, first rank 4
    job d               [=]     width 2, first rank 6
    ranks 0 to 3 end after a + b, ranks 4 and 5 after a + c, ranks 6 and 7 after a + d

Guarantee. Let M be the pool, a power of two, and OPT the smallest makespan there is. `lower_bound` is a time
T <= OPT at which every job has an option that takes at most T, and the least work (width x time) of such
options adds up to at most M x T. `search` begins with exactly these options. `place` takes the widest first:
where it puts a job of width w, blocks of width w tile the pool and every earlier job covers whole ones, so
the least loaded block carries at most the pool's average, which is at most T. The job adds at most T. So the
makespan is at most 2 T <= 2 OPT, and nothing that follows makes a schedule longer. (Where work does not
shrink with width, the option of least work is the narrowest of at most T, and this is the usual argument;
with the least work nothing has to be assumed about the times.) In a pool that is no power of two, blocks of
width w leave less than half of the ranks uncovered, so the least loaded one carries less than 2 T and the
makespan is below 3 OPT.

Choosing widths by a bound on time and work is Ludwig and Tiwari's (Scheduling malleable and nonmalleable
parallel tasks, SODA 1994); aligned blocks replace their packing.

Times are integers in ns, ties go to the lower index. The C++ core, where there is one, gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from megatron_augtree.config import InfeasiblePlanError
from megatron_augtree.planning import joint_blocks, joint_exact, joint_search, native
from megatron_augtree.planning.joint_blocks import Batch, Blocks, Draft
from megatron_augtree.planning.joint_search import Effort

#: `schedule` is optimal up to this many jobs, unless `BRANCHES` are used up.
EXACT_JOBS = 8

#: Partial schedules that `exact` looks at, at most: about five times what any instance of
#: scripts/joint_quality.py takes.
BRANCHES = 20_000

#: Of many jobs' search with all widths, and of the one that follows with those that it used: fewer to choose
#: from leaves more effort for each. Together they take as long as one search by the usual effort, and end
#: 0.04 % earlier on the average of 144 batches of the presets on 16 to 64 ranks, 0.4 % of 16 on 1024.
ALL_WIDTHS = Effort(limits=20, descent=3000, resettling=700)
USED_WIDTHS = Effort(limits=6, resettled=2, descent=2000, resettling=500)

Times = Sequence[Sequence[int]] | np.ndarray
Starts = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class Schedule:
    """Where every job runs.

    Attributes:
        width_index: [job] index of its width in `widths`.
        start: [job] first rank of its block.
        makespan: when the last rank ends, ns.
        optimal: whether no shorter schedule exists for certain; False says nothing.
    """

    width_index: tuple[int, ...]
    start: tuple[int, ...]
    makespan: int
    optimal: bool


def schedule(times: Times, widths: Sequence[int], pool: int, starts: Starts = ()) -> Schedule:
    """The joint schedule of a step: `search`, then `exact` for up to `EXACT_JOBS` jobs, for more `search`
    again among the widths that it used.

    Args:
        times: [job][width] ns, -1 where impossible.
        widths: ranks of a block: ascending powers of two, at most the pool.
        pool: ranks, any number.
        starts: known schedules to begin with beside the usual ones, each ([job] index of its width, [job]
            first rank of its block). The result is never longer than any of them.

    Raises:
        InfeasiblePlanError: a job is possible on no width.
        ValueError: widths or starts are not as above.
    """
    if len(times) == 1 and not starts:
        _check(times, widths, pool)
        time, option = min((time, option) for option, time in enumerate(map(int, times[0])) if time >= 0)
        return Schedule((option,), (0,), time, True)
    if 0 < len(times) <= EXACT_JOBS:
        found = search(times, widths, pool, starts)
        return found if found.optimal else exact(times, widths, pool, found)
    if len(widths) == 1:
        return search(times, widths, pool, starts)
    found = search(times, widths, pool, starts, ALL_WIDTHS)
    return found if found.optimal else _among_used(times, widths, pool, found)


def _among_used(times: Times, widths: Sequence[int], pool: int, found: Schedule) -> Schedule:
    """A schedule that is no longer than one that was found, of the widths that this one used."""
    used = sorted(set(found.width_index))
    if len(used) == len(widths):
        return found
    unit, index = widths[used[0]], {option: i for i, option in enumerate(used)}
    start = [index[option] for option in found.width_index], [first // unit for first in found.start]
    kept = [[row[option] for option in used] for row in times]
    better = search(kept, [widths[option] // unit for option in used], pool // unit, [start], USED_WIDTHS)
    options, starts = [used[i] for i in better.width_index], [first * unit for first in better.start]
    return _schedule(options, starts, better.makespan, False)


def search(
    times: Times, widths: Sequence[int], pool: int, starts: Starts = (), effort: Effort = Effort()  # noqa: B008
) -> Schedule:
    """The heuristic alone (see `joint_search`), under the guarantee above; arguments as for `schedule`."""
    if len(times) == 0:
        return Schedule((), (), 0, True)
    _check(times, widths, pool, starts)
    if tables := _tables(times, widths, pool):
        core, *batch = tables
        flat = np.array([part for start in starts for part in start], np.int64).reshape(-1, 2, len(times))
        return _schedule(*core.joint_search(*batch, flat, effort))
    batch = _batch(times, widths, pool)
    found = joint_search.search(batch, [_draft(batch, *start) for start in starts], effort)
    bound = joint_blocks.lower_bound(batch, joint_blocks.limits_of(batch))
    return _schedule(found.option, found.start, found.makespan, found.makespan == bound)


def exact(
    times: Times, widths: Sequence[int], pool: int, incumbent: Schedule, branches: int = BRANCHES
) -> Schedule:
    """Branch and bound for few jobs, from a schedule of `search` on; whether it ended is in `optimal`."""
    start = (incumbent.width_index, incumbent.start)
    _check(times, widths, pool, [start])
    if tables := _tables(times, widths, pool):
        core, *batch = tables
        return _schedule(*core.joint_exact(*batch, np.array([start], np.int64), branches))
    batch = _batch(times, widths, pool)
    found, optimal = joint_exact.exact(batch, _draft(batch, *start), branches)
    return _schedule(found.option, found.start, found.makespan, optimal)


def place(times: Times, widths: Sequence[int], pool: int, chosen: Sequence[int]) -> Schedule:
    """Blocks for jobs whose widths are known: widest first, then longest, each to the least loaded block.

    Args:
        chosen: [job] index of its width, a possible one; the other arguments as for `schedule`.
    """
    if len(times) == 0:
        return Schedule((), (), 0, True)
    _check(times, widths, pool, [(chosen, [0] * len(times))])
    if tables := _tables(times, widths, pool):
        core, *batch = tables
        return _schedule(*core.joint_place(*batch, [int(c) for c in chosen]))
    found = joint_blocks.place(_batch(times, widths, pool), [int(c) for c in chosen])
    return _schedule(found.option, found.start, found.makespan, False)


def lower_bound(times: Times, widths: Sequence[int], pool: int) -> int:
    """No makespan is below this, ns (see `joint_blocks.lower_bound`); arguments as for `schedule`."""
    if len(times) == 0:
        return 0
    _check(times, widths, pool)
    if tables := _tables(times, widths, pool):
        core, *batch = tables
        return core.joint_lower_bound(*batch)
    batch = _batch(times, widths, pool)
    return joint_blocks.lower_bound(batch, joint_blocks.limits_of(batch))


def _check(times: Times, widths: Sequence[int], pool: int, starts: Starts = ()) -> None:
    """What the core relies on: an index out of range would read foreign memory there."""
    powers = [1 << i for i in range(int(pool).bit_length())]
    if not len(widths) or [w for w in powers if w in widths] != list(widths):
        raise ValueError(f"widths {widths} are not ascending powers of two up to the pool, {pool}")
    table = np.asarray(times)
    if table.dtype.kind != "i":  # integers beyond 64 bits, or none
        table = np.asarray(times, object)
    whole = table.dtype.kind == "i" or all(isinstance(time, int | np.integer) for time in table.flat)
    if not whole or table.shape != (len(times), len(widths)) or table.min() < -1:
        raise ValueError(f"times are not integers from -1 on, one for each of {len(widths)} widths: {times}")
    possible = table >= 0
    for job in np.flatnonzero(~possible.any(axis=1)):
        raise InfeasiblePlanError(
            "a job runs on no number of ranks",
            values=f"job {job}, widths {list(widths)}",
            rule="every job fits on at least one width",
            remedy="raise the memory budget, or allow wider blocks",
        )
    for chosen, first in starts:
        option, start = np.asarray(chosen), np.asarray(first)
        good = option.shape == start.shape == (len(times),)
        if good and (good := option.min() >= 0 and option.max() < len(widths)):
            width = np.asarray(widths)[option]
            good = possible[np.arange(len(times)), option].all() and not (start % width).any()
            good = good and start.min() >= 0 and (start + width <= pool).all()
        if not good:
            raise ValueError(f"no schedule of these jobs: widths {chosen}, first ranks {first}")


def _tables(
    times: Times, widths: Sequence[int], pool: int
) -> tuple[ModuleType, np.ndarray, np.ndarray, int] | None:
    """The core and its tables; None where there is no core, or where a sum might leave its 62 bits.

    The largest sum is the work of all jobs, or the pool times a makespan: both at most pool x jobs x longest.
    """
    core = native.core()
    table = native.table(times) if core else None
    if table is None or pool * len(table) * int(table.max()) >= native.LIMIT:
        return None
    return core, table, np.array(widths, np.int64), pool


def _batch(times: Times, widths: Sequence[int], pool: int) -> Batch:
    rows = times.tolist() if isinstance(times, np.ndarray) else [[int(t) for t in row] for row in times]
    return Batch(rows, [int(w) for w in widths], int(pool))


def _draft(batch: Batch, chosen: Sequence[int], first: Sequence[int]) -> Draft:
    option, start = [int(c) for c in chosen], [int(f) for f in first]
    blocks = Blocks(batch)
    for row, o, s in zip(batch.times, option, start):
        blocks.change(blocks.node(o, s), row[o], 1)
    return Draft(option, start, blocks.best[1])


def _schedule(option: Sequence[int], start: Sequence[int], makespan: int, optimal: bool) -> Schedule:
    return Schedule(tuple(option), tuple(start), makespan, optimal)
