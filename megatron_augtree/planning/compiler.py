"""From a placement to a program: which rows travel when, and which tiles meet them.

Everything tree-specific is in one function, `sees`: may a query row of one span attend to the key rows of
another? Fused, prefill, chunk and replay passes, one tree or many, two levels or ten, use the same code.

A tile joins all query rows of a rank that see the same keys: the queries of all leaves against one spine
shard are one tile, not one per leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.placement import Placement, Span, count
from megatron_augtree.planning.schedule import (
    HOME,
    QUERIES,
    Payload,
    Program,
    Rows,
    Stage,
    Tile,
    Transfer,
    buffer_offsets,
    rows,
)
from megatron_augtree.planning.tree import ForestShape

PRIMITIVES = ("gather_kv", "move_kv", "move_q", "ring", "local")


class Held(NamedTuple):
    """A span of rows and where it lies on a rank."""

    span: Span
    buffer: str
    offset: int

    @property
    def range(self) -> tuple[int, int]:
        return self.offset, self.offset + self.span.hi - self.span.lo


def sees(shape: ForestShape, query: Span, key: Span) -> bool:
    """Whether every query row sees every key row; the pair (span, same span) is causal and answers False.

    Raises:
        AugTreeError: two spans of one node straddle.
    """
    if query.node != key.node:
        return key.node in shape.ancestors[query.node]
    if key.hi <= query.lo:
        return True
    if key.lo >= query.hi or key == query:
        return False
    raise AugTreeError(
        "two spans of one node overlap",
        values=f"{query}, {key}",
        rule="a node is cut once; its spans are equal or disjoint",
        remedy="mend the placement",
    )


def state_buffer(pass_id: int) -> str:
    """Name of the buffer with the keys and values that a pass kept."""
    return f"state/{pass_id}"


def compile_pass(
    shape: ForestShape,
    placement: Placement,
    *,
    states: Sequence[tuple[int, Placement]] = (),
    primitive: str = "gather_kv",
    pieces: int = 1,
) -> Program:
    """Compile the attention of one pass.

    Args:
        shape: the forest.
        placement: [rank] -> spans of the pass's own rows.
        states: (pass, its placement on this block) of the passes whose keys and values this one uses.
        primitive: ``gather_kv`` in `pieces` pieces, ``move_kv`` (as many pieces as remote ranks: the direct
            ring), ``move_q`` (queries go to prompt state and partial results come back), ``ring`` (whole
            shards, hop by hop: baselines), ``local`` (nothing may have to move).
        pieces: stages that the gather is cut into.

    Returns:
        The forward program.

    Raises:
        AugTreeError: an unknown primitive, ``local`` where rows would have to move.
    """
    block = _Block(shape, placement, states)
    if primitive == "move_q":
        program = _move_q(block)
    elif primitive == "ring":
        program = _ring(block)
    elif primitive in PRIMITIVES:
        program = _gather(block, block.world - 1 if primitive == "move_kv" else pieces)
    else:
        raise AugTreeError(
            "unknown primitive",
            values=primitive,
            rule=f"one of {', '.join(PRIMITIVES)}",
            remedy="correct the plan",
        )
    if primitive == "local" and any(stage.transfers for stage in program.stages):
        raise AugTreeError(
            "primitive local cannot run here",
            values=f"block of {block.world} ranks",
            rule="local needs every visible key on the query's own rank",
            remedy="use gather_kv or move_q",
        )
    return program


class _Block:
    """What every rank of the block holds, indexed by node."""

    def __init__(
        self, shape: ForestShape, placement: Placement, states: Sequence[tuple[int, Placement]]
    ) -> None:
        self.shape, self.world, self.placement = shape, len(placement), placement
        self.home = [[Held(s, HOME, o) for s, o in buffer_offsets(spans)] for spans in placement]
        self.state = [
            [Held(s, state_buffer(p), o) for p, placed in states for s, o in buffer_offsets(placed[rank])]
            for rank in range(self.world)
        ]
        self.buffers = [
            {HOME: count(spans), **{state_buffer(p): count(placed[r]) for p, placed in states}}
            for r, spans in enumerate(placement)
        ]
        self._seen: list[dict[int, list[Held]]] = [self._index(held) for held in self.home]

    def _index(self, held: list[Held]) -> dict[int, list[Held]]:
        """Key node -> the query spans of a rank that may see some of it."""
        index: dict[int, list[Held]] = {}
        for q in held:
            for node in (*self.shape.ancestors[q.span.node], q.span.node):
                index.setdefault(node, []).append(q)
        return index

    def owned(self, rank: int) -> list[Held]:
        """All keys and values that live on a rank."""
        return [*self.state[rank], *self.home[rank]]

    def needed(self, dst: int, keys: Sequence[Held]) -> list[Held]:
        """Those keys that some query of `dst` sees."""
        return [
            k
            for k in keys
            if any(sees(self.shape, q.span, k.span) for q in self._seen[dst].get(k.span.node, ()))
        ]

    def own_triangles(self, rank: int, wanted: Callable[[int], bool]) -> list[Tile]:
        """Causal tiles of a rank's own rows, one a node; a node's spans lie one after the other."""
        tiles = []
        for node in sorted({h.span.node for h in self.home[rank]}):
            mine = rows(HOME, [h.range for h in self.home[rank] if h.span.node == node])
            if wanted(node):
                tiles.append(Tile(mine, mine, causal=True))
        return tiles

    def full_tiles(self, queries: Sequence[Held], keys: Sequence[Held]) -> list[Tile]:
        """Rectangles of query rows against key rows of one buffer each, as few as the mask allows."""
        index = self._index(list(queries))
        merged: dict[tuple[Rows, str], list[tuple[int, int]]] = {}
        by_node: dict[tuple[str, int], list[Held]] = {}
        for key in keys:
            by_node.setdefault((key.buffer, key.span.node), []).append(key)
        for (buffer, node), held in by_node.items():
            held.sort(key=lambda k: k.span.lo)
            groups: dict[int, list[tuple[int, int]]] = {}
            for q in index.get(node, ()):
                if q.buffer == buffer and q.span.node == node:
                    continue  # the node's own rows on this rank are a causal tile
                # Descendants see the whole node, its own rows a prefix: a count says which.
                visible = sum(sees(self.shape, q.span, k.span) for k in held)
                if visible:
                    groups.setdefault(visible, []).append(q.range)
            for visible, ranges in groups.items():
                query_rows = rows(queries[0].buffer, ranges)
                merged.setdefault((query_rows, buffer), []).extend(k.range for k in held[:visible])
        return [Tile(q, rows(buffer, ranges), causal=False) for (q, buffer), ranges in merged.items()]

    def local_tiles(self, rank: int) -> list[Tile]:
        return self.full_tiles(self.home[rank], self.owned(rank))

    def is_leaf(self, node: int) -> bool:
        return not self.shape.children[node]


def _finish(block: _Block, stages: list[tuple[list[Transfer], list[list[Tile]]]]) -> Program:
    made = [Stage(tuple(transfers), tuple(map(tuple, tiles))) for transfers, tiles in stages]
    return Program(block.world, block.placement, tuple(block.buffers), tuple(made))


def _fetch(
    block: _Block, name: str, dst: int, sources: Sequence[tuple[int, Sequence[Held]]]
) -> tuple[list[Transfer], list[Held]]:
    """Bring keys of several ranks into one buffer of `dst`, laid out by node and row whoever sends them."""
    arriving = sorted(((k, src) for src, keys in sources for k in keys), key=lambda pair: pair[0].span)
    landed, transfers, offset = [], [], 0
    for key, _ in arriving:
        landed.append(Held(key.span, name, offset))
        offset += key.span.hi - key.span.lo
    for src, keys in sources:
        for buffer in sorted({k.buffer for k in keys}):
            pairs = sorted(
                (k.range, spot.range)
                for (k, s), spot in zip(arriving, landed)
                if s == src and k.buffer == buffer
            )
            transfers += _aligned(Payload.KV, src, dst, buffer, name, pairs)
    if offset:
        block.buffers[dst][name] = offset
    return transfers, landed


def _aligned(
    payload: Payload,
    src: int,
    dst: int,
    source: str,
    sink: str,
    pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]],
) -> list[Transfer]:
    """Transfers of (source range, sink range) pairs; one, since both ends order spans by node and row."""
    return [
        Transfer(payload, src, dst, rows(source, [a for a, _ in pairs]), rows(sink, [b for _, b in pairs]))
    ]


def _gather(block: _Block, pieces: int) -> Program:
    """Owner to consumer, only what is needed, the remote ranks in `pieces` groups.

    Own work stands at both ends: inner nodes' triangles while the first piece flies, leaves' triangles after
    the last. Reversed, the leaves hide the first fetch and the spine hides the last gradient's return.
    """
    world = block.world
    remote = max(world - 1, 0)
    pieces = max(1, min(pieces, remote))
    edges = [remote * i // pieces for i in range(pieces + 1)]
    stages = [([], [[] for _ in range(world)]) for _ in range(pieces + 1)]
    for rank in range(world):
        stages[0][1][rank] += block.own_triangles(rank, lambda n: not block.is_leaf(n)) + block.local_tiles(
            rank
        )
        for piece, (lo, hi) in enumerate(zip(edges, edges[1:])):
            sources = [
                ((rank - shift) % world, block.owned((rank - shift) % world))
                for shift in range(lo + 1, hi + 1)
            ]
            sources = [(src, block.needed(rank, keys)) for src, keys in sources]
            transfers, landed = _fetch(block, f"kv/{piece}", rank, [s for s in sources if s[1]])
            stages[piece][0].extend(transfers)
            stages[piece + 1][1][rank] += block.full_tiles(block.home[rank], landed)
        stages[-1][1][rank] += block.own_triangles(rank, block.is_leaf)
    return _finish(block, _without_idle(stages))


def _move_q(block: _Block) -> Program:
    """Queries travel to the prompt state, partial results travel back; the leaves' own keys are gathered."""
    world = block.world
    stages = [([], [[] for _ in range(world)]) for _ in range(3)]
    for rank in range(world):
        others = [src for src in range(world) if src != rank]
        stages[0][1][rank] += block.own_triangles(rank, lambda n: not block.is_leaf(n)) + block.local_tiles(
            rank
        )
        keys = [(src, block.needed(rank, block.home[src])) for src in others]
        transfers, landed = _fetch(block, "kv/0", rank, [s for s in keys if s[1]])
        stages[0][0].extend(transfers)
        stages[1][1][rank] += block.full_tiles(block.home[rank], landed)
        out, back, queries = _visitors(block, rank, others)
        stages[0][0].extend(out)
        stages[2][0].extend(back)
        if queries:
            stages[1][1][rank] += block.full_tiles(queries, block.state[rank])
        stages[2][1][rank] += block.own_triangles(rank, block.is_leaf)
    return _finish(block, _without_idle(stages))


def _visitors(
    block: _Block, rank: int, others: Sequence[int]
) -> tuple[list[Transfer], list[Transfer], list[Held]]:
    """Queries of other ranks that see prompt state of `rank`, in one buffer, and their way back."""
    coming = sorted(
        (
            (q, src)
            for src in others
            for q in block.home[src]
            if any(sees(block.shape, q.span, k.span) for k in block.state[rank])
        ),
        key=lambda pair: pair[0].span,
    )
    spots, offset = [], 0
    for q, _ in coming:
        spots.append(Held(q.span, QUERIES, offset))
        offset += q.span.hi - q.span.lo
    out, back = [], []
    for src in others:
        pairs = [(q.range, spot.range) for (q, s), spot in zip(coming, spots) if s == src]
        if pairs:
            out += _aligned(Payload.Q, src, rank, HOME, QUERIES, pairs)
            back += _aligned(Payload.PARTIAL, rank, src, QUERIES, HOME, [(b, a) for a, b in pairs])
    if offset:
        block.buffers[rank][QUERIES] = offset
    return out, back, spots


def _ring(block: _Block) -> Program:
    """Whole shards from neighbour to neighbour, as ring context parallelism does."""
    world = block.world
    stages = [([], [[] for _ in range(world)]) for _ in range(world)]
    for rank in range(world):
        stages[0][1][rank] += block.own_triangles(rank, lambda n: True) + block.local_tiles(rank)
    shards = [block.owned(rank) for rank in range(world)]
    for hop in range(world - 1):
        arrived = []
        for rank in range(world):
            src = (rank - 1) % world
            transfers, landed = _relay(block, f"kv/{hop}", src, rank, shards[src])
            stages[hop][0].extend(transfers)
            stages[hop + 1][1][rank] += block.full_tiles(block.home[rank], landed)
            arrived.append(landed)
        shards = arrived
    return _finish(block, _without_idle(stages))


def _relay(
    block: _Block, name: str, src: int, dst: int, shard: Sequence[Held]
) -> tuple[list[Transfer], list[Held]]:
    """Hand a whole shard on, buffer by buffer and layout unchanged, so that every hop names the same rows."""
    transfers, landed = [], []
    for part, buffer in enumerate(dict.fromkeys(h.buffer for h in shard)):
        held = [h for h in shard if h.buffer == buffer]
        sink, offset = f"{name}/{part}", 0
        for h in held:
            landed.append(Held(h.span, sink, offset))
            offset += h.span.hi - h.span.lo
        spots = landed[-len(held) :]
        transfers += _aligned(
            Payload.KV, src, dst, buffer, sink, [(h.range, spot.range) for h, spot in zip(held, spots)]
        )
        block.buffers[dst][sink] = offset
    return transfers, landed


def _without_idle(
    stages: list[tuple[list[Transfer], list[list[Tile]]]],
) -> list[tuple[list[Transfer], list[list[Tile]]]]:
    """Join a stage into the one before it where nothing lands between them and nothing computed is sent."""
    kept = [stages[0]]
    for transfers, tiles in stages[1:]:
        if not kept[-1][0] and all(t.payload is Payload.KV for t in transfers):
            kept[-1] = (transfers, [a + b for a, b in zip(kept[-1][1], tiles)])
        else:
            kept.append((transfers, tiles))
    return kept
