"""Attention of one pass as a program of global stages.

A placement says where rows are; `compile_pass` (compiler.py) turns it into a `Program`; `reverse` turns a
program into its backward, which is a program again. One executor, one price, one drawing serve both.

A stage is one step of the whole block: its transfers travel while its tiles are computed, and land when the
tiles are done. So a stage's transfers and tiles read only what earlier stages landed. Both ends of a transfer
read the same object: no tags, no negotiation, one sender and one receiver by construction.

Buffers, by name: ``home`` (the pass's own rows), ``state/<pass>`` (keys and values that an earlier pass kept
on this rank), ``kv/<i>`` (received keys and values), ``q`` (received queries and their partial results).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Placement, Span

HOME = "home"
QUERIES = "q"


class Rows(NamedTuple):
    """Rows of one named buffer on one rank: sorted, disjoint, coalesced half-open ranges."""

    buffer: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(hi - lo for lo, hi in self.ranges)


def rows(buffer: str, ranges: Iterable[tuple[int, int]]) -> Rows:
    """Rows of a buffer from ranges in any order; adjacent ranges are joined."""
    joined: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return Rows(buffer, tuple(joined))


class Tile(NamedTuple):
    """Queries against keys: a full rectangle, or a causal triangle.

    A causal tile has the same rows as queries and keys, contiguous in the buffer and increasing in position
    (the two chunks of a zigzag qualify), so top-left and bottom-right masks agree.
    """

    q: Rows
    kv: Rows
    causal: bool

    @property
    def area(self) -> int:
        """(query, key) pairs."""
        n = self.q.count
        return n * (n + 1) // 2 if self.causal else n * self.kv.count


class Landing(Enum):
    """How an arriving payload joins what is there."""

    COPY = "copy"
    ADD = "add"
    MERGE = "merge"


class Payload(Enum):
    """What travels: the fields of a row and how they land. Bytes follow from this table alone."""

    KV = (("k", "v"), Landing.COPY)
    Q = (("q",), Landing.COPY)
    PARTIAL = (("out", "lse"), Landing.MERGE)
    DKV = (("dk", "dv"), Landing.ADD)
    DQ = (("dq",), Landing.ADD)
    DPARTIAL = (("dout", "delta", "lse"), Landing.COPY)
    DPARTIAL_Q = (("dout", "delta", "lse", "q"), Landing.COPY)

    @property
    def fields(self) -> tuple[str, ...]:
        return self.value[0]

    @property
    def landing(self) -> Landing:
        return self.value[1]


class Transfer(NamedTuple):
    """Rows of a buffer on rank `src` go to as many rows of a buffer on rank `dst` (ranks of the block)."""

    payload: Payload
    src: int
    dst: int
    source: Rows
    sink: Rows


class Stage(NamedTuple):
    """One step of the block. `tiles[rank]` are computed while `transfers` travel."""

    transfers: tuple[Transfer, ...]
    tiles: tuple[tuple[Tile, ...], ...]


@dataclass(frozen=True)
class Program:
    """The attention of one pass, forward or backward, the same for every layer.

    Attributes:
        world: ranks of the block.
        home: [rank] -> spans of the ``home`` buffer in buffer order.
        buffers: [rank] -> buffer name -> rows.
        stages: the steps.
        backward: whether tiles and payloads are gradients.
    """

    world: int
    home: Placement
    buffers: tuple[Mapping[str, int], ...]
    stages: tuple[Stage, ...]
    backward: bool = False

    def of(self, rank: int) -> list[tuple[list[Transfer], tuple[Tile, ...]]]:
        """One rank's view: per stage the transfers it takes part in and its tiles."""
        return [([t for t in s.transfers if rank in (t.src, t.dst)], s.tiles[rank]) for s in self.stages]

    def area(self, rank: int) -> int:
        return sum(tile.area for stage in self.stages for tile in stage.tiles[rank])


def reverse(program: Program, *, keep: bool) -> Program:
    """The backward of a forward program.

    Forward stage t of m becomes backward stage m-1-t with the same tiles and every transfer turned round:
    KV -> DKV, Q -> DQ, PARTIAL -> DPARTIAL. What lands after stage t is used after stage t, so its gradient
    is complete before stage m-1-t comes up.

    Args:
        program: a forward program.
        keep: received keys, values and queries were kept since the forward. Otherwise keys and values are
            fetched again from their owner one stage before first use, and queries ride with DPARTIAL.
    """
    if program.backward:
        raise AugTreeError(
            "cannot reverse a backward program",
            values=f"a backward program of {len(program.stages)} stages on {program.world} ranks",
            rule="reverse takes a forward program",
            remedy="keep the forward program and reverse it once",
        )
    turned = {
        Payload.KV: Payload.DKV,
        Payload.Q: Payload.DQ,
        Payload.PARTIAL: Payload.DPARTIAL if keep else Payload.DPARTIAL_Q,
    }
    stages = [
        ([Transfer(turned[t.payload], t.dst, t.src, t.sink, t.source) for t in stage.transfers], stage.tiles)
        for stage in reversed(program.stages)
    ]
    if not keep:
        stages = _fetch_again(program, stages)
    return Program(
        program.world,
        program.home,
        program.buffers,
        tuple(Stage(tuple(transfers), tiles) for transfers, tiles in stages),
        backward=True,
    )


def _fetch_again(program: Program, stages: list) -> list:
    first_use: dict[tuple[int, str], int] = {}
    for index, (_, tiles) in enumerate(stages):
        for rank, mine in enumerate(tiles):
            for tile in mine:
                first_use.setdefault((rank, tile.kv.buffer), index)
    idle = tuple(() for _ in range(program.world))
    again: dict[int, list[Transfer]] = {}
    for transfer in _owned(program):
        first = first_use.get((transfer.dst, transfer.sink.buffer))
        if first is not None:
            again.setdefault(first - 1, []).append(transfer)
    if -1 in again:
        stages = [([], idle), *stages]
        again = {index + 1: transfers for index, transfers in again.items()}
    return [([*again.get(index, []), *transfers], tiles) for index, (transfers, tiles) in enumerate(stages)]


def _owned(program: Program) -> list[Transfer]:
    """The forward's KV transfers, each from the owner of the rows (a multi-hop ring is followed back)."""
    origin: dict[tuple[int, Rows], tuple[int, Rows]] = {}
    owned = []
    for stage in program.stages:
        for t in stage.transfers:
            if t.payload is Payload.KV:
                src, source = origin.get((t.src, t.source), (t.src, t.source))
                origin[(t.dst, t.sink)] = (src, source)
                owned.append(Transfer(Payload.KV, src, t.dst, source, t.sink))
    return owned


def field_bytes(shape: ModelShape) -> dict[str, int]:
    """Bytes of each field of one row in one layer, as it travels."""
    k, v = shape.kv_heads * shape.k_dim, shape.kv_heads * shape.v_dim
    q, o, n = shape.q_heads * shape.k_dim, shape.q_heads * shape.v_dim, shape.q_heads
    item, accum = shape.item_bytes, shape.accum_bytes
    return {
        "k": k * item,
        "v": v * item,
        "q": q * item,
        "dout": o * item,
        "out": o * accum,
        "lse": n * accum,
        "delta": n * accum,
        "dk": k * accum,
        "dv": v * accum,
        "dq": q * accum,
    }


def transfer_bytes(transfer: Transfer, shape: ModelShape) -> int:
    """Bytes of one transfer in one layer."""
    sizes = field_bytes(shape)
    return transfer.source.count * sum(sizes[name] for name in transfer.payload.fields)


class Promise(NamedTuple):
    """What one rank sends in one layer."""

    bytes: dict[str, int]  # payload name -> bytes
    messages: int  # one per stage and receiver


def promise(program: Program, rank: int, shape: ModelShape) -> Promise:
    """Bytes by payload and messages that `rank` of the block sends for one layer."""
    sent: Counter[str] = Counter()
    messages = 0
    for stage in program.stages:
        mine = [t for t in stage.transfers if t.src == rank]
        messages += len({t.dst for t in mine})
        for t in mine:
            sent[t.payload.name] += transfer_bytes(t, shape)
    return Promise(dict(sent), messages)


def check(program: Program, area: int) -> None:
    """Assert the rules of a program.

    Args:
        program: forward or backward.
        area: (query, key) pairs that the pass owes, all ranks together.

    Raises:
        AugTreeError: the broken rule and the stage.
    """
    landed = [
        {name for name in buffers if name == HOME or name.startswith("state/")} for buffers in program.buffers
    ]
    received: list[set[str]] = [set() for _ in range(program.world)]
    for index, stage in enumerate(program.stages):
        if not program.backward:
            for t in stage.transfers:
                _require(
                    t.source.buffer in landed[t.src] | received[t.src],
                    "a transfer reads what has not landed",
                    index,
                    t,
                )
            _check_partials(program, index)
            for rank, tiles in enumerate(stage.tiles):
                for tile in tiles:
                    known = landed[rank] | received[rank]
                    _require(
                        {tile.q.buffer, tile.kv.buffer} <= known,
                        "a tile reads what has not landed",
                        index,
                        tile,
                    )
        _check_stage(program, index, stage)
        for t in stage.transfers:
            received[t.dst].add(t.sink.buffer)
    done = sum(program.area(rank) for rank in range(program.world))
    _require(done == area, f"tiles cover {done} pairs, the mask has {area}", len(program.stages), None)


def _check_partials(program: Program, index: int) -> None:
    """Partial results leave only when every tile that adds to them is done."""
    for t in program.stages[index].transfers:
        if t.payload is Payload.PARTIAL:
            late = [
                tile
                for stage in program.stages[index:]
                for tile in stage.tiles[t.src]
                if tile.q.buffer == t.source.buffer
            ]
            _require(not late, "a partial result leaves before its tiles are done", index, t)


def _check_stage(program: Program, index: int, stage: Stage) -> None:
    copied: dict[tuple[int, str, str], list[tuple[int, int]]] = {}
    for t in stage.transfers:
        _require(
            t.src != t.dst and t.source.count == t.sink.count > 0,
            "a transfer's ends must differ and have the same, positive number of rows",
            index,
            t,
        )
        for rank, end in ((t.src, t.source), (t.dst, t.sink)):
            _require(
                end.ranges[-1][1] <= program.buffers[rank].get(end.buffer, 0),
                "a transfer's rows are outside their buffer",
                index,
                t,
            )
        if t.payload.landing is Landing.COPY:
            copied.setdefault((t.dst, t.sink.buffer, t.payload.name), []).extend(t.sink.ranges)
    for ranges in copied.values():
        ranges.sort()
        _require(all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:])), "copies overlap", index, ranges)
    for tiles in stage.tiles:
        for tile in tiles:
            same = tile.q == tile.kv and len(tile.q.ranges) == 1
            _require(
                tile.area > 0 and (same or not tile.causal), "a tile is empty or not a triangle", index, tile
            )


def _require(good: bool, rule: str, stage: int, thing: object) -> None:
    if not good:
        raise AugTreeError(
            "a program breaks a rule",
            values=f"stage {stage}: {thing}",
            rule=rule,
            remedy="report this plan: compiled programs must pass this check",
        )


def buffer_offsets(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Spans with the offset of their first row when laid out one after the other."""
    placed, offset = [], 0
    for span in spans:
        placed.append((span, offset))
        offset += span.hi - span.lo
    return placed
