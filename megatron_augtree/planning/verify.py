"""The rules of a program, forward or backward: what may be read when; nothing is lost or done twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

import numpy as np

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.schedule import HOME, Landing, Payload, Program, Rows, Transfer, bounds


def check(program: Program, area: int) -> None:
    """Assert the rules of a program.

    Args:
        program: forward or backward.
        area: (query, key) pairs that the pass owes, all ranks together.

    Raises:
        AugTreeError: the broken rule and the stage.
    """
    if not program.backward:
        _check_order(program)
    done = 0
    for index, stage in enumerate(program.stages):
        _check_transfers(program, index, stage.transfers)
        for tiles in stage.tiles:
            for tile in tiles:
                size = tile.area
                same = tile.q == tile.kv and len(tile.q.ranges) == 1
                if not size or (tile.causal and not same):
                    _broken("a tile is empty or not a triangle", index, tile)
                done += size
    if done != area:
        _broken(f"tiles cover {done} pairs, the mask has {area}", len(program.stages), None)


def _check_order(program: Program) -> None:
    """Nothing is read before it lands; a partial result leaves when all tiles that add to it are done."""
    known = [
        {name for name in buffers if name == HOME or name.startswith("state/")} for buffers in program.buffers
    ]
    last: dict[tuple[int, str], int] = {}
    for index, stage in enumerate(program.stages):
        for rank, tiles in enumerate(stage.tiles):
            last.update(((rank, tile.q.buffer), index) for tile in tiles)
    for index, stage in enumerate(program.stages):
        for t in stage.transfers:
            if t.source.buffer not in known[t.src]:
                _broken("a transfer reads what has not landed", index, t)
            if t.payload is Payload.PARTIAL and last.get((t.src, t.source.buffer), -1) >= index:
                _broken("a partial result leaves before its tiles are done", index, t)
        for rank, tiles in enumerate(stage.tiles):
            for tile in tiles:
                if tile.q.buffer not in known[rank] or tile.kv.buffer not in known[rank]:
                    _broken("a tile reads what has not landed", index, tile)
        for t in stage.transfers:
            known[t.dst].add(t.sink.buffer)


def _check_transfers(program: Program, index: int, transfers: Sequence[Transfer]) -> None:
    (_, _, sent), (lo, hi, received) = (
        _flat([t.source for t in transfers]),
        _flat([t.sink for t in transfers]),
    )
    for t, count, same in zip(transfers, sent.tolist(), (sent == received).tolist()):
        if t.src == t.dst or not same or not count:
            _broken("a transfer's ends must differ and have the same, positive number of rows", index, t)
        for rank, end in ((t.src, t.source), (t.dst, t.sink)):
            if end.ranges[-1][1] > program.buffers[rank].get(end.buffer, 0):
                _broken("a transfer's rows are outside their buffer", index, t)
    # Sorted by themselves, first and end rows of disjoint ranges alternate; a buffer's rows are numbered from
    # a place of its own.
    size = max((count for buffers in program.buffers for count in buffers.values()), default=0)
    place: dict[tuple[int, str, str], int] = {}
    number = [
        place.setdefault((t.dst, t.sink.buffer, t.payload.name), len(place))
        if t.payload.landing is Landing.COPY
        else -1
        for t in transfers
    ]
    base = np.repeat(np.array(number, np.int64), [len(t.sink.ranges) for t in transfers])
    first, end = (np.sort((x + base * size)[base >= 0], kind="stable") for x in (lo, hi))
    if (first[1:] < end[:-1]).any():
        _broken("copies overlap", index, f"among {len(transfers)} transfers")


def _flat(ends: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([ranges] first row, [ranges] end row, [ends] rows)."""
    counts = [len(end.ranges) for end in ends]
    lo, hi = bounds(chain.from_iterable(end.ranges for end in ends))
    seen = np.concatenate([[0], np.cumsum(hi - lo)])
    edges = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return lo, hi, np.diff(seen[edges])


def _broken(rule: str, stage: int, thing: object) -> NoReturn:
    raise AugTreeError(
        "a program breaks a rule",
        values=f"stage {stage}: {thing}",
        rule=rule,
        remedy="report this plan: compiled programs must pass this check",
    )
