"""One pass on its block, played in time: who computes when, what travels when, who waits for whom.

`cost.py` prices a pass in closed forms; here its compiled program is played. Every rank has a compute side,
and a sending and a receiving side of its link; ranks of a node send and receive over the node's network
cards. The constants are those of `cost.Prices`; the structure is the executor's:

    forward of a layer   QKV | stage 0: post, tiles, land | stage 1 .. | output projection, MLP
    backward of a layer  (the layer again) | MLP, output projection | stages, reversed | QKV

- A stage's messages leave when both ends have come to the stage, one after the other on each side that they
  use, in the order of the distance between their ends. A rank leaves a stage when its tiles are computed and
  its messages, in and out, are done. So ranks wait for messages, never for a barrier; where transfers do not
  overlap, tiles come after them.
- With prefetch, what a wave fetches from prompt state leaves behind the last stage with transfers of the
  layer before, and has landed before the stage that first uses it.
- At the end of a forward the scored rows' values are shared in the block: no rank is done before all ranks
  that have some.

Layers are equal. A layer maps the times at which ranks and links are free to later ones, and adding a number
to all times that depend on each other adds it to what they become; so once a layer moves all of these by one
number, every further layer does, and those that are left are added at once, exactly. Mostly that is the first
or second one; where a rank with less to do drifts until it waits for others, it may take all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_augtree.planning.compiler import state_buffer
from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.plan import Pass, Plan
from megatron_augtree.planning.schedule import Payload, Program, Stage, Transfer, field_bytes, reverse
from megatron_augtree.planning.simulate_clock import Attention, Clock, Messages, Step, Wiring


class Played(NamedTuple):
    """A forward or a backward on its block, nanoseconds since the block began: [block rank] each.

    Attributes:
        end: when the rank is done.
        busy: of that, what it computes.
        exposed: what it waits for its own messages that both ends have posted, or for copies to the host.
    """

    end: np.ndarray
    busy: np.ndarray
    exposed: np.ndarray


class PassTimes(NamedTuple):
    """A pass on a stage of the pipeline; the last one has the vocabulary.

    Attributes:
        forward, backward: on a stage that is not the last.
        last_forward, last_backward: on the last one.
        kept, work: [block rank] bytes, see `cost.PassPrice`; of all layers.
        rows: [block rank] rows.
    """

    forward: Played
    backward: Played
    last_forward: Played
    last_backward: Played
    kept: list[int]
    work: list[int]
    rows: list[int]

    def of(self, backward: bool, last: bool) -> Played:
        """One of the four."""
        return self[2 * last + backward]


class PassSimulator:
    """Plays the passes of a plan, each on its block alone; passes that do the same once.

    Args:
        plan: the plan.
        prices: model and machine.
        cards: network cards of a node, see `Wiring.of`.
    """

    def __init__(self, plan: Plan, prices: Prices, cards: int = 0) -> None:
        self.plan, self.prices, self.cards = plan, prices, cards
        fields = field_bytes(prices.model)
        self.sizes = {payload: sum(fields[name] for name in payload.fields) for payload in Payload}
        self._known: dict[tuple, PassTimes] = {}

    def times(self, p: Pass) -> PassTimes:
        """How long a pass takes on its ranks, and what it keeps."""
        key = self._signature(p)
        if key not in self._known:
            self._known[key] = _OnePass(self, p).times()
        return self._known[key]

    def _signature(self, p: Pass) -> tuple:
        """Equal for passes that do the same: nodes are numbered anew, with what is above them."""
        shape = self.plan.shape
        placed = [p.placement, *(self.plan.passes[read].placement for read in p.reads)]
        used = sorted({s.node for held in placed for spans in held for s in spans})
        place = {node: i for i, node in enumerate(used)}
        nodes = tuple(
            (tuple(sorted(place[a] for a in shape.ancestors[n] if a in place)), shape.rows[n],
             shape.scored[n], shape.starts[n], bool(shape.children[n]))
            for n in used
        )  # fmt: skip
        held = tuple(
            tuple(tuple((place[s.node], s.lo, s.hi) for s in spans) for spans in rows) for rows in placed
        )
        wiring = Wiring.of(p.block, self.prices, self.cards)
        first, size = p.block[0], p.node_ranks
        groups = tuple(r // size - first // size for r in p.block) if size else ()
        how = (p.primitive, p.pieces, p.keep, p.prefetch, p.keep_layers, p.keep_attention, p.offload)
        return how, p.id in self.plan.provides, wiring.node, wiring.card, groups, nodes, held


class _OnePass:
    """One pass, ready to be played."""

    def __init__(self, simulator: PassSimulator, p: Pass) -> None:
        plan, prices = simulator.plan, simulator.prices
        self.prices, self.sizes, self.world = prices, simulator.sizes, len(p.block)
        self.wiring = Wiring.of(p.block, prices, simulator.cards)
        states = [plan.passes[read].placement for read in p.reads]
        loads = PassLoads(plan.shape, p, states, prices.cluster.node_ranks)
        self.rows = [load.rows for load in loads.ranks]
        self.scored = np.array([load.scored > 0 for load in loads.ranks])
        self.price = PassPrice(prices, loads, provides=p.id in plan.provides)
        self.pair = prices.pair(p)
        program, back = plan.program(p.id), prices.cluster.gemm_backward_pct
        # Nothing travels ahead where nothing travels beside.
        prefetch = p.prefetch and prices.cluster.overlap
        self.forward = self._attention(program, prefetch=prefetch)
        self.again = self._attention(program, prefetch=False) if prefetch else self.forward
        self.backward = self._attention(reverse(program, keep=p.keep), prefetch=False)
        self.before, self.behind = self._linear(100, prices.cluster.layer_ns)
        self.before_back, self.behind_back = self._linear(back, 2 * prices.cluster.layer_ns)

    def times(self) -> PassTimes:
        """All of it."""
        lines, price, pair = self.price.lines, self.price, self.pair
        vocabulary = np.array([(x.vocabulary, x.vocabulary_back) for x in lines], np.int64).T
        last = [self._forward(vocabulary[0]), self._backward(vocabulary[1])]
        others = last
        if self.prices.model.stages > 1 and vocabulary.any():
            others = [self._forward(0 * vocabulary[0]), self._backward(0 * vocabulary[1])]
        return PassTimes(*others, *last, price.kept(pair), price.work(pair), self.rows)

    # The program in nanoseconds.

    def _linear(self, percent: int, fixed: int) -> tuple[np.ndarray, np.ndarray]:
        """[rank] ns of a layer's linear layers: QKV, and the others with all fixed costs."""
        m = self.prices.model
        share = 2 * m.hidden * (m.q_heads * m.k_dim + m.kv_heads * (m.k_dim + m.v_dim))
        both = [self.prices.rows_ns(rows) * percent // 100 for rows in self.rows]
        before = [ns * share // m.linear_flops for ns in both]
        behind = [ns - part + fixed for ns, part in zip(both, before)]
        return np.array(before, np.int64), np.array(behind, np.int64)

    def _attention(self, program: Program, *, prefetch: bool) -> Attention:
        if not prefetch:
            return Attention(tuple(self._step(program, stage, stage.transfers) for stage in program.stages))
        ahead = [t for stage in program.stages for t in stage.transfers if _from_state(t)]
        rest = [[t for t in stage.transfers if not _from_state(t)] for stage in program.stages]
        sinks = {(t.dst, t.sink.buffer) for t in ahead}
        uses = [i for i, stage in enumerate(program.stages) if _reads(stage, sinks)]
        return Attention(
            tuple(self._step(program, stage, moves) for stage, moves in zip(program.stages, rest)),
            Messages(ahead, self.wiring, self.sizes) if ahead else None,
            max((i for i, moves in enumerate(rest) if moves), default=0),
            min(uses, default=0),
        )

    def _step(self, program: Program, stage: Stage, transfers: Sequence[Transfer]) -> Step:
        c, prices = self.prices.cluster, self.prices
        percent = c.attention_backward_pct if program.backward else 100
        tiles = []
        for mine in stage.tiles:
            pairs = rows = 0
            for tile in mine:
                n, area = tile.q.count, tile.area
                masked = n * min(n, c.tile_rows) // 2 if tile.causal else _padding(area, n, c.query_rows)
                pairs, rows = pairs + area + masked, rows + n
            spent = (prices.attention.ns(pairs) + len(mine) * c.tile_ns) * percent // 100
            tiles.append(spent + prices.merging.ns(rows))
        came = [0] * self.world
        for t in transfers:
            came[t.dst] += t.source.count if t.payload is Payload.PARTIAL else 0
        after = np.array([prices.merging.ns(rows) for rows in came], np.int64)
        messages = Messages(transfers, self.wiring, self.sizes) if transfers else None
        if messages is not None:
            after += c.stage_ns * messages.takes_part
        return Step(messages, np.array(tiles, np.int64), after)

    # In time.

    def _forward(self, vocabulary: np.ndarray) -> Played:
        """A stage's share of the layers."""
        model, clock = self.prices.model, Clock(self.world, self.prices.cluster.overlap)
        clock.compute(np.full(self.world, self.prices.cluster.pass_ns, np.int64))
        if self.forward.ahead is not None:
            clock.send_ahead(self.forward.ahead, clock.now)
        layers = -(-model.layers // model.stages)
        clock.repeat(layers, lambda: self._forward_of(clock, self.forward), self.forward)
        clock.compute(vocabulary)
        clock.meet(self.scored)
        return self._played(clock)

    def _backward(self, vocabulary: np.ndarray) -> Played:
        """The same, in reverse; of the layers those that keep everything come first."""
        model, pair = self.prices.model, self.pair
        # Cut as `PassPrice.time` cuts them: the slowest stage's.
        layers, again = -(-model.layers // model.stages), -(-(model.layers - pair.whole) // model.stages)
        attended = min(pair.attention // model.stages, again)
        clock = Clock(self.world, self.prices.cluster.overlap)
        clock.compute(vocabulary + self.prices.cluster.pass_ns)

        def whole() -> None:
            clock.compute(self.behind_back)
            clock.attend(self.backward)
            clock.compute(self.before_back)

        def repeated() -> None:
            self._forward_of(clock, self.again)
            whole()

        def rest_repeated() -> None:
            clock.compute(self.before + self.behind)
            whole()

        clock.repeat(layers - again, whole, self.backward)
        clock.repeat(again - attended, repeated, self.again, self.backward)
        clock.repeat(attended, rest_repeated, self.backward)
        return self._played(clock)

    def _forward_of(self, clock: Clock, attention: Attention) -> None:
        clock.compute(self.before)
        clock.attend(attention)
        clock.compute(self.behind)

    def _played(self, clock: Clock) -> Played:
        if self.price.offloads:
            host, pair = self.prices.host, self.pair
            rests = [x.fixed + pair.whole * x.whole + pair.attention * x.attention for x in self.price.lines]
            clock.wait(np.array([host.ns(size) for size in rests], np.int64))
        return Played(clock.now.copy(), clock.busy.copy(), clock.exposed.copy())


def _from_state(t: Transfer) -> bool:
    return t.payload is Payload.KV and t.source.buffer.startswith(state_buffer(""))


def _reads(stage: Stage, sinks: set[tuple[int, str]]) -> bool:
    return any((rank, t.kv.buffer) in sinks for rank, tiles in enumerate(stage.tiles) for t in tiles)


def _padding(pairs: int, rows: int, floor: int) -> int:
    """Pairs that a kernel computes for query rows that are not there, as in `cost.py`."""
    return pairs * (floor - rows) // rows if 0 < rows < floor else 0
