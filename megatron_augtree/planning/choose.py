"""The plan of a step among modes whose trees differ: what a mode shares decides which forest it computes.

``augtree`` plans the forest in which groups share what they have in common, with the peers that share as
candidates (`search.py`). Few ranks, or little memory, may be better off with a tree a group: where groups are
joined, that forest is planned, too. Peers that share nothing compute a third one; they are planned only where
they may be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.baselines import UNSHARED
from megatron_augtree.planning.cost import NS
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import Considered, configured, explain, unshared_least
from megatron_augtree.planning.tree import ForestShape

#: More rows than any prompt has: trees of different groups never merge.
_NEVER = 1 << 62

#: A mode that shares within groups only.
WITHIN = "gather-reuse"


class Trees(Protocol):
    """A forest of a step: its lengths, [root] the number of the (first) group behind it, and whether a tree
    holds rows of several groups."""

    @property
    def shape(self) -> ForestShape: ...

    @property
    def tree_groups(self) -> Sequence[int]: ...

    @property
    def joined(self) -> bool: ...


T = TypeVar("T", bound=Trees)


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """A plan, the forest that it plays, and the candidates that were looked at on the way."""

    trees: T
    plan: Plan
    considered: Sequence[Considered]


def choose(trees_of: Callable[[str], T], model: ModelShape, world: int, config: AugTreeConfig) -> Chosen[T]:
    """The mode's plan; under ``augtree`` without sharing over groups, or that of a peer which shares nothing,
    where it is faster.

    Args:
        trees_of: mode -> the forest that it computes.
        model: sizes of the model, without what `configured` adds.
        world: ranks of the pool.
        config: the mode and its limits.

    Raises:
        InfeasiblePlanError: a forced plan or a memory budget that nothing satisfies.
    """
    model = configured(model, config)
    joined = trees_of(config.mode)
    first = _planned(config.mode, joined, model, world, config)
    found = [first]
    if config.mode == "augtree" and joined.joined:
        found.append(_planned(config.mode, trees_of(WITHIN), model, world, config))
    free = config.mode == "augtree" and not config.force
    if free and _unshared_may_win(first, model, world, config):
        found += [_planned(mode, trees_of(mode), model, world, config) for mode in UNSHARED]
    feasible = [x for x in found if isinstance(x, Chosen)]
    if not feasible:
        raise first
    best = min(feasible, key=lambda x: x.plan.seconds)  # ties go to the earlier one
    every = sorted((c for x in feasible for c in x.considered), key=lambda c: (not c.fits, c.time_ns))
    return Chosen(best.trees, best.plan, every)


def _planned(
    mode: str, trees: T, model: ModelShape, world: int, config: AugTreeConfig
) -> Chosen[T] | InfeasiblePlanError:
    ask = {"tree_groups": trees.tree_groups, "mode": mode}
    try:
        plan, considered = explain(trees.shape, model, world, config, **ask)
    except InfeasiblePlanError as error:
        return error
    # A baseline on its own looks at nothing else.
    alone = Considered(f"{plan.mode}: {plan.note}", round(plan.seconds * NS), plan.peak_bytes, True)
    return Chosen(trees, plan, considered or [alone])


def _unshared_may_win(
    first: Chosen[T] | InfeasiblePlanError, model: ModelShape, world: int, config: AugTreeConfig
) -> bool:
    """Whether sharing nothing can be faster; seldom, so that its plans are seldom made."""
    if not isinstance(first, Chosen):
        return True
    return unshared_least(first.trees.shape, model, world, config) < first.plan.seconds


def merging(mode: str, min_shared_rows: int) -> dict[str, int | bool]:
    """How a mode merges sequences, as arguments of `tree.from_sequences`.

    Args:
        mode: ``augtree`` merges over groups, the others within groups or not at all.
        min_shared_rows: rows that groups have to share.
    """
    minimum = min_shared_rows if mode == "augtree" else _NEVER
    return {"min_shared_rows": minimum, "share": mode not in UNSHARED}
