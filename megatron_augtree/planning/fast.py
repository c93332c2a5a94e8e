"""The C++ core's prices behind the interface of `jobs.Jobs` and `planner.price`.

The core takes only int64 tables, and only where every integer that it may meet stays below 2**62
(`_bounded`); otherwise, and without the extension, pure Python runs. Both give the same integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from operator import mul
from types import ModuleType

import numpy as np

from megatron_augtree.planning import native
from megatron_augtree.planning.candidates import Choice
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.offers import Job, Offer, Options
from megatron_augtree.planning.plan import Event, Pass
from megatron_augtree.planning.recipe import Recipe
from megatron_augtree.planning.tree import ForestShape

_PRIMITIVES = ("gather_kv", "move_kv", "move_q", "ring", "local")
_PHASES = ("fused", "phased")


def make_jobs(
    shape: ForestShape,
    prices: Prices,
    pairs_per_row: int,
    room: int,
    options: Options,
    slot_weight: int = 0,
    *,
    world: int,
) -> Jobs:
    """`Jobs`, by the core where it is there and the integers are small enough for it.

    Args:
        shape, prices, pairs_per_row, room, options, slot_weight: as for `Jobs`.
        world: the widest block.
    """
    core = native.core()
    if core is not None and _bounded(shape, prices, pairs_per_row, room, world):
        return FastJobs(core, shape, prices, pairs_per_row, room, options, slot_weight)
    return Jobs(shape, prices, pairs_per_row, room, options, slot_weight)


class FastJobs(Jobs):
    """`Jobs` by the core."""

    def __init__(
        self,
        core: ModuleType,
        shape: ForestShape,
        prices: Prices,
        pairs_per_row: int,
        room: int,
        options: Options,
        slot_weight: int,
    ) -> None:
        super().__init__(shape, prices, pairs_per_row, room, options, slot_weight)
        numbers = [value for value in options if not isinstance(value, tuple)]
        numbers += [room, slot_weight, pairs_per_row]
        tables = [shape.parents, shape.rows, shape.scored, constants(prices), numbers]
        tables += [options.pieces, options.chunks, options.waves]
        self._core = core.Jobs(*(np.array(values, np.int64) for values in tables))  # see `_bounded`

    def estimate(self, nodes: Sequence[int], width: int) -> Offer | None:
        return _offer(self._core.estimate(nodes, width))

    def best(self, nodes: Sequence[int], width: int) -> Offer | None:
        found = self._core.best(nodes, width)
        self.leanest = _offer(self._core.leanest())
        return _offer(found)

    def settle(self, nodes: Sequence[int], choice: Choice) -> Offer:
        return _offer(self._core.settle(nodes, _choice_numbers(choice)))

    def with_copies(self, nodes: Sequence[int], width: int) -> list[Job] | None:
        if nodes[-1] - nodes[0] + 1 == len(nodes):
            found = self._core.tree_jobs(nodes[0], nodes[-1] + 1, width)
        else:
            found = self._core.with_copies(nodes, width)
        if found is None:
            return None
        return [Job(tuple(part), offset, _offer(numbers)) for part, offset, numbers in found]

    def table(
        self, trees: Sequence[Sequence[int]], widths: Sequence[int], enough: int, many: bool
    ) -> list[list[int]]:
        return self._core.table([(nodes[0], nodes[-1] + 1) for nodes in trees], list(widths), enough, many)

    def price(self, recipes: Sequence[Recipe], events: Sequence[Event], world: int) -> tuple[int, int]:
        """(ns, bytes above what a step needs whatever its rows) of some recipes: `planner.price`."""
        table, lists = _recipe_table(recipes)
        played = [(action == "backward", pass_id) for action, pass_id in events]
        return self._core.price(native.table(table), native.table(lists), native.table(played), world)

    def rank_times(self, passes: Sequence[Pass]) -> list[list[int]]:
        """[pass, rank of its block in turn] `timeline.Times`, one after the other.

        Args:
            passes: of one plan, on blocks of neighbours.
        """
        table = [
            [p.block[0], len(p.block), len(p.reads), _PRIMITIVES.index(p.primitive), p.pieces, p.node_ranks,
             p.keep, p.prefetch, p.keep_layers, p.keep_attention, p.offload]
            for p in passes
        ]  # fmt: skip
        held = [spans for p in passes for spans in p.placement]
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(held)), np.int64)
        reads = [read for p in passes for read in p.reads]
        counts = list(map(len, held))
        return self._core.rank_times(*map(native.table, (table, counts)), flat, native.table(reads)).tolist()


def _offer(numbers: Sequence[int] | None) -> Offer | None:
    if numbers is None:
        return None
    cost, time, slot, peak, *rest = numbers
    return Offer(cost, time, slot, peak, _choice(tuple(rest)))


@lru_cache(maxsize=4096)
def _choice(numbers: tuple[int, ...]) -> Choice:
    """A choice from its numbers; a batch has thousands of offers and a few dozen choices."""
    (degree, phase, chunks, waves, primitive, pieces, node_ranks, prefetch, lane,
     wide, keep, whole, attention, wave_whole, wave_attention, offload) = numbers  # fmt: skip
    return Choice(
        degree=degree, phase=_PHASES[phase], chunks=chunks, waves=waves, primitive=_PRIMITIVES[primitive],
        pieces=pieces, node_ranks=node_ranks, prefetch=bool(prefetch), lane_degree=lane, wide=wide,
        keep=bool(keep), keep_layers=whole, keep_attention=attention, wave_layers=wave_whole,
        wave_attention=wave_attention, offload=bool(offload),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _choice_numbers(c: Choice) -> tuple[int, ...]:
    return (
        c.degree, _PHASES.index(c.phase), c.chunks, c.waves, _PRIMITIVES.index(c.primitive), c.pieces,
        c.node_ranks, c.prefetch, c.lane_degree, c.wide, c.keep, c.keep_layers, c.keep_attention,
        c.wave_layers, c.wave_attention, c.offload,
    )  # fmt: skip


def _recipe_table(recipes: Sequence[Recipe]) -> tuple[list[list[int]], list[int]]:
    """(a row of numbers a recipe, all their nodes and reads one after the other)."""
    rows, lists = [], []
    for r in recipes:
        rows.append(
            [r.start, r.width, r.lane_degree, r.wide, r.lo, r.hi, _PRIMITIVES.index(r.primitive), r.pieces,
             r.node_ranks, r.keep, r.prefetch, r.keep_layers, r.keep_attention, r.offload, len(r.inner),
             len(r.leaves), len(r.reads)]
        )  # fmt: skip
        lists += [*r.inner, *r.leaves, *r.reads]
    return rows, lists


@lru_cache(maxsize=64)
def constants(prices: Prices) -> tuple[int, ...]:
    """What prices are made of, in the order of ``Constants`` in csrc/pricing.h."""
    m, c = prices.model, prices.cluster
    value = m.q_heads * m.v_dim
    sizes = [
        m.layers, m.stages, m.recomputed, m.attention_kept, m.logit_rows, m.saved_bytes, m.input_bytes,
        m.attended_bytes, m.kv_bytes, m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes,
        m.q_heads * m.k_dim * m.item_bytes, (value + m.q_heads) * m.accum_bytes,
        value * m.item_bytes + 2 * m.q_heads * m.accum_bytes, m.q_heads * m.k_dim * m.accum_bytes,
        m.vocab * m.accum_bytes, m.hidden * m.item_bytes, c.node_ranks, c.gemm_half_rows, c.tile_ns,
        c.tile_rows, c.query_rows, c.attention_backward_pct, c.gemm_backward_pct, c.stage_ns, c.layer_ns,
        c.pass_ns, c.message_ns, int(c.overlap), int(prices.host is not None),
    ]  # fmt: skip
    rates = [prices.linear, prices.vocabulary, prices.beside, prices.merging, prices.attention, prices.link]
    rates += [prices.nic, prices.host or prices.nic]
    return (*sizes, *chain.from_iterable(rates))


def _bounded(shape: ForestShape, prices: Prices, pairs_per_row: int, room: int, world: int) -> bool:
    """Whether every integer that pricing this forest may meet stays below `native.LIMIT`."""
    if max(*map(abs, constants(prices)), *shape.rows, abs(room), pairs_per_row) >= native.LIMIT:
        return False
    return _largest(shape, prices, pairs_per_row, world) < native.LIMIT


def _largest(shape: ForestShape, prices: Prices, pairs_per_row: int, world: int) -> int:
    """An upper bound of what pricing meets: all rows on one rank, sent to all others, in every pass."""
    m, c = prices.model, prices.cluster
    rows = shape.total_rows + len(shape.rows)
    pairs = sum(map(mul, shape.starts, shape.rows)) + sum(map(mul, shape.rows, shape.rows))
    costs = 8 * (pairs + pairs_per_row * rows)
    padded = (pairs + rows * c.tile_rows) * (c.query_rows + 1)
    tiles = (2 * len(shape.rows) + 4) * (world + 2)
    compute = prices.attention.ns(padded) + prices.linear.ns(rows + c.gemm_half_rows)
    compute += prices.beside.ns(rows) + tiles * c.tile_ns
    percent = max(c.attention_backward_pct, c.gemm_backward_pct, 100)
    wire = sum(constants(prices)[8:14]) * rows * (world + 1)
    moved = prices.link.ns(wire) + prices.nic.ns(wire) + (world + 2) * 2 * (c.message_ns + c.stage_ns)
    layer = compute * percent // 100 + moved + prices.merging.ns(2 * rows * (world + 2)) + 4 * c.layer_ns
    kept = (m.layers + 4) * rows * (2 * m.saved_bytes + m.attended_bytes) + m.layers * wire
    kept += 4 * (rows + m.logit_rows) * (m.vocab + m.hidden) * m.accum_bytes
    host = prices.host.ns(kept) if prices.host is not None else 0
    step = (-(-m.layers // m.stages) + 1) * 4 * layer + 4 * c.pass_ns + host
    step += 4 * prices.vocabulary.ns(rows + c.gemm_half_rows)
    sent = rows * m.input_bytes  # from stage to stage
    hops = prices.link.ns(sent) + prices.nic.ns(sent) + (len(shape.rows) + 2) * 2 * c.message_ns
    slots = step + (step + hops) * 16 * (m.stages - 1)
    return max(costs, padded * c.query_rows, kept, compute * percent, slots)
