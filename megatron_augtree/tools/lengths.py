"""Forests from lengths: what planners, pictures and benchmarks need where there are no tokens, or no torch.

A `Step` gives the trees of a mode: ``augtree`` shares within and across groups, the baselines within a group,
or not at all. Sequences are numbered group by group, response by response, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_augtree.config import InputError
from megatron_augtree.data.groups import Group
from megatron_augtree.planning.baselines import UNSHARED
from megatron_augtree.planning.choose import merging
from megatron_augtree.planning.tree import ForestShape, from_lengths, from_sequences, sequence_of


class Trees(NamedTuple):
    """A forest, and which groups and sequences its nodes belong to.

    Attributes:
        shape: the forest.
        tree_groups: [root] number of the (first) group behind it.
        paths: [sequence] its nodes from the root down; empty where it has no rows.
        joined: whether some tree holds rows of several groups.
    """

    shape: ForestShape
    tree_groups: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    joined: bool = False


@dataclass(frozen=True)
class Step:
    """The groups of one step.

    Attributes:
        names: [sequence] (group, response).
        merged: trees as ``augtree`` shares them.
        single: trees within groups.
        scored: [sequence] rows of it that carry a loss.
        prompts: [group] tokens before the first token in which its responses may differ.
    """

    names: tuple[tuple[int, int], ...]
    merged: Trees
    single: Trees
    scored: tuple[int, ...]
    prompts: tuple[int, ...]

    def trees(self, mode: str) -> Trees:
        """The forest that a ``--context-parallel-mode`` computes."""
        if mode in UNSHARED:
            return self.flat
        return self.merged if mode == "augtree" else self.single

    @property
    def flat(self) -> Trees:
        """Every sequence a tree of its own."""
        rows, groups, paths, scored = [], [], [], []
        for (group, _), path, count in zip(self.names, self.single.paths, self.scored):
            length = sum(self.single.shape.rows[node] for node in path)
            paths.append((len(rows),) if length else ())
            if length:
                rows.append(length)
                groups.append(group)
                scored.append(count)
        shape = ForestShape((-1,) * len(rows), tuple(rows), tuple(scored), (1,) * len(rows))
        return Trees(shape, tuple(groups), tuple(paths))

    @property
    def groups(self) -> int:
        """How many groups."""
        return len(self.prompts)

    @property
    def unshared_rows(self) -> int:
        """Rows that a run without sharing computes."""
        shape = self.single.shape
        return sum(shape.rows[node] for path in self.single.paths for node in path)

    @property
    def unshared_pairs(self) -> int:
        """(query, key) pairs that a run without sharing computes."""
        shape = self.single.shape
        return sum(shape.area(node) for path in self.single.paths for node in path)


def step_of_lengths(groups: Sequence[tuple[int, Sequence[int]]]) -> Step:
    """Groups of (prompt tokens, response tokens) whose responses differ from their first token on.

    Raises:
        InputError: a prompt without a token, or a response of fewer than none.
    """
    shapes, paths, scored, names = [], [], [], []
    for number, (prompt, responses) in enumerate(groups):
        if prompt < 1 or any(tokens < 0 for tokens in responses):
            raise InputError(
                "a length is out of range",
                values=f"group {number}: prompt {prompt}, responses {', '.join(map(str, responses))}",
                rule="a prompt has at least 1 token, a response at least 0",
                remedy="correct the lengths",
            )
        alone = len(responses) == 1  # one response is one node: nothing branches
        own = (0, [prompt - 1 + responses[0]]) if alone else (prompt - 1, responses)
        shape = from_lengths(*own)
        if alone and shape.rows:
            shape = ForestShape(shape.parents, shape.rows, (responses[0],), shape.ends)
        shapes.append(shape if responses else ForestShape((), (), (), ()))
        paths.append(_paths_of(own[0], own[1]))
        scored += responses
        names += [(number, i) for i in range(len(responses))]
    trees = _join(shapes, paths)
    return Step(tuple(names), trees, trees, tuple(scored), tuple(prompt for prompt, _ in groups))


def _paths_of(prompt_rows: int, response_rows: Sequence[int]) -> list[tuple[int, ...]]:
    """[response] its nodes in `from_lengths`' numbering."""
    spine, paths = (0,) if prompt_rows else (), []
    leaf = len(spine)
    for rows in response_rows:
        paths.append((*spine, leaf) if rows else spine)
        leaf += bool(rows)
    return paths


def _join(shapes: Sequence[ForestShape], paths: Sequence[Sequence[tuple[int, ...]]]) -> Trees:
    """Forests one after the other, a group each."""
    fields: tuple[list[int], ...] = ([], [], [], [])
    groups: list[int] = []
    moved: list[tuple[int, ...]] = []
    for group, (shape, own) in enumerate(zip(shapes, paths)):
        first = len(fields[1])
        fields[0].extend(p + first if p >= 0 else -1 for p in shape.parents)
        for values, more in zip(fields[1:], (shape.rows, shape.scored, shape.ends)):
            values.extend(more)
        groups += [group] * len(shape.roots)
        moved += [tuple(node + first for node in path) for path in own]
    return Trees(ForestShape(*map(tuple, fields)), tuple(groups), tuple(moved))


def step_of_rollouts(trees: Sequence[Sequence[tuple[int, int]]]) -> Step:
    """Multi-turn groups, as `workloads.rollout_trees` gives them: all begin with the same policy."""
    apart = [_rollouts(nodes, nodes[0][1]) for nodes in trees]
    # Within a group nothing branches between the policy and the task: they are one node.
    joined = [
        _rollouts([(-1, nodes[0][1] + nodes[1][1]), *((max(p - 1, 0), t) for p, t in nodes[2:])], nodes[0][1])
        for nodes in trees
    ]
    single = _join([shape for shape, _ in joined], [paths for _, paths in joined])
    merged = single
    if len(trees) > 1:
        merged = _one_root(_join([shape for shape, _ in apart], [paths for _, paths in apart]))
    scored = tuple(sum(single.shape.scored[n] for n in path) for path in single.paths)
    names = tuple((group, i) for group, (_, paths) in enumerate(joined) for i in range(len(paths)))
    return Step(names, merged, single, scored, tuple(nodes[0][1] for nodes in trees))


def _rollouts(nodes: Sequence[tuple[int, int]], policy: int) -> tuple[ForestShape, list[tuple[int, ...]]]:
    """One group's tree and the paths of its rollouts; the first `policy` tokens carry no loss."""
    parents, tokens = tuple(p for p, _ in nodes), [count for _, count in nodes]
    ends = tuple(int(node not in parents) for node in range(len(nodes)))
    # The first token is nobody's target.
    rows, scored = (tokens[0] - 1, *tokens[1:]), (tokens[0] - policy, *tokens[1:])
    shape = ForestShape(parents, rows, scored, ends)
    return shape, [shape.chain(node) for node in range(len(nodes)) if ends[node]]


def _one_root(trees: Trees) -> Trees:
    """The same forest with all its roots, which hold the same rows, as one."""
    shape, place, kept = trees.shape, {}, []
    # Nodes keep their order; every root but the first goes.
    for node, parent in enumerate(shape.parents):
        if parent < 0 and kept:
            place[node] = 0
        else:
            place[node] = len(kept)
            kept.append(node)
    parents = tuple(place[shape.parents[n]] if shape.parents[n] >= 0 else -1 for n in kept)
    values = (tuple(field[n] for n in kept) for field in (shape.rows, shape.scored, shape.ends))
    paths = tuple(tuple(place[node] for node in path) for path in trees.paths)
    return Trees(ForestShape(parents, *values), (0,), paths, joined=True)


def step_of_groups(groups: Sequence[Group], min_shared_rows: int) -> Step:
    """Groups with their tokens; see `tree.from_sequences` for `min_shared_rows`."""
    sequences, numbers = [], []
    for number, group in enumerate(groups):
        for r in group.responses:
            sequences.append(sequence_of(group.prompt, r.tokens, r.loss_mask, group.prompt_salt, r.salt))
            numbers.append(number)
    merged, single = (
        from_sequences(sequences, groups=numbers, **merging(mode, min_shared_rows))
        for mode in ("augtree", "gather-reuse")
    )
    return Step(
        tuple((g, i) for g, group in enumerate(groups) for i in range(len(group.responses))),
        Trees(merged.shape, merged.tree_groups, merged.paths, merged.joined),
        Trees(single.shape, single.tree_groups, single.paths),
        tuple(int(sequence.scored.sum()) for sequence in sequences),
        tuple(len(group.prompt) for group in groups),
    )
