"""Rounds: how a batch is arranged so that all ranks keep step (`lock_step.py`).

The pool is cut into equal blocks. Each takes as many *rounds* as any other: some trees in one job, which all
blocks play alike, fused or over equally many chunks and waves. Longest trees first fill all rounds of all
blocks evenly, and what is nearly as long then shares a round. Where trees are too few or too uneven, the
longest are played in parts, a prompt copy each. Arrangements that keep step by themselves (`pool.py`) count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.candidates import copies_of, split_inner
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.lock_step import in_step, out_of_step
from megatron_augtree.planning.offers import Job, Offer
from megatron_augtree.planning.plan import counted
from megatron_augtree.planning.pool import Arrangement, Placed, Pool
from megatron_augtree.planning.price import price_recipes
from megatron_augtree.planning.recipe import Decision

Nodes = tuple[int, ...]


class Shape(NamedTuple):
    """How the jobs of a round are played: `chunks` and `waves` of phased ones, 0 and 0 of fused ones."""

    chunks: int = 0
    waves: int = 0


class Rounds(NamedTuple):
    """Trees, or parts of them, dealt to blocks.

    Attributes:
        degree: ranks of a block.
        nodes: [round][block] nodes of a job.
        copied: whether some tree is played in parts.
    """

    degree: int
    nodes: list[list[Nodes]]
    copied: bool


class Played(NamedTuple):
    """A round in one shape, estimated.

    Attributes:
        cost, time, slot: of the slowest block; see `offers.Offer`.
        shape: of all its jobs.
        offers: [block].
    """

    cost: int
    time: int
    slot: int
    shape: Shape
    offers: list[Offer]


class Candidate(NamedTuple):
    """Rounds, [round] ways to play them, cheapest first, and what the cheapest add up to, ns."""

    estimate_ns: int
    rounds: Rounds
    played: list[list[Played]]


class LockStep:
    """Arrangements of a batch in lock-step.

    Args:
        pool: the batch; `pool.jobs` says what is tried.

    Attributes:
        leanest: of the jobs for which nothing fitted, the one that came nearest.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool, self.world, self.options = pool, pool.world, pool.jobs.options
        self.stages = pool.stages
        self.leanest: Offer | None = None
        self._by_shape: dict[Shape, Jobs] = {}
        self._ideals: dict[Nodes, int] = {}

    def arrangements(self) -> Iterator[Arrangement]:
        """Those that fit: the pool's, then equal rounds, the most promising first, while estimates, a few per
        cent off, are near the best.

        Raises:
            InfeasiblePlanError: there are too few trees and leaves for the blocks.
        """
        best = None
        for arrangement in self.pool.arrangements():
            made = self._exact(arrangement)
            if made is not None:
                best = made.time_ns if best is None else min(best, made.time_ns)
                yield made
        for candidate in sorted(self._candidates(best), key=lambda x: x.estimate_ns):
            if best is not None and 50 * candidate.estimate_ns > 51 * best:
                return
            made = self._counted(candidate)
            if made is not None:
                best = made.time_ns if best is None else min(best, made.time_ns)
                yield made

    # Trees on blocks.

    def _degrees(self) -> list[int]:
        """Ranks that hold one prompt copy: equal blocks fill the pool."""
        degree, copies = self.pool.degree, max(1, self.options.copies)
        if degree:
            return [degree // copies] if self.world % (degree // copies) == 0 else []
        return [d for d in range(1, self.pool.limit + 1) if self.world % d == 0]

    def _rounds(self, degree: int, count: int) -> Iterator[Rounds]:
        """Trees dealt to so many rounds; those longer than an even share of them in parts, too."""
        places = count * (self.world // degree)
        whole = self._parts(places, self._even(1))
        cut = self._parts(places, self._even(places))
        for parts in [whole, cut] if len(cut) > len(whole) else [whole]:
            if len(parts) >= places:
                yield Rounds(degree, self._dealt(parts, places, count), len(parts) > len(self.pool.trees))

    def _even(self, places: int) -> int:
        return sum(map(self._ideal, self.pool.trees)) // places

    def _parts(self, places: int, most: int) -> list[Nodes]:
        """Trees, or as many parts as there are places, none longer than `most` ns on a rank if it has leaves
        to share: parts repeat their prompt, so each is at most halved four times."""
        pool, copies = self.pool, self.options.copies
        if copies:
            return [part for tree in pool.trees for part in self._copies(tree, copies)]
        heap = [(-self._ideal(tree), number, 0, tree) for number, tree in enumerate(pool.trees)]
        heapify(heap)
        done: list[tuple[int, Nodes]] = []
        number = len(heap)
        while heap and (number < places or -heap[0][0] > most):
            _, own, depth, nodes = heappop(heap)
            halves = self._copies(nodes, 2) if depth < 4 or number < places else [nodes]
            if len(halves) == 1:
                done.append((own, nodes))
                continue
            heappush(heap, (-self._ideal(halves[0]), own, depth + 1, halves[0]))
            heappush(heap, (-self._ideal(halves[1]), number, depth + 1, halves[1]))
            number += 1
        return [nodes for _, nodes in sorted([*done, *((own, nodes) for _, own, _, nodes in heap)])]

    def _copies(self, nodes: Nodes, copies: int) -> list[Nodes]:
        return copies_of(self.pool.shape, nodes, copies, self.pool.jobs.unit)

    def _ideal(self, nodes: Nodes) -> int:
        """What nodes take on one rank without any fixed cost, ns; at least 1: no place may stay empty."""
        if nodes not in self._ideals:
            self._ideals[nodes] = max(1, self.pool.jobs.ideal(nodes, 1))
        return self._ideals[nodes]

    def _dealt(self, parts: Sequence[Nodes], places: int, count: int) -> list[list[Nodes]]:
        """[round][block] nodes: places of even work, those with most of it in the first round."""
        costs = [self._ideal(part) for part in parts]
        held: list[list[Nodes]] = [[] for _ in range(places)]
        loads = [0] * places
        for part, cost, place in zip(parts, costs, longest_first(costs, loads)):
            held[place].append(part)
            loads[place] += cost
        order = sorted(range(places), key=lambda place: (-loads[place], place))
        nodes = [tuple(sorted({n for part in held[place] for n in part})) for place in order]
        blocks = places // count
        return [nodes[first : first + blocks] for first in range(0, places, blocks)]

    # Ways to play them.

    def _candidates(self, best: int | None) -> Iterator[Candidate]:
        """Every degree, in more and more rounds while that helps, unless a bound says that it is not near the
        best."""
        seated = best is not None
        leaves = sum(not below for below in self.pool.shape.children)
        for degree in self._degrees():
            before: int | None = None
            blocks = self.world // degree
            counts = {1 << i for i in range((leaves // blocks).bit_length())}
            for count in sorted(counts | {len(self.pool.trees) // blocks} - {0}):
                least = None
                for rounds in self._rounds(degree, count):
                    seated = True
                    if best is not None and 50 * self._bound(rounds) > 51 * best:
                        continue
                    for candidate in self._estimated(rounds):
                        yield candidate
                        least = min(least or candidate.estimate_ns, candidate.estimate_ns)
                if least is not None:
                    best = least if best is None else min(best, least)
                    if before is not None and least >= before:
                        break
                    before = least
        if not seated:
            limit = self.pool.degree or self.pool.limit
            raise out_of_step(
                f"blocks of {'' if self.pool.degree else 'at most '}{counted(limit, 'rank')} in a pool of "
                f"{self.world}, {counted(len(self.pool.trees), 'tree')} with "
                f"{counted(leaves, 'leaf', 'leaves')}"
            )

    def _bound(self, rounds: Rounds) -> int:
        """No way to play some rounds takes less, ns."""
        ideals = [max(map(self._ideal, nodes)) // rounds.degree for nodes in rounds.nodes]
        return sum(ideals) + len(ideals) * self.pool.launch_ns + (self.stages - 1) * max(ideals)

    def _estimated(self, rounds: Rounds) -> Iterator[Candidate]:
        """Every round as is cheapest for its slowest block, if it fits in some shape; under a pipeline, where
        the longest pass of all counts, also all rounds in one shape."""
        played = [self._ways(nodes, rounds.degree) for nodes in rounds.nodes]
        if not all(played):
            return
        orders = [played]
        shapes = {way.shape for way in played[0]} if self.stages > 1 else ()
        for shape in sorted(shapes):
            if all(any(way.shape == shape for way in ways) for ways in played):
                orders.append([sorted(ways, key=lambda way: way.shape != shape) for ways in played])
        for order in orders:
            first = [ways[0] for ways in order]
            time = sum(x.time for x in first) + (self.stages - 1) * max(x.slot for x in first)
            yield Candidate(time, rounds, order)

    def _ways(self, nodes: Sequence[Nodes], degree: int) -> list[Played]:
        """A round's ways, cheapest first: fused, and phased where memory or a pipeline asks for it."""
        fused = self._in_shape(nodes, degree, Shape()) if self.options.fused else None
        found = [fused]
        if self._asks_for_waves(fused):
            found += [self._in_shape(nodes, degree, shape) for shape in self._shapes(nodes, degree)]
        return sorted((x for x in found if x is not None), key=lambda x: x.cost)

    def _in_shape(self, nodes: Sequence[Nodes], degree: int, shape: Shape) -> Played | None:
        jobs, offers = self._jobs(shape), []
        for mine in nodes:
            offer = jobs.estimate(mine, degree)
            if offer is None:
                self._note_leanest(jobs, mine, degree)
                return None
            offers.append(offer)
        return Played(*(max(column) for column in list(zip(*offers))[:3]), shape, offers)

    def _asks_for_waves(self, fused: Played | None) -> bool:
        if self.options.phased != 1:
            return self.options.phased == 2
        if fused is None or self.stages > 1:
            return True
        layers = self.pool.jobs.prices.model.layers
        return self.options.whole == -1 and any(0 <= x.choice.keep_layers < layers for x in fused.offers)

    def _shapes(self, nodes: Sequence[Nodes], degree: int) -> list[Shape]:
        """Chunks and waves that the longest job asks for, and the usual few, as many as every job can be cut
        into."""
        shape = self.pool.shape
        jobs = [split_inner(shape, mine) for mine in nodes]
        rows = min(sum(shape.rows[n] for n in inner) for inner, _ in jobs)
        leaves = min(len(leaves) for _, leaves in jobs)
        if not rows:
            return []
        found = [Shape(self.options.chunks[0], waves) for waves in self.options.waves[:2]]
        offer = self._jobs(None).estimate(max(nodes, key=self._ideal), degree)
        if offer is not None and offer.choice.phase == "phased":
            found.insert(0, Shape(offer.choice.chunks, offer.choice.waves))
        able = [Shape(min(x.chunks, rows), min(x.waves, leaves)) for x in found]
        return list(dict.fromkeys(x for x in able if self._may(x)))

    def _may(self, x: Shape) -> bool:
        """Whether a forced number of chunks or waves is kept."""
        return all(
            len(allowed) > 1 or number == allowed[0]
            for number, allowed in ((x.chunks, self.options.chunks), (x.waves, self.options.waves))
        )

    def _jobs(self, shape: Shape | None) -> Jobs:
        """Prices of jobs that are played in a shape; None: phased in any."""
        if shape not in self._by_shape:
            base, tried = self.pool.jobs, {"fused": False, "phased": 2}
            if shape == Shape():
                tried = {"fused": True, "phased": 0}
            elif shape is not None:
                tried |= {"chunks": (shape.chunks,), "waves": (shape.waves,)}
            options = self.options._replace(copies=1, **tried)
            rest = base.room, options, base.slot_weight
            self._by_shape[shape] = make_jobs(base.shape, base.prices, base.unit, *rest, world=self.world)
        return self._by_shape[shape]

    def _note_leanest(self, jobs: Jobs, nodes: Nodes, degree: int) -> None:
        """Remember what a job that does not fit needs."""
        jobs.best(nodes, degree)
        lean = jobs.leanest
        if lean is not None and (self.leanest is None or lean.peak < self.leanest.peak):
            self.leanest = lean

    # Counted.

    def _counted(self, x: Candidate) -> Arrangement | None:
        """A candidate counted rank by rank, each round in the first shape that then fits."""
        placed: list[Placed] = []
        for nodes, ways in zip(x.rounds.nodes, x.played):
            settled = next(filter(None, (self._settled(nodes, way, x.rounds.degree) for way in ways)), None)
            if settled is None:
                return None
            placed += settled
        name = f"lock-step, degree {x.rounds.degree}, {counted(len(x.rounds.nodes), 'round')}"
        return self._exact(Arrangement(name + (", copies" if x.rounds.copied else ""), tuple(placed), 0, 0))

    def _settled(self, nodes: Sequence[Nodes], way: Played, degree: int) -> list[Placed] | None:
        jobs, placed = self._jobs(way.shape), []
        for block, (mine, offer) in enumerate(zip(nodes, way.offers)):
            settled = jobs.settle(mine, offer.choice)
            if settled.peak > jobs.room:
                settled = jobs.best(mine, degree)
            if settled is None:
                self._note_leanest(jobs, mine, degree)
                return None
            placed.append(Placed(Job(mine, 0, settled), block * degree))
        return placed

    def _exact(self, x: Arrangement) -> Arrangement | None:
        """An arrangement priced in lock-step on its own ranks; None where it does not fit or keep step."""
        jobs = self.pool.jobs
        recipes, events = x.recipes(jobs.shape, jobs.unit)
        time_ns, peak = price_recipes(jobs, recipes, events, self.world)
        peak -= jobs.prices.cluster.base_bytes
        decision = Decision("augtree", recipes, events, x.name, time_ns, peak)
        found = in_step(decision, jobs.shape, jobs.prices, self.world) if peak <= jobs.room else None
        return None if found is None else replace(x, time_ns=found.time_ns, peak_bytes=peak)
