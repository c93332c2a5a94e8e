"""Candidate plans of the ``augtree`` mode: from a handful of choices to passes and events.

A candidate cuts the pool into aligned blocks, cuts trees into prompt copies where asked, gives the parts to
blocks (longest first), and makes each block's passes: fused, or prefill (chunks) and replay waves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_augtree.planning.assign import assign
from megatron_augtree.planning.lanes import place, row_cost
from megatron_augtree.planning.placement import Placement, Span, collect, zigzag
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.tree import ForestShape


@dataclass(frozen=True)
class Choice:
    """What makes a plan.

    Attributes:
        degree: ranks of a block, of the ranks that hold one prompt copy.
        copies: parts that every tree is cut into, a prompt copy each.
        phase: ``fused`` or ``phased``.
        chunks, waves: passes of the spine and of the leaves (phased).
        small: of a phased plan's trees, those of at most so many rows stay fused: they fit as they are.
        primitive, pieces: how queries meet keys held elsewhere (of the waves, where phased).
        lane_degree: ranks of a lane; never more than `degree`.
        wide: longest leaves that are cut over the whole block.
        together: trees of a block share passes, or follow each other.
        keep: received keys and values are kept.
    """

    degree: int
    copies: int = 1
    phase: str = "fused"
    chunks: int = 1
    waves: int = 1
    small: int = 0
    primitive: str = "gather_kv"
    pieces: int = 1
    lane_degree: int = 1
    wide: int = 0
    together: bool = True
    keep: bool = True

    def __str__(self) -> str:
        parts = [f"degree {self.degree}"]
        parts += [f"{self.copies} copies"] if self.copies > 1 else []
        parts += [
            self.phase if self.phase == "fused" else f"phased ({self.chunks} chunks, {self.waves} waves)"
        ]
        parts += [f"trees to {self.small} rows fused"] if self.small else []
        if self.degree > 1:
            parts += [self.primitive + (f" in {self.pieces}" if self.primitive == "gather_kv" else "")]
        lanes = f"lanes of {self.lane_degree}" + (f", {self.wide} wide" if self.wide else "")
        parts += [lanes if self.degree > 1 else "", "" if self.together else "trees in turn"]
        return ", ".join(part for part in parts if part)


def cut_pool(world: int, degree: int) -> list[tuple[int, ...]]:
    """Aligned blocks of `degree` ranks; what is left is cut into powers of two."""
    blocks, start = [], 0
    while start < world:
        left = world - start
        size = degree if left >= degree else 1 << (left.bit_length() - 1)
        blocks.append(tuple(range(start, start + size)))
        start += size
    return blocks


def build(choice: Choice, shape: ForestShape, world: int, pairs_per_row: int) -> Plan:
    """Make the plan of a choice.

    Args:
        choice: the decisions.
        shape: the forest.
        world: ranks of the pool.
        pairs_per_row: cost of a row's linear layers in (query, key) pairs, see `lanes.row_cost`.
    """
    blocks = cut_pool(world, choice.degree)
    parts = [part for root in shape.roots for part in _copies(shape, root, choice.copies, pairs_per_row)]
    taken: list[set[int]] = [set() for _ in blocks]
    costs = [sum(row_cost(shape, n, 0, shape.rows[n], pairs_per_row) for n in part) for part in parts]
    for part, where in zip(parts, _to_blocks(costs, blocks, [part[0] for part in parts])):
        taken[where].update(part)
    maker = _Maker(choice, shape, pairs_per_row)
    for block, nodes in zip(blocks, taken):
        trees = (
            [sorted(nodes)]
            if choice.together
            else [[n for n in shape.subtree(root) if n in nodes] for root in shape.roots if root in nodes]
        )
        for tree in filter(None, trees):
            maker.add(block, tree)
    return Plan(
        world=world,
        mode="augtree",
        shape=shape,
        passes=tuple(maker.passes),
        events=tuple(maker.events),
        note=str(choice),
    )


def _copies(shape: ForestShape, root: int, copies: int, pairs_per_row: int) -> list[list[int]]:
    """Parts of a tree, each with its share of the leaves and all their ancestors."""
    nodes = shape.subtree(root)
    leaves = [n for n in nodes if not shape.children[n]]
    if copies == 1 or len(leaves) < 2:
        return [list(nodes)]
    weights = [row_cost(shape, n, 0, shape.rows[n], pairs_per_row) for n in leaves]
    where = assign(weights, [0] * min(copies, len(leaves)))
    parts = []
    for part in range(min(copies, len(leaves))):
        chosen = [leaf for leaf, target in zip(leaves, where) if target == part]
        parts.append(sorted({n for leaf in chosen for n in shape.chain(leaf)}))
    return [part for part in parts if part]


def _to_blocks(costs: Sequence[int], blocks: Sequence[tuple[int, ...]], roots: Sequence[int]) -> list[int]:
    """Longest part first, to the block that would finish it first; copies of a tree go to different ones."""
    loads, where = [0] * len(blocks), [0] * len(costs)
    holds: set[tuple[int, int]] = set()
    for part in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        free = [b for b in range(len(blocks)) if (roots[part], b) not in holds] or range(len(blocks))
        target = min(free, key=lambda b: (loads[b] + costs[part] // len(blocks[b]), b))
        where[part] = target
        holds.add((roots[part], target))
        loads[target] += costs[part] // len(blocks[target])
    return where


class _Maker:
    """Collects the passes and events of all blocks."""

    def __init__(self, choice: Choice, shape: ForestShape, pairs_per_row: int) -> None:
        self.choice, self.shape, self.pairs_per_row = choice, shape, pairs_per_row
        self.passes: list[Pass] = []
        self.events: list[Event] = []
        self.jobs = 0

    def add(self, block: tuple[int, ...], nodes: Sequence[int]) -> None:
        """The passes of some trees on a block: one job."""
        present = set(nodes)
        inner = [n for n in nodes if any(c in present for c in self.shape.children[n])]
        leaves = [n for n in nodes if n not in inner]
        rows = sum(self.shape.rows[n] for n in nodes)
        if self.choice.phase == "phased" and inner and leaves and rows > self.choice.small:
            self._phased(block, inner, leaves)
        else:
            index = self._pass(block, "fused", self._place(block, inner, leaves), ())
            self.events += [Event("forward", index), Event("backward", index)]
        self.jobs += 1

    def _phased(self, block: tuple[int, ...], inner: Sequence[int], leaves: Sequence[int]) -> None:
        chunks: list[int] = []
        for spans in cut_chunks(self.shape, inner, self.choice.chunks):
            pieces = [piece for span in spans for piece in enumerate(zigzag(*span, [1] * len(block)))]
            kind = "prefill" if self.choice.chunks == 1 else "chunk"
            chunks.append(self._pass(block, kind, collect(len(block), pieces), tuple(chunks)))
        self.events += [Event("forward", chunk) for chunk in chunks]
        weights = [row_cost(self.shape, n, 0, self.shape.rows[n], self.pairs_per_row) for n in leaves]
        where = assign(weights, [0] * min(self.choice.waves, len(leaves)))
        for wave in range(min(self.choice.waves, len(leaves))):
            chosen = [leaf for leaf, target in zip(leaves, where) if target == wave]
            if chosen:
                index = self._pass(block, "replay", self._place(block, (), chosen), tuple(chunks))
                self.events += [Event("forward", index), Event("backward", index)]
        self.events += [Event("backward", chunk) for chunk in reversed(chunks)]

    def _place(self, block: tuple[int, ...], inner: Sequence[int], leaves: Sequence[int]) -> Placement:
        degree = len(block)
        lane = min(self.choice.lane_degree, degree)
        return place(
            self.shape,
            inner,
            leaves,
            degree,
            lane_degree=lane if degree % lane == 0 else 1,
            wide=min(self.choice.wide, len(leaves)),
            pairs_per_row=self.pairs_per_row,
        )

    def _pass(self, block: tuple[int, ...], kind: str, placement: Placement, reads: tuple[int, ...]) -> int:
        choice = self.choice
        primitive = (
            choice.primitive if kind in ("fused", "replay") or choice.primitive != "move_q" else "gather_kv"
        )
        if primitive == "move_q" and not reads:
            primitive = "gather_kv"
        self.passes.append(
            Pass(
                id=len(self.passes),
                job=self.jobs,
                kind=kind,
                block=block,
                placement=placement,
                reads=reads,
                primitive=primitive if len(block) > 1 else "local",
                pieces=choice.pieces,
                keep=choice.keep,
            )
        )
        return len(self.passes) - 1


def cut_chunks(shape: ForestShape, inner: Sequence[int], chunks: int) -> list[list[Span]]:
    """Cut inner nodes, in order, into at most `chunks` runs of equal rows: causal pieces of the spine."""
    total = sum(shape.rows[n] for n in inner)
    chunks = max(1, min(chunks, total))
    edges = [total * i // chunks for i in range(chunks + 1)]
    runs: list[list[Span]] = [[] for _ in range(chunks)]
    start = 0
    for node in inner:
        for run, (lo, hi) in enumerate(zip(edges, edges[1:])):
            first, last = max(lo - start, 0), min(hi - start, shape.rows[node])
            if first < last:
                runs[run].append(Span(node, first, last))
        start += shape.rows[node]
    return runs
