"""The choices that are tried for a job: some nodes of the forest on a block of some ranks.

For every way to lay the leaves (all wide, whole, the long ones wide and the others whole) the fused pass is
priced with its traffic in 1, 2, 4 or one piece a rank, flat or node by node. Where memory asks for recompute,
or a pipeline for more slots, prefill or chunks and waves are priced as well.

`csrc/choices.h` is the twin of this file: the same candidates in the same order, the same integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from megatron_augtree.planning.candidates import Choice, split_inner
from megatron_augtree.planning.demand import Pair
from megatron_augtree.planning.lanes import row_cost
from megatron_augtree.planning.offers import EVERY_RANK, Offer
from megatron_augtree.planning.priced import Priced

if TYPE_CHECKING:
    from megatron_augtree.planning.jobs import Jobs

#: Estimates that are counted rank by rank before a job is given up.
TRIES = 3


class _Tried(NamedTuple):
    """An offer and the passes that it is of."""

    offer: Offer
    priced: Priced

    @property
    def choice(self) -> Choice:
        """How it is played."""
        return self.offer.choice


class ChoiceSearch:
    """The choices for some nodes on a block of some ranks, each priced by its heaviest rank."""

    def __init__(self, jobs: Jobs, nodes: Sequence[int], width: int) -> None:
        self.jobs, self.options, self.width = jobs, jobs.options, width
        self.inner, self.leaves = split_inner(jobs.shape, nodes)
        self.best: Offer | None = None
        self._offers: list[Offer] = []
        self._unrepeated = 0

    def run(self) -> ChoiceSearch:
        """Try fused passes, and waves where they may pay."""
        tree = bool(self.inner and self.leaves)
        if self.width >= self.options.least:
            if self.options.fused or not tree:
                self._fused()
            if tree and self._asks_for_waves():
                self._phased()
        return self

    def worth_settling(self) -> list[Choice]:
        """The cheapest that are said to fit, cheapest first; those that nearly are; then the leanest."""
        room, order = self.jobs.room, sorted(self._offers, key=lambda o: o.cost)
        fitting = [o for o in order if o.peak <= room][:TRIES]
        near = [o for o in order if room < o.peak <= room + room // 16][:TRIES]
        lean = [min(self._offers, key=lambda o: o.peak)] if self._offers else []
        return list(dict.fromkeys(o.choice for o in [*fitting, *near, *lean]))

    def _consider(self, offer: Offer) -> bool:
        self._offers.append(offer)
        if offer.peak > self.jobs.room or (self.best is not None and offer.cost >= self.best.cost):
            return False
        self.best = offer
        return True

    def _asks_for_waves(self) -> bool:
        """Waves pay where nothing fits, where a pipeline wants slots, and where they save recompute: more
        than a fiftieth of the time."""
        if self.options.phased != 1:
            return self.options.phased == 2
        if self.best is None or self.jobs.prices.model.stages > 1:
            return True
        return self.options.whole == -1 and 50 * self._unrepeated < 49 * self.best.cost

    # How leaves lie, and what travels.

    def _lanes(self, inner: Sequence[int]) -> list[tuple[int, int]]:
        """(lane degree, wide leaves) worth trying: all wide; whole, where no leaf is much longer than a
        rank's share; the leaves beyond a whole, a half or a quarter share wide, the others whole."""
        if self.options.lane_degree:
            lane = self.options.lane_degree
            return [(lane, 0)] if self.width % lane == 0 else []
        if self.width == 1:
            return [(1, 0)]
        shape, unit = self.jobs.shape, self.jobs.unit
        cost = {n: row_cost(shape, n, 0, shape.rows[n], unit) for n in (*inner, *self.leaves)}
        share = sum(cost.values()) // self.width
        longest = max((cost[n] for n in self.leaves), default=0)
        found = [(self.width, 0)]
        if self.leaves and 2 * longest <= 3 * share:
            found.append((1, 0))
        for part in (1, 2, 4):
            wide = sum(cost[n] * part > share for n in self.leaves)
            if 0 < wide < len(self.leaves) and (1, wide) not in found:
                found.append((1, wide))
        return found

    def _ways(self) -> list[tuple[int, str, int]]:
        """(ranks of a node or 0, primitive, pieces) of a gather; the first is the plainest."""
        if self.width == 1:
            return [(0, "local", 1)]
        node_ranks = self.jobs.prices.cluster.node_ranks
        hops = [0, node_ranks] if self.options.hops and self.width > node_ranks else [0]
        only = len(self.options.pieces) == 1
        found: list[tuple[int, str, int]] = []
        for pieces in self.options.pieces:
            if pieces == EVERY_RANK:
                found += [(0, "move_kv", 1)] if self.width > 2 or only else []
            elif pieces < self.width or only:
                found += [(hop, "gather_kv", pieces) for hop in hops]
        return found

    # Fused.

    def _fused(self) -> None:
        for lane, wide in self._lanes(self.inner):
            for hop, primitive, pieces in self._ways():
                way = {"primitive": primitive, "pieces": pieces, "node_ranks": hop}
                choice = Choice(self.width, lane_degree=lane, wide=wide, **way)
                if self._all_hides(choice):
                    break

    def _all_hides(self, choice: Choice) -> bool:
        """Try a fused pass; one that gives up what it received, too, where keeping it asks for recompute.

        Returns:
            Whether no traffic shows: other ways to move the same rows can only cost more.
        """
        hidden = False
        for keep in (True, False) if self.options.lean else (True,):
            priced = Priced(self.jobs, self.inner, self.leaves, replace(choice, keep=keep), exact=False)
            hidden = priced.spine[0].hidden if keep else hidden
            (offer,) = priced.offers()
            if self._consider(offer):
                self._unrepeated = sum(priced.spine[0].time(Pair(self.jobs.prices.model.layers, 0)))
            repeats = self._repeats(offer.choice.keep_layers)
            if self.width == 1 or offer.peak <= self.jobs.room and not repeats:
                break
        return hidden

    def _repeats(self, kept: int) -> bool:
        """Whether passes that keep so many layers run others again; -1 stands for the flags."""
        m = self.jobs.prices.model
        return (kept if kept >= 0 else m.layers - m.recomputed) < m.layers

    # Phased.

    def _phased(self) -> None:
        """Waves over one prefill; the cheapest and the leanest of either primitive also over chunks, where
        the prefill is what memory is short of, and in other ways, where traffic shows; those that want
        memory also without keeping what they receive, and offloaded, and so the cheapest in half as many
        waves."""
        several = self.jobs.prices.model.stages > 1
        first_chunks = self.options.chunks if several else self.options.chunks[:1]
        tried = [x for chunks in first_chunks for choice in self._waves(chunks) for x in self._try(choice)]
        if not tried:
            return
        seeds, cheapest = [], []
        for queries in (False, True):
            mine = [x for x in tried if (x.choice.primitive == "move_q") == queries]
            fitting = [x for x in mine if x.offer.peak <= self.jobs.room]
            seeds += [min(mine, key=lambda x: x.offer.peak)] if mine else []
            cheapest += [min(fitting, key=lambda x: x.offer.cost)] if fitting else []
            seeds += cheapest[-1:] if fitting else []
        more: list[_Tried] = []
        for seed in seeds:
            chunks = self.options.chunks[1:] if seed.priced.spine_is_heavy and not several else ()
            for number in chunks:
                more += self._try(replace(seed.choice, chunks=number))
            for hop, primitive, pieces in self._ways()[1:] if seed.priced.shows_traffic else ():
                # Prefill and chunks have nothing that travels ahead: they may want pieces.
                if seed.choice.primitive == "move_q":
                    pieces = self.width - 1 if primitive == "move_kv" else pieces
                    more += self._try(replace(seed.choice, pieces=pieces)) if not hop else []
                elif seed.choice.primitive == "gather_kv":
                    way = {"primitive": primitive, "pieces": pieces, "node_ranks": hop}
                    more += self._try(replace(seed.choice, **way))
        seed = min(cheapest, key=lambda x: x.offer.cost, default=None)
        if seed is not None and self._wants_memory(seed):
            more += [x for x in tried if self._halves(x.choice, seed.choice)]
        if self.options.lean and self.width > 1:
            for seed in [*seeds, *more]:
                more += self._try(replace(seed.choice, keep=False)) if self._wants_memory(seed) else []
        if self.options.offload and self.jobs.prices.host is not None:
            for seed in [*seeds, *more]:
                if self._wants_memory(seed):
                    self._try(replace(seed.choice, offload=True))

    def _halves(self, choice: Choice, seed: Choice) -> bool:
        """Whether a choice of the first ones is another one in half as many waves."""
        pairs = {"keep_layers": 0, "keep_attention": 0, "wave_layers": 0, "wave_attention": 0}
        return replace(choice, waves=2 * choice.waves, **pairs) == replace(seed, **pairs)

    def _wants_memory(self, x: _Tried) -> bool:
        """Whether it does not fit, or runs layers again."""
        kept = x.choice.keep_layers, x.choice.wave_layers
        return x.offer.peak > self.jobs.room or any(map(self._repeats, kept))

    def _try(self, choice: Choice) -> list[_Tried]:
        priced = Priced(self.jobs, self.inner, self.leaves, choice, exact=False)
        tried = [_Tried(offer, priced) for offer in priced.offers()]
        for x in tried:
            self._consider(x.offer)
        return tried

    def _waves(self, chunks: int) -> Iterator[Choice]:
        options, ways = self.options, self._ways()
        early = options.prefetch and self.jobs.prices.cluster.overlap
        for waves in dict.fromkeys(min(waves, len(self.leaves)) for waves in options.waves):
            for lane, wide in self._lanes(()):
                choice = Choice(
                    self.width, phase="phased", chunks=chunks, waves=waves, lane_degree=lane, wide=wide
                )
                # What travels a layer ahead needs no pieces to hide: the plainest way will do.
                for hop, primitive, pieces in ways if options.gather or self.width == 1 else ():
                    if (primitive, pieces) == ways[0][1:]:
                        way = {"primitive": primitive, "pieces": pieces, "node_ranks": hop}
                        yield replace(choice, prefetch=early and self.width > 1, **way)
                few = not options.gather or self._queries_are_few(waves)
                if options.move_q and self.width > 1 and few:
                    yield replace(choice, primitive="move_q", pieces=1)

    def _queries_are_few(self, waves: int) -> bool:
        """Queries and partial results of a wave weigh at most four times what its prompt's keys do."""
        m, rows = self.jobs.prices.model, self.jobs.shape.rows
        query = m.q_heads * m.k_dim * m.item_bytes + m.attended_bytes
        leaves, spine = sum(rows[n] for n in self.leaves), sum(rows[n] for n in self.inner)
        return leaves * query <= 4 * waves * spine * m.kv_bytes
