"""The peers as planners over the same executor. Each variant is named; none is made weaker than it is.

===========================  =================================================================================
``ring``                     ring context parallelism: a pass a response, prompt recomputed, nothing shared
``ring-reuse``               one packed zigzag pass a group: prompt once, all keys and values ringed
``ring-reuse-two-pass``      prompt once, then all responses in one pass, the prompt's keys and values again
``ring-reuse-per-response``  prompt once, then each response ringed, the prompt's keys and values again
``gather-reuse``             one packed zigzag pass a group, keys and values gathered in one piece
``dynamic``                  Megatron's dynamic context parallelism: ranks by each response's length, balanced
``dynamic-reuse``            the same for whole groups: prompt once, ranks by the group's rows, gathered
``dcp-phased``               balanced blocks, keys and values gathered: prompt once, then all responses
``dcp-fused``                the same in one pass, prompt and responses together: the strong one
``paper``                    arXiv 2609.33133: per group plain ring, lanes with a prompt copy each, or queries
                             that travel; in rounds where memory asks for them
===========================  =================================================================================

Under the first five, replicas of `degree` ranks take groups in turn, as data parallelism does; ``dcp`` and
``paper`` deal trees out longest first. Under the dynamic modes `degree` is that of the longest sequence or
group, and 0 the cheapest of all. A sequence, or a group's pass, is a micro-batch: under pipeline stages the
price sees every pass as a slot, so that ``ring`` and ``dynamic`` are priced as pipelined as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_augtree.config import InfeasiblePlanError
from megatron_augtree.planning.baselines import modes, paper
from megatron_augtree.planning.baselines.common import Costs, Recipes, Sizes, Step
from megatron_augtree.planning.baselines.hybrid import widths
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.recipe import plan_of
from megatron_augtree.planning.tree import ForestShape

__all__ = [
    "BASELINES",
    "UNSHARED",
    "Costs",
    "Recipes",
    "baseline_plan",
    "baseline_recipes",
    "degrees_of",
    "lean",
    "recipes_of",
    "seatings",
    "variants",
]

#: Mode -> generator of recipes: what the mode runs, then its other choices.
BASELINES = {
    **{mode: modes.seated(mode) for mode in modes.SEATED},
    "dcp-phased": modes.dcp_phased,
    "dcp-fused": modes.dcp_fused,
    "paper": paper.paper,
}

#: Modes whose forest shares nothing; all others share within a group only.
UNSHARED = ("ring", "dynamic")

#: Modes that give every tree ranks of its own choice: `degree` is that of the longest.
FREE = ("dynamic", "dynamic-reuse")


def baseline_recipes(
    mode: str,
    shape: ForestShape,
    tree_groups: Sequence[int],
    world: int,
    degree: int,
    costs: Costs | None = None,
) -> Recipes:
    """The passes of a baseline, their rows not yet placed.

    Args:
        mode: a key of `BASELINES`.
        shape: flattened for the modes in `UNSHARED`, trees of single groups for the others.
        tree_groups: [tree] number of the group behind each root of the shape.
        world: ranks of the pool.
        degree: ranks of a replica, 0 for the pool; under the dynamic modes ranks of the longest sequence or
            group, 0 for the cheapest.
        costs: what it chooses by; None: loads.

    Raises:
        InfeasiblePlanError: the pool does not have the degree.
    """
    return next(BASELINES[mode](_step(mode, shape, tree_groups, world, degree, costs)))


def variants(
    mode: str,
    shape: ForestShape,
    tree_groups: Sequence[int],
    world: int,
    costs: Costs | None = None,
    degrees: Sequence[int] = (),
) -> Iterator[Recipes]:
    """All recipes of a baseline, over degrees and its own choices, so that a caller can take the cheapest.

    Args:
        mode, shape, tree_groups, world, costs: as for `baseline_recipes`.
        degrees: which; none: all that the pool has.
    """
    for degree in degrees or degrees_of(mode, world):
        yield from BASELINES[mode](_step(mode, shape, tree_groups, world, degree, costs))


def seatings(
    mode: str,
    shape: ForestShape,
    tree_groups: Sequence[int],
    world: int,
    costs: Costs | None = None,
    degrees: Iterable[int] = (),
) -> Iterator[modes.Seating]:
    """`variants` of a mode in which every tree is one job (`modes.SEATED`), without their recipes.

    Thousands can be compared by a table of what a tree costs on some ranks; `recipes_of` makes the winner's.
    """
    step = _step(mode, shape, tree_groups, world, 0, costs)
    for degree in degrees or degrees_of(mode, world):
        yield from modes.SEATED[mode][0](_at(mode, step, degree))


def recipes_of(mode: str, shape: ForestShape, seating: modes.Seating) -> Recipes:
    """The recipes of one of a mode's `seatings`."""
    return modes.seat(shape, modes.SEATED[mode][1], seating)


def degrees_of(mode: str, world: int) -> list[int]:
    """The degrees that a pool has under a mode, ascending."""
    return widths(world) if mode in FREE else [d for d in range(1, world + 1) if world % d == 0]


def lean(made: Recipes) -> Recipes:
    """The same passes without keeping what they receive: less memory, more traffic in the backward."""
    recipes, events, note = made
    return [r._replace(keep=False) for r in recipes], events, f"{note}, re-fetching"


def baseline_plan(
    mode: str,
    shape: ForestShape,
    tree_groups: Sequence[int],
    world: int,
    degree: int,
    costs: Costs | None = None,
) -> Plan:
    """The plan of a baseline; arguments and errors as for `baseline_recipes`."""
    recipes, events, note = baseline_recipes(mode, shape, tree_groups, world, degree, costs)
    unit = (costs or Costs()).pairs_per_row
    return plan_of(recipes, events, mode=mode, shape=shape, world=world, pairs_per_row=unit, note=note)


def _step(
    mode: str,
    shape: ForestShape,
    tree_groups: Sequence[int],
    world: int,
    degree: int,
    costs: Costs | None,
) -> Step:
    """The step with its degree checked."""
    costs, trees = costs or Costs(), shape.trees
    sizes = Sizes(shape, trees, costs.pairs_per_row)
    return _at(mode, Step(shape, trees, tuple(tree_groups), world, world, costs, sizes), degree)


def _at(mode: str, step: Step, degree: int) -> Step:
    free, world = mode in FREE, step.world
    if degree and (degree not in widths(world) if free else world % degree):
        rule = "divides the number of ranks"
        if free:
            rule = "is a power of two of at most the number of ranks, or all of them"
        raise InfeasiblePlanError(
            "the pool does not divide into replicas",
            values=f"--context-parallel-size {degree}, {world} ranks",
            rule=f"under {mode} the degree {rule}",
            remedy="choose a divisor" if not free else "choose one of them",
        )
    return replace(step, degree=degree if free else degree or world)
