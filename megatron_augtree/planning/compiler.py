"""From a placement to a program: which rows travel when, and which tiles meet them.

Who sees what is in `holdings.py`; here is who fetches what from whom, and in which stage.

A *relay*: where a block spans nodes, `gather_kv` may send keys that several ranks of another node need there
once, to the rank that has the place in its node that the owner has in its own. It hands them on inside its
node one stage later. What it needs itself lies in its ``kv/<stage>`` beside all else that arrives in that
stage; what it only hands on lies in ``kv/<stage>/relay``, which no tile reads. Turned round, the ranks of a
node add their dK, dV up at the relay, and the sum crosses once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_augtree.config import AugTreeError
from megatron_augtree.planning.holdings import WHOLE, Block, Keys, Laid, full_tiles, state_buffer
from megatron_augtree.planning.placement import Placement
from megatron_augtree.planning.schedule import (
    HOME,
    QUERIES,
    RELAY,
    Payload,
    Program,
    Rows,
    Stage,
    Tile,
    Transfer,
    runs,
    uncollected,
)
from megatron_augtree.planning.tree import ForestShape

__all__ = ["PRIMITIVES", "compile_pass", "state_buffer"]

PRIMITIVES = ("gather_kv", "move_kv", "move_q", "ring", "local")

#: Transfers of a stage, and the tiles of every rank.
_Stages = list[tuple[list[Transfer], list[list[Tile]]]]


def compile_pass(
    shape: ForestShape,
    placement: Placement,
    *,
    states: Sequence[tuple[int, Placement]] = (),
    primitive: str = "gather_kv",
    pieces: int = 1,
    nodes: Sequence[int] | None = None,
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
        nodes: [rank] node of the machine; keys cross to another node once, to a relay that hands them on
            (``gather_kv`` only). None, or all equal: everyone fetches from the owner.

    Returns:
        The forward program.

    Raises:
        AugTreeError: an unknown primitive, ``local`` where rows would have to move, `nodes` that do not fit.
    """
    if primitive not in PRIMITIVES:
        raise AugTreeError(
            "unknown primitive",
            values=primitive,
            rule=f"one of {', '.join(PRIMITIVES)}",
            remedy="correct the plan",
        )
    nodes = [0] * len(placement) if nodes is None else nodes
    if len(nodes) != len(placement) or (len(set(nodes)) > 1 and primitive != "gather_kv"):
        raise AugTreeError(
            "keys cannot be handed on inside nodes here",
            values=f"{primitive}, block of {len(placement)} ranks, nodes {list(nodes)}",
            rule="every rank of the block is on a node, and only gather_kv hands keys on",
            remedy="use gather_kv, or compile without nodes",
        )
    with uncollected():
        block = Block(shape, placement, states)
        if primitive == "move_q":
            stages = _move_q(block)
        elif primitive == "ring":
            stages = _ring(block)
        else:
            stages = _gather(block, block.world - 1 if primitive == "move_kv" else pieces, nodes)
        made = [Stage(tuple(moves), tuple(map(tuple, tiles))) for moves, tiles in _without_idle(stages)]
    if primitive == "local" and any(stage.transfers for stage in made):
        raise AugTreeError(
            "primitive local cannot run here",
            values=f"block of {block.world} ranks",
            rule="local needs every visible key on the query's own rank",
            remedy="use gather_kv or move_q",
        )
    return Program(block.world, block.placement, tuple(block.buffers), tuple(made))


def _begin(block: Block, stages: int, *, leaves: bool = True) -> _Stages:
    """Stages of which the first has what a rank can compute from its own rows, leaves' triangles if wanted.

    It hides the first piece's travel and, reversed, the last gradient's return. In a later stage of a gather
    nothing would be left to hide: after the last piece nothing travels.
    """
    made: _Stages = [([], [[] for _ in range(block.world)]) for _ in range(stages)]
    for rank in range(block.world):
        triangles = block.triangles(rank) if leaves else block.triangles(rank, leaves=False)
        made[0][1][rank] += triangles + block.local_tiles(rank)
    return made


class _Lot(NamedTuple):
    """Keys on their way to a rank.

    Attributes:
        keys: [n] numbers in `Block.keys`, increasing.
        source, buffer, at: [n] the rank that sends each, the buffer there and its first row in it.
    """

    keys: np.ndarray
    source: np.ndarray
    buffer: np.ndarray
    at: np.ndarray


def _owners(keys: Keys, wanted: np.ndarray) -> _Lot:
    """Keys from where they live. `wanted`: [keys] bool."""
    number = np.flatnonzero(wanted)
    return _Lot(number, keys.rank[number], keys.buffer[number], keys.at[number])


def _arrive(
    block: Block, name: str, dst: int, lot: _Lot, turn: Sequence[int], payload: Payload = Payload.KV
) -> tuple[list[Transfer], Laid]:
    """Bring rows of several ranks into one buffer of `dst`, laid out by node and row whoever sends them.

    Args:
        block: the block.
        name: the buffer.
        dst: the rank.
        lot: the rows.
        turn: sources in the order of their transfers.
        payload: what travels.
    """
    keys, names = block.keys, block.names
    lo, hi = keys.lo[lot.keys], keys.hi[lot.keys]
    landed = Laid(name, np.stack([block.used[keys.node[lot.keys]], lo, hi]))
    if not landed.count:
        return [], landed
    block.buffers[dst][name] = landed.count
    place = np.zeros(block.world, np.int64)
    place[list(turn)] = np.arange(len(turn))
    sender = place[lot.source] * len(names) + lot.buffer
    short = len(turn) * len(names) < 1 << 15  # numpy sorts 16 bits by counting
    order = np.argsort(sender.astype(np.int16) if short else sender, kind="stable")
    transfers = []
    for first, source, sink in runs(sender[order], lot.at[order], landed.at[order], (hi - lo)[order]):
        key = order[first]
        src, buffer = int(lot.source[key]), names[lot.buffer[key]]
        transfers.append(Transfer(payload, src, dst, Rows(buffer, source), Rows(name, sink)))
    return transfers, landed


class _Routes(NamedTuple):
    """Who sends the keys of a rank to another, and when.

    Attributes:
        turn: [to] the ranks that send something, in the order of their transfers.
        giver: [to, owner] the owner itself, or the relay that hands its keys on.
        arrival: [to, owner] the stage.
    """

    turn: list[list[int]]
    giver: np.ndarray
    arrival: np.ndarray


def _routes(nodes: Sequence[int], pieces: int) -> _Routes:
    """A rank fetches from its node's ranks, the nearest below it first, and as a relay from other nodes'.

    Either kind is cut into `pieces` groups, a stage each, as far as there are ranks. With one node this is
    the direct ring.
    """
    world, members = len(nodes), list(dict.fromkeys(nodes))
    ranks_of = [[r for r in range(world) if nodes[r] == node] for node in members]
    place = {rank: i for ranks in ranks_of for i, rank in enumerate(ranks)}
    giver, arrival = np.zeros((2, world, world), np.int64)
    turn: list[list[int]] = [[] for _ in range(world)]
    for number, mates in enumerate(ranks_of):
        size = len(mates)
        others = [src for hop in range(1, len(members)) for src in ranks_of[number - hop]]
        for dst in mates:
            near = [mates[place[dst] - shift] for shift in range(1, size)]
            far = [src for src in others if place[src] % size == place[dst]]
            turn[dst] = near + far
            for sources in (near, far):
                giver[dst, sources] = sources
                arrival[dst, sources] = _groups(len(sources), pieces)
        for src in others:
            relay = mates[place[src] % size]
            rest = [dst for dst in mates if dst != relay]
            giver[rest, src], arrival[rest, src] = relay, arrival[relay, src] + 1
    return _Routes(turn, giver, arrival)


def _groups(count: int, pieces: int) -> list[int]:
    """[item] its group, where `count` items are cut into at most `pieces` groups of nearly equal size."""
    pieces = max(1, min(pieces, count))
    edges = [count * i // pieces for i in range(pieces)]
    return [bisect_right(edges, item) - 1 for item in range(count)]


def _gather(block: Block, pieces: int, nodes: Sequence[int]) -> _Stages:
    """Owner to consumer, only what is needed, through relays where the block spans nodes."""
    routes = _routes(nodes, pieces)
    arrivals = int(routes.arrival.max(initial=0)) + 1
    stages = _begin(block, arrivals + 1)
    when = [np.where(block.sees(r), routes.arrival[r][block.keys.rank], -1) for r in range(block.world)]
    relays = _Relays(block, routes, nodes) if len(set(nodes)) > 1 else None
    for stage in range(arrivals):
        name = f"kv/{stage}"
        for rank in range(block.world):
            lot = _owners(block.keys, when[rank] == stage)
            if relays is not None:
                lot = relays.reroute(rank, lot)
            transfers, landed = _arrive(block, name, rank, lot, routes.turn[rank])
            stages[stage][0].extend(transfers)
            stages[stage + 1][1][rank] += full_tiles(block.shape, block.home[rank], landed)
            if relays is not None:
                relays.hold(rank, lot, landed)
                stages[stage][0].extend(relays.fetch(rank, stage))
    return stages


class _Relays:
    """Keys that crossed to another node: where its ranks find them.

    Attributes:
        node: [rank] its node, counted in block order.
        buffer, at: [node, key] the buffer of the relay and the row in it.
    """

    def __init__(self, block: Block, routes: _Routes, nodes: Sequence[int]) -> None:
        self.block, self.routes = block, routes
        number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        self.node = np.array([number[node] for node in nodes])
        self.buffer, self.at = np.zeros((2, len(number), len(block.keys.rank)), np.int64)
        #: [node, used node] end of what any of its ranks sees.
        self.seen = np.stack([block.seen[self.node == node].max(axis=0) for node in range(len(number))])

    def reroute(self, rank: int, lot: _Lot) -> _Lot:
        """Take from relays what they hand on."""
        giver, node = self.routes.giver[rank][lot.source], self.node[rank]
        direct = giver == lot.source
        buffer = np.where(direct, lot.buffer, self.buffer[node][lot.keys])
        return _Lot(lot.keys, giver, buffer, np.where(direct, lot.at, self.at[node][lot.keys]))

    def hold(self, rank: int, lot: _Lot, landed: Laid) -> None:
        """Remember where the keys of other nodes have landed."""
        far = self.node[lot.source] != self.node[rank]
        if not far.any():
            return
        if landed.buffer not in self.block.names:
            self.block.names.append(landed.buffer)
        self.buffer[self.node[rank], lot.keys[far]] = self.block.names.index(landed.buffer)
        self.at[self.node[rank], lot.keys[far]] = landed.at[:-1][far]

    def fetch(self, rank: int, stage: int) -> list[Transfer]:
        """What a rank fetches from other nodes only to hand it on."""
        keys, routes, node = self.block.keys, self.routes, self.node[rank]
        mine = (routes.giver[rank] == np.arange(len(self.node))) & (self.node != node)
        mine &= routes.arrival[rank] == stage
        wanted = mine[keys.rank] & (keys.hi <= self.seen[node][keys.node])
        lot = _owners(keys, wanted & (keys.hi > self.block.seen[rank][keys.node]))
        transfers, landed = _arrive(self.block, f"kv/{stage}{RELAY}", rank, lot, routes.turn[rank])
        self.hold(rank, lot, landed)
        return transfers


def _move_q(block: Block) -> _Stages:
    """Queries travel to the prompt state, partial results travel back, hidden by leaves' triangles; the
    leaves' own keys are gathered."""
    stages = _begin(block, 3, leaves=False)
    own = block.keys.buffer == block.names.index(HOME)
    for rank in range(block.world):
        others = [src for src in range(block.world) if src != rank]
        lot = _owners(block.keys, own & block.sees(rank))
        transfers, landed = _arrive(block, "kv/0", rank, lot, others)
        visitors = _owners(block.keys, own & _visits(block, rank))
        there, queries = _arrive(block, QUERIES, rank, visitors, others, Payload.Q)
        back = [Transfer(Payload.PARTIAL, t.dst, t.src, t.sink, t.source) for t in there]
        stages[0][0].extend(transfers + there)
        stages[2][0].extend(back)
        stages[1][1][rank] += full_tiles(block.shape, block.home[rank], landed)
        for state in block.state[rank]:
            stages[1][1][rank] += full_tiles(block.shape, queries, state)
        stages[2][1][rank] += block.triangles(rank, leaves=True)
    return stages


def _visits(block: Block, rank: int) -> np.ndarray:
    """[keys] whether a query of these rows, elsewhere, sees prompt state of `rank`."""
    ends: dict[int, int] = {}  # node -> end of its first span there
    for state in block.state[rank]:
        for node, end in zip(state.nodes, state.spans[2][state.first[:-1]].tolist()):
            ends[node] = min(ends.get(node, WHOLE), end)
    ancestors = block.shape.ancestors
    least = [0 if ends.keys() & ancestors[n] else ends.get(n, WHOLE) for n in block.used.tolist()]
    return (block.keys.lo >= np.array(least, np.int64)[block.keys.node]) & (block.keys.rank != rank)


def _ring(block: Block) -> _Stages:
    """Whole shards from neighbour to neighbour, layout unchanged, as ring context parallelism does."""
    world = block.world
    stages = _begin(block, world)
    shards = [block.owned(rank) for rank in range(world)]
    for hop in range(world - 1):
        arrived = []
        for rank in range(world):
            src = (rank - 1) % world
            landed = [laid.moved(f"kv/{hop}/{part}") for part, laid in enumerate(shards[src])]
            for there, here in zip(shards[src], landed):
                every = ((0, here.count),)
                source, sink = Rows(there.buffer, every), Rows(here.buffer, every)
                stages[hop][0].append(Transfer(Payload.KV, src, rank, source, sink))
                block.buffers[rank][here.buffer] = here.count
                stages[hop + 1][1][rank] += full_tiles(block.shape, block.home[rank], here)
            arrived.append(landed)
        shards = arrived
    return stages


def _without_idle(stages: _Stages) -> _Stages:
    """Join a stage into the one before it where nothing lands between them and nothing computed is sent."""
    kept = [stages[0]]
    for transfers, tiles in stages[1:]:
        if not kept[-1][0] and all(t.payload is Payload.KV for t in transfers):
            kept[-1] = (transfers, [a + b for a, b in zip(kept[-1][1], tiles)])
        else:
            kept.append((transfers, tiles))
    return kept
