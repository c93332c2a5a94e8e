"""Programs: every pair once, every row where a tile reads it, backwards too; `check` and `promise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.compiler import compile_pass
from megatron_augtree.planning.lanes import place_inner
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Placement, Span, collect
from megatron_augtree.planning.schedule import (
    HOME,
    Payload,
    Program,
    Rows,
    Stage,
    Tile,
    Transfer,
    field_bytes,
    promise,
    reverse,
    rows,
)
from megatron_augtree.planning.tree import ForestShape, from_lengths
from megatron_augtree.planning.verify import check
from tests.unit.forests import BackwardMachine, Graph, Machine, Work, graphs, visible

#: 4 query heads of 8 (values 6), 2 KV heads, 2 bytes on the wire, 4 where results add up.
MODEL = ModelShape(
    layers=2, hidden=32, ffn=64, vocab=64, q_heads=4, kv_heads=2, k_dim=8, v_dim=6, item_bytes=2
)
KV, Q, PARTIAL = 2 * (8 + 6) * 2, 4 * 8 * 2, (4 * 6 + 4) * 4
DKV, DQ, DPARTIAL = 2 * (8 + 6) * 4, 4 * 8 * 4, 4 * 6 * 2 + 4 * 4 + 4 * 4


def owed(shape: ForestShape, placement: Placement) -> int:
    return sum(
        len(visible(shape, (s.node, r))) for spans in placement for s in spans for r in range(s.lo, s.hi)
    )


def zigzagged(shape: ForestShape, degree: int) -> Placement:
    return collect(degree, place_inner(shape, range(len(shape.rows)), degree))


def play(
    graph: Graph, work: Work, primitive: str, pieces: int, nodes: Sequence[int] | None = None
) -> Program:
    """Compile, check and play one pass, forwards and both kinds of backwards."""
    states = graph.states(work)
    program = compile_pass(
        graph.shape, work.placement, states=states, primitive=primitive, pieces=pieces, nodes=nodes
    )
    check(program, owed(graph.shape, work.placement))
    forward = Machine(graph.shape, program, states).forward()
    forward.check_forward()
    for keep in (True, False):
        backward = reverse(program, keep=keep)
        check(backward, owed(graph.shape, work.placement))
        machine = BackwardMachine(forward, backward, states, keep)
        machine.forward()
        machine.check_backward()
    return program


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_every_pair_once_forwards_and_backwards(graph):
    for work in graph.works:
        for primitive, pieces in graph.primitives(work):
            play(graph, work, primitive, pieces)


RESIDUES = [(d, n) for d in (2, 3, 4) for n in (*range(1, 4 * d + 1), 7, 11)]


@pytest.mark.parametrize(("degree", "length"), RESIDUES)
def test_zigzag_of_every_residue(degree, length):
    """Case 24: lengths of every residue modulo 2 x degree, alone and in packed mixtures."""
    single = from_lengths(0, [length])
    packed = ForestShape((-1, -1, 1), (3, length, 2), (3, 0, 2), (1, 0, 1))
    for shape in (single, packed):
        graph = Graph(shape, (Work(zigzagged(shape, degree)),))
        for primitive, pieces in graph.primitives(graph.works[0]):
            play(graph, graph.works[0], primitive, pieces)


def test_a_tree_of_many_levels_compiles():
    shape = ForestShape((-1, *range(59)), (1,) * 60, (1,) * 60, (1,) * 60)
    graph = Graph(shape, (Work(zigzagged(shape, 2)),))
    assert play(graph, graph.works[0], "gather_kv", 1).world == 2


def test_leaf_queries_against_a_shard_are_one_tile():
    """Not one tile a response: what makes replay cheap."""
    shape = from_lengths(8, [2, 3, 1, 2])
    placement = collect(
        2,
        [
            *place_inner(shape, [0], 2),
            (0, [Span(1, 0, 2), Span(2, 0, 3)]),
            (1, [Span(3, 0, 1), Span(4, 0, 2)]),
        ],
    )
    program = compile_pass(shape, placement)
    received = [tile for stage in program.stages for tile in stage.tiles[0] if tile.kv.buffer == "kv/0"]
    # Rank 0: its late spine rows and all leaf rows see rank 1's whole shard.
    assert [(tile.q.count, tile.kv.count) for tile in received] == [(2 + 5, 4)]
    # Leaves' triangles hide the only piece, too.
    assert [t.causal for t in program.stages[0].tiles[0]].count(True) == 3


def test_local_refuses_where_rows_would_move():
    shape = from_lengths(4, [2, 2])
    alone = collect(1, place_inner(shape, [0, 1, 2], 1))
    assert not any(stage.transfers for stage in compile_pass(shape, alone, primitive="local").stages)
    with pytest.raises(AugTreeError, match="local"):
        compile_pass(shape, zigzagged(shape, 2), primitive="local")
    with pytest.raises(AugTreeError, match="unknown primitive"):
        compile_pass(shape, alone, primitive="teleport")


def test_spans_of_a_node_never_overlap():
    """Neither on one rank, nor on two, nor with prompt state."""
    shape = from_lengths(6, [2])
    first, second = (Span(0, 0, 4),), (Span(0, 2, 6),)
    for placement, states in (
        ((first, second), []),
        (((*first, *second), ()), []),
        ((second, ()), [(0, ((), first))]),
        ((first, first), []),
    ):
        with pytest.raises(AugTreeError, match="overlap"):
            compile_pass(shape, placement, states=states)


def test_rows_join_and_count():
    assert rows("x", [(4, 6), (0, 2), (2, 3)]) == Rows("x", ((0, 3), (4, 6)))
    assert rows("x", [(4, 6), (0, 2), (2, 3)]).count == 5
    three = Rows("x", ((0, 3),))
    assert Tile(three, three, True).area == 6 and Tile(three, Rows("y", ((0, 4),)), False).area == 12


# Promise: bytes and messages against formulas.


def sent(program: Program) -> dict[str, int]:
    total: dict[str, int] = {}
    for rank in range(program.world):
        for name, size in promise(program, rank, MODEL).bytes.items():
            total[name] = total.get(name, 0) + size
    return total


def messages(program: Program) -> list[int]:
    return [promise(program, rank, MODEL).messages for rank in range(program.world)]


def test_bytes_of_a_field():
    assert field_bytes(MODEL) == {
        "k": 2 * 8 * 2,
        "v": 2 * 6 * 2,
        "q": 4 * 8 * 2,
        "dout": 4 * 6 * 2,
        "out": 4 * 6 * 4,
        "lse": 4 * 4,
        "delta": 4 * 4,
        "dk": 2 * 8 * 4,
        "dv": 2 * 6 * 4,
        "dq": 4 * 8 * 4,
    }


@pytest.mark.parametrize("degree", (2, 3, 4, 8))
def test_bytes_of_a_spine(degree):
    """A whole-shard ring hands on d - 1 shards a rank; the selective gather needs exactly three quarters."""
    shard = 2 * 5
    shape = from_lengths(shard * degree, [])
    placement = zigzagged(shape, degree)
    whole = degree * (degree - 1) * shard
    ring = compile_pass(shape, placement, primitive="ring")
    assert [promise(ring, rank, MODEL).bytes for rank in range(degree)] == [
        {"KV": (degree - 1) * shard * KV}
    ] * degree
    assert messages(ring) == [degree - 1] * degree
    assert sent(reverse(ring, keep=True)) == {"DKV": whole * DKV}
    for pieces in (1, 2, degree - 1):
        program = compile_pass(shape, placement, pieces=pieces)
        assert sent(program) == {"KV": whole * KV * 3 // 4}
        assert messages(program) == [degree - 1] * degree
        assert len([s for s in program.stages if s.transfers]) == min(pieces, degree - 1)
        assert sent(reverse(program, keep=True)) == {"DKV": whole * DKV * 3 // 4}
        assert sent(reverse(program, keep=False)) == {"KV": whole * KV * 3 // 4, "DKV": whole * DKV * 3 // 4}


@pytest.mark.parametrize("degree", (2, 4))
def test_bytes_of_a_fused_pass(degree):
    """With a whole leaf on every rank, each needs the d - 1 other spine shards and nothing else."""
    shard, leaf = 2 * 3, 4
    shape = from_lengths(shard * degree, [leaf] * degree)
    placement = collect(
        degree,
        [*place_inner(shape, [0], degree), *((rank, [Span(rank + 1, 0, leaf)]) for rank in range(degree))],
    )
    whole = degree * (degree - 1) * shard
    for primitive in ("gather_kv", "move_kv"):
        program = compile_pass(shape, placement, primitive=primitive)
        assert sent(program) == {"KV": whole * KV}
        assert messages(program) == [degree - 1] * degree
        assert sent(reverse(program, keep=True)) == {"DKV": whole * DKV}
    # The baseline that rings everything moves the leaves too.
    assert sent(compile_pass(shape, placement, primitive="ring")) == {
        "KV": degree * (degree - 1) * (shard + leaf) * KV
    }


@pytest.mark.parametrize("degree", (2, 3, 4))
def test_bytes_of_replay(degree):
    """move_q: leaf rows go to the d - 1 other shards of prompt state and come back as partial results."""
    shape = from_lengths(4 * degree, [3] * degree)
    state = collect(degree, place_inner(shape, [0], degree))
    waves = collect(degree, [(rank, [Span(rank + 1, 0, 3)]) for rank in range(degree)])
    moved, prompt = 3 * degree * (degree - 1), 4 * degree * (degree - 1)
    program = compile_pass(shape, waves, states=[(0, state)], primitive="move_q")
    assert sent(program) == {"Q": moved * Q, "PARTIAL": moved * PARTIAL}
    assert messages(program) == [2 * (degree - 1)] * degree
    assert sent(reverse(program, keep=True)) == {"DPARTIAL": moved * DPARTIAL, "DQ": moved * DQ}
    assert sent(reverse(program, keep=False)) == {"DPARTIAL_Q": moved * (DPARTIAL + Q), "DQ": moved * DQ}
    gather = compile_pass(shape, waves, states=[(0, state)])
    assert sent(gather) == {"KV": prompt * KV}
    assert sent(reverse(gather, keep=False)) == {"KV": prompt * KV, "DKV": prompt * DKV}


def test_transfers_of_a_stage_to_one_rank_are_one_message():
    """Rank 0 sends rank 1 queries and its own leaf keys at once; the partial results come back in another."""
    program, _ = good()
    first = program.stages[0].transfers
    assert {t.payload for t in first if (t.src, t.dst) == (0, 1)} == {Payload.Q, Payload.KV}
    assert messages(program) == [2, 2]


def test_nothing_moves_on_one_rank():
    shape = from_lengths(5, [2, 3])
    program = compile_pass(shape, zigzagged(shape, 1), primitive="move_kv")
    assert promise(program, 0, MODEL) == ({}, 0)
    assert program.area(0) == owed(shape, program.home)


def test_a_ranks_view():
    shape = from_lengths(8, [2, 2])
    program = compile_pass(shape, zigzagged(shape, 3), primitive="move_kv")
    for rank in range(3):
        view = program.of(rank)
        assert [tiles for _, tiles in view] == [stage.tiles[rank] for stage in program.stages]
        assert [t for mine, _ in view for t in mine] == [
            t for stage in program.stages for t in stage.transfers if rank in (t.src, t.dst)
        ]


def test_reverse_takes_a_forward_program():
    shape = from_lengths(4, [])
    backward = reverse(compile_pass(shape, zigzagged(shape, 2)), keep=True)
    with pytest.raises(AugTreeError, match="backward"):
        reverse(backward, keep=True)


# Check: one broken program a rule.


def good() -> tuple[Program, int]:
    """A replay by move_q with a wide leaf: every payload of the forward occurs."""
    shape = from_lengths(8, [4, 3])
    state = collect(2, place_inner(shape, [0], 2))
    placement = collect(2, [*place_inner(shape, [1], 2), (0, [Span(2, 0, 3)])])
    program = compile_pass(shape, placement, states=[(0, state)], primitive="move_q")
    return program, owed(shape, placement)


def with_stage(program: Program, index: int, stage: Stage) -> Program:
    stages = list(program.stages)
    stages[index] = stage
    return replace(program, stages=tuple(stages))


def change(program: Program, payload: Payload, **fields) -> Program:
    """The first transfer of a payload with other fields."""
    for index, stage in enumerate(program.stages):
        for place, t in enumerate(stage.transfers):
            if t.payload is payload:
                moved = [*stage.transfers[:place], t._replace(**fields), *stage.transfers[place + 1 :]]
                return with_stage(program, index, stage._replace(transfers=tuple(moved)))
    raise LookupError(payload)


def first(program: Program, payload: Payload) -> Transfer:
    return next(t for stage in program.stages for t in stage.transfers if t.payload is payload)


def unlanded_transfer(program: Program) -> Program:
    return change(program, Payload.Q, source=first(program, Payload.KV).sink, sink=Rows("q", ((0, 2),)))


def unlanded_tile(program: Program) -> Program:
    tiles = program.stages[0].tiles
    late = Tile(tiles[0][0].q, first(program, Payload.KV).sink, False)
    return with_stage(program, 0, program.stages[0]._replace(tiles=((*tiles[0], late), *tiles[1:])))


def early_partial(program: Program) -> Program:
    stages = list(program.stages)
    partials = tuple(t for t in stages[2].transfers if t.payload is Payload.PARTIAL)
    assert partials
    stages[1] = stages[1]._replace(transfers=partials)
    stages[2] = stages[2]._replace(transfers=())
    return replace(program, stages=tuple(stages))


def to_itself(program: Program) -> Program:
    return change(program, Payload.KV, src=first(program, Payload.KV).dst)


def unequal_ends(program: Program) -> Program:
    return change(program, Payload.KV, source=Rows(HOME, ((0, 1),)))


def no_rows(program: Program) -> Program:
    return change(program, Payload.KV, source=Rows(HOME, ()), sink=Rows("kv/0", ()))


def outside(program: Program) -> Program:
    return change(program, Payload.KV, source=Rows(HOME, ((98, 100),)))


def overlapping_copies(program: Program) -> Program:
    stage = program.stages[0]
    kv = first(program, Payload.KV)
    return with_stage(program, 0, stage._replace(transfers=(*stage.transfers, kv)))


def skewed_triangle(program: Program) -> Program:
    index = len(program.stages) - 1
    tiles = program.stages[index].tiles
    tile = next(t for t in tiles[0] if t.causal)
    wrong = tile._replace(kv=Rows(tile.kv.buffer, ((0, tile.kv.count + 1),)))
    return with_stage(
        program, index, program.stages[index]._replace(tiles=((wrong, *tiles[0][1:]), tiles[1]))
    )


def empty_tile(program: Program) -> Program:
    tiles = program.stages[0].tiles
    nothing = Tile(Rows(HOME, ()), Rows(HOME, ((0, 1),)), False)
    return with_stage(program, 0, program.stages[0]._replace(tiles=((*tiles[0], nothing), *tiles[1:])))


def lost_tile(program: Program) -> Program:
    tiles = program.stages[-1].tiles
    return with_stage(
        program, len(program.stages) - 1, program.stages[-1]._replace(tiles=(tiles[0][1:], tiles[1]))
    )


BROKEN = {
    unlanded_transfer: "a transfer reads what has not landed",
    unlanded_tile: "a tile reads what has not",
    early_partial: "leaves before its tiles",
    to_itself: "ends must differ",
    unequal_ends: "same, positive",
    no_rows: "same, positive",
    outside: "outside their buffer",
    overlapping_copies: "copies overlap",
    skewed_triangle: "not a triangle",
    empty_tile: "a tile is empty",
    lost_tile: "tiles cover",
}


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda f: f.__name__)
def test_check_catches(breaking):
    program, area = good()
    check(program, area)
    with pytest.raises(AugTreeError, match=BROKEN[breaking]):
        check(breaking(program), area)


@pytest.mark.parametrize("breaking", (unequal_ends, lost_tile), ids=lambda f: f.__name__)
def test_check_catches_a_broken_backward(breaking):
    program, area = good()
    check(reverse(program, keep=False), area)
    with pytest.raises(AugTreeError, match=BROKEN[breaking]):
        check(reverse(breaking(program), keep=False), area)
