"""Attention of one pass as a program of global stages.

A placement says where rows are; `compile_pass` (compiler.py) turns it into a `Program`; `reverse` turns a
program into its backward, which is a program again. One executor, one price, one drawing serve both.

A stage is one step of the whole block: its transfers travel while its tiles are computed, and land when the
tiles are done. So a stage's transfers and tiles read only what earlier stages landed. Both ends of a transfer
read the same object: no tags, no negotiation, one sender and one receiver by construction.

Buffers, by name: ``home`` (the pass's own rows), ``state/<pass>`` (keys and values that an earlier pass kept
on this rank), ``kv/<i>`` (keys and values received in stage i), ``kv/<i>/relay`` (those that this rank only
hands on), ``q`` (received queries and their partial results).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Placement

HOME = "home"
QUERIES = "q"
#: Ends the names of buffers that no tile reads.
RELAY = "/relay"


class Rows(NamedTuple):
    """Rows of one named buffer on one rank: sorted, disjoint, coalesced half-open ranges."""

    buffer: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        return sum(hi - lo for lo, hi in self.ranges)


def rows(buffer: str, ranges: Sequence[tuple[int, int]]) -> Rows:
    """Rows of a buffer from ranges in any order; adjacent ranges are joined."""
    if len(ranges) == 1:
        return Rows(buffer, tuple(ranges))
    joined: list[tuple[int, int]] = []
    for lo, hi in sorted(ranges):
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    return Rows(buffer, tuple(joined))


Ranges = tuple[tuple[int, int], ...]


def bounds(ranges: Iterable[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """([n] first rows, [n] end rows) of ranges."""
    lo, hi = np.fromiter(chain.from_iterable(ranges), np.int64).reshape(-1, 2).T
    return lo, hi


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing looks for cycles meanwhile: a program may be half a million small tuples, none in a cycle, and
    to scan them again and again while they are made takes half of the time that making them takes."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def runs(
    group: np.ndarray, source: np.ndarray, sink: np.ndarray, length: np.ndarray
) -> Iterator[tuple[int, Ranges, Ranges]]:
    """Rows on the move, group after group, as joined ranges at both ends.

    Args:
        group: [n] what belongs together, in order.
        source, sink: [n] first rows of each piece, increasing within a group.
        length: [n] its rows.

    Yields:
        (first piece of the group, ranges at the source, ranges at the sink).
    """
    new = np.diff(group, prepend=-1) != 0
    firsts = np.flatnonzero(new)
    ends = []
    for lo in (source, sink):
        start = new.copy()
        start[1:] |= lo[1:] != (lo + length)[:-1]
        edges = np.flatnonzero(start)
        last = np.append(edges[1:], len(lo)) - 1
        ranges = list(zip(lo[edges].tolist(), (lo + length)[last].tolist()))
        cuts = [*(np.cumsum(start)[firsts] - 1).tolist(), len(ranges)]
        ends.append([tuple(ranges[a:b]) for a, b in zip(cuts, cuts[1:])])
    return zip(firsts.tolist(), *ends)


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
        with uncollected():
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


class _Origin(NamedTuple):
    """Where the rows of a buffer that is handed on came from.

    Attributes:
        lo, hi: [n] pieces of the buffer, in order and without gaps.
        owner: [n] the owner of each, by its number in `owners`.
        at: [n] first row there.
        owners: (rank, buffer).
    """

    lo: np.ndarray
    hi: np.ndarray
    owner: np.ndarray
    at: np.ndarray
    owners: list[tuple[int, str]]


def _owned(program: Program) -> list[Transfer]:
    """The forward's KV transfers, each from the owner of the rows (hops are followed back)."""
    moves = [t for stage in program.stages for t in stage.transfers if t.payload is Payload.KV]
    handed_on = {(t.src, t.source.buffer) for t in moves}
    landed: dict[tuple[int, str], list[Transfer]] = {}
    origins: dict[tuple[int, str], _Origin] = {}
    owned = []
    for t in moves:
        here, there = (t.src, t.source.buffer), (t.dst, t.sink.buffer)
        came = landed.get(here, ())
        if not came:
            found = [t]
        elif len(came) == 1 and came[0].sink == t.source:
            found = [came[0]._replace(dst=t.dst, sink=t.sink)]
        else:
            if here not in origins:  # what is handed on landed in earlier stages, all of it
                origins[here] = _origin(came)
            found = _followed(origins[here], t)
        owned += found
        if there in handed_on:
            landed.setdefault(there, []).extend(found)
    return owned


def _origin(came: Sequence[Transfer]) -> _Origin:
    owners: dict[tuple[int, str], int] = {}
    columns = []
    for t in came:
        at, lo, length = _pieces(t)
        owner = owners.setdefault((t.src, t.source.buffer), len(owners))
        columns.append((lo, lo + length, np.full(len(lo), owner), at))
    lo, *others = (np.concatenate(column) for column in zip(*columns))
    order = np.argsort(lo)
    return _Origin(lo[order], *(column[order] for column in others), list(owners))


def _pieces(t: Transfer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first row at the source, first row at the sink, rows) of pieces that are one range at either end."""
    ends = []
    for end in (t.source, t.sink):
        lo, hi = bounds(end.ranges)
        ends.append((lo, np.cumsum(hi - lo) - (hi - lo)))
    cuts = np.union1d(ends[0][1], ends[1][1])
    places = []
    for lo, seen in ends:
        piece = np.searchsorted(seen, cuts, "right") - 1
        places.append(lo[piece] + cuts - seen[piece])
    return *places, np.diff(cuts, append=t.source.count)


def _followed(origin: _Origin, t: Transfer) -> list[Transfer]:
    """Transfers of the same rows to the same sink, one from each owner."""
    source, sink, length = _pieces(t)
    first = np.searchsorted(origin.lo, source, "right") - 1
    count = np.searchsorted(origin.lo, source + length, "left") - first
    piece = np.repeat(np.arange(len(source)), count)
    part = np.arange(len(piece)) - np.repeat(np.cumsum(count) - count - first, count)
    lo = np.maximum(source[piece], origin.lo[part])
    hi = np.minimum((source + length)[piece], origin.hi[part])
    columns = (
        origin.owner[part],
        origin.at[part] + lo - origin.lo[part],
        sink[piece] + lo - source[piece],
        hi - lo,
    )
    order = np.argsort(columns[0], kind="stable")
    owner, *rest = (column[order] for column in columns)
    found = []
    for first, a, b in runs(owner, *rest):
        src, buffer = origin.owners[owner[first]]
        found.append(Transfer(Payload.KV, src, t.dst, Rows(buffer, a), Rows(t.sink.buffer, b)))
    return found


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
