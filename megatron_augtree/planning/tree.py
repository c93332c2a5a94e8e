"""The prefix trees of one optimizer step, built over rows.

A sequence x0..xT-1 has T-1 rows; row i has input x_i, position i and target x_{i+1}. Two sequences share
row i exactly when they agree on tokens 0..i+1 and on those tokens' salts. Every row then has one target,
identical and nested responses merge by themselves, and no hidden state is ever fanned out.

This is the only file that compares tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_augtree.config import InputError


@dataclass(frozen=True)
class ForestShape:
    """Lengths only: all that a planner sees.

    Nodes are numbered depth first, parents before children.

    Attributes:
        parents: a node's parent, -1 for a root.
        rows: rows of a node.
        scored: rows of a node that carry a loss.
        ends: how many sequences end in a node.
    """

    parents: tuple[int, ...]
    rows: tuple[int, ...]
    scored: tuple[int, ...]
    ends: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each node's first row."""
        starts: list[int] = []
        for parent in self.parents:
            starts.append(0 if parent < 0 else starts[parent] + self.rows[parent])
        return tuple(starts)

    @cached_property
    def ancestors(self) -> tuple[frozenset[int], ...]:
        """Proper ancestors of each node."""
        found: list[frozenset[int]] = []
        for parent in self.parents:
            found.append(frozenset() if parent < 0 else found[parent] | {parent})
        return tuple(found)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                lists[parent].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def roots(self) -> tuple[int, ...]:
        return tuple(node for node, parent in enumerate(self.parents) if parent < 0)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Global number of each node's first row; the last entry is the number of rows."""
        return tuple(int(x) for x in np.concatenate([[0], np.cumsum(self.rows, dtype=np.int64)]))

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    def subtree(self, node: int) -> tuple[int, ...]:
        """The node and everything below it, in order."""
        return tuple(range(node, self.subtree_ends[node]))

    @cached_property
    def trees(self) -> tuple[tuple[int, ...], ...]:
        """[tree] its nodes."""
        return tuple(map(self.subtree, self.roots))

    @cached_property
    def subtree_ends(self) -> tuple[int, ...]:
        """[node] the first node after its subtree: nodes are numbered depth first."""
        ends = list(range(1, len(self.parents) + 1))
        for node in range(len(self.parents) - 1, -1, -1):
            if self.parents[node] >= 0:
                ends[self.parents[node]] = max(ends[self.parents[node]], ends[node])
        return tuple(ends)

    def chain(self, node: int) -> tuple[int, ...]:
        """The nodes from the root down to `node`."""
        return (*sorted(self.ancestors[node]), node)

    def area(self, node: int, lo: int = 0, hi: int | None = None) -> int:
        """(query row, key row) pairs of rows lo..hi of a node, ancestors included."""
        hi = self.rows[node] if hi is None else hi
        first, last = self.starts[node] + lo + 1, self.starts[node] + hi
        return (first + last) * (hi - lo) // 2


@dataclass(frozen=True)
class TokenSequence:
    """One sequence as the loss sees it.

    Attributes:
        tokens: [T] ids.
        scored: [T-1] bool; entry i says whether row i (target token i+1) carries a loss.
        salt: [T] or [T, k] integers, or None; rows are shared only where salts agree too.
    """

    tokens: np.ndarray
    scored: np.ndarray
    salt: np.ndarray | None = None


def sequence_of(
    prompt: Seq[int],
    tokens: Seq[int],
    loss_mask: Seq[bool],
    prompt_salt: Seq[int] | None = None,
    salt: Seq[int] | None = None,
) -> TokenSequence:
    """A prompt (at least one token) and one response to it.

    Args:
        prompt, tokens: ids.
        loss_mask: [response tokens]; a response's first token is the target of the prompt's last row.
        prompt_salt, salt: of the prompt's and the response's tokens; None of one of them is 0.
    """
    scored = np.concatenate([np.zeros(len(prompt) - 1, bool), np.asarray(loss_mask, bool)])
    salts = None
    if prompt_salt is not None or salt is not None:
        salts = np.asarray([*(prompt_salt or (0,) * len(prompt)), *(salt or (0,) * len(tokens))], np.int64)
    return TokenSequence(np.asarray([*prompt, *tokens], np.int64), scored, salts)


@dataclass(frozen=True)
class Forest:
    """The trees of one optimizer step with their tokens.

    Attributes:
        shape: lengths.
        inputs, targets, positions: [rows] int64, nodes concatenated in order.
        scored: [rows] bool; rows that any sequence scores.
        paths: [sequence] -> its nodes from the root down.
        logical: [sequence] -> [R] int64, the row behind each of its logical rows, in token order.
        tree_groups: [tree] number of the (first) group behind each root.
        joined: whether some tree holds rows of several groups.
    """

    shape: ForestShape
    inputs: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    scored: np.ndarray
    paths: tuple[tuple[int, ...], ...]
    logical: tuple[np.ndarray, ...]
    tree_groups: tuple[int, ...]
    joined: bool

    def row_of(self, sequence: int, token: int) -> int:
        """The row whose target is `token` of `sequence` (token 0 is nobody's target)."""
        for node in self.paths[sequence]:
            start = self.shape.starts[node]
            if start <= token - 1 < start + self.shape.rows[node]:
                return self.shape.offsets[node] + token - 1 - start
        raise InputError(
            "no such token",
            values=f"sequence {sequence}, token {token}",
            rule="tokens 1..T-1 of a sequence are targets of rows",
            remedy="ask for a token inside the sequence",
        )


def from_sequences(
    sequences: Seq[TokenSequence],
    *,
    groups: Seq[int] | None = None,
    min_shared_rows: int = 1,
    share: bool = True,
) -> Forest:
    """Merge sequences into prefix trees.

    Args:
        sequences: any number, in the caller's order.
        groups: [sequence] group numbers; sequences of one group always merge, groups merge with each other
            only where they share at least `min_shared_rows` rows. None: one group.
        min_shared_rows: see `groups`. Any value is exact; small shared prefixes only tie trees together.
        share: False leaves every sequence a tree of its own (what ring context parallelism computes).

    Returns:
        The forest; `paths` and `logical` follow the order of `sequences`.
    """
    for index, sequence in enumerate(sequences):
        _check_sequence(index, sequence)
    builder = _Builder(sequences)
    numbers = [0] * len(sequences) if groups is None else groups
    if not share:
        for index in range(len(sequences)):
            builder.add_cluster([index])
    else:
        for cluster in _clusters(sequences, groups, min_shared_rows):
            builder.add_cluster(cluster)
    return builder.finish(numbers)


def from_groups(
    groups: Seq[tuple[Seq[int], Seq[tuple[Seq[int], Seq[bool]]]]],
    *,
    min_shared_rows: int = 1,
    share: bool = True,
) -> Forest:
    """Trees of (prompt, [(response tokens, loss mask)]) groups.

    Sequences are numbered group by group, response by response.
    """
    sequences, numbers = [], []
    for number, (prompt, responses) in enumerate(groups):
        for tokens, mask in responses:
            scored = np.concatenate([np.zeros(max(len(prompt) - 1, 0), bool), np.asarray(mask, bool)])
            scored = scored if len(prompt) else scored[1:]
            sequences.append(TokenSequence(np.asarray([*prompt, *tokens], np.int64), scored))
            numbers.append(number)
    return from_sequences(sequences, groups=numbers, min_shared_rows=min_shared_rows, share=share)


def from_lengths(prompt_rows: int, response_rows: Seq[int]) -> ForestShape:
    """The shape of one group whose responses differ at once: a spine and its leaves, in rows."""
    spine = (-1,) if prompt_rows else ()
    parent = 0 if prompt_rows else -1
    leaves = [rows for rows in response_rows if rows]
    return ForestShape(
        parents=(*spine, *[parent] * len(leaves)),
        rows=(*((prompt_rows,) if prompt_rows else ()), *leaves),
        scored=(*((0,) if prompt_rows else ()), *leaves),
        ends=(*((len(response_rows) - len(leaves),) if prompt_rows else ()), *[1] * len(leaves)),
    )


def _check_sequence(index: int, sequence: TokenSequence) -> None:
    tokens, scored, salt = sequence.tokens, sequence.scored, sequence.salt
    rows = max(len(tokens) - 1, 0)
    if len(scored) != rows or (salt is not None and len(salt) != len(tokens)):
        raise InputError(
            "a sequence's fields have different lengths",
            values=f"sequence {index}: {len(tokens)} tokens, {len(scored)} scored rows, "
            f"{'no' if salt is None else len(salt)} salts",
            rule="T tokens have T - 1 rows and, if any, T salts",
            remedy="pass one mask entry per target token",
        )


def _clusters(
    sequences: Seq[TokenSequence], groups: Seq[int] | None, min_shared_rows: int
) -> list[list[int]]:
    """Sequences that may share rows, in order of first appearance.

    Sharing `m` rows means agreeing on the first m + 1 tokens, which is an equivalence, so a dictionary finds
    the groups to join; a group whose sequences disagree within those tokens stays by itself.
    """
    if groups is None:
        return [list(range(len(sequences)))]
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    joined: dict[object, list[int]] = {}
    for group, indices in members.items():
        heads = {_key(sequences[i], min_shared_rows + 1) for i in indices}
        head = heads.pop() if len(heads) == 1 else None
        joined.setdefault(head if head is not None else ("group", group), []).extend(indices)
    return list(joined.values())


def _key(sequence: TokenSequence, length: int) -> bytes | None:
    if len(sequence.tokens) < length:
        return None
    return _symbols(sequence)[:length].tobytes()


def _symbols(sequence: TokenSequence) -> np.ndarray:
    """[T, 1 + k] int64: a token and its salts."""
    tokens = np.asarray(sequence.tokens, np.int64).reshape(-1, 1)
    if sequence.salt is None:
        return tokens
    salt = np.asarray(sequence.salt, np.int64)
    return np.concatenate([tokens, salt.reshape(len(tokens), int(np.prod(salt.shape[1:])))], axis=1)


def _shared_rows(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    if a.shape[1] != b.shape[1]:
        return 0
    differ = np.flatnonzero((a[:length] != b[:length]).any(axis=1))
    agree = int(differ[0]) if len(differ) else length
    return max(agree - 1, 0)


class _Builder:
    """Radix merging by sorting: sequences that share a prefix are neighbours in byte order."""

    def __init__(self, sequences: Seq[TokenSequence]) -> None:
        self.sequences = sequences
        self.symbols = [_symbols(s) for s in sequences]
        self.parents: list[int] = []
        self.bounds: list[tuple[int, int, int]] = []  # (sequence that holds the rows, first row, end row)
        self.end_node = [-1] * len(sequences)

    def add_cluster(self, indices: list[int]) -> None:
        # Sequences without rows have no node; salts of another width never agree, so widths stay apart.
        order = sorted(
            (i for i in indices if len(self.symbols[i]) > 1),
            key=lambda i: (self.symbols[i].shape[1], self.symbols[i].astype(">i8").tobytes(), i),
        )
        if not order:
            return
        shared = [_shared_rows(self.symbols[a], self.symbols[b]) for a, b in zip(order, order[1:])]
        work = [(0, len(order), 0, -1)]
        while work:
            lo, hi, depth, parent = work.pop()
            ends = [len(self.symbols[order[i]]) - 1 for i in range(lo, hi)]
            common = min([*shared[lo : hi - 1], *ends])
            if common > depth:
                self.parents.append(parent)
                self.bounds.append((order[lo], depth, common))
                parent = len(self.parents) - 1
            pieces = self._split(order, shared, lo, hi, common, parent)
            # A stack plays in reverse; responses keep the caller's order.
            for first, last in sorted(pieces, key=lambda p: -min(order[p[0] : p[1]])):
                work.append((first, last, common, parent))

    def _split(self, order, shared, lo, hi, common, parent) -> list[tuple[int, int]]:
        """Runs of order[lo:hi] that share more than `common` rows; sequences that end here get their node."""
        pieces, start = [], lo
        for i in range(lo, hi):
            if i + 1 == hi or shared[i] <= common:
                run = order[start : i + 1]
                if len(self.symbols[run[0]]) - 1 <= common:
                    for index in run:
                        self.end_node[index] = parent
                else:
                    pieces.append((start, i + 1))
                start = i + 1
        return pieces

    def finish(self, groups: Seq[int]) -> Forest:
        parents, bounds = self.parents, self.bounds
        rows = [hi - lo for _, lo, hi in bounds]
        offsets = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)

        def gather(pick):
            parts = [pick(self.sequences[s].tokens, lo, hi) for s, lo, hi in bounds]
            return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

        paths, logical, members = [], [], {}
        scored = np.zeros(int(offsets[-1]), bool)
        for index, sequence in enumerate(self.sequences):
            path, node = [], self.end_node[index]
            while node >= 0:
                path.append(node)
                node = parents[node]
            path.reverse()
            if path:
                members.setdefault(path[0], []).append(groups[index])
            rows_of = np.concatenate(
                [np.arange(offsets[n], offsets[n + 1]) for n in path] or [np.zeros(0, np.int64)]
            )
            mine = rows_of[np.asarray(sequence.scored, bool)]
            scored[mine] = True
            paths.append(tuple(path))
            logical.append(mine)
        ends = np.zeros(len(parents), np.int64)
        for node in self.end_node:
            if node >= 0:
                ends[node] += 1
        counts = [int(scored[offsets[n] : offsets[n + 1]].sum()) for n in range(len(parents))]
        shape = ForestShape(tuple(parents), tuple(rows), tuple(counts), tuple(int(e) for e in ends))
        return Forest(
            shape=shape,
            inputs=gather(lambda t, lo, hi: t[lo:hi]),
            targets=gather(lambda t, lo, hi: t[lo + 1 : hi + 1]),
            positions=gather(lambda t, lo, hi: np.arange(lo, hi)),
            scored=scored,
            paths=tuple(paths),
            logical=tuple(logical),
            tree_groups=tuple(members[root][0] for root in shape.roots),
            joined=any(len(set(mine)) > 1 for mine in members.values()),
        )
