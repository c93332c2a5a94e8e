"""Every degree by itself: what a search finds whose blocks all have one degree.

With all widths to choose from, a tree's cheapest job on some ranks may be parts on narrower blocks, which
share no pass with their neighbours, and a search that is not exact may end elsewhere. So batches of few nodes
are arranged once for each degree, as if it were forced: no degree that divides the pool is then faster,
forced, than what the planner chooses by itself. Degrees that cannot end before the best are passed over, and
so are all for a single tree that is not small: of the powers of two it has seen every one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_augtree.planning.arrangement import Arrangement
from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.pool import Pool
from megatron_augtree.planning.sharing import FEW_NODES
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.planning.uniform import Uniform

#: Ranks of a pool whose degrees are few enough.
_FEW_RANKS = 64

#: A tree is small where a pass, whatever its rows, costs such a part of its time: there estimates say little.
_SMALL = 25

#: Ranks of a block, and trees on it, from which on one pass tells what all may take.
_WIDE, _SEVERAL = 8, 4


def is_few(shape: ForestShape, world: int, stages: int) -> bool:
    """Whether a batch is small enough for that, and no pipeline asks for slots."""
    return len(shape.rows) <= FEW_NODES and world <= _FEW_RANKS and stages == 1


def by_degree(
    pool: Pool, alone: Callable[[int], Pool], found: Sequence[Arrangement]
) -> Iterator[Arrangement]:
    """Arrangements of one degree each.

    Args:
        pool: the batch with all widths.
        alone: degree -> the same batch with blocks of that degree only.
        found: arrangements so far; what comes is added by the caller, priced on its own ranks.
    """
    best, powers = _least(found), pool.world & (pool.world - 1) == 0
    if len(pool.trees) == 1 and powers and best is not None and _SMALL * pool.pass_ns < best:
        return
    for degree in range(1, pool.limit + 1):
        if pool.world % degree == 0 and may_end(pool, degree, best) and not is_slow(pool, degree, best):
            for made in alone(degree).arrangements():
                yield replace(made, name=f"{made.name}, all of degree {degree}")
            best = _least(found)


def _least(found: Sequence[Arrangement]) -> int | None:
    return min((x.time_ns for x in found), default=None)


def may_end(pool: Pool, degree: int, best: int | None) -> bool:
    """Whether a batch may end before the best on blocks of one degree, even if all else is even.

    A block computes a sequence with all its ancestors. A tree on k blocks is therefore computed with its root
    k times, and k is at least what its work asks for.
    """
    if best is None:
        return True
    jobs, shape, most = pool.jobs, pool.shape, best - pool.launch_ns
    if Uniform(pool).least_shared(degree) >= best:
        return False
    leaves = (n for n, children in enumerate(shape.children) if not children)
    if max(jobs.ideal(shape.chain(n), degree) for n in leaves) >= most:
        return False
    work = 0
    for nodes, ideal in zip(pool.trees, pool.ideals):
        root = jobs.ideal(nodes[:1], 1) if len(nodes) > 1 else 0
        blocks = max(1, -(-(ideal - root) // (degree * most - root)))
        work += ideal + (blocks - 1) * root
    return work < most * pool.world


def is_slow(pool: Pool, degree: int, best: int | None) -> bool:
    """Whether wide blocks with several trees each take a tenth more than the best, were all blocks as full:
    by the fullest one's trees in one pass, the fewest launches there are. If its estimate says so, it is
    counted, too: of few rows a rank estimates are off by more than that."""
    blocks = pool.world // degree
    if best is None or degree < _WIDE or len(pool.trees) < _SEVERAL * blocks:
        return False
    jobs, loads = pool.jobs, [0] * blocks
    where = longest_first(pool.ideals, loads)
    for ideal, block in zip(pool.ideals, where):
        loads[block] += ideal
    full = loads.index(max(loads))
    nodes = tuple(n for tree, block in zip(pool.trees, where) if block == full for n in tree)
    ways = (make(nodes, degree) for make in (jobs.estimate, jobs.best))
    least = jobs.ideal(nodes, degree) - pool.floor_ns
    return all(offer is not None and 10 * (offer.cost - least) > 11 * best for offer in ways)
