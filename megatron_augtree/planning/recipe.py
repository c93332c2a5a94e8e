"""A pass in a few integers, before its rows are placed: what planners compare and the fast core prices.

A plan of a thousand ranks holds tens of thousands of spans, a recipe a handful of numbers and the nodes. All
planners, the baselines' too, make recipes; only the winner's rows are placed (`plan_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_augtree.planning.lanes import place
from megatron_augtree.planning.placement import Placement, Span, collect, zigzag
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.tree import ForestShape


class Recipe(NamedTuple):
    """One pass. Its block is `width` neighbours from rank `start` on.

    Attributes:
        job: the job it belongs to.
        kind: one of `plan.KINDS`.
        start, width: ranks of the block.
        inner: nodes that are cut in a zigzag over the whole block, in ascending order.
        leaves: nodes that go to lanes, in ascending order; see `lanes.place`.
        lane_degree, wide: see `lanes.place`; `lane_degree` divides `width`.
        lo, hi: which of the inner nodes' rows, counted through all of them in turn; `hi` -1 is all.
        reads: earlier passes (positions in the list of recipes) whose keys and values it uses.
        primitive, pieces, node_ranks, keep, prefetch, keep_layers, keep_attention, offload: see `plan.Pass`.
    """

    job: int
    kind: str
    start: int
    width: int
    inner: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    lane_degree: int = 1
    wide: int = 0
    lo: int = 0
    hi: int = -1
    reads: tuple[int, ...] = ()
    primitive: str = "gather_kv"
    pieces: int = 1
    node_ranks: int = 0
    keep: bool = True
    prefetch: bool = False
    keep_layers: int = -1
    keep_attention: int = 0
    offload: bool = False


@dataclass(frozen=True)
class Decision:
    """A plan that is priced and whose rows are not placed yet.

    Attributes:
        mode: whose plan it is: ``augtree``, or a peer's.
        recipes, events: passes, and what is played.
        note: why this plan, in a line.
        time_ns, peak_bytes: its price.
    """

    mode: str
    recipes: Sequence[Recipe]
    events: Sequence[Event]
    note: str
    time_ns: int
    peak_bytes: int


def placement_of(recipe: Recipe, shape: ForestShape, pairs_per_row: int) -> Placement:
    """Where a recipe's rows go.

    Args:
        recipe: the pass.
        shape: the forest.
        pairs_per_row: cost of a row's linear layers in (query, key) pairs, see `lanes.row_cost`.
    """
    if recipe.hi < 0:
        return place(
            shape,
            recipe.inner,
            recipe.leaves,
            recipe.width,
            lane_degree=recipe.lane_degree,
            wide=recipe.wide,
            pairs_per_row=pairs_per_row,
        )
    spans = cut_rows(shape, recipe.inner, recipe.lo, recipe.hi)
    pieces = [piece for span in spans for piece in enumerate(zigzag(*span, [1] * recipe.width))]
    return collect(recipe.width, pieces)


def cut_rows(shape: ForestShape, nodes: Sequence[int], lo: int, hi: int) -> list[Span]:
    """Rows lo..hi of some nodes, counted through all of them in turn: a causal piece of a spine."""
    spans, start = [], 0
    for node in nodes:
        first, last = max(lo - start, 0), min(hi - start, shape.rows[node])
        if first < last:
            spans.append(Span(node, first, last))
        start += shape.rows[node]
    return spans


def plan_of(
    recipes: Sequence[Recipe],
    events: Sequence[Event],
    *,
    mode: str,
    shape: ForestShape,
    world: int,
    pairs_per_row: int,
    note: str = "",
) -> Plan:
    """The plan of some recipes: every pass with its rows placed.

    Args:
        recipes: passes in order; `reads` are positions in it.
        events: what is played.
        mode: the ``--context-parallel-mode``.
        shape: the forest.
        world: ranks of the pool.
        pairs_per_row: see `placement_of`.
        note: why this plan, in a line.
    """
    passes = [
        Pass(
            id=index,
            job=r.job,
            kind=r.kind,
            block=tuple(range(r.start, r.start + r.width)),
            placement=placement_of(r, shape, pairs_per_row),
            reads=r.reads,
            primitive=r.primitive if r.width > 1 else "local",
            pieces=r.pieces,
            keep=r.keep,
            node_ranks=r.node_ranks if r.width > 1 else 0,
            prefetch=r.prefetch,
            keep_layers=r.keep_layers,
            keep_attention=r.keep_attention,
            offload=r.offload,
        )
        for index, r in enumerate(recipes)
    ]
    return Plan(world, mode, shape, tuple(passes), tuple(events), note)
