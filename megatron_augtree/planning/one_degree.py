"""Every degree by itself: what a search finds whose blocks all have one degree.

With all widths to choose from, a tree's cheapest job on some ranks may be parts on narrower blocks, which
share no pass with their neighbours, and a search that is not exact may end elsewhere. So batches of few nodes
are arranged once for each degree, as if it were forced: no forced degree is then faster than what the planner
chooses by itself. Degrees that cannot end before the best are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from megatron_augtree.planning.arrangement import Arrangement
from megatron_augtree.planning.pool import FEW_ROWS, Pool
from megatron_augtree.planning.sharing import FEW_NODES
from megatron_augtree.planning.uniform import Uniform

#: Ranks of a pool whose degrees are few enough.
_FEW_RANKS = 64


def by_degree(
    pool: Pool, alone: Callable[[int], Pool], best: Callable[[], int | None]
) -> Iterator[Arrangement]:
    """Arrangements of one degree each, of a batch of few nodes.

    Args:
        pool: the batch with all widths.
        alone: degree -> the same batch with blocks of that degree only.
        best: time of the best arrangement so far, ns; None where there is none.
    """
    if len(pool.shape.rows) > FEW_NODES or pool.world > _FEW_RANKS:
        return
    few = pool.shape.total_rows < FEW_ROWS * pool.world  # estimates say little
    if len(pool.trees) == 1 and pool.world & (pool.world - 1) == 0 and not few:
        return  # all its blocks have been compared
    for degree in range(1, pool.limit + 1):
        if pool.world % degree == 0 and may_end(pool, degree, best()):
            for made in alone(degree).arrangements():
                yield replace(made, name=f"{made.name}, all of degree {degree}")


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
