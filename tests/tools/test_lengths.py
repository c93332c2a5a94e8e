"""Forests from lengths equal those that tokens give, in every mode; presets repeat and stay within bounds."""

from __future__ import annotations

import random
import statistics

import pytest

from megatron_augtree.config import InputError
from megatron_augtree.data.groups import Group, Response
from megatron_augtree.data.workloads import WORKLOADS, rollout_trees, workload
from megatron_augtree.planning.tree import TokenSequence, from_groups, from_sequences
from megatron_augtree.tools.lengths import Step, step_of_groups, step_of_lengths, step_of_rollouts

LENGTHS = [
    (9, [4, 2, 3]),
    (1, [3, 5]),  # no spine: a root a response
    (6, [7]),  # one response: one node
    (5, [0, 2, 0]),  # empty responses end in the prompt
    (4, [0]),
    (1, [0, 2]),  # a sequence without rows
    (3, []),
]


def tokens_of(lengths) -> list[tuple[list[int], list[list[int]]]]:
    """Token ids with these lengths; responses differ at once, groups in their first token."""
    draw, made = random.Random(0), []
    for number, (prompt, responses) in enumerate(lengths):
        ids = [number, *(draw.randrange(100, 200) for _ in range(prompt - 1))]
        made.append((ids, [[i, *(draw.randrange(200, 300) for _ in range(n - 1))] if n else []
                           for i, n in enumerate(responses)]))  # fmt: skip
    return made


def groups_of(lengths) -> list[Group]:
    return [
        Group(f"g{i}", tuple(prompt), tuple(Response(tuple(r), (True,) * len(r)) for r in responses))
        for i, (prompt, responses) in enumerate(tokens_of(lengths))
    ]


@pytest.mark.parametrize("mode", ["augtree", "gather-reuse", "ring"])
def test_lengths_give_the_forest_that_tokens_give(mode):
    got = step_of_lengths(LENGTHS).trees(mode)
    made = [(p, [(r, [True] * len(r)) for r in responses]) for p, responses in tokens_of(LENGTHS)]
    sequences = [p + r for p, responses in tokens_of(LENGTHS) for r in responses]
    if mode == "ring":
        want = from_groups(made, share=False)
    else:  # trees of groups with a first token each
        want = from_groups(made)
    assert got.shape == want.shape and got.paths == want.paths
    assert len(sequences) == len(got.paths)
    for root, group in zip(got.shape.roots, got.tree_groups):
        names = step_of_lengths(LENGTHS).names
        assert {names[s][0] for s, path in enumerate(got.paths) if path and path[0] == root} == {group}


@pytest.mark.parametrize("mode", ["augtree", "gather-reuse", "ring"])
def test_a_group_file_gives_the_same_step_as_its_lengths(mode):
    of_groups, of_lengths = step_of_groups(groups_of(LENGTHS), 1), step_of_lengths(LENGTHS)
    assert of_groups.trees(mode) == of_lengths.trees(mode)
    assert of_groups == of_lengths
    assert of_groups.unshared_rows == sum(max(p + r - 1, 0) for p, rs in LENGTHS for r in rs)
    assert of_groups.unshared_pairs == sum(
        (p + r - 1) * (p + r) // 2 for p, responses in LENGTHS for r in responses)


def test_groups_share_across_each_other_only_under_augtree():
    answers = [(7, 8), (8, 9)]
    groups = [Group(n, (1, 2, 3, 4, last), tuple(Response(a, (True, True)) for a in answers))
              for n, last in (("a", 5), ("b", 6))]  # fmt: skip
    step = step_of_groups(groups, 3)
    assert len(step.trees("augtree").shape.roots) == 1 and step.trees("augtree").tree_groups == (0,)
    assert len(step.trees("gather-reuse").shape.roots) == 2
    assert len(step.trees("ring").shape.roots) == 4
    assert len(step_of_groups(groups, 4).trees("augtree").shape.roots) == 2


def test_masks_and_salts_count():
    response = Response((7, 8, 9), (True, False, True), salt=(0, 0, 0))
    salted = Response((7, 8, 9), (True, False, True), salt=(1, 0, 0))
    step = step_of_groups([Group("a", (1, 2), (response, response, salted))], 1)
    assert step.scored == (2, 2, 2)
    # the salted response's first token stands apart, so only the prompt's row is shared
    assert step.merged.shape.rows == (1, 3, 3) and step.merged.shape.ends == (0, 2, 1)


@pytest.mark.parametrize("group", [(0, [3]), (4, [2, -1])])
def test_lengths_out_of_range_are_refused(group):
    with pytest.raises(InputError, match="a length is out of range"):
        step_of_lengths([group])


@pytest.mark.parametrize("name", WORKLOADS)
def test_presets_keep_their_median_and_bounds_and_repeat(name):
    made, groups = WORKLOADS[name], workload(name, 400, 3)
    assert groups == workload(name, 400, 3) and groups[:50] == workload(name, 50, 3)
    assert len(groups) == 400 and {len(responses) for _, responses in groups} == {made.responses}
    prompts = [prompt for prompt, _ in groups]
    answers = [tokens for _, responses in groups for tokens in responses]
    for lengths, values in ((made.prompt, prompts), (made.response, answers)):
        assert 1 <= min(values) and max(values) <= lengths.largest
        assert statistics.median(values) == pytest.approx(lengths.p50, rel=0.2)
        assert (len(set(values)) > 1) == (lengths.sigma > 0)
    assert (groups != workload(name, 400, 4)) == (made.prompt.sigma > 0)


def test_an_unknown_preset_is_refused():
    with pytest.raises(InputError, match="longreward"):
        workload("longrewards", 1, 0)


def test_rollouts_branch_at_turns_and_share_one_policy():
    trees = rollout_trees(5, 1)
    assert trees == rollout_trees(5, 1) != rollout_trees(5, 2)
    for nodes in trees:
        leaves = [n for n in range(len(nodes)) if n not in {parent for parent, _ in nodes}]
        assert len(leaves) == 8 and all(tokens > 0 for _, tokens in nodes)
        for leaf in leaves:
            length = depth = 0
            while leaf >= 0:
                length, depth, leaf = length + nodes[leaf][1], depth + 1, nodes[leaf][0]
            assert length <= 16384 and depth >= 3
    step = step_of_rollouts(trees)
    assert len(step.single.shape.roots) == 5 and step.single.tree_groups == (0, 1, 2, 3, 4)
    assert step.merged.shape.roots == (0,) and step.merged.shape.rows[0] == 4799
    assert step.merged.shape.total_rows == step.single.shape.total_rows - 4 * 4799
    alone = step_of_rollouts(trees[:1])
    assert alone.merged == alone.single and alone.merged.shape.rows[0] > 4799


def test_rollouts_give_the_forest_that_tokens_give():
    """Small copies of the trees, with tokens that differ where nodes do."""
    trees = [[(-1, 4), (0, 3), (1, 2), (1, 1), (3, 2), (3, 5)], [(-1, 4), (0, 2), (1, 1), (1, 6)]]
    sequences, numbers, fresh = [], [], iter(range(10, 999))
    for group, nodes in enumerate(trees):
        own = [[next(fresh) for _ in range(tokens)] if parent >= 0 else [1, 2, 3, 4]
               for parent, tokens in nodes]
        for node in range(len(nodes)):
            if node not in {parent for parent, _ in nodes}:
                path, at = [], node
                while at >= 0:
                    path, at = own[at] + path, nodes[at][0]
                sequences.append(TokenSequence(path, [i >= 3 for i in range(len(path) - 1)]))
                numbers.append(group)
    step: Step = step_of_rollouts(trees)
    for rows, trees_of in ((1, step.merged), (99, step.single)):
        want = from_sequences(sequences, groups=numbers, min_shared_rows=rows)
        assert trees_of.shape == want.shape and trees_of.paths == want.paths
    assert step.scored == tuple(sum(s.scored) for s in sequences)
