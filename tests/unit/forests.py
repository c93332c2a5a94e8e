"""Random forests, placements and pass graphs, and a symbolic machine that plays their programs.

The machine moves row *names* instead of numbers: a buffer's row knows which global row it holds, a query row
knows which keys it has met, a key row which queries have sent it a gradient. It knows nothing of trees beyond
`visible`, so it is an oracle for the compiler, the reversal and the prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from megatron_augtree.planning.placement import Placement, Span, collect
from megatron_augtree.planning.schedule import HOME, Payload, Program, Rows
from megatron_augtree.planning.tree import ForestShape

#: Programs that every pass has; ``move_q`` is added where a pass reads prompt state.
PRIMITIVES = (("gather_kv", 1), ("gather_kv", 2), ("gather_kv", 3), ("move_kv", 1), ("ring", 1))


def forest(*trees: ForestShape) -> ForestShape:
    """Several trees, one after the other."""
    parents, rows, scored, ends = [], [], [], []
    for tree in trees:
        parents += [p + len(rows) if p >= 0 else -1 for p in tree.parents]
        rows, scored, ends = rows + [*tree.rows], scored + [*tree.scored], ends + [*tree.ends]
    return ForestShape(tuple(parents), tuple(rows), tuple(scored), tuple(ends))


@st.composite
def shapes(draw, max_nodes: int = 6, max_rows: int = 6) -> ForestShape:
    """Any depth, several roots; every leaf ends a sequence, inner nodes may."""
    parents: list[int] = []
    for node in range(draw(st.integers(1, max_nodes))):
        chain, above = [-1], node - 1
        while above >= 0:  # depth-first numbering: a parent lies on the chain of the node before
            chain.append(above)
            above = parents[above]
        parents.append(draw(st.sampled_from(chain)))
    rows = [draw(st.integers(1, max_rows)) for _ in parents]
    scored = [draw(st.integers(0, n)) for n in rows]
    ends = [draw(st.integers(0 if node in parents else 1, 2)) for node in range(len(rows))]
    return ForestShape(tuple(parents), tuple(rows), tuple(scored), tuple(ends))


@st.composite
def cuts(draw, spans: Sequence[Span], degree: int) -> Placement:
    """Rows cut anywhere and given to any rank: the most general placement; ranks may stay empty."""
    pieces = []
    for node, lo, hi in spans:
        inside = st.integers(lo + 1, hi - 1)
        edges = sorted(draw(st.sets(inside, max_size=4))) if hi - lo > 1 else []
        for first, last in zip([lo, *edges], [*edges, hi]):
            pieces.append((draw(st.integers(0, degree - 1)), [Span(node, first, last)]))
    return collect(degree, pieces)


@dataclass(frozen=True)
class Work:
    """One pass: its placement and the passes it reads, by number."""

    placement: Placement
    reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Graph:
    """All passes of a forest on one block."""

    shape: ForestShape
    works: tuple[Work, ...]

    def states(self, work: Work) -> list[tuple[int, Placement]]:
        return [(read, self.works[read].placement) for read in work.reads]

    def primitives(self, work: Work) -> tuple[tuple[str, int], ...]:
        return PRIMITIVES + ((("move_q", 1),) if work.reads else ())


@st.composite
def graphs(draw, max_degree: int = 4) -> Graph:
    """Fused; or prefill or chunks, then replays."""
    shape, degree = draw(shapes()), draw(st.integers(1, max_degree))
    nodes = range(len(shape.rows))
    inner = [n for n in nodes if shape.children[n]]
    leaves = [n for n in nodes if not shape.children[n]]
    if not inner or draw(st.booleans()):
        return Graph(shape, (Work(draw(cuts([Span(n, 0, shape.rows[n]) for n in nodes], degree))),))
    flat = [(n, row) for n in inner for row in range(shape.rows[n])]
    edges = [0, *sorted(draw(st.sets(st.integers(1, max(1, len(flat) - 1)), max_size=2))), len(flat)]
    works: list[Work] = []
    for first, last in zip(edges, edges[1:]):
        mine = flat[first:last]
        spans = [
            Span(n, min(r for m, r in mine if m == n), max(r for m, r in mine if m == n) + 1)
            for n in dict.fromkeys(n for n, _ in mine)
        ]
        if spans:
            works.append(Work(draw(cuts(spans, degree)), tuple(range(len(works)))))
    chunks, waves = tuple(range(len(works))), draw(st.integers(1, 2))
    where = [draw(st.integers(0, waves - 1)) for _ in leaves]
    for wave in sorted(set(where)):
        spans = [Span(n, 0, shape.rows[n]) for n, w in zip(leaves, where) if w == wave]
        works.append(Work(draw(cuts(spans, degree)), chunks))
    return Graph(shape, tuple(works))


def row_names(shape: ForestShape, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(node, row) of each buffer row of some spans."""
    return [(s.node, row) for s in spans for row in range(s.lo, s.hi)]


def visible(shape: ForestShape, name: tuple[int, int]) -> set[tuple[int, int]]:
    """Every row that a row may attend to: its ancestors' rows, its node's up to itself."""
    node, row = name
    seen, above = {(node, r) for r in range(row + 1)}, shape.parents[node]
    while above >= 0:
        seen |= {(above, r) for r in range(shape.rows[above])}
        above = shape.parents[above]
    return seen


def indices(rows: Rows) -> list[int]:
    return [i for lo, hi in rows.ranges for i in range(lo, hi)]


class Machine:
    """All ranks of a block, moving names.

    Attributes:
        names: (rank, buffer) -> [row] the global row it holds, None before it lands.
        met: (rank, buffer) -> [row] keys that the query row has met; in the backward, that its dQ counts.
        given: (rank, buffer) -> [row] queries that the key row's dK, dV count (backward).
        ready: (rank, buffer) -> [row] whether the query row's dout is there (backward).
    """

    def __init__(self, shape: ForestShape, program: Program, states: Sequence[tuple[int, Placement]]) -> None:
        self.shape, self.program = shape, program
        self.pairs = 0
        sizes = {
            (rank, name): count
            for rank, buffers in enumerate(program.buffers)
            for name, count in buffers.items()
        }
        self.names = {key: [None] * count for key, count in sizes.items()}
        self.owned = {(rank, HOME) for rank in range(program.world)}
        for rank, spans in enumerate(program.home):
            self.names[(rank, HOME)] = row_names(shape, spans)
            for read, placed in states:
                self.owned.add((rank, f"state/{read}"))
                self.names[(rank, f"state/{read}")] = row_names(shape, placed[rank])
        self.met = {key: [set() for _ in range(count)] for key, count in sizes.items()}

    def forward(self) -> Machine:
        for stage in self.program.stages:
            sent = [(t, self._pick(t)) for t in stage.transfers]
            self._compute(stage.tiles)
            for t, values in sent:
                self._land(t, values)
        return self

    def _pick(self, t) -> list:
        source = (t.src, t.source.buffer)
        if t.payload is Payload.PARTIAL:
            return [(self.names[source][i], set(self.met[source][i])) for i in indices(t.source)]
        return [self.names[source][i] for i in indices(t.source)]

    def _land(self, t, values: list) -> None:
        sink = (t.dst, t.sink.buffer)
        assert len(values) == t.sink.count
        for i, value in zip(indices(t.sink), values):
            if t.payload is Payload.PARTIAL:
                name, keys = value
                assert name == self.names[sink][i] and not keys & self.met[sink][i]
                self.met[sink][i] |= keys
            else:
                assert value is not None and sink not in self.owned
                self.names[sink][i] = value

    def _compute(self, tiles) -> None:
        for rank, mine in enumerate(tiles):
            for tile in mine:
                q, kv = (rank, tile.q.buffer), (rank, tile.kv.buffer)
                keys = indices(tile.kv)
                for place, i in enumerate(indices(tile.q)):
                    for j in keys[: place + 1] if tile.causal else keys:
                        self._pair(q, i, kv, j)

    def _pair(self, q, i: int, kv, j: int) -> None:
        query, key = self.names[q][i], self.names[kv][j]
        assert query is not None and key is not None, "a tile reads what has not landed"
        assert key in visible(self.shape, query) and key not in self.met[q][i]
        self.met[q][i].add(key)
        self.pairs += 1

    def check_forward(self) -> None:
        """Every home row has met exactly what it may see, and nothing was computed beside that."""
        owed = 0
        for rank in range(self.program.world):
            for name, keys in zip(self.names[(rank, HOME)], self.met[(rank, HOME)]):
                assert keys == visible(self.shape, name)
                owed += len(keys)
        assert self.pairs == owed


class BackwardMachine(Machine):
    """Plays the reversed program of a machine that has gone forward."""

    def __init__(
        self, done: Machine, backward: Program, states: Sequence[tuple[int, Placement]], keep: bool
    ) -> None:
        super().__init__(done.shape, backward, states)
        self.expected = done.names
        if keep:
            self.names = {key: list(names) for key, names in done.names.items()}
        self.given = {key: [set() for _ in names] for key, names in self.names.items()}
        self.ready = {key: [key[1] == HOME] * len(names) for key, names in self.names.items()}

    def _pair(self, q, i: int, kv, j: int) -> None:
        assert self.ready[q][i], "a tile reads a gradient that has not landed"
        super()._pair(q, i, kv, j)
        assert self.names[q][i] not in self.given[kv][j]
        self.given[kv][j].add(self.names[q][i])

    def _pick(self, t) -> list:
        source = (t.src, t.source.buffer)
        held = {Payload.DKV: self.given, Payload.DQ: self.met, Payload.KV: self.names}.get(
            t.payload, self.expected
        )
        assert t.payload is not Payload.KV or source in self.owned, "keys are fetched again from their owner"
        values = [held[source][i] for i in indices(t.source)]
        return [set(v) if isinstance(v, set) else v for v in values]

    def _land(self, t, values: list) -> None:
        source, sink = (t.src, t.source.buffer), (t.dst, t.sink.buffer)
        for a, b, value in zip(indices(t.source), indices(t.sink), values, strict=True):
            assert self.expected[source][a] == self.expected[sink][b], "both ends mean the same row"
            if t.payload in (Payload.DKV, Payload.DQ):
                into = (self.given if t.payload is Payload.DKV else self.met)[sink]
                assert not value & into[b]
                into[b] |= value
            elif t.payload is Payload.KV:
                self.names[sink][b] = value
            else:
                assert t.payload in (Payload.DPARTIAL, Payload.DPARTIAL_Q)
                self.ready[sink][b] = True
                if t.payload is Payload.DPARTIAL_Q:
                    self.names[sink][b] = value

    def check_backward(self) -> None:
        """dQ counts every key once; dK and dV, where the rows live, every query once."""
        self.check_forward()
        queries = [name for rank in range(self.program.world) for name in self.names[(rank, HOME)]]
        for key in self.owned:
            for name, counted in zip(self.names[key], self.given[key]):
                assert counted == {q for q in queries if name in visible(self.shape, q)}
