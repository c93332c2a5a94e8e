"""The rules of a plan, as `Plan.check` asserts them. Every check is linear in the plan's spans and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.placement import Span

if TYPE_CHECKING:
    from megatron_augtree.planning.plan import Pass, Plan

#: node -> spans of it.
_Held = dict[int, list[Span]]


def check_pass(plan: Plan, p: Pass) -> None:
    """Block, rows and fields of a pass."""
    require(
        0 <= p.id < len(plan.passes) and plan.passes[p.id] is p,
        "passes are numbered in order",
        lambda: f"pass {p.id}",
    )
    require(
        len(set(p.block)) == len(p.block) == len(p.placement) > 0
        and 0 <= min(p.block) <= max(p.block) < plan.world,
        "a block's ranks are distinct ranks of the pool",
        lambda: f"pass {p.id}: {p.block} of {plan.world}",
    )
    require(
        len(set(p.reads)) == len(p.reads),
        "a pass reads another pass once",
        lambda: f"pass {p.id} reads {p.reads}",
    )
    require(
        not p.nodes or 0 <= min(p.nodes) <= max(p.nodes) < len(plan.shape.rows),
        "a pass holds nodes of the forest",
        lambda: f"pass {p.id}: {sorted(p.nodes)} of {len(plan.shape.rows)}",
    )
    require(
        all(len(spans) < 2 or list(spans) == sorted(spans) for spans in p.placement),
        "a rank's spans are in the order of nodes and rows: tiles and transfers count on it",
        lambda: f"pass {p.id}",
    )
    for read in p.reads:
        require(
            0 <= read < p.id and plan.passes[read].block == p.block and plan.passes[read].job == p.job,
            "a pass reads earlier passes of its job on its block",
            lambda read=read: f"pass {p.id} reads {read}",
        )
    require(p.primitive != "move_q" or bool(p.reads), "move_q needs prompt state", lambda: f"pass {p.id}")
    require(
        p.keep_layers >= 0 <= p.keep_attention or (p.keep_layers, p.keep_attention) == (-1, 0),
        "layers that keep are counted from 0; a pass that leaves it to the model has -1 and 0",
        lambda: f"pass {p.id}: keep_layers {p.keep_layers}, keep_attention {p.keep_attention}",
    )
    require(
        p.node_ranks == 0 or (p.node_ranks > 0 and p.primitive == "gather_kv"),
        "only gather_kv hands keys on inside nodes, of so many ranks each",
        lambda: f"pass {p.id}: {p.primitive}, node_ranks {p.node_ranks}",
    )
    require(
        bool(p.reads) or not p.prefetch,
        "only prompt state can be fetched ahead",
        lambda: f"pass {p.id} reads nothing",
    )


def check_job(plan: Plan, job: int, passes: list[Pass]) -> None:
    """Every row once; every ancestor's row where the pass can see it."""
    shape = plan.shape
    own = {p.id: _held(p) for p in passes}
    parts = _together(own.values())
    for node, spans in parts.items():
        require(
            _covers(spans, shape.rows[node]),
            "a job holds every row of its nodes once",
            lambda node=node: f"job {job}, node {node}: {_rows(parts[node])} of {shape.rows[node]} rows",
        )
    for node in parts:
        require(
            shape.ancestors[node] <= parts.keys(),
            "a job holds the ancestors of its nodes",
            lambda node=node: f"job {job}, node {node}",
        )
    known: dict[tuple[int, ...], _Held] = {}
    for p in passes:
        if p.reads not in known:
            known[p.reads] = _together(own[read] for read in p.reads)
        _check_sight(plan, p, own[p.id], known[p.reads], parts)


def _check_sight(plan: Plan, p: Pass, own: _Held, read: _Held, parts: _Held) -> None:
    """What a pass holds and reads is all that its rows see; `parts` is what its job holds, every row once."""
    shape = plan.shape
    # A node of which a pass has as many spans as its job has is whole.
    whole = {node for held in (own, read) for node, spans in held.items() if len(spans) == len(parts[node])}
    for node, spans in own.items():
        visible = [*spans, *read.get(node, ())]
        if node not in whole and _covers(visible, shape.rows[node]):
            whole.add(node)
        last = 0 if node in whole else max(hi for _, _, hi in spans)
        require(
            node in whole or _covers([span for span in visible if span[1] < last], last),
            "a pass reads its node's earlier rows",
            lambda node=node: f"pass {p.id}, node {node}",
        )
    for node in own:
        require(
            shape.ancestors[node] <= whole,
            "a pass reads all its ancestors' rows",
            lambda node=node: f"pass {p.id}, node {node}, ancestors {sorted(shape.ancestors[node] - whole)}",
        )


def _held(p: Pass) -> _Held:
    """node -> the spans of it that a pass holds."""
    held: _Held = {}
    for spans in p.placement:
        for span in spans:
            if span[0] in held:
                held[span[0]].append(span)
            else:
                held[span[0]] = [span]
    return held


def _together(parts: Iterable[_Held]) -> _Held:
    """What several passes hold."""
    held: _Held = {}
    for part in parts:
        for node, spans in part.items():
            held[node] = [*held[node], *spans] if node in held else spans
    return held


def _rows(spans: Iterable[Span]) -> list[tuple[int, int]]:
    return sorted((lo, hi) for _, lo, hi in spans)


def _covers(spans: Iterable[Span], end: int) -> bool:
    """Whether spans of one node are its rows up to `end`, each once."""
    edge = 0
    for _, lo, hi in sorted(spans):
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
        require(
            0 <= pass_id < len(plan.passes),
            "an event is of a pass",
            lambda action=action, pass_id=pass_id: f"{action} {pass_id}",
        )
        if action == "forward":
            reads = plan.passes[pass_id].reads
            require(
                forward.issuperset(reads) and backward.isdisjoint(reads) and pass_id not in forward,
                "a forward comes once, while the state it reads is alive",
                lambda pass_id=pass_id: f"pass {pass_id}",
            )
            forward.add(pass_id)
        else:
            done = pass_id in backward or not readers.get(pass_id, set()) <= backward
            require(
                action == "backward" and pass_id in forward and not done,
                "a backward comes once, after its readers'",
                lambda action=action, pass_id=pass_id: f"{action} {pass_id}",
            )
            backward.add(pass_id)
    require(
        forward == backward == set(range(len(plan.passes))),
        "every pass has a forward and a backward",
        lambda: f"forward {sorted(forward)}, backward {sorted(backward)}",
    )


def require(good: bool, rule: str, values: str | Callable[[], str]) -> None:
    """Raise an `AugTreeError` unless a rule holds; `values` are written down only then."""
    if not good:
        raise AugTreeError(
            "a plan breaks a rule",
            values=values if isinstance(values, str) else values(),
            rule=rule,
            remedy="plan again; a plan that the planner made and that fails here is a bug",
        )
