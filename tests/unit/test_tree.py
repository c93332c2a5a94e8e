"""Trees over rows: two sequences share row i exactly where tokens 0..i+1 and their salts agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import InputError
from megatron_augtree.planning.tree import (
    Forest,
    ForestShape,
    TokenSequence,
    from_groups,
    from_lengths,
    from_sequences,
)
from tests.unit.forests import shapes, visible


def sequence(tokens, scored=None, salt=None) -> TokenSequence:
    rows = max(len(tokens) - 1, 0)
    mask = np.ones(rows, bool) if scored is None else np.asarray(scored, bool)
    return TokenSequence(
        np.asarray(tokens, np.int64), mask, None if salt is None else np.asarray(salt, np.int64)
    )


def symbols(s: TokenSequence) -> list[tuple[int, ...]]:
    salts = [()] * len(s.tokens) if s.salt is None else [tuple(np.atleast_1d(x).tolist()) for x in s.salt]
    return [(int(token), *salt) for token, salt in zip(s.tokens, salts, strict=True)]


def clusters(sequences, groups, minimum: int) -> list[object]:
    """[sequence] -> a name that sequences which may share rows have in common."""
    if groups is None:
        return ["all"] * len(sequences)
    heads: dict[int, set] = {}
    for s, group in zip(sequences, groups, strict=True):
        found = symbols(s)
        heads.setdefault(group, set()).add(tuple(found[: minimum + 1]) if len(found) > minimum else None)
    names = {group: next(iter(h)) if len(h) == 1 and None not in h else None for group, h in heads.items()}
    return [group if names[group] is None else names[group] for group in groups]


def check_against_prefixes(forest: Forest, sequences, names) -> None:
    """The brute force: a dictionary from prefixes to rows."""
    shape = forest.shape
    row_of: dict[object, int] = {}
    scored: set[int] = set()
    for number, s in enumerate(sequences):
        found = symbols(s)
        rows = [r for n in forest.paths[number] for r in range(shape.offsets[n], shape.offsets[n + 1])]
        assert len(rows) == max(len(found) - 1, 0)
        for i, row in enumerate(rows):
            prefix = (names[number], tuple(found[: i + 2]))
            assert row_of.setdefault(prefix, row) == row
            assert (forest.inputs[row], forest.targets[row], forest.positions[row]) == (
                s.tokens[i],
                s.tokens[i + 1],
                i,
            )
            assert forest.row_of(number, i + 1) == row
        assert forest.logical[number].tolist() == [row for row, on in zip(rows, s.scored, strict=True) if on]
        scored |= set(forest.logical[number].tolist())
    assert len(set(row_of.values())) == len(row_of) == shape.total_rows, "different prefixes, different rows"
    assert set(np.flatnonzero(forest.scored)) == scored
    check_shape(forest)


def check_shape(forest: Forest) -> None:
    shape = forest.shape
    for node, parent in enumerate(shape.parents):
        assert parent < node and shape.rows[node] > 0
        below = {n for n in range(len(shape.parents)) if node in shape.ancestors[n]}
        assert set(shape.subtree(node)) == {node, *range(node + 1, node + 1 + len(below))}, "depth first"
        lo, hi = shape.offsets[node], shape.offsets[node + 1]
        assert shape.scored[node] == forest.scored[lo:hi].sum()
        assert shape.ends[node] == sum(path[-1:] == (node,) for path in forest.paths)
        assert len(shape.children[node]) != 1 or shape.ends[node], (
            "a node is cut only where paths part or end"
        )


@st.composite
def token_sequences(draw, salted: bool = True) -> TokenSequence:
    tokens = draw(st.lists(st.integers(-1, 2), max_size=6))
    width = draw(st.sampled_from((None, 0, 2))) if salted else None
    salt = None
    if width is not None:
        entry = st.integers(0, 1) if width == 0 else st.tuples(st.integers(0, 1), st.just(7))
        salt = np.asarray([draw(entry) for _ in tokens], np.int64).reshape(
            (len(tokens), *((2,) if width else ()))
        )
    return sequence(tokens, [draw(st.booleans()) for _ in tokens[1:]], salt)


@settings(max_examples=150, deadline=None)
@given(st.lists(token_sequences(), max_size=7))
def test_rows_are_shared_exactly_where_prefixes_agree(sequences):
    check_against_prefixes(from_sequences(sequences), sequences, clusters(sequences, None, 1))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(token_sequences(), st.integers(0, 3)), max_size=7), st.integers(1, 3))
def test_groups_join_where_they_share_enough(items, minimum):
    sequences, groups = [s for s, _ in items], [g for _, g in items]
    forest = from_sequences(sequences, groups=groups, min_shared_rows=minimum)
    check_against_prefixes(forest, sequences, clusters(sequences, groups, minimum))


@settings(max_examples=100, deadline=None)
@given(st.lists(token_sequences(), max_size=5))
def test_without_sharing_every_sequence_is_a_tree(sequences):
    forest = from_sequences(sequences, share=False)
    check_against_prefixes(forest, sequences, list(range(len(sequences))))
    assert len(forest.shape.roots) == sum(len(s.tokens) > 1 for s in sequences)


@settings(max_examples=100, deadline=None)
@given(st.lists(token_sequences(salted=False), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_permuting_responses_permutes_leaves(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    a, b = from_sequences(sequences), from_sequences([sequences[i] for i in order])
    assert sorted(zip(a.positions, a.inputs, a.targets, a.scored)) == sorted(
        zip(b.positions, b.inputs, b.targets, b.scored)
    )
    assert sorted(a.shape.rows) == sorted(b.shape.rows)
    for place, number in enumerate(order):
        assert [a.inputs[r] for r in a.logical[number]] == [b.inputs[r] for r in b.logical[place]]


def test_the_prompts_last_token_begins_every_branch():
    """Two responses that differ at once: P - 1 spine rows, R rows a branch, no row with two targets."""
    forest = from_groups([([5, 6, 7], [([1, 2], [1, 1]), ([3], [1])])])
    assert forest.shape == ForestShape((-1, 0, 0), (2, 2, 1), (0, 2, 1), (0, 1, 1))
    assert forest.inputs.tolist() == [5, 6, 7, 1, 7] and forest.targets.tolist() == [6, 7, 1, 2, 3]
    assert forest.positions.tolist() == [0, 1, 2, 3, 2]
    assert forest.scored.tolist() == [False, False, True, True, True]


def test_duplicates_nested_and_empty_responses():
    """Case 4: [A, B], [A, B], [A], []: duplicates share their rows, the empty one has none of its own."""
    forest = from_groups([([5, 6], [([1, 2], [1, 1]), ([1, 2], [1, 1]), ([1], [1]), ([], [])])])
    assert forest.shape == ForestShape((-1, 0, 1), (1, 1, 1), (0, 1, 1), (1, 1, 2))
    assert [r.tolist() for r in forest.logical] == [[1, 2], [1, 2], [1], []]
    assert forest.paths == ((0, 1, 2), (0, 1, 2), (0, 1), (0,))


def test_one_token_prompts_share_nothing():
    """Case 25: P = 1, G = 8: nothing to share, unless the first response token is the same."""
    apart = from_groups([([9], [([t, 50], [1, 1]) for t in range(8)])])
    assert apart.shape.parents == (-1,) * 8 and apart.shape.rows == (2,) * 8
    same = from_groups([([9], [([0, t], [1, 1]) for t in range(8)])])
    assert same.shape == ForestShape((-1, *[0] * 8), (1,) * 9, (1,) * 9, (0, *[1] * 8))


def test_losses_on_inner_nodes():
    """A shared assistant turn is one row that several sequences score, or that only one of them does."""
    a = sequence([1, 2, 3, 4], [0, 1, 1])
    b = sequence([1, 2, 3, 5], [0, 0, 1])
    forest = from_sequences([a, b])
    assert forest.shape.scored == (1, 1, 1)
    assert [r.tolist() for r in forest.logical] == [[1, 2], [3]]


def test_salts_part_what_tokens_share():
    forest = from_sequences([sequence([1, 2, 3], salt=[0, 0, 0]), sequence([1, 2, 3], salt=[0, 1, 0])])
    assert len(forest.shape.roots) == 2
    late = from_sequences([sequence([1, 2, 3], salt=[0, 0, 0]), sequence([1, 2, 3], salt=[0, 0, 1])])
    assert late.shape.parents == (-1, 0, 0) and late.targets.tolist() == [2, 3, 3]


def test_an_unsalted_pair_shares_across_a_salted_neighbour():
    """Sequences of another salt width stand between the two in byte order; they must not part them."""
    forest = from_sequences([sequence([1, 2, 3]), sequence([1, 3], salt=[2, 5]), sequence([1, 2, 4])])
    assert forest.paths[0][0] == forest.paths[2][0] and len(forest.shape.roots) == 2


def test_groups_share_a_spine_of_enough_rows():
    system = list(range(20))
    groups = [([*system, 30 + g], [([t], [1]) for t in range(2)]) for g in range(3)]
    tied = from_groups(groups, min_shared_rows=19)
    assert len(tied.shape.roots) == 1 and tied.shape.rows[0] == 19 and len(tied.shape.rows) == 1 + 3 + 6
    assert len(from_groups(groups, min_shared_rows=20).shape.roots) == 3


@pytest.mark.parametrize("kind", ("nested", "comb"))
def test_five_hundred_levels(kind):
    tokens = np.arange(502)
    if kind == "nested":
        responses = [(tokens[2 : 2 + n], [True] * n) for n in range(1, 501)]
    else:
        responses = [([*tokens[2 : 1 + n], 999], [True] * n) for n in range(1, 501)]
    forest = from_groups([(tokens[:2], responses)])
    assert forest.shape.total_rows == (501 if kind == "nested" else 1 + 499 + 500)
    assert max(map(len, forest.shape.ancestors)) >= 499
    assert [len(r) for r in forest.logical] == list(range(1, 501))


def test_nothing_at_all():
    for forest in (from_sequences([]), from_groups([([], [])]), from_groups([([4], [([], [])])])):
        assert forest.shape == ForestShape((), (), (), ()) and forest.shape.total_rows == 0
    assert from_groups([([], [([1, 2], [1, 1])])]).logical[0].tolist() == [0]


def test_lengths_alone_give_the_same_shape():
    prompt, answers = [0] * 6, [3, 1, 0, 5]
    groups = [(prompt, [([10 + i] * n, [1] * n) for i, n in enumerate(answers)])]
    assert from_lengths(5, answers) == from_groups(groups).shape
    assert from_lengths(0, [2, 0, 3]) == ForestShape((-1, -1), (2, 3), (2, 3), (1, 1))


def test_fields_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="sequence 1: 3 tokens, 1 scored"):
        from_sequences([sequence([1, 2]), TokenSequence(np.arange(3), np.ones(1, bool))])
    with pytest.raises(InputError, match="2 salts"):
        from_sequences([sequence([1, 2, 3], salt=[0, 0])])


@pytest.mark.parametrize("token", (0, 4, -1))
def test_row_of_a_token_that_is_nobodys_target(token):
    forest = from_sequences([sequence([1, 2, 3, 4])])
    assert forest.row_of(0, 3) == 2
    with pytest.raises(InputError, match=f"token {token}"):
        forest.row_of(0, token)


@settings(max_examples=100, deadline=None)
@given(shapes(max_nodes=8))
def test_area_counts_pairs(shape):
    for node, rows in enumerate(shape.rows):
        lo, hi = rows // 3, rows - rows // 4
        assert shape.area(node, lo, hi) == sum(len(visible(shape, (node, r))) for r in range(lo, hi))
        assert shape.area(node) == sum(len(visible(shape, (node, r))) for r in range(rows))
        assert shape.chain(node)[-1] == node and set(shape.chain(node)[:-1]) == shape.ancestors[node]
        assert shape.starts[node] == sum(shape.rows[a] for a in shape.ancestors[node])
