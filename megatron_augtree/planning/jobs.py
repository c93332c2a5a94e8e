"""The cheapest way to play a job: some nodes of the forest on a block of some ranks.

The search prices choices by the block's heaviest rank in closed forms (`typical.py`); what it settles on is
counted rank by rank (`loads.py`), as `planner.price` counts the finished plan.

For every way to lay the leaves (all wide, whole, the long ones wide and the others whole) the fused pass is
priced with its traffic in 1, 2, 4 or one piece a rank, flat or node by node. Where memory asks for recompute,
or a pipeline for more slots, prefill or chunks and waves are priced as well. The recompute pair of a pass is
a closed form of the bytes that are left (`cost.Demand.fit`).

`csrc/pricing.cpp` is the twin of this file: the same candidates in the same order, the same integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_augtree.planning.candidates import Choice, chunk_rows, copies_of, split_inner, waves_of
from megatron_augtree.planning.cost import Demand, Pair, PassPrice, Prices
from megatron_augtree.planning.lanes import row_cost
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.placement import Span
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.recipe import Recipe, cut_rows, placement_of
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.planning.typical import Lay, TypicalLoads

#: Estimates that are counted rank by rank before a job is given up.
TRIES = 3

#: Stands for a piece a remote rank: ``move_kv``, the direct ring.
EVERY_RANK = 0


class Options(NamedTuple):
    """What is tried; a forced key leaves one value.

    Attributes:
        least: fewest ranks of a block: a primitive that moves something needs two.
        lane_degree: 0 tries all wide, whole and mixtures.
        pieces: numbers of pieces of a gather; see `EVERY_RANK`.
        fused: whether fused passes are tried.
        phased: whether phased plans are: 0 never, 1 where memory or a pipeline asks for them, 2 always.
        chunks, waves: numbers of passes of a phased plan.
        gather, move_q: what waves may do.
        lean: received keys may be given up.
        hops: gathers may go node by node.
        prefetch: waves may fetch the next layer's prompt keys and values early.
        offload: prefill and chunks may rest in host memory.
        copies: parts of a tree with a prompt copy each; 0 leaves them to the planner.
        whole, attention: the recompute pair of every pass; -1 leaves it to the planner, -2 to the flags.
    """

    least: int = 1
    lane_degree: int = 0
    pieces: tuple[int, ...] = (1, 2, 4, EVERY_RANK)
    fused: bool = True
    phased: int = 1
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    waves: tuple[int, ...] = (1, 2, 4, 8)
    gather: bool = True
    move_q: bool = True
    lean: bool = True
    hops: bool = True
    prefetch: bool = True
    offload: bool = True
    copies: int = 0
    whole: int = -1
    attention: int = 0


class Offer(NamedTuple):
    """A priced choice.

    Attributes:
        cost: what is compared: `time`, and under a pipeline a share of `slot`.
        time: nanoseconds of all its passes, forward and backward.
        slot: nanoseconds of its longest pass.
        peak: bytes of its heaviest rank, above what a step needs whatever its rows.
        choice: how it is played.
    """

    cost: int
    time: int
    slot: int
    peak: int
    choice: Choice


@dataclass(frozen=True)
class Job:
    """A job on its place within a block.

    Attributes:
        nodes: of the forest, ascending.
        offset: first rank, counted from the block's.
        offer: how it is played.
    """

    nodes: tuple[int, ...]
    offset: int
    offer: Offer


class Jobs:
    """Prices jobs of one forest.

    Args:
        shape: the forest.
        prices: model and machine.
        pairs_per_row: see `lanes.row_cost`.
        room: bytes that a job's peak may have.
        options: what is tried.
        slot_weight: sixteenths of (pipeline stages - 1) x longest slot that count as cost.

    Attributes:
        leanest: the job that came nearest to fitting, of those for which nothing fitted.
    """

    def __init__(
        self,
        shape: ForestShape,
        prices: Prices,
        pairs_per_row: int,
        room: int,
        options: Options,
        slot_weight: int = 0,
    ) -> None:
        self.shape, self.prices, self.unit = shape, prices, pairs_per_row
        self.room, self.options, self.slot_weight = room, options, slot_weight
        self.leanest: Offer | None = None

    # One job.

    def estimate(self, nodes: Sequence[int], width: int) -> Offer | None:
        """The cheapest way to play some nodes on `width` ranks within the room, by its heaviest rank."""
        return _Search(self, nodes, width).run().best

    def best(self, nodes: Sequence[int], width: int) -> Offer | None:
        """Counted rank by rank: of the `TRIES` best estimates and the leanest, the cheapest that fits."""
        best = None
        for choice in _Search(self, nodes, width).run().worth_settling():
            offer = self.settle(nodes, choice)
            if offer.peak <= self.room:
                best = offer if best is None or offer.cost < best.cost else best
            elif self.leanest is None or offer.peak < self.leanest.peak:
                self.leanest = offer
        return best

    def settle(self, nodes: Sequence[int], choice: Choice) -> Offer:
        """A choice counted rank by rank, with the recompute pairs that then fit."""
        inner, leaves = split_inner(self.shape, nodes)
        offers = Priced(self, inner, leaves, choice, exact=True).offers()
        return min(offers, key=lambda o: (o.peak > self.room, o.cost))

    def offer(self, times: Sequence[tuple[int, int]], peak: int, choice: Choice) -> Offer:
        """A choice whose passes take `times` (forward, backward)."""
        slots = [forward + backward for forward, backward in times]
        time, slot = sum(slots), max(slots)
        stages = self.prices.model.stages
        return Offer(time + slot * (stages - 1) * self.slot_weight // 16, time, slot, peak, choice)

    def ideal(self, nodes: Sequence[int], ranks: int) -> int:
        """Forward and backward of some nodes spread evenly over some ranks, without any fixed cost, ns."""
        c, m = self.prices.cluster, self.prices.model
        rows = sum(self.shape.rows[n] for n in nodes)
        pairs = sum(self.shape.area(n) for n in nodes)
        linear = (self.prices.linear.ns(rows) + self.prices.beside.ns(rows)) * (100 + c.gemm_backward_pct)
        attention = self.prices.attention.ns(pairs) * (100 + c.attention_backward_pct)
        return m.layers * (linear // 100 + attention // 100) // (ranks * m.stages)

    def floor(self, nodes: Sequence[int], ranks: int) -> int:
        """No job with these nodes takes less on some ranks: even work, and the launches of one pass, ns."""
        c, m = self.prices.cluster, self.prices.model
        return self.ideal(nodes, ranks) + -(-m.layers // m.stages) * 3 * c.layer_ns + 2 * c.pass_ns

    def pair(self, demand: Demand, room: int) -> Pair | None:
        """The recompute pair of passes with this demand, or None where none fits."""
        m, options = self.prices.model, self.options
        if options.whole == -1:
            return demand.fit(room)
        if options.whole == -2:
            return Pair(m.layers - m.recomputed, m.attention_kept)
        return Pair(min(options.whole, m.layers), min(options.attention, m.layers - options.whole))

    def said(self, pair: Pair) -> Pair:
        """What a pass says of its recompute: -1 where the flags decide."""
        return Pair(-1, 0) if self.options.whole == -2 else pair

    # Prompt copies.

    def with_copies(self, nodes: Sequence[int], width: int) -> list[Job] | None:
        """The cheapest way to play a tree on a block, estimated: a job, or parts with a prompt copy each."""
        whole = self.estimate(nodes, width) if self.options.copies < 2 else None
        best = [Job(tuple(nodes), 0, whole)] if whole is not None else None
        for copies in self._copies(nodes, width):
            parts = copies_of(self.shape, nodes, copies, self.unit)
            jobs: list[Job] = []
            if best is not None and max(self.floor(p, width // copies) for p in parts) >= cost_of(best):
                continue
            for index, part in enumerate(parts):
                offer = self.estimate(part, width // copies)
                if offer is None:
                    break
                jobs.append(Job(part, index * (width // copies), offer))
            if len(jobs) == len(parts) and (best is None or cost_of(jobs) < cost_of(best)):
                best = jobs
        return best

    def table(self, trees: Sequence[Sequence[int]], widths: Sequence[int], enough: int) -> list[list[int]]:
        """[tree] estimated costs on blocks of the widths in turn, -1 where nothing fits.

        Args:
            trees: [tree] its nodes, a whole subtree.
            widths: ascending.
            enough: a row ends where a tree costs less than so many nanoseconds: wider blocks only cost work.
        """
        rows = []
        for nodes in trees:
            costs: list[int] = []
            for width in widths:
                jobs = self.with_copies(nodes, width)
                costs.append(-1 if jobs is None else cost_of(jobs))
                if 0 <= costs[-1] < enough:
                    break
            rows.append(costs)
        return rows

    def _copies(self, nodes: Sequence[int], width: int) -> Iterator[int]:
        """Numbers of copies that the block and the leaves allow: powers of two, or what is forced."""
        inner, leaves = split_inner(self.shape, nodes)
        forced = self.options.copies
        if forced > 1 and width % forced == 0:
            yield forced
        copies = 2
        while not forced and inner and copies <= min(width, len(leaves)):
            if width % copies == 0:
                yield copies
            copies *= 2


class _Search:
    """The choices for some nodes on a block of some ranks, each priced by its heaviest rank."""

    def __init__(self, jobs: Jobs, nodes: Sequence[int], width: int) -> None:
        self.jobs, self.options, self.width = jobs, jobs.options, width
        self.inner, self.leaves = split_inner(jobs.shape, nodes)
        self.best: Offer | None = None
        self._offers: list[Offer] = []
        self._unrepeated = 0

    def run(self) -> _Search:
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
            if self.width == 1 or offer.peak <= self.jobs.room and not self._repeats(offer.choice):
                break
        return hidden

    def _repeats(self, choice: Choice) -> bool:
        m = self.jobs.prices.model
        return (choice.keep_layers if choice.keep_layers >= 0 else m.layers - m.recomputed) < m.layers

    # Phased.

    def _phased(self) -> None:
        """Waves over one prefill; the cheapest and the leanest of either primitive also over chunks, without
        keeping what they receive where nothing fits, and offloaded."""
        several = self.jobs.prices.model.stages > 1
        first_chunks = self.options.chunks if several else self.options.chunks[:1]
        tried = [o for chunks in first_chunks for choice in self._waves(chunks) for o in self._try(choice)]
        if not tried:
            return
        seeds = []
        for queries in (False, True):
            mine = [offer for offer in tried if (offer.choice.primitive == "move_q") == queries]
            fitting = [offer for offer in mine if offer.peak <= self.jobs.room]
            seeds += [min(mine, key=lambda o: o.peak)] if mine else []
            seeds += [min(fitting, key=lambda o: o.cost)] if fitting else []
        more: list[Offer] = []
        for seed in seeds:
            for chunks in () if several else self.options.chunks[1:]:
                more += self._try(replace(seed.choice, chunks=chunks))
            for hop, primitive, pieces in self._ways()[1:]:
                # Prefill and chunks have nothing that travels ahead: they may want pieces.
                if seed.choice.primitive == "move_q":
                    pieces = self.width - 1 if primitive == "move_kv" else pieces
                    more += self._try(replace(seed.choice, pieces=pieces)) if not hop else []
                elif seed.choice.primitive == "gather_kv":
                    way = {"primitive": primitive, "pieces": pieces, "node_ranks": hop}
                    more += self._try(replace(seed.choice, **way))
        if self.options.lean and self.width > 1 and self.best is None:
            for seed in [*seeds, *more]:
                more += self._try(replace(seed.choice, keep=False))
        if self.options.offload and self.jobs.prices.host is not None:
            for seed in [*seeds, *more]:
                self._try(replace(seed.choice, offload=True))

    def _try(self, choice: Choice) -> list[Offer]:
        offers = Priced(self.jobs, self.inner, self.leaves, choice, exact=False).offers()
        for offer in offers:
            self._consider(offer)
        return offers

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


class Priced:
    """The passes of a choice with their prices: of the heaviest rank, or of every rank (`exact`).

    Attributes:
        spine: of the fused pass, or of prefill or chunks.
        replays: of the waves.
    """

    def __init__(
        self, jobs: Jobs, inner: Sequence[int], leaves: Sequence[int], choice: Choice, *, exact: bool
    ) -> None:
        self.jobs, self.choice, self.exact = jobs, choice, exact
        gather = choice.primitive if choice.primitive != "move_q" else "gather_kv"
        self.fused = choice.phase == "fused" or not inner or not leaves
        if self.fused:
            lay = self._lay(inner, leaves)
            self.spine, self.replays = [self._price(lay, gather, [])], []
            return
        runs = chunk_rows(jobs.shape, inner, choice.chunks)
        states = [Recipe(0, "chunk", 0, choice.degree, tuple(inner), lo=lo, hi=hi) for lo, hi in runs]
        self.spine = [
            self._price(state, gather, states[:index], spine=True) for index, state in enumerate(states)
        ]
        self.replays = [
            self._price(self._lay((), wave), choice.primitive, states)
            for wave in waves_of(jobs.shape, leaves, choice.waves, jobs.unit)
        ]

    def _lay(self, inner: Sequence[int], leaves: Sequence[int]) -> Recipe:
        c = self.choice
        wide = min(c.wide, len(leaves))
        return Recipe(0, "fused", 0, c.degree, tuple(inner), tuple(leaves), c.lane_degree, wide)

    def _price(
        self, lay: Recipe, primitive: str, states: Sequence[Recipe], *, spine: bool = False
    ) -> PassPrice:
        jobs, c = self.jobs, self.choice
        shape, node_ranks = jobs.shape, jobs.prices.cluster.node_ranks
        p = Pass(
            0, 0, lay.kind, tuple(range(c.degree)), (), (), primitive, c.pieces, c.keep, c.node_ranks,
            prefetch=c.prefetch and not spine and not self.fused, offload=c.offload and spine,
        )  # fmt: skip
        if self.exact:
            placements = [placement_of(x, shape, jobs.unit) for x in (lay, *states)]
            loads = PassLoads(shape, replace(p, placement=placements[0]), placements[1:], node_ranks)
        else:
            loads = TypicalLoads(shape, _typical(shape, lay, states), p, node_ranks, jobs.unit)
        return PassPrice(jobs.prices, loads, provides=spine)

    def offers(self) -> list[Offer]:
        """The choice with the recompute pairs that fit; of a phased one, what the waves keep first, or the
        spine first."""
        jobs = self.jobs
        kept = self.spine[0].demand()
        if self.fused:
            pair = jobs.pair(kept, jobs.room) or Pair(0, 0)
            said = jobs.said(pair)
            made = replace(self.choice, keep_layers=said.whole, keep_attention=said.attention)
            return [jobs.offer([self.spine[0].time(pair)], self.spine[0].peak(pair), made)]
        for price in self.spine[1:]:
            kept = kept.together(price.demand())
        turn = self.replays[0].demand()
        for price in self.replays[1:]:
            turn = turn.in_turn(price.demand())
        return [self._phased_offer(*pairs) for pairs in self._pairs(kept, turn)]

    def _phased_offer(self, spine: Pair, wave: Pair) -> Offer:
        jobs = self.jobs
        times = [price.time(spine) for price in self.spine] + [price.time(wave) for price in self.replays]
        own, waves = jobs.said(spine), jobs.said(wave)
        made = replace(
            self.choice,
            keep_layers=own.whole,
            keep_attention=own.attention,
            wave_layers=waves.whole,
            wave_attention=waves.attention,
        )
        return jobs.offer(times, self._peak(spine, wave), made)

    def _pairs(self, kept: Demand, turn: Demand) -> list[tuple[Pair, Pair]]:
        """(spine's, waves') recompute pairs: each of the two takes what it can before the other."""
        jobs, nothing = self.jobs, Pair(0, 0)
        if jobs.options.whole != -1:
            pair = jobs.pair(kept, jobs.room) or nothing
            return [(pair, pair)]
        wave = turn.fit(jobs.room - kept.kept(nothing)) or nothing
        spine = kept.beside(turn.peak(nothing)).fit(jobs.room) or nothing
        return [
            (kept.beside(turn.peak(wave)).fit(jobs.room) or nothing, wave),
            (spine, turn.fit(jobs.room - kept.kept(spine)) or nothing),
        ]

    def _peak(self, spine: Pair, wave: Pair) -> int:
        """Bytes of the heaviest rank: prefill or chunks stay while the waves come and go."""
        alive, peak = [0] * len(self.spine[0].lines), 0
        for price in self.spine:
            alive = [a + b for a, b in zip(alive, price.kept(spine))]
            peak = max(peak, *[a + b for a, b in zip(alive, price.work(spine))])
        for price in self.replays:
            # One rank stands for all of an even spine, two may for a wave.
            below = alive + alive[-1:] * (len(price.lines) - len(alive))
            needs = zip(below, price.kept(wave), price.work(wave))
            peak = max(peak, *[sum(parts) for parts in needs])
        return peak


def _typical(shape: ForestShape, lay: Recipe, states: Sequence[Recipe]) -> Lay:
    """A recipe's rows, and those of the passes it reads, before they are placed."""
    if lay.hi < 0:
        inner = [Span(n, 0, shape.rows[n]) for n in lay.inner]
    else:
        inner = cut_rows(shape, lay.inner, lay.lo, lay.hi)
    rows = sum(state.hi - state.lo for state in states)
    nodes = len(states[0].inner) if states and lay.leaves else 0
    return Lay(tuple(inner), lay.leaves, lay.width, lay.lane_degree, lay.wide, rows, nodes)


def cost_of(jobs: Sequence[Job]) -> int:
    """Cost of jobs that run beside each other on parts of a block."""
    return max(job.offer.cost for job in jobs)
