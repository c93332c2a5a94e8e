"""A block's heaviest ranks in closed forms: what the search prices, before any row is placed.

Nodes cut over a block are taken as even (zigzag evens rows and pairs alike); whole leaves are dealt out
longest first, wide ones fill up what that left uneven. Two ranks stand for the block: one of the fullest
lane, and one that takes most of the wide leaves. Only jobs that the search settles on are counted rank by
rank (`loads.py`); a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_augtree.planning.assign import level, longest_first
from megatron_augtree.planning.lanes import row_cost
from megatron_augtree.planning.loads import RankLoad, cut_tiles, landings
from megatron_augtree.planning.placement import Span
from megatron_augtree.planning.plan import Pass
from megatron_augtree.planning.tree import ForestShape


class Lay(NamedTuple):
    """Rows of a pass before they are placed.

    Attributes:
        inner: spans cut over the whole block.
        leaves: nodes that go to lanes.
        width, lane_degree, wide: see `lanes.place`.
        state_rows, state_nodes, states: what earlier passes keep on the block: rows, nodes, how many passes.
    """

    inner: tuple[Span, ...]
    leaves: tuple[int, ...]
    width: int
    lane_degree: int = 1
    wide: int = 0
    state_rows: int = 0
    state_nodes: int = 0
    states: int = 0


class _Part(NamedTuple):
    """Rows of one node on one rank.

    Attributes:
        rows, pairs, scored: of this rank.
        start, above: rows above the first one, and of them those of ancestors.
        ranks: how many ranks the node is cut over.
        of: rows of the node, on all ranks.
        inner: whether others of the pass are below it.
    """

    rows: int
    pairs: int
    scored: int
    start: int
    above: int
    ranks: int
    of: int
    inner: bool


class TypicalLoads:
    """The loads of a pass on its heaviest ranks; takes the place of `PassLoads`.

    Args:
        shape: the forest.
        lay: rows of the pass.
        p: how they are moved; its placement is not looked at.
        node_ranks: ranks of a node of the machine.
        pairs_per_row: see `lanes.row_cost`.
    """

    def __init__(self, shape: ForestShape, lay: Lay, p: Pass, node_ranks: int, pairs_per_row: int) -> None:
        self.shape, self.lay, self.p, self.unit = shape, lay, p, pairs_per_row
        self.world = lay.width
        self.mates = min(lay.width, node_ranks)
        self.machine_nodes = -(-lay.width // node_ranks)
        inner = [self._cut(span, self.world, True) for span in lay.inner]
        self.ranks = [self._load(inner + leaves) for leaves in self._leaves()]

    @property
    def stages(self) -> int:
        """Stages with transfers in the forward."""
        remote = self.world - 1
        if not remote or not any(load.messages for load in self.ranks):
            return 0
        return 2 if self.p.primitive == "move_q" else self._landings

    @property
    def _landings(self) -> int:
        last = self.world - (self.machine_nodes - 1) * self.mates
        return landings(self.p, [self.mates] * (self.machine_nodes - 1) + [last], crosses=self._crosses)

    @property
    def _crosses(self) -> bool:
        return bool(self.p.node_ranks) and self.machine_nodes > 1 and self.p.primitive == "gather_kv"

    def _cut(self, span: Span, ranks: int, inner: bool = False, *, share: int = 1, shares: int = 0) -> _Part:
        """A share of some rows: an even one of `ranks`, or `share` of `shares`."""
        shares = shares or ranks
        size = span.hi - span.lo
        rows = -(-size * share // shares)
        pairs = -(-self.shape.area(*span) * share // shares)
        scored = min(self.shape.scored[span.node] * (2 if ranks > 1 else 1), rows)
        above = self.shape.starts[span.node]
        return _Part(rows, pairs, scored, above + span.lo, above, ranks, size, inner)

    def _leaves(self) -> list[list[_Part]]:
        """Leaves of the heaviest ranks."""
        lay, shape, lane_degree = self.lay, self.shape, self.lay.lane_degree
        spans = [Span(n, 0, shape.rows[n]) for n in lay.leaves]
        if lane_degree == self.world:
            return [[self._cut(span, self.world) for span in spans]]
        order = sorted(spans, key=lambda s: (-s.hi, s.node))
        spread, narrow = order[: lay.wide], order[lay.wide :]
        costs = [row_cost(shape, *span, self.unit) for span in narrow]
        lanes = [0] * (self.world // lane_degree)
        where = longest_first(costs, lanes)
        for cost, lane in zip(costs, where):
            lanes[lane] += cost
        wide = sum(row_cost(shape, *span, self.unit) for span in spread)
        shares = level(lanes, wide)
        found = []
        for chosen in dict.fromkeys((lanes.index(max(lanes)), shares.index(max(shares)))):
            mine = [self._cut(s, lane_degree) for s, lane in zip(narrow, where) if lane == chosen]
            if shares[chosen]:
                part = {"share": shares[chosen], "shares": wide * lane_degree}
                mine = [self._cut(span, self.world, **part) for span in spread] + mine
            found.append(mine)
        return found

    def _load(self, parts: Sequence[_Part]) -> RankLoad:
        lay, p, d = self.lay, self.p, self.world
        lands = self._landings
        resumed, lane = bool(lay.states and not lay.leaves), lay.lane_degree
        tiles = cut_tiles(lands, d, mixed=self._crosses or resumed)
        whole = len(lay.inner) * bool(lay.leaves) + lay.state_nodes
        cut, lane_cut = [x for x in parts if x.ranks == d > 1], [x for x in parts if 1 < x.ranks < d]
        rows = sum(x.rows for x in parts)
        below = sum(x.rows for x in parts if x.start)
        early = sum(x.rows * (x.start // d) for x in parts)
        early += sum(x.rows * (x.rows + 1) // 2 for x in parts if x.inner or p.primitive != "move_q")
        near, far, messages = self._traffic(parts, p.primitive == "move_q")
        load = RankLoad(
            rows=rows,
            scored=sum(x.scored for x in parts),
            cut=sum(x.rows for x in (*cut, *lane_cut)),
            below=sum(x.rows for x in parts if x.above),
            above=sum(x.rows * x.above for x in parts),
            pairs=sum(x.pairs for x in parts),
            visiting=0,
            early=early,
            triangles=tuple(x.rows for x in parts),
            tiles=len(parts)
            + max(min(whole, 2), lay.states)
            + min(whole, 2) * lands
            + len(cut) * tiles
            + len(lane_cut) * cut_tiles(lands, lane),
            merged=rows
            + max(below, rows * lay.states)
            + below * lands
            + sum(x.rows for x in cut) * lands
            + sum(x.rows for x in lane_cut) * min(lands, lane - 1),
            kv_in=near + far,
            kv_out=near + far,
            kv_far_in=far,
            kv_far_out=far,
            q_in=0,
            q_out=0,
            q_far_in=0,
            q_far_out=0,
            messages=messages,
        )
        return self._with_visits(load, parts) if p.primitive == "move_q" else load

    def _traffic(self, parts: Sequence[_Part], leaves_only: bool) -> tuple[int, int, int]:
        """(near, far) key rows that a rank receives, as many as it sends; and messages."""
        d, m, lane = self.world, self.mates, self.lay.lane_degree
        shared = sum(x.of for x in parts if x.ranks == d > 1)
        shared += 0 if leaves_only or d == 1 else self.lay.state_rows
        in_lane = sum(x.of - x.rows for x in parts if 1 < x.ranks < d)
        far, near = shared * (d - m) // d, shared * (m - 1) // d
        messages = d - 1 if shared else lane - 1 if in_lane else 0
        if self._crosses and shared:
            once = shared * (self.machine_nodes - 1) // d
            near, far, messages = near + far - once, once, 2 * (m - 1) + self.machine_nodes - 1
        return near + in_lane, far, messages

    def _with_visits(self, load: RankLoad, parts: Sequence[_Part]) -> RankLoad:
        """Queries go to the prompt state and partial results come back."""
        d, m = self.world, self.mates
        total = sum(self.shape.rows[n] for n in self.lay.leaves)
        seen = sum(self.shape.rows[n] * self.shape.starts[n] for n in self.lay.leaves)
        mine = sum(x.rows * x.start for x in parts)
        come, go = max(seen - mine, 0) // d, mine * (d - 1) // d
        away, here = load.rows * (d - 1), max(total - load.rows, 0)
        return load._replace(
            pairs=max(load.pairs + come - go, 0),
            visiting=come,
            tiles=load.tiles + self.lay.states,
            merged=load.merged + away + here,
            q_in=here,
            q_out=away,
            q_far_in=here * (d - m) // (d - 1),
            q_far_out=load.rows * (d - m),
            messages=2 * (d - 1),
        )
