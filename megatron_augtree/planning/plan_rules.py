"""The rules of a plan, as `Plan.check` asserts them. Every check is linear in the plan's spans and passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from megatron_augtree.config import AugTreeError

if TYPE_CHECKING:
    from megatron_augtree.planning.plan import Pass, Plan


def check_pass(plan: Plan, p: Pass) -> None:
    """Block, rows and fields of a pass."""
    require(
        0 <= p.id < len(plan.passes) and plan.passes[p.id] is p,
        "passes are numbered in order",
        f"pass {p.id}",
    )
    require(
        len(set(p.block)) == len(p.block) == len(p.placement) > 0
        and all(0 <= rank < plan.world for rank in p.block),
        "a block's ranks are distinct ranks of the pool",
        f"pass {p.id}: {p.block} of {plan.world}",
    )
    require(
        all(0 <= node < len(plan.shape.rows) for node in p.nodes),
        "a pass holds nodes of the forest",
        f"pass {p.id}: {sorted(p.nodes)} of {len(plan.shape.rows)}",
    )
    require(
        all(list(spans) == sorted(spans) for spans in p.placement),
        "a rank's spans are in the order of nodes and rows: tiles and transfers count on it",
        f"pass {p.id}",
    )
    for read in p.reads:
        require(
            0 <= read < p.id and plan.passes[read].block == p.block and plan.passes[read].job == p.job,
            "a pass reads earlier passes of its job on its block",
            f"pass {p.id} reads {read}",
        )
    require(p.primitive != "move_q" or bool(p.reads), "move_q needs prompt state", f"pass {p.id}")
    require(
        p.keep_layers >= 0 <= p.keep_attention or (p.keep_layers, p.keep_attention) == (-1, 0),
        "layers that keep are counted from 0; a pass that leaves it to the model has -1 and 0",
        f"pass {p.id}: keep_layers {p.keep_layers}, keep_attention {p.keep_attention}",
    )
    require(
        p.node_ranks == 0 or (p.node_ranks > 0 and p.primitive == "gather_kv"),
        "only gather_kv hands keys on inside nodes, of so many ranks each",
        f"pass {p.id}: {p.primitive}, node_ranks {p.node_ranks}",
    )
    require(
        bool(p.reads) or not p.prefetch,
        "only prompt state can be fetched ahead",
        f"pass {p.id} reads nothing",
    )


def check_job(plan: Plan, job: int, passes: list[Pass]) -> None:
    """Every row once; every ancestor's row where the pass can see it."""
    shape = plan.shape
    for node, ranges in _held(passes).items():
        require(
            _covers(ranges, shape.rows[node]),
            "a job holds every row of its nodes once",
            f"job {job}, node {node}: {sorted(ranges)} of {shape.rows[node]} rows",
        )
    nodes = frozenset().union(*(p.nodes for p in passes))
    for node in nodes:
        require(
            shape.ancestors[node] <= nodes,
            "a job holds the ancestors of its nodes",
            f"job {job}, node {node}",
        )
    for p in passes:
        visible = _held([p, *(plan.passes[read] for read in p.reads)])
        whole = {node for node, ranges in visible.items() if _covers(ranges, shape.rows[node])}
        for node, ranges in _held([p]).items():
            last = max(hi for _, hi in ranges)
            require(
                node in whole or _covers([r for r in visible[node] if r[0] < last], last),
                "a pass reads its node's earlier rows",
                f"pass {p.id}, node {node}",
            )
            missing = shape.ancestors[node] - whole
            require(
                not missing,
                "a pass reads all its ancestors' rows",
                f"pass {p.id}, node {node}, ancestors {sorted(missing)}",
            )


def _held(passes: Iterable[Pass]) -> dict[int, list[tuple[int, int]]]:
    """node -> the rows that some passes hold."""
    held: dict[int, list[tuple[int, int]]] = {}
    for p in passes:
        for spans in p.placement:
            for node, lo, hi in spans:
                held.setdefault(node, []).append((lo, hi))
    return held


def _covers(ranges: Iterable[tuple[int, int]], end: int) -> bool:
    edge = 0
    for lo, hi in sorted(ranges):
        if lo != edge or hi <= lo:
            return False
        edge = hi
    return edge == end


def check_events(plan: Plan) -> None:
    """A forward and a backward of every pass, in an order in which what a pass reads is alive."""
    forward: set[int] = set()
    backward: set[int] = set()
    readers: dict[int, set[int]] = {}
    for p in plan.passes:
        for read in p.reads:
            readers.setdefault(read, set()).add(p.id)
    for action, pass_id in plan.events:
        require(0 <= pass_id < len(plan.passes), "an event is of a pass", f"{action} {pass_id}")
        if action == "forward":
            reads = plan.passes[pass_id].reads
            require(
                forward.issuperset(reads) and backward.isdisjoint(reads) and pass_id not in forward,
                "a forward comes once, while the state it reads is alive",
                f"pass {pass_id}",
            )
            forward.add(pass_id)
        else:
            done = pass_id in backward or not readers.get(pass_id, set()) <= backward
            require(
                action == "backward" and pass_id in forward and not done,
                "a backward comes once, after its readers'",
                f"{action} {pass_id}",
            )
            backward.add(pass_id)
    require(
        forward == backward == set(range(len(plan.passes))),
        "every pass has a forward and a backward",
        f"forward {sorted(forward)}, backward {sorted(backward)}",
    )


def require(good: bool, rule: str, values: str) -> None:
    """Raise an `AugTreeError` unless a rule holds."""
    if not good:
        raise AugTreeError(
            "a plan breaks a rule",
            values=values,
            rule=rule,
            remedy="plan again; a plan that the planner made and that fails here is a bug",
        )
