"""What travels when and which tiles meet it, against a definition row by row; keys through relays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.compiler import compile_pass
from megatron_augtree.planning.lanes import place, place_inner
from megatron_augtree.planning.placement import Placement, Span, collect
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.schedule import HOME, Program, promise, reverse
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import Graph, Machine, Work, graphs, indices, row_names, visible
from tests.unit.test_schedule import DKV, KV, MODEL, play

Row = tuple[int, int]
States = Sequence[tuple[int, Placement]]


# The definition, row by row.


def owners(shape: ForestShape, placement: Placement, states: States) -> dict[Row, int]:
    held = [placement, *(placed for _, placed in states)]
    return {
        name: rank for kind in held for rank, spans in enumerate(kind) for name in row_names(shape, spans)
    }


def needs(shape: ForestShape, placement: Placement, states: States) -> list[set[Row]]:
    """[rank] -> rows, owned elsewhere, that some query of the rank sees."""
    owner = owners(shape, placement, states)
    seen = [{key for name in row_names(shape, spans) for key in visible(shape, name)} for spans in placement]
    return [{key for key in keys if owner[key] != rank} for rank, keys in enumerate(seen)]


def group_of(item: int, count: int, pieces: int) -> int:
    """The group of an item, where group g of k holds items n g / k .. n (g + 1) / k, rounded down."""
    pieces = min(pieces, count)
    return next(g for g in range(pieces) if count * (g + 1) // pieces > item)


def moves(
    shape: ForestShape, placement: Placement, states: States, nodes: Sequence[int], pieces: int
) -> dict[tuple[int, int, int], set[Row]]:
    """(stage, from, to) -> rows. A row crosses to the rank that has its owner's place in the other node."""
    ranks_of = {n: [r for r, m in enumerate(nodes) if m == n] for n in dict.fromkeys(nodes)}
    place_of = {r: i for mates in ranks_of.values() for i, r in enumerate(mates)}
    order = list(ranks_of)
    owner, found = owners(shape, placement, states), {}

    def direct(src: int, dst: int) -> int:
        """The stage in which `dst` fetches from the owner: nearest below first, around the node or nodes."""
        mine, size = nodes[dst], len(ranks_of[nodes[dst]])
        if nodes[src] == mine:
            sources = [ranks_of[mine][(place_of[dst] - shift) % size] for shift in range(1, size)]
        else:
            others = [order[(order.index(mine) - hop) % len(order)] for hop in range(1, len(order))]
            sources = [r for n in others for r in ranks_of[n] if place_of[r] % size == place_of[dst]]
        return group_of(sources.index(src), len(sources), pieces)

    for rank, rows in enumerate(needs(shape, placement, states)):
        mates = ranks_of[nodes[rank]]
        for row in rows:
            src = owner[row]
            relay = rank if src in mates else mates[place_of[src] % len(mates)]
            found.setdefault((direct(src, relay), src, relay), set()).add(row)
            if relay != rank:
                found.setdefault((direct(src, relay) + 1, relay, rank), set()).add(row)
    return found


def sent(program: Program, machine: Machine) -> dict[tuple[int, int, int], list[Row]]:
    """The same of a program that a machine has played; a buffer's name says its stage."""
    found: dict[tuple[int, int, int], list[Row]] = {}
    seen: list[int] = []
    for stage in program.stages:
        numbers = {int(t.sink.buffer.split("/")[1]) for t in stage.transfers}
        assert len(numbers) <= 1 and not numbers & set(seen)
        seen += numbers
        for t in stage.transfers:
            names = [machine.names[(t.src, t.source.buffer)][i] for i in indices(t.source)]
            assert names == [machine.names[(t.dst, t.sink.buffer)][i] for i in indices(t.sink)]
            found.setdefault((*numbers, t.src, t.dst), []).extend(names)
    assert seen == sorted(seen)
    return found


def tiles(shape: ForestShape, rank: int, buffer: str, machine: Machine) -> list[tuple[frozenset, frozenset]]:
    """(queries, keys) of the rectangles of a rank's rows against a buffer: rows that see the same keys of a
    node are one, and so are nodes that the same rows see. A node's rows in their own buffer are a triangle.
    """
    keys, queries = machine.names[(rank, buffer)], machine.names[(rank, HOME)]
    merged: dict[frozenset, set] = {}
    for node in {n for n, _ in keys}:
        seeing: dict[frozenset, set] = {}
        for query in queries:
            if buffer != HOME or query[0] != node:
                seen = frozenset(k for k in keys if k[0] == node and k in visible(shape, query))
                seeing.setdefault(seen, set()).add(query)
        for seen, rows in seeing.items():
            if seen:
                merged.setdefault(frozenset(rows), set()).update(seen)
    return [(rows, frozenset(seen)) for rows, seen in merged.items()]


def compare(graph: Graph, work: Work, nodes: Sequence[int] | None, pieces: int) -> Program:
    """A compiled gather against the definition."""
    states, shape = graph.states(work), graph.shape
    program = compile_pass(shape, work.placement, states=states, pieces=pieces, nodes=nodes)
    machine = Machine(shape, program, states).forward()
    found = sent(program, machine)
    assert {key: sorted(rows) for key, rows in found.items()} == {
        key: sorted(rows)
        for key, rows in moves(
            shape, work.placement, states, nodes or [0] * program.world, max(pieces, 1)
        ).items()
    }
    for rank, buffers in enumerate(program.buffers):
        for buffer, count in buffers.items():
            names = machine.names[(rank, buffer)]
            assert len(names) == count and names == sorted(names), "laid out by node and row"
            got = [
                (
                    frozenset(machine.names[(rank, t.q.buffer)][i] for i in indices(t.q)),
                    frozenset(machine.names[(rank, buffer)][i] for i in indices(t.kv)),
                )
                for stage in program.stages
                for t in stage.tiles[rank]
                if t.kv.buffer == buffer and not t.causal
            ]
            want = [] if buffer.endswith("/relay") else tiles(shape, rank, buffer, machine)
            assert Counter(got) == Counter(want)
    return program


@settings(max_examples=50, deadline=None)
@given(graphs(), st.integers(1, 5))
def test_a_direct_gather_is_what_its_definition_says(graph, pieces):
    for work in graph.works:
        compare(graph, work, None, pieces)


@st.composite
def on_nodes(draw) -> tuple[Graph, list[int]]:
    """Passes and the node of each of their ranks, in any order."""
    graph = draw(graphs(max_degree=7))
    world = len(graph.works[0].placement)
    return graph, draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))


@settings(max_examples=80, deadline=None)
@given(on_nodes(), st.integers(1, 5))
def test_every_pair_once_and_every_row_crosses_once(drawn, pieces):
    graph, nodes = drawn
    for work in graph.works:
        states = graph.states(work)
        program = play(graph, work, "gather_kv", pieces, nodes)
        assert program == compare(graph, work, nodes, pieces)
        wanted = needs(graph.shape, work.placement, states)
        owner = owners(graph.shape, work.placement, states)
        crossing = {
            (row, nodes[rank])
            for rank, rows in enumerate(wanted)
            for row in rows
            if nodes[owner[row]] != nodes[rank]
        }
        assert far(program, nodes, "KV") == len(crossing)
        assert far(reverse(program, keep=True), nodes, "DKV") == len(crossing)
        again = reverse(program, keep=False)
        assert far(again, nodes, "DKV") == len(crossing)
        apart = sum(nodes[owner[row]] != nodes[rank] for rank, rows in enumerate(wanted) for row in rows)
        assert far(again, nodes, "KV") == apart, "fetched again from the owner"


def far(program: Program, nodes: Sequence[int], payload: str) -> int:
    """Rows that cross between nodes."""
    return sum(
        t.source.count
        for stage in program.stages
        for t in stage.transfers
        if t.payload.name == payload and nodes[t.src] != nodes[t.dst]
    )


def fused(degree: int) -> tuple[ForestShape, Placement]:
    """A spine over all ranks, four rows each, and a whole leaf of two rows on every rank."""
    shape = from_lengths(4 * degree, [2] * degree)
    return shape, collect(
        degree,
        [*place_inner(shape, [0], degree), *((r, [Span(r + 1, 0, 2)]) for r in range(degree))],
    )


def bytes_between(program: Program, nodes: Sequence[int]) -> tuple[int, int]:
    """(inside nodes, between them) of what all ranks send."""
    total = sum(sum(promise(program, r, MODEL).bytes.values()) for r in range(program.world))
    across = sum(far(program, nodes, name) * size for name, size in (("KV", KV), ("DKV", DKV)))
    return total - across, across


@pytest.mark.parametrize("pieces", (1, 2, 4))
def test_bytes_of_two_nodes(pieces):
    """m ranks a node, 4 rows a rank: m * 4 rows cross each way; each is handed on m - 1 times, and m - 1 of
    a rank's mates fetch its own 4 rows directly."""
    m = 3
    shape, placement = fused(2 * m)
    nodes = [0] * m + [1] * m
    program = compile_pass(shape, placement, nodes=nodes, pieces=pieces)
    inside, across = 2 * m * 4 * (m - 1) * 2, 2 * m * 4
    assert bytes_between(program, nodes) == (inside * KV, across * KV)
    assert bytes_between(reverse(program, keep=True), nodes) == (inside * DKV, across * DKV)
    # Fetched again by everyone from the owner; the gradients go the way the keys came.
    flat = (2 * m * 4 * (m - 1), 2 * m * 4 * m)
    again = (flat[0] * KV + inside * DKV, flat[1] * KV + across * DKV)
    assert bytes_between(reverse(program, keep=False), nodes) == again
    # The far keys are the first piece's: with two pieces of near ones nothing is added behind them.
    assert len([s for s in program.stages if s.transfers]) == 2
    # In one piece near ranks, the relay, and the near ranks again; in two, one of them gets both at once.
    counts = [promise(program, r, MODEL).messages for r in range(2 * m)]
    assert counts == [2 * (m - 1) + 1 - (pieces > 1)] * (2 * m)


def test_a_relay_without_rows_of_its_own():
    """It hands on what it does not use, and nothing of it is fetched again."""
    shape = from_lengths(6, [3, 2])
    placement = ((Span(0, 0, 3),), (Span(0, 3, 6),), (), (Span(1, 0, 3), Span(2, 0, 2)))
    graph, nodes = Graph(shape, (Work(placement),)), [0, 0, 1, 1]
    program = play(graph, graph.works[0], "gather_kv", 1, nodes)
    assert program.buffers[2] == {HOME: 0, "kv/0/relay": 3} and not program.area(2)
    again = reverse(program, keep=False)
    into = {(t.dst, t.sink.buffer) for s in again.stages for t in s.transfers if t.payload.name == "KV"}
    assert into == {(1, "kv/0"), (3, "kv/0"), (3, "kv/1")}


def test_one_node_is_no_node():
    shape, placement = fused(4)
    flat = compile_pass(shape, placement, pieces=2)
    assert compile_pass(shape, placement, pieces=2, nodes=[3] * 4) == flat
    assert compile_pass(shape, placement, pieces=2, nodes=[0, 0, 1, 1]) != flat


@pytest.mark.parametrize(
    ("primitive", "nodes"),
    [("move_kv", [0, 0, 1, 1]), ("ring", [0, 0, 1, 1]), ("gather_kv", [0, 0, 1])],
)
def test_nodes_that_do_not_fit(primitive, nodes):
    shape, placement = fused(4)
    with pytest.raises(AugTreeError, match="handed on"):
        compile_pass(shape, placement, primitive=primitive, nodes=nodes)


def plan_of(block: tuple[int, ...], **fields) -> Plan:
    shape, placement = fused(len(block))
    made = Pass(0, 0, "fused", block, placement, **fields)
    return Plan(12, "augtree", shape, (made,), (Event("forward", 0), Event("backward", 0)))


def test_a_plan_compiles_for_its_nodes():
    """Ranks 6..9 of nodes of 8 are two on either node."""
    plan = plan_of((6, 7, 8, 9), node_ranks=8)
    plan.check(pairs=True)
    shape, placement = fused(4)
    assert plan.program(0) == compile_pass(shape, placement, nodes=[0, 0, 1, 1])
    assert plan_of((0, 1, 2, 3), node_ranks=8).program(0) == compile_pass(shape, placement)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"node_ranks": 2, "primitive": "move_kv"}, "only gather_kv hands keys on"),
        ({"node_ranks": -2}, "only gather_kv hands keys on"),
        ({"keep_layers": -2}, "layers that keep are counted"),
        ({"keep_attention": -1}, "layers that keep are counted"),
        ({"prefetch": True}, "only prompt state can be fetched ahead"),
    ],
)
def test_a_plan_refuses(fields, rule):
    plan = plan_of((6, 7, 8, 9))
    plan.check()
    with pytest.raises(AugTreeError, match=rule):
        replace(plan, passes=(replace(plan.passes[0], **fields),)).check()


def test_wide_leaves_over_uneven_nodes():
    """A mixture of whole and wide leaves on nodes of 3, 1 and 2 ranks, as the planner places it."""
    shape = from_lengths(14, [3, 12, 2, 8])
    placement = place(shape, [0], [1, 2, 3, 4], 6, lane_degree=1, wide=2, pairs_per_row=5)
    graph = Graph(shape, (Work(placement),))
    for pieces in (1, 2, 4):
        for nodes in ([0, 0, 0, 1, 2, 2], [2, 1, 2, 0, 1, 2]):
            play(graph, graph.works[0], "gather_kv", pieces, nodes)
            compare(graph, graph.works[0], nodes, pieces)
