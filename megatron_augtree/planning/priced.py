"""The passes of one choice for a job, with their prices and the recompute pairs that fit.

`csrc/priced.h` is the twin of this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_augtree.planning.candidates import Choice, chunk_rows, waves_of
from megatron_augtree.planning.cost import PassPrice
from megatron_augtree.planning.demand import Demand, Pair
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.offers import Offer
from megatron_augtree.planning.placement import Span
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.recipe import Recipe, cut_rows, placement_of
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.planning.typical import Lay, TypicalLoads

if TYPE_CHECKING:
    from megatron_augtree.planning.jobs import Jobs


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
        if self.fused:
            pair = jobs.pair(self.spine[0].demand(), jobs.room) or Pair(0, 0)
            said = jobs.said(pair)
            made = replace(self.choice, keep_layers=said.whole, keep_attention=said.attention)
            return [jobs.offer([(self.spine[0], pair)], self.spine[0].peak(pair), made)]
        return [self._phased_offer(*pairs) for pairs in self._pairs(*self._demands())]

    @property
    def spine_is_heavy(self) -> bool:
        """Whether the prompt's passes ask for more memory while they run than the waves ever do: if not, more
        and smaller ones cannot make a pair fit, or a plan leaner."""
        kept, turn = self._demands()
        least = min(turn.peak(Pair(0, 0)), turn.peak(Pair(turn.layers, 0)))
        return kept.work_again > least

    @property
    def shows_traffic(self) -> bool:
        """Whether traffic shows: otherwise further ways to move the same rows only cost more. Queries have
        one way."""
        waves = [] if self.choice.primitive == "move_q" else self.replays
        return not all(price.hidden for price in [*self.spine, *waves])

    def _demands(self) -> tuple[Demand, Demand]:
        """The spine's, together, and the waves', in turn."""
        kept = self.spine[0].demand()
        for price in self.spine[1:]:
            kept = kept.together(price.demand())
        turn = self.replays[0].demand()
        for price in self.replays[1:]:
            turn = turn.in_turn(price.demand())
        return kept, turn

    def _phased_offer(self, spine: Pair, wave: Pair) -> Offer:
        jobs = self.jobs
        passes = [(price, spine) for price in self.spine] + [(price, wave) for price in self.replays]
        own, waves = jobs.said(spine), jobs.said(wave)
        made = replace(
            self.choice,
            keep_layers=own.whole,
            keep_attention=own.attention,
            wave_layers=waves.whole,
            wave_attention=waves.attention,
        )
        return jobs.offer(passes, self._peak(spine, wave), made)

    def _pairs(self, kept: Demand, turn: Demand) -> list[tuple[Pair, Pair]]:
        """(spine's, waves') recompute pairs: each of the two takes what it can before the other."""
        jobs, nothing = self.jobs, Pair(0, 0)
        if jobs.options.whole != -1:
            pair = jobs.pair(kept, jobs.room) or nothing
            return [(pair, pair)]
        wave = turn.fit(jobs.room - kept.kept(nothing)) or nothing
        spine = self._spine_pair(kept.beside(turn.peak(nothing)))
        return [
            (self._spine_pair(kept.beside(turn.peak(wave))), wave),
            (spine, turn.fit(jobs.room - kept.kept(spine)) or nothing),
        ]

    def _spine_pair(self, kept: Demand) -> Pair:
        """What the spine keeps: what fits, or, where it rests in host memory, what copies there leave worth
        keeping."""
        room = self.jobs.room
        if self.spine[0].offloads:
            copied = self.spine[0].copied()
            for price in self.spine[1:]:
                copied = copied.beside(price.copied())
            best = copied.best()
            if kept.peak(best) <= room:
                return best
        return kept.fit(room) or Pair(0, 0)

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
    return Lay(tuple(inner), lay.leaves, lay.width, lay.lane_degree, lay.wide, rows, nodes, len(states))
