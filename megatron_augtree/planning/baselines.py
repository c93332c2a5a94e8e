"""The peers as planners over the same executor. Each variant is named; none is made weaker than it is.

===========================  =================================================================================
``ring``                     ring context parallelism: a pass a response, prompt recomputed, nothing shared
``ring-reuse``               one packed zigzag pass a group: prompt once, all keys and values ringed
``ring-reuse-per-response``  prompt once, then each response ringed, the prompt's keys and values again
``gather-reuse``             one packed zigzag pass a group, keys and values gathered in one piece
===========================  =================================================================================

Replicas of `degree` ranks take groups in turn, as data parallelism does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_augtree.config import InfeasiblePlanError
from megatron_augtree.planning.lanes import place_inner
from megatron_augtree.planning.placement import collect
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.tree import ForestShape

#: Modes whose forest shares nothing; all others share within a group only.
UNSHARED = ("ring",)


def baseline_plan(mode: str, shape: ForestShape, tree_groups: Sequence[int], world: int, degree: int) -> Plan:
    """The plan of a baseline.

    Args:
        mode: a key of `BASELINES`.
        shape: flattened for ``ring``, trees of single groups for the others.
        tree_groups: [tree] number of the group behind each root of the shape.
        world: ranks of the pool.
        degree: ranks of a replica; 0 is the pool.

    Raises:
        InfeasiblePlanError: the degree does not divide the pool.
    """
    degree = degree or world
    if world % degree:
        raise InfeasiblePlanError(
            "the pool does not divide into replicas",
            values=f"--context-parallel-size {degree}, {world} ranks",
            rule=f"under {mode} the degree divides the number of ranks",
            remedy="choose a divisor",
        )
    passes: list[Pass] = []
    events: list[Event] = []
    for root, group in sorted(zip(shape.roots, tree_groups), key=lambda pair: (pair[1], pair[0])):
        replica = group % (world // degree)
        block = tuple(range(replica * degree, (replica + 1) * degree))
        BASELINES[mode](shape, root, block, passes, events)
    return Plan(
        world=world,
        mode=mode,
        shape=shape,
        passes=tuple(passes),
        events=tuple(events),
        note=f"degree {degree}",
    )


def _packed(primitive: str) -> Callable[[ForestShape, int, tuple[int, ...], list[Pass], list[Event]], None]:
    """One zigzag pass a tree."""

    def add(shape, root, block, passes, events) -> None:
        index = len(passes)
        passes.append(_zigzag_pass(shape, shape.subtree(root), block, "fused", primitive, index, index))
        events += [Event("forward", index), Event("backward", index)]

    return add


def _per_response(
    shape: ForestShape, root: int, block: tuple[int, ...], passes: list[Pass], events: list[Event]
) -> None:
    """Inner nodes in a prefill, then a replay a leaf, all ringed."""
    nodes = shape.subtree(root)
    inner = [n for n in nodes if shape.children[n]]
    if not inner:
        return _packed("ring")(shape, root, block, passes, events)
    first = len(passes)
    passes.append(_zigzag_pass(shape, inner, block, "prefill", "ring", first, first))
    events.append(Event("forward", first))
    for leaf in (n for n in nodes if not shape.children[n]):
        index = len(passes)
        passes.append(_zigzag_pass(shape, [leaf], block, "replay", "ring", index, first, reads=(first,)))
        events += [Event("forward", index), Event("backward", index)]
    events.append(Event("backward", first))
    return None


def _zigzag_pass(
    shape: ForestShape,
    nodes: Sequence[int],
    block: tuple[int, ...],
    kind: str,
    primitive: str,
    index: int,
    job: int,
    reads: tuple[int, ...] = (),
) -> Pass:
    placement = collect(len(block), place_inner(shape, nodes, len(block)))
    return Pass(
        id=index, job=job, kind=kind, block=block, placement=placement, reads=reads, primitive=primitive
    )


BASELINES = {
    "ring": _packed("ring"),
    "ring-reuse": _packed("ring"),
    "ring-reuse-per-response": _per_response,
    "gather-reuse": _packed("gather_kv"),
}
