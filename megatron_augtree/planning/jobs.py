"""The cheapest way to play a job: some nodes of the forest on a block of some ranks.

The search (`choices.py`) prices choices by the block's heaviest ranks in closed forms (`typical.py`); what it
settles on is counted rank by rank (`loads.py`), as `price.price` counts the finished plan. The recompute pair
of a pass is a closed form of the bytes that are left (`demand.Demand.fit`).

`csrc/jobs.cpp` is the twin of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from megatron_augtree.planning.candidates import Choice, copies_of, split_inner
from megatron_augtree.planning.choices import ChoiceSearch
from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.demand import Demand, Pair
from megatron_augtree.planning.lanes import node_costs
from megatron_augtree.planning.offers import NEVER, SKIPPED, Job, Offer, Options, cost_of
from megatron_augtree.planning.priced import Priced
from megatron_augtree.planning.tree import ForestShape


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
        return ChoiceSearch(self, nodes, width).run().best

    def best(self, nodes: Sequence[int], width: int) -> Offer | None:
        """Counted rank by rank: of the `TRIES` best estimates and the leanest, the cheapest that fits."""
        best = None
        for choice in ChoiceSearch(self, nodes, width).run().worth_settling():
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

    def offer(self, passes: Sequence[tuple[PassPrice, Pair]], peak: int, choice: Choice) -> Offer:
        """A choice with these passes."""
        stages, times = self.prices.model.stages, [sum(price.time(pair)) for price, pair in passes]
        time, slot = sum(times), max(times if stages == 1 else [price.slot(pair) for price, pair in passes])
        return Offer(time + slot * (stages - 1) * self.slot_weight // 16, time, slot, peak, choice)

    def ideal(self, nodes: Sequence[int], ranks: int) -> int:
        """Forward and backward of some nodes spread evenly over some ranks, without any fixed cost, ns."""
        c, m = self.prices.cluster, self.prices.model
        rows, pairs = self.totals(nodes)
        linear = (self.prices.linear.ns(rows) + self.prices.beside.ns(rows)) * (100 + c.gemm_backward_pct)
        attention = self.prices.attention.ns(pairs) * (100 + c.attention_backward_pct)
        return m.layers * (linear // 100 + attention // 100) // (ranks * m.stages)

    def totals(self, nodes: Sequence[int]) -> tuple[int, int]:
        """(rows, pairs) of some nodes."""
        rows, pairs = self._sums
        if nodes and nodes[-1] - nodes[0] + 1 == len(nodes):  # a tree
            first, end = nodes[0], nodes[-1] + 1
            return rows[end] - rows[first], pairs[end] - pairs[first]
        return sum(rows[n + 1] - rows[n] for n in nodes), sum(pairs[n + 1] - pairs[n] for n in nodes)

    @cached_property
    def _sums(self) -> tuple[list[int], list[int]]:
        """[node, and one more] rows and pairs of all nodes before it."""
        shape = self.shape
        areas = node_costs(shape, range(len(shape.rows)), 0)
        return [0, *accumulate(shape.rows)], [0, *accumulate(areas)]

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
        """The cheapest way to play a tree on some ranks, estimated: a job, or parts with a prompt copy each.

        More ranks than a block may have are a group of blocks, a part on each.
        """
        alone = self.options.copies < 2 and not 0 < self.options.limit < width
        whole = self.estimate(nodes, width) if alone else None
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

    def table(
        self, trees: Sequence[Sequence[int]], widths: Sequence[int], enough: int, many: bool
    ) -> list[list[int]]:
        """[tree] estimated costs on blocks of the widths in turn, -1 where nothing fits.

        Args:
            trees: [tree] its nodes, a whole subtree.
            widths: ascending.
            enough: a row ends where a tree costs less than so many nanoseconds: wider blocks only cost work.
            many: of so many trees none needs a block that takes a tenth more work than a wider one; that and
                narrower ones are `SKIPPED`.
        """
        rows = []
        for nodes in trees:
            first, least = 0, NEVER
            while many and first + 1 < len(widths) and self.floor(nodes, widths[first + 1]) >= enough:
                first += 1
            costs = [SKIPPED] * first
            for width in widths[first:]:
                costs.append(self._cost(nodes, width))
                if costs[-1] >= 0:
                    least = min(least, costs[-1] * width)
                if 0 <= costs[-1] < enough:
                    break
            for at in reversed(range(first)):
                costs[at] = self._cost(nodes, widths[at])
                work = costs[at] * widths[at]
                if least < NEVER and (work < 0 or 10 * work > 11 * least):
                    break
                least = min(least, work) if work >= 0 else least
            rows.append(costs)
        return rows

    def _cost(self, nodes: Sequence[int], width: int) -> int:
        jobs = self.with_copies(nodes, width)
        return -1 if jobs is None else cost_of(jobs)

    def _copies(self, nodes: Sequence[int], width: int) -> Iterator[int]:
        """Numbers of copies that ranks, limit and leaves allow, or what is forced."""
        inner, leaves = split_inner(self.shape, nodes)
        forced, limit = self.options.copies, self.options.limit or width
        most = min(width, len(leaves)) if inner else 0
        for copies in [forced] * (forced > 1) if forced else range(2, most + 1):
            if width % copies == 0 and self.options.least <= width // copies <= limit:
                yield copies
