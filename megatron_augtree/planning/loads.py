"""What every rank of a pass does in one layer, counted from the placement alone.

The counts equal what the compiler emits (rows, pairs, received rows, messages; a test compares them), so that
candidates are priced without compiling them. `viewers.py` says who sees which keys; `csrc/loads.cpp` counts
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from megatron_augtree.planning.placement import Placement
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.viewers import Keys, Viewers


class RankLoad(NamedTuple):
    """What one rank does in one layer of a pass.

    Attributes:
        rows, scored, cut, below: its rows; those that reach the vocabulary, those of nodes cut over ranks,
            and those of nodes with ancestors.
        pairs: (query, key) pairs it computes; `visiting` of them with other ranks' queries (``move_q``).
        above: pairs of its rows and their ancestors', wherever these are computed.
        early: those that need nothing received, computed while the first piece travels. Under ``move_q``
            leaves' own triangles are not among them: they are computed while results come back.
        triangles: rows of each of its causal tiles.
        tiles: attention calls, an estimate.
        merged: rows of partial results that are merged, an estimate.
        kv_in, kv_out: key rows received and sent; of them `kv_far_in`, `kv_far_out` across nodes.
        q_in, q_out: query rows received and sent (``move_q``); `q_far_in`, `q_far_out` across nodes.
        messages: messages sent in the forward.
    """

    rows: int
    scored: int
    cut: int
    below: int
    above: int
    pairs: int
    visiting: int
    early: int
    triangles: tuple[int, ...]
    tiles: int
    merged: int
    kv_in: int
    kv_out: int
    kv_far_in: int
    kv_far_out: int
    q_in: int
    q_out: int
    q_far_in: int
    q_far_out: int
    messages: int


def landings(p: Pass, sizes: Sequence[int], *, crosses: bool) -> int:
    """Stages in which keys land, as many as there can be.

    Args:
        p: the pass; its placement is not looked at.
        sizes: [node of the machine] ranks of the block there.
        crosses: keys cross to another node once and are handed on there.
    """
    if p.primitive == "move_q":
        return 1
    world = sum(sizes)
    if p.primitive in ("ring", "move_kv"):
        return world - 1
    if not crosses:
        return min(p.pieces, world - 1)
    # A relay has a source or more in every other node, and hands on what came one stage later.
    far = (len(sizes) - 1) * -(-max(sizes) // min(sizes))
    return max(min(p.pieces, max(sizes) - 1), min(p.pieces, far) + 1)


def cut_tiles(lands: int, ranks: int, *, mixed: bool = False) -> int:
    """Tiles of a rank's rows of a node that is cut over some ranks, with the others' rows of it: one a
    landing, and one more where keys of several ranks land together, of which a zigzag's first rows see less
    than its last.

    Args:
        lands: landings of the pass.
        ranks: how many the node is cut over.
        mixed: in every landing there are some such: a node's keys are handed on to others, or an earlier
            pass had its first rows.
    """
    own = min(lands, ranks - 1)
    return 2 * lands if mixed else own + (own < ranks - 1)


class PassLoads(Viewers):
    """The loads of a pass on every rank of its block; arguments as for `Viewers`."""

    @property
    def crosses(self) -> bool:
        """Whether keys cross to another node once and are handed on there."""
        return bool(self.p.node_ranks) and self.machine_nodes > 1 and self.p.primitive == "gather_kv"

    @cached_property
    def ranks(self) -> list[RankLoad]:
        if self.p.primitive == "move_q":
            return self._move_q()
        return self._ring() if self.p.primitive == "ring" else self._gather()

    @property
    def stages(self) -> int:
        """Stages with transfers in the forward."""
        remote = self.world - 1
        if not remote or not any(r.messages for r in self.ranks):
            return 0
        if self.p.primitive == "move_q":
            return 2
        if self.p.primitive in ("ring", "move_kv"):
            return remote
        return self._landings

    @cached_property
    def _landings(self) -> int:
        return landings(self.p, [mates.bit_count() for mates in self._mates], crosses=self.crosses)

    # What a rank computes.

    def _basic(self, rank: int) -> dict:
        spans, own = self.p.placement[rank], self._own[rank]
        whole, shape = self._whole[rank], self.shape
        cut = [n for n in own if self._holders[n] == self.world > 1]
        lane_cut = [n for n in own if 1 < self._holders[n] < self.world]
        rows = sum(own.values())
        under = sum(n for node, n in own.items() if shape.parents[node] >= 0)
        lands = self._landings
        resumed = any(s.node in own for state in self.states for s in state[rank])
        tiles = cut_tiles(lands, self.world, mixed=self.crosses or resumed)
        lane = max((self._holders[n] for n in lane_cut), default=1)
        lane_lands, lane_tiles = min(lands, lane - 1), cut_tiles(lands, lane)
        held = self._states_held(rank)
        shared = min(len(whole), 2)
        return {
            "rows": rows,
            "scored": sum(min(shape.scored[s.node], s.hi - s.lo) for s in spans),
            "cut": sum(own[n] for n in (*cut, *lane_cut)),
            "below": sum(n for node, n in own.items() if shape.starts[node]),
            "above": sum(n * shape.starts[node] for node, n in own.items()),
            "pairs": sum(shape.area(*s) for s in spans),
            "visiting": 0,
            "early": self._early(rank),
            "triangles": tuple(own.values()),
            # Own triangles; keys held, a buffer a pass; those of shared nodes, and of nodes cut over all
            # ranks, or over those of a lane.
            "tiles": len(own)
            + max(shared, held)
            + shared * lands
            + len(cut) * tiles
            + len(lane_cut) * lane_tiles,
            "merged": rows
            + max(under, rows * held)
            + under * lands
            + sum(own[n] for n in cut) * lands
            + sum(own[n] for n in lane_cut) * lane_lands,
            "q_in": 0,
            "q_out": 0,
            "q_far_in": 0,
            "q_far_out": 0,
        }

    def _states_held(self, rank: int) -> int:
        """Earlier passes of which a rank holds keys: a buffer each."""
        return sum(bool(state[rank]) for state in self.states)

    def _early(self, rank: int) -> int:
        """Pairs with keys that a rank holds itself; leaves' triangles come last where queries travel."""
        own, shape = self._own[rank], self.shape
        held: dict[int, int] = {}
        for state in self.states:
            for s in state[rank]:
                held[s.node] = held.get(s.node, 0) + s.hi - s.lo
        pairs = 0
        for node, n in own.items():
            pairs += n * sum(own.get(a, 0) + held.get(a, 0) for a in shape.ancestors[node])
            pairs += n * held.get(node, 0) if shape.children[node] else 0
            pairs += n * (n + 1) // 2 if shape.children[node] or self.p.primitive != "move_q" else 0
        return pairs

    # The primitives.

    def _gather(self) -> list[RankLoad]:
        kinds = [self.p.placement, *self.states]
        keys = self._keys(kinds)
        direct = [] if self.crosses else [self._direct(kinds, keys, rank) for rank in range(self.world)]
        flows = direct or self._handed_on(kinds)
        return [
            RankLoad(
                **self._basic(rank),
                kv_in=near_in + far_in,
                kv_out=near_out + far_out,
                kv_far_in=far_in,
                kv_far_out=far_out,
                messages=messages,
            )
            for rank, (near_in, far_in, near_out, far_out, messages) in enumerate(flows)
        ]

    def _direct(self, kinds: Sequence[Placement], keys: dict[int, Keys], rank: int) -> tuple[int, ...]:
        """(near in, far in, near out, far out) key rows and messages of a rank: owner to consumer."""
        return *self._arriving(keys, rank), *self._leaving(kinds, rank)

    def _handed_on(self, kinds: Sequence[Placement]) -> list[list[int]]:
        """The same where keys cross to another node once, to a relay, which hands them on there."""
        flows = [[0, 0, 0, 0, 0] for _ in range(self.world)]
        first = [0] * self.world  # ranks that a rank sends its own rows to, a bit a rank
        then = [0] * self.world  # ranks that it hands others' rows on to
        ranks_of = [[r for r in range(self.world) if self.node_of[r] == n] for n in range(self.machine_nodes)]
        place = {r: ranks.index(r) for ranks in ranks_of for r in ranks}
        for kind in kinds:
            for src in range(self.world):
                for s in kind[src]:
                    seen, size = self._viewers(s) & ~(1 << src), s.hi - s.lo
                    for node, mates in enumerate(self._mates):
                        wanting = seen & mates
                        if not wanting:
                            continue
                        giver = src
                        if node != self.node_of[src]:
                            giver = ranks_of[node][place[src] % len(ranks_of[node])]
                            flows[src][3] += size
                            flows[giver][1] += size
                            first[src] |= 1 << giver
                            wanting &= ~(1 << giver)
                            then[giver] |= wanting
                        else:
                            first[src] |= wanting
                        flows[giver][2] += size * wanting.bit_count()
                        for rank in ranks_of[node]:
                            flows[rank][0] += size * (wanting >> rank & 1)
        for rank in range(self.world):
            flows[rank][4] = first[rank].bit_count() + then[rank].bit_count()
        return flows

    def _ring(self) -> list[RankLoad]:
        kinds = (self.p.placement, *self.states)
        shards = [sum(s.hi - s.lo for kind in kinds for s in kind[r]) for r in range(self.world)]
        total, remote = sum(shards), self.world - 1
        loads = []
        for rank in range(self.world):
            passing = [shards[(rank - hop) % self.world] for hop in range(remote)]
            arriving = total - shards[rank] if remote else 0
            after, before = (rank + 1) % self.world, (rank - 1) % self.world
            loads.append(
                RankLoad(
                    **self._basic(rank),
                    kv_in=arriving,
                    kv_out=sum(passing),
                    kv_far_in=arriving if self.node_of[before] != self.node_of[rank] else 0,
                    kv_far_out=sum(passing) if self.node_of[after] != self.node_of[rank] else 0,
                    messages=sum(x > 0 for x in passing),
                )
            )
        return loads

    def _move_q(self) -> list[RankLoad]:
        """Leaves' own keys are gathered; queries go to the prompt state, partial results come back."""
        keys = self._keys([self.p.placement])
        meets = [self._meets(rank) for rank in range(self.world)]
        loads = []
        for rank in range(self.world):
            near_in, far_in = self._arriving(keys, rank)
            near_out, far_out, _ = self._leaving([self.p.placement], rank)
            receivers = 0
            for s in self.p.placement[rank]:
                receivers |= self._viewers(s)
            q_out, q_far_out, pairs_out = self._visits(meets, rank, out=True)
            q_in, q_far_in, pairs_in = self._visits(meets, rank, out=False)
            for other in range(self.world):
                receivers |= (meets[other].get(rank, (0, 0))[0] > 0) << other
            receivers &= ~(1 << rank)
            back = sum(meets[rank].get(other, (0, 0))[0] > 0 for other in range(self.world) if other != rank)
            basic = self._basic(rank)
            basic |= {
                "pairs": basic["pairs"] + pairs_in - pairs_out,
                "visiting": pairs_in,
                "tiles": basic["tiles"] + self._states_held(rank),
                "merged": basic["merged"] + q_in + q_out,
                "q_in": q_in,
                "q_out": q_out,
                "q_far_in": q_far_in,
                "q_far_out": q_far_out,
            }
            loads.append(
                RankLoad(
                    **basic,
                    kv_in=near_in + far_in,
                    kv_out=near_out + far_out,
                    kv_far_in=far_in,
                    kv_far_out=far_out,
                    messages=receivers.bit_count() + back,
                )
            )
        return loads

    def _meets(self, rank: int) -> dict[int, tuple[int, int]]:
        """Rank of a query -> (its query rows that see prompt state of `rank`, pairs with it)."""
        total: dict[int, int] = {}
        ends: dict[int, list[tuple[int, int]]] = {}
        for state in self.states:
            for s in state[rank]:
                total[s.node] = total.get(s.node, 0) + s.hi - s.lo
                ends.setdefault(s.node, []).append((s.hi, s.hi - s.lo))
        met: dict[int, tuple[int, int]] = {}
        for src, spans in enumerate(self.p.placement):
            rows = pairs = 0
            for q in spans:
                seen = sum(total.get(a, 0) for a in self.shape.ancestors[q.node])
                seen += sum(size for end, size in ends.get(q.node, ()) if end <= q.lo)
                rows += q.hi - q.lo if seen else 0
                pairs += (q.hi - q.lo) * seen
            met[src] = rows, pairs
        return met

    def _visits(
        self, meets: Sequence[dict[int, tuple[int, int]]], rank: int, *, out: bool
    ) -> tuple[int, int, int]:
        """(query rows, those across nodes, pairs) that a rank sends out, or takes in."""
        rows = far = pairs = 0
        for other in range(self.world):
            if other != rank:
                there, who = (other, rank) if out else (rank, other)
                visiting, computed = meets[there][who]
                rows, pairs = rows + visiting, pairs + computed
                far += visiting if self.node_of[other] != self.node_of[rank] else 0
        return rows, far, pairs
