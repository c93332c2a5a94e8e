"""The running example of the documentation, from tokens to ranks: where does this response's token go?

Prompt p0..p5; responses a (4 tokens), b (2), c (3); four ranks; lanes {0, 1}, {2}, {3}.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_augtree.config import InputError
from megatron_augtree.planning.lanes import place_inner
from megatron_augtree.planning.placement import Span, collect, zigzag
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.tree import ForestShape, from_groups
from megatron_augtree.runtime.layout import PassLayout, Place, SequenceLayout, locate

P, A, B, C = [10, 11, 12, 13, 14, 15], [20, 21, 22, 23], [30, 31], [40, 41, 42]
FOREST = from_groups([(P, [(r, [True] * len(r)) for r in (A, B, C)])])
#: Five spine rows in a zigzag of eight chunks (three of them empty), a over ranks 0 and 1, b and c whole.
PLACEMENT = collect(
    4,
    [
        *place_inner(FOREST.shape, [0], 4),
        *enumerate(zigzag(1, 0, 4, [1, 1])),
        (2, [Span(2, 0, 2)]),
        (3, [Span(3, 0, 3)]),
    ],
)
FUSED = Plan(
    4,
    "augtree",
    FOREST.shape,
    (Pass(0, 0, "fused", (0, 1, 2, 3), PLACEMENT),),
    (Event("forward", 0), Event("backward", 0)),
)
SPINE = collect(4, place_inner(FOREST.shape, [0], 4))
LEAVES = collect(4, [*enumerate(zigzag(1, 0, 4, [1, 1])), (2, [Span(2, 0, 2)]), (3, [Span(3, 0, 3)])])
PHASED = Plan(
    4,
    "augtree",
    FOREST.shape,
    (Pass(0, 0, "prefill", (0, 1, 2, 3), SPINE), Pass(1, 0, "replay", (0, 1, 2, 3), LEAVES, reads=(0,))),
    (Event("forward", 0), Event("forward", 1), Event("backward", 1), Event("backward", 0)),
)
#: Two blocks, a prompt copy each.
COPIES = Plan(
    2,
    "augtree",
    FOREST.shape,
    (
        Pass(0, 0, "fused", (0,), ((Span(0, 0, 5), Span(1, 0, 4)),), primitive="local"),
        Pass(1, 1, "fused", (1,), ((Span(0, 0, 5), Span(2, 0, 2), Span(3, 0, 3)),), primitive="local"),
    ),
    (Event("forward", 0), Event("backward", 0), Event("forward", 1), Event("backward", 1)),
)


def test_the_tree():
    assert FOREST.shape == ForestShape((-1, 0, 0, 0), (5, 4, 2, 3), (0, 4, 2, 3), (0, 1, 1, 1))
    assert FOREST.inputs.tolist() == [*P[:5], 15, *A[:3], 15, *B[:1], 15, *C[:2]]
    assert FOREST.targets.tolist() == [*P[1:], *A, *B, *C]
    assert FOREST.positions.tolist() == [*range(5), 5, 6, 7, 8, 5, 6, 5, 6, 7]


def test_the_plans_check():
    for plan in (FUSED, PHASED, COPIES):
        plan.check(pairs=True)
    assert [FUSED.rows_of_rank(rank) for rank in range(4)] == [3, 4, 2, 5]
    assert [COPIES.rows_of_rank(rank) for rank in range(2)] == [9, 10]


def test_what_each_rank_gets():
    """Spine rows first, then leaf rows; targets only where a loss is."""
    layout = PassLayout(FUSED.passes[0], FOREST)
    inputs = [[14, 15, 22], [10, 13, 20, 21], [15, 30], [11, 12, 15, 40, 41]]
    positions = [[4, 5, 8], [0, 3, 6, 7], [5, 6], [1, 2, 5, 6, 7]]
    targets = [[20, 23], [21, 22], [30, 31], [40, 41, 42]]
    for rank in range(4):
        local = layout.local([rank], torch.device("cpu"))
        assert local.inputs.tolist() == inputs[rank] and local.positions.tolist() == positions[rank]
        assert local.targets.tolist() == targets[rank]
        assert FOREST.targets[local.rows[local.scored.numpy()]].tolist() == targets[rank]
    assert layout.counts == [2, 2, 2, 3] and layout.span(2) == slice(4, 6)
    both = layout.local([1, 3], torch.device("cpu"))
    assert both.inputs.tolist() == inputs[1] + inputs[3] and both.targets.tolist() == targets[1] + targets[3]
    assert both.scored.tolist() == [2, 3, 6, 7, 8]


@pytest.mark.parametrize(
    ("sequence", "token", "place"),
    [
        (0, 1, (1, 0)),
        (0, 2, (3, 0)),
        (0, 3, (3, 1)),
        (0, 4, (1, 1)),
        (0, 5, (0, 0)),  # the prompt
        (0, 6, (0, 1)),
        (0, 7, (1, 2)),
        (0, 8, (1, 3)),
        (0, 9, (0, 2)),  # a0..a3
        (1, 5, (0, 0)),
        (1, 6, (2, 0)),
        (1, 7, (2, 1)),  # the prompt again, then b0, b1
        (2, 6, (3, 2)),
        (2, 7, (3, 3)),
        (2, 8, (3, 4)),
    ],
)  # c0..c2
def test_where_a_token_goes(sequence, token, place):
    rank, index = place
    assert locate(FUSED, FOREST, sequence, token) == [Place(0, rank, index)]
    local = PassLayout(FUSED.passes[0], FOREST).local([rank], torch.device("cpu"))
    tokens = [*P, *(A, B, C)[sequence]]
    assert (local.inputs[index], local.positions[index]) == (tokens[token - 1], token - 1)
    assert FOREST.targets[local.rows[index]] == tokens[token]


def test_where_a_token_goes_in_phases_and_copies():
    assert locate(PHASED, FOREST, 0, 5) == [Place(0, 0, 0)] and locate(PHASED, FOREST, 0, 9) == [
        Place(1, 0, 1)
    ]
    assert locate(COPIES, FOREST, 2, 3) == [Place(0, 0, 2), Place(1, 1, 2)], "one a prompt copy"
    assert locate(COPIES, FOREST, 2, 8) == [Place(1, 1, 9)]
    for token in (0, 9):
        with pytest.raises(InputError, match=f"sequence 2, token {token}"):
            locate(COPIES, FOREST, 2, token)


@pytest.mark.parametrize(
    ("plan", "completed"),
    [(FUSED, [[0, 1, 2]]), (PHASED, [[], [0, 1, 2]]), (COPIES, [[0], [1, 2]])],
    ids=("fused", "phased", "copies"),
)
def test_whole_sequences_come_back(plan, completed):
    """The vectorised twin: slots of a sequence's logical rows, in token order, in its own job's passes."""
    layouts = [PassLayout(p, FOREST) for p in plan.passes]
    sequences = SequenceLayout(plan, FOREST, layouts)
    assert sequences.completed == completed
    for number, response in enumerate((A, B, C)):
        passes, slots = sequences.places(number)
        rows = [layouts[p].slots[slot] for p, slot in zip(passes, slots)]
        assert FOREST.targets[rows].tolist() == response


def test_a_plan_that_lacks_a_sequences_rows():
    other = from_groups([(P, [(A, [True] * 4)])])
    plan = Plan(
        1,
        "augtree",
        other.shape,
        (Pass(0, 0, "fused", (0,), ((Span(0, 0, 9),),)),),
        (Event("forward", 0), Event("backward", 0)),
    )
    short = Plan(1, "augtree", other.shape, (Pass(0, 0, "fused", (0,), ((Span(0, 0, 7),),)),), plan.events)
    whole = SequenceLayout(plan, other, [PassLayout(plan.passes[0], other)])
    assert np.array_equal(whole.places(0)[1], np.arange(4))
    broken = SequenceLayout(short, other, [PassLayout(short.passes[0], other)])
    with pytest.raises(InputError, match="does not hold"):
        broken.places(0)
