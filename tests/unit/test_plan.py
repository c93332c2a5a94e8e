"""Plans: `check` names each broken rule, JSON keeps everything, the digest covers every field."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError
from megatron_augtree.planning.candidates import Choice, build, chunk_rows, cut_pool
from megatron_augtree.planning.lanes import place_inner
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Placement, Span, collect
from megatron_augtree.planning.plan import Event, Pass, Plan, table, with_note
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.recipe import cut_rows
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.forests import forest, visible

MODEL = ModelShape(layers=2, hidden=32, ffn=64, vocab=64, q_heads=4, kv_heads=2, k_dim=8, v_dim=8)
SHAPE = forest(from_lengths(9, [4, 2, 3]), from_lengths(5, [6, 1]))


def phased() -> Plan:
    """Two chunks and two waves of a tree on ranks 0 and 1, the other tree fused on rank 2."""
    block = (0, 1)
    first = collect(2, [(0, [Span(0, 0, 2)]), (1, [Span(0, 2, 5)])])
    second = collect(2, [(0, [Span(0, 5, 8)]), (1, [Span(0, 8, 9)])])
    passes = (
        Pass(0, 0, "chunk", block, first),
        Pass(1, 0, "chunk", block, second, reads=(0,)),
        Pass(2, 0, "replay", block, collect(2, place_inner(SHAPE, [1], 2)), reads=(0, 1), primitive="move_q"),
        Pass(
            3,
            0,
            "replay",
            block,
            collect(2, [(0, [Span(2, 0, 2)]), (1, [Span(3, 0, 3)])]),
            reads=(0, 1),
            pieces=2,
            keep=False,
        ),
        Pass(4, 1, "fused", (2,), ((Span(4, 0, 5), Span(5, 0, 6), Span(6, 0, 1)),), primitive="local"),
    )
    events = [
        ("forward", 0),
        ("forward", 1),
        ("forward", 2),
        ("backward", 2),
        ("forward", 3),
        ("backward", 3),
        ("backward", 1),
        ("backward", 0),
        ("forward", 4),
        ("backward", 4),
    ]
    return Plan(
        3, "augtree", SHAPE, passes, tuple(Event(*e) for e in events), "by hand", 0.25, 1000, "prices"
    )


def with_pass(plan: Plan, index: int, **changes) -> Plan:
    passes = list(plan.passes)
    passes[index] = replace(passes[index], **changes)
    return replace(plan, passes=tuple(passes), _programs={})


def with_events(plan: Plan, *order: int) -> Plan:
    return replace(plan, events=tuple(plan.events[i] for i in order))


def holds(*ranks: list[Span]) -> Placement:
    return tuple(tuple(spans) for spans in ranks)


def test_a_good_plan_passes():
    plan = phased()
    plan.check(pairs=True)
    assert plan.jobs == ((0, 1, 2, 3), (4,)) and plan.provides == {0, 1}
    assert plan.job_of_node == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert [plan.rows_of_rank(rank) for rank in range(3)] == [2 + 3 + 2 + 2, 3 + 1 + 2 + 3, 12]


def test_every_pair_of_a_plan_is_in_one_program():
    plan = phased()
    done = sum(plan.program(p.id).area(r) for p in plan.passes for r in range(len(p.block)))
    assert done == sum(len(visible(SHAPE, (n, r))) for n, rows in enumerate(SHAPE.rows) for r in range(rows))
    assert plan.program(2) is plan.program(2)


LEAF = (Span(1, 0, 4),)
BROKEN = {
    "an unknown kind": (lambda p: with_pass(p, 0, kind="prefetch"), "known kind"),
    "an unknown primitive": (lambda p: with_pass(p, 0, primitive="teleport"), "known kind"),
    "a wrong number": (lambda p: with_pass(p, 2, id=3), "numbered in order"),
    "a number beyond the end": (lambda p: with_pass(p, 4, id=5), "numbered in order"),
    "a rank outside the pool": (lambda p: with_pass(p, 4, block=(3,)), "distinct ranks of the pool"),
    "a rank twice": (lambda p: with_pass(p, 0, block=(0, 0)), "distinct ranks"),
    "a placement of another degree": (lambda p: with_pass(p, 4, block=(1, 2)), "distinct ranks"),
    "no rank": (lambda p: with_pass(p, 4, block=(), placement=()), "distinct ranks"),
    "a read of a later pass": (lambda p: with_pass(p, 0, reads=(1,)), "reads earlier passes"),
    "a read of no pass": (lambda p: with_pass(p, 1, reads=(-5,)), "reads earlier passes"),
    "a read of another job": (lambda p: with_pass(p, 4, reads=(0,), block=(0,)), "reads earlier passes"),
    "a read across blocks": (lambda p: with_pass(p, 2, block=(1, 2)), "reads earlier passes"),
    "move_q without state": (lambda p: with_pass(p, 0, primitive="move_q"), "move_q needs"),
    "a lost row": (
        lambda p: with_pass(p, 3, placement=holds([Span(2, 0, 2)], [Span(3, 0, 2)])),
        "holds every row",
    ),
    "a row twice": (
        lambda p: with_pass(p, 3, placement=holds([Span(2, 0, 2)], [Span(2, 0, 2), Span(3, 0, 3)])),
        "holds every row",
    ),
    "rows out of order": (
        lambda p: with_pass(p, 2, placement=tuple(spans[::-1] for spans in p.passes[2].placement)),
        "in the order of nodes and rows",
    ),
    "an unknown mode": (lambda p: replace(p, mode="augtre"), "the mode is one of"),
    "an unknown node": (
        lambda p: with_pass(p, 3, placement=holds([Span(2, 0, 2)], [Span(3, 0, 3), Span(9, 0, 1)])),
        "nodes of the forest",
    ),
    "a lost ancestor": (
        lambda p: with_pass(p, 4, placement=holds([Span(5, 0, 6), Span(6, 0, 1)])),
        "holds the ancestors",
    ),
    "a chunk that lacks the earlier one": (
        lambda p: with_pass(p, 1, reads=()),
        "reads its node's earlier rows",
    ),
    "a wave that reads a chunk twice": (lambda p: with_pass(p, 3, reads=(0, 0)), "reads another pass once"),
    "a wave that lacks a chunk": (lambda p: with_pass(p, 3, reads=(0,)), "reads all its ancestors' rows"),
    "a leaf in no job": (
        lambda p: with_pass(p, 4, placement=holds([Span(4, 0, 5), Span(5, 0, 6)])),
        "last node",
    ),
    "a wave before its chunk": (lambda p: with_events(p, 0, 2, 1, 3, 4, 5, 6, 7, 8, 9), "forward comes once"),
    "a forward twice": (lambda p: with_events(p, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9), "forward comes once"),
    "state that is gone": (lambda p: with_events(p, 0, 1, 2, 3, 6, 4, 5, 7, 8, 9), "backward comes once"),
    "a backward twice": (lambda p: with_events(p, *range(10), 9), "backward comes once"),
    "a backward without forward": (
        lambda p: with_events(p, 0, 1, 3, 2, 4, 5, 6, 7, 8, 9),
        "backward comes once",
    ),
    "a chunk's backward before its reader's": (
        lambda p: with_events(p, 0, 1, 2, 3, 4, 5, 7, 6, 8, 9),
        "backward comes once",
    ),
    "a missing backward": (lambda p: with_events(p, *range(9)), "forward and a backward"),
    "a missing pass": (lambda p: with_events(p, *range(8)), "forward and a backward"),
    "an unknown action": (
        lambda p: replace(p, events=(*p.events, Event("sideways", 4))),
        "backward comes once",
    ),
    "an event of no pass": (lambda p: replace(p, events=(*p.events, Event("forward", 7))), "of a pass"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_the_broken_rule(name):
    breaking, rule = BROKEN[name]
    with pytest.raises(AugTreeError) as caught:
        breaking(phased()).check()
    assert rule in caught.value.rule


def test_check_with_pairs_compiles():
    """A leaf that two waves cut between them is computed once, but its rows cannot see each other."""
    plan = phased()
    with pytest.raises(AugTreeError):
        with_pass(
            plan, 4, block=(1, 2), placement=holds([Span(4, 0, 5)], [Span(5, 0, 6), Span(6, 0, 1)])
        ).check(pairs=True)


def test_json_keeps_everything():
    plan = phased()
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan and again.digest() == plan.digest()
    assert all(isinstance(span, Span) for p in again.passes for spans in p.placement for span in spans)
    again.check(pairs=True)


@pytest.mark.parametrize(
    "breaking",
    [
        lambda d: d.pop("shape"),
        lambda d: d.pop("seconds"),
        lambda d: d["shape"].pop("rows"),
        lambda d: d["passes"][0].pop("block"),
        lambda d: d["passes"][0].update(colour="red"),
        lambda d: d["passes"][0]["placement"][0].append([0, 1]),
        lambda d: d["events"].append(["forward"]),
        lambda d: d.update(passes=3),
        lambda d: d.update(shape=[]),
    ],
)
def test_json_that_is_no_plan(breaking):
    data = json.loads(json.dumps(phased().to_json()))
    breaking(data)
    with pytest.raises(AugTreeError, match="cannot read a plan"):
        Plan.from_json(data)


def leaves_of(tree: object, path: tuple = ()) -> list[tuple]:
    """Paths to all values of a JSON tree that hold no others."""
    if not isinstance(tree, dict | list):
        return [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [found for key, value in items for found in leaves_of(value, (*path, key))]


def test_json_of_wrong_types_is_refused_wherever_it_is():
    """Whoever edits a plan by hand gets an error of four parts, not a traceback from a comparison."""
    data = phased().to_json()
    text = json.dumps(data)
    paths = leaves_of(json.loads(text))
    assert len(paths) > 100
    for path in paths:
        for wrong in (None, [], {}, 1.5j):
            changed = json.loads(text)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = wrong
            with pytest.raises(AugTreeError, match="cannot read a plan"):
                Plan.from_json(changed)


@pytest.mark.parametrize("other", (replace(SHAPE, ends=(9, *SHAPE.ends[1:])), replace(SHAPE, parents=(7,))))
def test_a_plan_fits_one_step_and_one_pool(other):
    plan = phased()
    plan.check_fits(SHAPE, 3)
    for shape, world in ((other, 3), (SHAPE, 2)):
        with pytest.raises(InputError, match="does not fit"):
            plan.check_fits(shape, world)


def test_the_digest_covers_every_field():
    plan = phased()
    shape = {
        f.name: replace(SHAPE, **{f.name: (*getattr(SHAPE, f.name)[:-1], 0)}) for f in fields(ForestShape)
    }
    plan_changes = {
        "world": 4,
        "mode": "ring",
        "events": plan.events[::-1],
        "note": "other",
        "seconds": 0.5,
        "peak_bytes": 1001,
        "pricing": "others",
        "passes": plan.passes[:-1],
        "shape": replace(SHAPE, rows=(*SHAPE.rows[:-1], 2)),
    }
    pass_changes = {
        "id": 9,
        "job": 1,
        "kind": "prefill",
        "block": (1, 0),
        "placement": plan.passes[0].placement[::-1],
        "reads": (1,),
        "primitive": "ring",
        "pieces": 2,
        "keep": False,
        "node_ranks": 8,
        "prefetch": True,
        "keep_layers": 1,
        "keep_attention": 1,
        "offload": True,
    }
    assert set(plan_changes) == {f.name for f in fields(Plan)} - {"_programs"}
    assert set(pass_changes) == {f.name for f in fields(Pass)}
    others = [replace(plan, **{name: value}) for name, value in plan_changes.items()]
    others += [with_pass(plan, 0, **{name: value}) for name, value in pass_changes.items()]
    others += [replace(plan, shape=changed) for changed in shape.values()]
    digests = [plan.digest(), *(other.digest() for other in others)]
    assert len(set(digests)) == len(digests)
    assert phased().digest() == plan.digest()


def test_compiling_leaves_the_digest_alone():
    plan = phased()
    before = plan.digest()
    plan.check(pairs=True)
    assert plan.digest() == before and plan == phased()


def test_the_table():
    lines = table(phased()).splitlines()
    assert lines[0] == "augtree: 30 rows in 2 trees on 3 ranks, 5 passes; by hand" and str(phased()) == table(
        phased()
    )
    assert lines[1].split() == ["pass", "kind", "ranks", "rows", "a", "rank", "moves", "reads", "keep"]
    assert lines[4].split() == ["2", "replay", "0-1", "2", "2", "move_q", "0,1", "yes"]
    assert lines[5].split() == ["3", "replay", "0-1", "2", "3", "gather_kv", "in", "2", "0,1", "no"]
    assert lines[6].split() == ["4", "fused", "2", "12", "nothing", "-", "yes"]


def test_a_note_changes_nothing_else():
    plan = with_note(phased(), "cheap", 1.5, 7, "new")
    assert (plan.note, plan.seconds, plan.peak_bytes, plan.pricing) == ("cheap", 1.5, 7, "new")
    assert (plan.passes, plan.events, plan.shape) == (phased().passes, phased().events, SHAPE)


# From choices to plans.


@pytest.mark.parametrize(
    ("world", "degree", "sizes"),
    [
        (8, 4, [4, 4]),
        (24, 16, [16, 8]),
        (3, 2, [2, 1]),
        (5, 4, [4, 1]),
        (6, 6, [6]),
        (7, 1, [1] * 7),
        (6, 4, [4, 2]),
        (8, 5, [5, 2, 1]),
    ],
)
def test_the_pool_is_cut_into_aligned_blocks(world, degree, sizes):
    blocks = cut_pool(world, degree)
    assert [len(b) for b in blocks] == sizes and [r for b in blocks for r in b] == [*range(world)]


def test_chunks_are_causal_runs():
    shape = ForestShape((-1, 0, 1, 1), (7, 4, 2, 2), (0, 0, 2, 2), (0, 0, 1, 1))

    def cut(inner, chunks):
        return [cut_rows(shape, inner, lo, hi) for lo, hi in chunk_rows(shape, inner, chunks)]

    assert cut([0, 1], 3) == [[Span(0, 0, 3)], [Span(0, 3, 7)], [Span(1, 0, 4)]]
    assert cut([0, 1], 2) == [[Span(0, 0, 5)], [Span(0, 5, 7), Span(1, 0, 4)]]
    assert len(cut([1], 9)) == 4


CHOICES = [
    Choice(
        degree=d,
        copies=c,
        phase=phase,
        chunks=chunks,
        waves=waves,
        primitive=primitive,
        pieces=k,
        lane_degree=lane,
        wide=wide,
        together=together,
        keep=keep,
    )
    for d, c, phase, chunks, waves, primitive, k, lane, wide, together, keep in [
        (1, 1, "fused", 1, 1, "gather_kv", 1, 1, 0, True, True),
        (2, 1, "fused", 1, 1, "gather_kv", 1, 1, 2, True, True),
        (2, 2, "fused", 1, 1, "move_kv", 1, 2, 0, False, False),
        (4, 1, "phased", 1, 2, "gather_kv", 2, 2, 0, True, False),
        (4, 1, "phased", 3, 1, "move_q", 1, 1, 1, False, True),
        (3, 1, "phased", 2, 3, "move_q", 1, 3, 0, True, True),
        (1, 4, "phased", 2, 2, "gather_kv", 1, 1, 0, True, True),
    ]
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("world", (4, 6))
def test_built_plans_check(choice, world):
    deep = ForestShape((-1, 0, 1, 1, 0), (6, 3, 4, 2, 5), (0, 2, 4, 2, 5), (0, 0, 1, 1, 1))
    shape = forest(SHAPE, deep, from_lengths(0, [3]))
    plan = build(choice, shape, world, 5)
    plan.check(pairs=True)
    kinds = {p.kind for p in plan.passes}
    assert kinds >= ({"fused"} if choice.phase == "fused" else {"replay"})
    assert ("chunk" in kinds) == (choice.chunks > 1) and ("prefill" in kinds) == (
        choice.phase == "phased" and choice.chunks == 1
    )
    assert all(len(p.block) <= choice.degree and p.keep == choice.keep for p in plan.passes)
    assert all(p.primitive == "local" for p in plan.passes if len(p.block) == 1)
    assert plan.note == str(choice)


def test_nothing_to_compute():
    plan = make_plan(ForestShape((), (), (), ()), MODEL, 2, AugTreeConfig(), tree_groups=[])
    assert plan.passes == () and plan.events == () and plan.seconds == 0
    plan.check(pairs=True)
    assert Plan.from_json(plan.to_json()) == plan


def test_the_predicted_peak_is_held_against_a_budget():
    plan = replace(phased(), peak_bytes=1001)
    plan.check(budget_bytes=1001)
    plan.check()
    with pytest.raises(AugTreeError, match="1001 of 1000 bytes"):
        plan.check(budget_bytes=1000)
