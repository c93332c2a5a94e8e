"""What all baselines share: what they choose by, how jobs become recipes, who takes which tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_augtree.planning.candidates import split_inner
from megatron_augtree.planning.cluster import Cluster
from megatron_augtree.planning.lanes import node_costs, row_cost
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.recipe import Recipe, placement_of
from megatron_augtree.planning.tree import ForestShape

#: Passes, what is played, and why in a line: a plan whose rows are not placed yet.
Recipes = tuple[list[Recipe], list[Event], str]


@dataclass(frozen=True)
class Costs:
    """What a baseline chooses by.

    Attributes:
        pairs_per_row: cost of a row's linear layers in (query, key) pairs, see `lanes.row_cost`.
        price: (shape, recipes, events) -> (ns, bytes of the largest rank), of the whole plan; None: by the
            load of the slowest rank, in pairs.
        budget_bytes: memory of a rank; what needs more is chosen only where nothing fits. 0: no limit.
        model, cluster: for the score of ``paper``; None: it knows of no traffic.
    """

    pairs_per_row: int = 1
    price: Callable[[ForestShape, Sequence[Recipe], Sequence[Event]], tuple[int, int]] | None = None
    budget_bytes: int = 0
    model: ModelShape | None = None
    cluster: Cluster | None = None

    def of(self, shape: ForestShape, made: Recipes) -> tuple[bool, int]:
        """(does not fit, time) of some recipes: the smaller, the better."""
        if self.price is None:
            return False, slowest_load(shape, made[0], self.pairs_per_row)
        time_ns, peak_bytes = self.price(shape, made[0], made[1])
        return 0 < self.budget_bytes < peak_bytes, time_ns


def slowest_load(shape: ForestShape, recipes: Sequence[Recipe], pairs_per_row: int) -> int:
    """Load of the busiest rank, in pairs; in every pass a block waits for its slowest rank."""
    busy: dict[int, int] = {}
    for recipe in recipes:
        placed = placement_of(recipe, shape, pairs_per_row)
        slowest = max(sum(row_cost(shape, *span, pairs_per_row) for span in spans) for spans in placed)
        for rank in range(recipe.start, recipe.start + recipe.width):
            busy[rank] = busy.get(rank, 0) + slowest
    return max(busy.values(), default=0)


class Sizes:
    """Sizes of the trees of a step, counted once for all degrees.

    Args:
        shape: the forest.
        trees: [tree] -> its nodes.
        pairs_per_row: see `lanes.row_cost`.
    """

    def __init__(self, shape: ForestShape, trees: Sequence[Sequence[int]], pairs_per_row: int) -> None:
        self._shape, self._trees, self._unit = shape, trees, pairs_per_row

    @cached_property
    def rows(self) -> list[int]:
        """[tree] its rows."""
        return [sum(map(self._shape.rows.__getitem__, nodes)) for nodes in self._trees]

    @cached_property
    def work(self) -> list[int]:
        """[tree] its rows and pairs, in pairs."""
        return [sum(node_costs(self._shape, nodes, self._unit)) for nodes in self._trees]


@dataclass(frozen=True)
class Step:
    """What a baseline plans.

    Attributes:
        shape: the forest, shared as the mode shares.
        trees: [tree] -> its nodes.
        groups: [tree] -> number of its group.
        world: ranks of the pool.
        degree: ranks of a replica; under the dynamic modes, of the longest sequence or tree.
        costs: what is chosen by.
        sizes: of its trees.
    """

    shape: ForestShape
    trees: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]
    world: int
    degree: int
    costs: Costs
    sizes: Sizes

    @property
    def replicas(self) -> int:
        return self.world // self.degree

    def in_turn(self) -> list[int]:
        """[tree] -> replica, as data parallelism deals groups out."""
        return [group % self.replicas for group in self.groups]

    def by_group(self) -> list[int]:
        """Trees in the order of their groups."""
        return sorted(range(len(self.trees)), key=lambda t: (self.groups[t], t))


class Lay(NamedTuple):
    """How leaves lie and keys travel.

    Attributes:
        lane: ranks of a lane; 0: the block.
        wide: longest leaves that are cut over the block whatever `lane` is.
        pieces: pieces of a gather.
    """

    lane: int = 0
    wide: int = 0
    pieces: int = 1


LAID_WIDE = Lay()


class Maker:
    """Collects jobs as recipes and events.

    Args:
        shape: the forest.
    """

    def __init__(self, shape: ForestShape) -> None:
        self.shape = shape
        self.recipes: list[Recipe] = []
        self.events: list[Event] = []
        self.jobs = 0

    def made(self, note: str) -> Recipes:
        """Everything so far."""
        return self.recipes, self.events, note

    def fused(
        self, nodes: Sequence[int], start: int, width: int, primitive: str, how: Lay = LAID_WIDE
    ) -> None:
        """A job of one pass over some nodes."""
        inner, leaves = split_inner(self.shape, nodes)
        self._add("fused", start, width, primitive, how, inner=inner, leaves=leaves)
        self.jobs += 1

    def phased(
        self,
        nodes: Sequence[int],
        start: int,
        width: int,
        primitive: str,
        how: Lay = LAID_WIDE,
        *,
        spine: str = "",
        waves: Sequence[Sequence[int]] = (),
    ) -> None:
        """A job of a prefill of the inner nodes and a replay a wave; without inner nodes, of one fused pass.

        Args:
            nodes: what the job computes.
            start, width: its block.
            primitive: of the replays.
            how: how leaves lie and keys travel.
            spine: primitive of the prefill; empty: the same.
            waves: leaves of each replay; none: all leaves in one.
        """
        inner, leaves = split_inner(self.shape, nodes)
        if not inner:
            self.fused(nodes, start, width, spine or primitive, how)
            return
        prefill = self._add("prefill", start, width, spine or primitive, how, inner=inner, backward=False)
        for wave in waves or [leaves]:
            self._add("replay", start, width, primitive, how, leaves=tuple(wave), reads=(prefill,))
        self.events.append(Event("backward", prefill))
        self.jobs += 1

    def _add(
        self,
        kind: str,
        start: int,
        width: int,
        primitive: str,
        how: Lay,
        *,
        inner: tuple[int, ...] = (),
        leaves: tuple[int, ...] = (),
        reads: tuple[int, ...] = (),
        backward: bool = True,
    ) -> int:
        index = len(self.recipes)
        self.recipes.append(
            Recipe(
                job=self.jobs,
                kind=kind,
                start=start,
                width=width,
                inner=inner,
                leaves=leaves,
                lane_degree=how.lane or width,
                wide=min(how.wide, len(leaves)),
                reads=reads,
                primitive=primitive,
                pieces=how.pieces,
            )
        )
        self.events.append(Event("forward", index))
        if backward:
            self.events.append(Event("backward", index))
        return index
