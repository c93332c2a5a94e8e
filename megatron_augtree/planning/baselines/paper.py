"""The paper's planner (arXiv 2609.33133, planner section) at a fixed degree d, tree by tree.

A configuration is (primitive, b rounds, s lanes):

- b = 0: plain ring context parallelism of every response with its own prompt.
- ``move_kv``: the d ranks form s lanes of d/s ranks. Every lane prefills the whole prompt, a copy each, and
  replays its responses in b rounds; keys and values travel inside the lane only.
- ``move_q``: one prefill over all d ranks, whose keys and values stay where they are; in each of b rounds
  the responses, on s lanes, send their queries to them.

The score is the paper's, per layer: work alpha W, traffic beta C with gamma across nodes, and latency L, with
the longest response standing for all. It chooses among configurations that fit; rounds cost latency only,
so they come from memory. Where responses go is decided by their real lengths: subset dynamic programming for
few of them, longest first for many, with the sum over rounds of the longest lane to be small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_augtree.planning.assign import EXACT_ITEMS, exact, longest_first
from megatron_augtree.planning.baselines.common import Lay, Maker, Recipes, Step
from megatron_augtree.planning.candidates import split_inner
from megatron_augtree.planning.lanes import node_costs
from megatron_augtree.planning.tree import ForestShape

NS = 10**9


@dataclass(frozen=True)
class Configuration:
    """How a tree is computed; `rounds` 0 is the plain ring."""

    primitive: str = "ring"
    rounds: int = 0
    lanes: int = 1

    def __str__(self) -> str:
        return f"{self.primitive}, b = {self.rounds}, s = {self.lanes}"


def assign_grid(weights: Sequence[int], rounds: int, lanes: int) -> list[tuple[int, int]]:
    """Responses to (round, lane), so that the sum over rounds of the longest lane is small.

    Guarantee: for up to `EXACT_ITEMS` responses the smallest possible sum, and among those assignments the
    lightest heaviest round (the memory of a round is what rounds are for). Otherwise longest first over all
    cells.

    Args:
        weights: [response] work, positive.
        rounds, lanes: the grid; at least as many responses as rounds.
    """
    few = len(weights) <= EXACT_ITEMS
    if few and min(rounds, lanes) > 1:
        return list(_exact_grid(tuple(weights), rounds, lanes))
    # One round is all about its longest lane; one lane has one sum, so it is all about its heaviest round.
    assign = exact if few else longest_first
    return [divmod(cell, lanes) for cell in assign(weights, [0] * (rounds * lanes))]


@lru_cache(maxsize=1024)
def _exact_grid(weights: tuple[int, ...], rounds: int, lanes: int) -> tuple[tuple[int, int], ...]:
    """Subset dynamic programming: first lanes of a round, then rounds."""
    full = (1 << len(weights)) - 1
    sums = [0] * (full + 1)
    for mask in range(1, full + 1):
        low = mask & -mask
        sums[mask] = sums[mask ^ low] + weights[low.bit_length() - 1]
    longest, cuts = sums, []
    for _ in range(min(lanes, len(weights)) - 1):
        longest, cut = _one_more(longest, lambda part, rest: max(part, rest), sums)
        cuts.append(cut)
    best, picks = [(value, value) for value in longest], []
    for _ in range(rounds - 1):
        best, pick = _one_more(
            best, lambda part, rest: (part + rest[0], max(part, rest[1])), longest, leave=True
        )
        picks.append(pick)
    where, left = [(0, 0)] * len(weights), full
    for round_ in range(rounds):
        chosen = picks[rounds - 2 - round_][left] if round_ < rounds - 1 else left
        left ^= chosen
        for depth in range(len(cuts), -1, -1):
            lane = cuts[depth - 1][chosen] if depth else chosen
            chosen ^= lane
            for item in range(len(weights)):
                if lane >> item & 1:
                    where[item] = (round_, depth)
    return tuple(where)


def _one_more(values: list, join, parts: list[int], *, leave: bool = False) -> tuple[list, list[int]]:
    """Best values when a set is cut into one more part, and that part: the one with the set's lowest item.

    Args:
        values: [set] best value with the parts so far.
        join: (value of the new part, value of the rest) -> value.
        parts: [set] value of a single part.
        leave: something must be left for the other parts, where a set has more than one item.
    """
    found, cut = list(values), [0] * len(values)
    for mask in range(1, len(values)):
        low = mask & -mask
        rest = mask ^ low
        sub, best, chosen = rest, None, 0
        while True:
            part = low | (rest ^ sub)
            if not (leave and part == mask and rest):
                value = join(parts[part], values[mask ^ part])
                if best is None or value < best:
                    best, chosen = value, part
            if not sub:
                break
            sub = (sub - 1) & rest
        found[mask], cut[mask] = best, chosen
    return found, cut


def paper(step: Step) -> Iterator[Recipes]:
    """By the score first; then each tree's cheapest; then every configuration for all trees that have it."""
    trees = [_Tree(step, nodes) for nodes in step.trees]
    yield _dealt(step, trees, [tree.by_score() for tree in trees], "by score")
    known = [tree.feasible() for tree in trees]
    if step.costs.price is not None:
        chosen = [min(found, key=tree.time) for tree, found in zip(trees, known)]
        yield _dealt(step, trees, chosen, "by price")
    for configuration in dict.fromkeys(c for found in known for c in found):
        usable = [configuration if configuration in found else found[0] for found in known]
        yield _dealt(step, trees, usable, str(configuration))


def _dealt(step: Step, trees: Sequence[_Tree], chosen: Sequence[Configuration], why: str) -> Recipes:
    """Trees longest first over replicas."""
    times = [tree.time(c)[1] for tree, c in zip(trees, chosen)] if step.replicas > 1 else [0] * len(trees)
    where, maker = longest_first(times, [0] * step.replicas), Maker(step.shape)
    for number in step.by_group():
        trees[number].add(maker, where[number] * step.degree, chosen[number])
    return maker.made(f"degree {step.degree}, {why}")


class _Tree:
    """One tree: its configurations, their scores, and their jobs."""

    def __init__(self, step: Step, nodes: Sequence[int]) -> None:
        self.step, self.nodes, self.shape = step, nodes, step.shape
        self.inner, self.leaves = split_inner(step.shape, nodes)
        self.weights = node_costs(self.shape, self.leaves, step.costs.pairs_per_row)
        self._times: dict[Configuration, tuple[bool, int]] = {}
        self._cells: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def configurations(self) -> Iterator[Configuration]:
        """All of them whose lanes and rounds are not empty."""
        degree, units = self.step.degree, len(self.leaves)
        yield Configuration()
        if not self.inner:
            return
        lanes = [s for s in range(1, degree + 1) if degree % s == 0 and s <= units]
        for primitive in ("move_kv", "move_q") if degree > 1 else ("move_kv",):
            for lane in lanes:
                for rounds in (1 << i for i in range((units // lane).bit_length())):
                    yield Configuration(primitive, rounds, lane)

    def feasible(self) -> list[Configuration]:
        """Those that fit in memory; all where none does."""
        found = list(self.configurations())
        return [c for c in found if self._fits(c)] or found

    def by_score(self) -> Configuration:
        """Of those the best by score, found without a price of the others; ties go to the earlier."""
        score = _Score(self.step, self.shape, self.inner, self.leaves)
        found = sorted(self.configurations(), key=score.of)
        return next(filter(self._fits, found), found[0])

    def _fits(self, configuration: Configuration) -> bool:
        costs = self.step.costs
        return costs.price is None or not costs.budget_bytes or not self.time(configuration)[0]

    def time(self, configuration: Configuration) -> tuple[bool, int]:
        """(does not fit, time) on a block of its own."""
        if configuration not in self._times:
            maker = Maker(self.shape)
            self.add(maker, 0, configuration)
            self._times[configuration] = self.step.costs.of(self.shape, maker.made(""))
        return self._times[configuration]

    def add(self, maker: Maker, start: int, configuration: Configuration) -> None:
        """The jobs of a configuration."""
        degree = self.step.degree
        if not configuration.rounds:
            for leaf in self.leaves:
                maker.fused(self.shape.chain(leaf), start, degree, "ring")
            return
        grid = configuration.rounds, configuration.lanes
        if grid not in self._cells:
            self._cells[grid] = assign_grid(self.weights, *grid)
        cells = self._cells[grid]
        width = degree // configuration.lanes
        by_lane: list[list[list[int]]] = [
            [[] for _ in range(configuration.rounds)] for _ in range(configuration.lanes)
        ]
        for leaf, (round_, lane) in zip(self.leaves, cells):
            by_lane[lane][round_].append(leaf)
        if configuration.primitive == "move_q":
            waves = [sorted(sum(leaves, [])) for leaves in zip(*by_lane)]
            rounds = list(filter(None, waves))
            maker.phased(self.nodes, start, degree, "move_q", Lay(width), spine="move_kv", waves=rounds)
            return
        for lane, rounds in enumerate(by_lane):
            mine = sorted({n for leaves in rounds for leaf in leaves for n in self.shape.chain(leaf)})
            if mine:
                maker.phased(mine, start + lane * width, width, "move_kv", waves=list(filter(None, rounds)))


class _Score:
    """The paper's score of a configuration, in ns of one layer's forward, largest rank."""

    def __init__(self, step: Step, shape: ForestShape, inner: Sequence[int], leaves: Sequence[int]) -> None:
        self.step, self.units = step, len(leaves)
        starts, rows, unit = shape.starts, shape.rows, step.costs.pairs_per_row
        self.prompt = max(starts[n] for n in leaves)
        self.response = max(rows[n] for n in leaves)
        self.spine_rows = sum(rows[n] for n in inner)
        self.spine_work = sum(node_costs(shape, inner, unit))
        last = self.prompt + self.response
        pairs = (last * (last + 1) - self.prompt * (self.prompt + 1)) // 2
        self.unit_work = pairs + unit * self.response
        self.ring_work = last * (last + 1) // 2 + unit * last

    def of(self, c: Configuration) -> int:
        degree, shares = self.step.degree, -(-self.units // c.lanes)
        width = degree // c.lanes
        if not c.rounds:
            moved = self._kv((self.prompt + self.response) * (degree - 1) // degree, degree)
            return self.units * (self._alpha(self.ring_work, degree) + moved + self._latency(degree - 1))
        if c.primitive == "move_kv":
            prefill = self._alpha(self.spine_work, width) + self._latency(width - 1)
            prefill += self._kv(self.spine_rows * (width - 1) // width, width)
            rows = c.rounds * self.prompt + shares * self.response
            replay = self._alpha(shares * self.unit_work, width) + self._latency(c.rounds * (width - 1))
            return prefill + replay + self._kv(rows * (width - 1) // width, width)
        prefill = self._alpha(self.spine_work, degree) + self._latency(degree - 1)
        prefill += self._kv(self.spine_rows * (degree - 1) // degree, degree)
        rows = self.units * self.response * (degree - 1) // degree
        inside = shares * self.response * (width - 1) // width
        replay = self._alpha(shares * self.unit_work, width) + self._latency(2 * c.rounds)
        return prefill + replay + self._q(rows, degree) + self._kv(inside, width)

    def _alpha(self, pairs: int, ranks: int) -> int:
        model, cluster = self.step.costs.model, self.step.costs.cluster
        if model is None or cluster is None:
            return pairs // ranks
        return pairs * model.pair_flops * NS // (cluster.attention_flops * ranks)

    def _beta(self, size: int, ranks: int) -> int:
        """Traffic of a rank; gamma: the path between nodes where its lane spans them."""
        cluster = self.step.costs.cluster
        return size * NS // (cluster.link_bytes_s if ranks <= cluster.node_ranks else cluster.nic_bytes_s)

    def _kv(self, rows: int, ranks: int) -> int:
        model, cluster = self.step.costs.model, self.step.costs.cluster
        return 0 if model is None or cluster is None else self._beta(rows * model.kv_bytes, ranks)

    def _q(self, rows: int, ranks: int) -> int:
        """Queries there, partial results and their reduction back."""
        model, cluster = self.step.costs.model, self.step.costs.cluster
        if model is None or cluster is None:
            return 0
        query = model.q_heads * model.k_dim * model.item_bytes
        back = model.q_heads * (model.v_dim + 1) * model.accum_bytes
        return self._beta(rows * (query + back), ranks) + rows * back * NS // cluster.row_bytes_s

    def _latency(self, stages: int) -> int:
        cluster = self.step.costs.cluster
        return 0 if cluster is None else stages * (cluster.stage_ns + cluster.message_ns)
