"""Memory that no way to play some nodes can do without, in closed forms: known before anything is priced.

What a pass keeps and works with grows with the rows of a rank, and its heaviest rank has at least an even
share of all rows; so bytes of all rows together, over the ranks of the block, bound a plan's peak from below.
Logits, and what is received, come on top. `cost.PassPrice` has the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_augtree.planning.candidates import split_inner
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.demand import Pair
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.tree import ForestShape


class RowBytes(NamedTuple):
    """Bytes of a row.

    Attributes:
        kept: from forward to backward.
        state: more of a prompt's row whose keys and values later passes read.
        work: beside what is kept, while its pass runs.
    """

    kept: int
    state: int
    work: int

    @property
    def alone(self) -> int:
        """Of a row whose pass runs."""
        return self.kept + self.work


def row_bytes(prices: Prices, pair: Pair, *, offload: bool = False) -> RowBytes:
    """What a row takes under a recompute pair; `offload`: what is kept rests in host memory."""
    m = prices.model
    kept = m.layers * m.input_bytes + pair.whole * (m.saved_bytes - m.input_bytes)
    kept += pair.attention * m.attended_bytes
    state = m.layers * (m.kv_heads * (m.k_dim + m.v_dim) * m.accum_bytes + m.kv_bytes)
    # Layers that keep everything hold keys and values anyway, where they do not rest elsewhere.
    state -= 0 if offload else pair.whole * m.kv_bytes
    work = (9 if pair.whole == m.layers else 13) * m.saved_bytes // 4
    return RowBytes(0 if offload else kept, state, work)


class Least:
    """Bytes that jobs need at the least under some options.

    Args:
        shape: the forest.
        prices: model and machine.
        options: what is tried; how recompute is chosen decides what a row keeps.
    """

    def __init__(self, shape: ForestShape, prices: Prices, options: Options) -> None:
        self.shape, self.waves = shape, max(options.waves)
        m, everything = prices.model, Pair(prices.model.layers, 0)
        if options.whole == -1:
            pairs = [everything, Pair(0, 0)]  # between them a row keeps more, or works more
        elif options.whole == -2:
            pairs = [Pair(m.layers - m.recomputed, m.attention_kept)]
        else:
            whole = min(options.whole, m.layers)
            pairs = [Pair(whole, min(options.attention, m.layers - whole))]
        self._row = min(row_bytes(prices, pair).alone for pair in pairs)
        offload = options.offload and prices.host is not None
        resting = [row_bytes(prices, pair, offload=x) for pair in pairs for x in {False, offload}]
        self._resting = min(row.kept + row.state for row in resting)

    def bytes(self, nodes: Sequence[int]) -> int:
        """Of some nodes on all ranks of their block: in one pass, or a prompt and the most waves that are
        tried."""
        inner, leaves = split_inner(self.shape, nodes)
        spine, tail = (sum(self.shape.rows[n] for n in part) for part in (inner, leaves))
        fused = (spine + tail) * self._row
        return min(fused, spine * self._resting + tail * self._row // self.waves) if inner else fused
