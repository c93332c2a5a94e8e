"""From measured times to a machine's constants. No device, no process group: numbers in, numbers out.

Every fit is least squares on relative errors, with coefficients that are not negative. It sees every other
size; what it says of the sizes in between, which it never saw, is its error. Times are nanoseconds, medians
of repeats, so that a few slow repeats move nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_augtree.planning.cluster import LIMIT, MAY_BE_0
from megatron_augtree.planning.model import ModelShape

#: (sizes, measured) in the order of the sizes.
Curve = Sequence[tuple[tuple[int, ...], float]]

#: Candidates: a kernel's blocks are of these sizes.
_BLOCKS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

#: Candidates for the backward of products and element-wise work, per cent of the forward.
_BACKWARD_PCT = range(50, 401)

#: A block is believed where it explains so much more than none: the squared error is divided by it.
_BELIEVED = 1.5


@dataclass(frozen=True)
class Fit:
    """Constants, and how far they are off where they were not fitted.

    Attributes:
        values: constant of `Cluster` -> its value.
        error: median relative error on held-out sizes; None where nothing was fitted.
    """

    values: dict[str, int | bool]
    error: float | None = None


def nonnegative(
    columns: Sequence[Sequence[float]], target: Sequence[float], of: Sequence[float] | None = None
) -> list[float]:
    """Coefficients >= 0 that explain a target as a sum of columns.

    Args:
        columns: up to five columns of n numbers.
        target: [n].
        of: [n] positive: errors count relative to it; default the target.

    Returns:
        a coefficient a column: of all sets of columns whose own coefficients are not negative, the best.
    """
    weights = 1.0 / np.asarray(target if of is None else of, float)
    table, goal = np.asarray(columns, float).T * weights[:, None], np.asarray(target, float) * weights
    best, least = [0.0] * len(columns), float((goal**2).sum())
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            part = table[:, chosen]
            scale = np.linalg.norm(part, axis=0) + 1e-300
            found = np.linalg.lstsq(part / scale, goal, rcond=None)[0] / scale
            error = float(((part @ found - goal) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = [0.0] * len(columns), error
                for index, value in zip(chosen, found):
                    best[index] = float(value)
    return best


def halves(curve: Curve) -> tuple[Curve, Curve]:
    """Every other point to fit, the others to hold out; both ends are fitted where their number is odd."""
    return curve[::2], curve[1::2]


def error_of(predict: Callable[..., float], curve: Curve) -> float:
    """Median relative error of a prediction."""
    return statistics.median(abs(predict(*sizes) / found - 1) for sizes, found in curve)


def whole(name: str, value: float) -> int:
    """A constant as an integer within its bounds."""
    return int(min(max(round(value), 0 if name in MAY_BE_0 else 1), LIMIT - 1))


def _per_second(each_ns: float, units: float = 1.0) -> float:
    """Units a second, where one thing of `units` takes so many nanoseconds."""
    return units * 1e9 / each_ns if each_ns > 0 else float(LIMIT)


def _values(**found: float | bool) -> dict[str, int | bool]:
    return {name: v if isinstance(v, bool) else whole(name, v) for name, v in found.items()}


# Transfers.


def fit_stage(bare: Curve, hidden: Curve) -> Fit:
    """Cost of a stage with transfers: what never hides, and what hides under tiles where transfers overlap.

    Args:
        bare: ((bytes,), ns) of a stage without tiles, by bytes that a rank sends.
        hidden: ((bytes,), ns) that a stage of few bytes adds to a tile that lasts longer.
    """
    fitted, held = halves(bare)
    fixed, each = nonnegative([[1.0] * len(fitted), [s[0] for s, _ in fitted]], [ns for _, ns in fitted])
    stage = min(max(statistics.median(ns for _, ns in hidden), 0.0), fixed)
    values = _values(stage_ns=stage, message_ns=fixed - stage, link_bytes_s=_per_second(each))
    return Fit(values, error_of(lambda sent: fixed + each * sent, held))


def fit_path(between: Curve) -> Fit:
    """Bytes a second across nodes, all ranks of a node at once; ((bytes,), ns) as for `fit_stage`."""
    fitted, held = halves(between)
    fixed, each = nonnegative([[1.0] * len(fitted), [s[0] for s, _ in fitted]], [ns for _, ns in fitted])
    return Fit(_values(nic_bytes_s=_per_second(each)), error_of(lambda sent: fixed + each * sent, held))


def hidden_share(bare_ns: float, added_ns: float, stage_ns: float) -> float:
    """How much of a large transfer a longer tile hides.

    1 is all of it, 0 nothing, or that there is nothing that could hide; below 0 it costs more than alone.

    Args:
        bare_ns: a stage with the transfer and no tile.
        added_ns: what the transfer adds to the tile.
        stage_ns: what never hides.
    """
    if bare_ns <= stage_ns:
        return 0.0
    return min(1.0, 1 - (added_ns - stage_ns) / (bare_ns - stage_ns))


# Attention.


@dataclass(frozen=True)
class TileTimes:
    """Time of a tile, ns: `fixed + pair * pairs + merge * rows`, pairs counted as a kernel computes them."""

    fixed: float
    pair: float
    merge: float
    query_rows: int
    tile_rows: int = 1

    def rectangle(self, queries: int, keys: int) -> float:
        """All queries against all keys."""
        return self.fixed + self.pair * max(queries, self.query_rows) * keys + self.merge * queries

    def triangle(self, rows: int) -> float:
        """Causal: the kernel computes masked pairs on the diagonal too."""
        pairs = rows * (rows + 1) / 2 + rows * min(rows, self.tile_rows) / 2
        return self.fixed + self.pair * pairs + self.merge * rows


def fit_tiles(
    rectangles: Curve, triangles: Curve, back: Curve, back_triangles: Curve, shape: ModelShape
) -> tuple[Fit, TileTimes]:
    """The tile curve: fixed cost, rate, blocks of queries and keys, and the backward's share.

    Args:
        rectangles: ((queries, keys), ns) forward, with the merge of the result.
        triangles: ((rows,), ns) forward, with the merge.
        back, back_triangles: the same tiles' backward, with adding up the gradients.
        shape: heads and widths of the tiles.
    """
    fitted, held = halves(rectangles)
    tiles = _rectangles(fitted)
    squares, held_squares = halves(triangles)
    tiles = _with_diagonal(tiles, squares)
    error = statistics.median(
        [abs(tiles.rectangle(*sizes) / ns - 1) for sizes, ns in held]
        + [abs(tiles.triangle(*sizes) / ns - 1) for sizes, ns in held_squares]
    )
    # Of the pairs alone: what small tiles cost beside them is another matter, and a free term takes it.
    pairs = TileTimes(0.0, tiles.pair, 0.0, tiles.query_rows, tiles.tile_rows)
    forward = [pairs.rectangle(*s) for s, _ in halves(back)[0]]
    forward += [pairs.triangle(*s) for s, _ in halves(back_triangles)[0]]
    backward = [ns for half in (halves(back)[0], halves(back_triangles)[0]) for _, ns in half]
    _, times = nonnegative([[1.0] * len(backward), forward], backward)
    values = _values(
        tile_ns=tiles.fixed,
        attention_flops=_per_second(tiles.pair, shape.pair_flops),
        query_rows=tiles.query_rows,
        tile_rows=tiles.tile_rows,
        attention_backward_pct=100 * times,
    )
    return Fit(values, error), tiles


def _rectangles(curve: Curve) -> TileTimes:
    times, candidates = [ns for _, ns in curve], []
    for block in _BLOCKS:
        pairs = [max(q, block) * k for (q, k), _ in curve]
        found = nonnegative([[1.0] * len(times), pairs, [q for (q, _), _ in curve]], times)
        tiles = TileTimes(*found, query_rows=block)
        candidates.append((_squares(tiles.rectangle, curve), tiles))
    return _believed(candidates)


def _with_diagonal(tiles: TileTimes, curve: Curve) -> TileTimes:
    made = [TileTimes(tiles.fixed, tiles.pair, tiles.merge, tiles.query_rows, block) for block in _BLOCKS]
    return _believed([(_squares(t.triangle, curve), t) for t in made])


def _squares(predict: Callable[..., float], curve: Curve) -> float:
    return sum((predict(*sizes) / ns - 1) ** 2 for sizes, ns in curve)


def _believed(candidates: list[tuple[float, TileTimes]]) -> TileTimes:
    """The best block; none (a block of 1 row, the first) unless a block explains clearly more."""
    none, best = candidates[0], min(candidates, key=lambda c: c[0])
    return best[1] if best[0] * _BELIEVED < none[0] else none[1]


# Rows.


@dataclass(frozen=True)
class RowTimes:
    """Time of one layer's linear layers, ns: `each * (rows + half)`."""

    each: float
    half: float

    def linear(self, rows: int) -> float:
        return self.each * (rows + self.half)


def fit_products(curve: Curve, flops: int, shape: ModelShape) -> tuple[Fit, RowTimes]:
    """The curve of matrix products.

    Args:
        curve: ((rows,), ns) of one product, forward.
        flops: operations of a row in it.
        shape: whose linear layers `RowTimes` is for.
    """
    fitted, held = halves(curve)
    fixed, each = nonnegative([[1.0] * len(fitted), [s[0] for s, _ in fitted]], [ns for _, ns in fitted])
    rate, half = _per_second(each, flops), fixed / each if each else 0.0
    values = _values(gemm_flops=rate, gemm_half_rows=half)
    return (
        Fit(values, error_of(lambda rows: fixed + each * rows, held)),
        RowTimes(shape.linear_flops * 1e9 / rate, half),
    )


def fit_layers(
    forward: Curve,
    backward: Curve,
    rows: RowTimes,
    tiles: TileTimes,
    attention_backward_pct: int,
    shape: ModelShape,
) -> Fit:
    """What a layer and a pass cost beside products and tiles; forward and backward are explained together.

    Args:
        forward, backward: ((layers, rows), ns) of a pass over one causal sequence, one scored row.
        rows, tiles: what is known already.
        attention_backward_pct: see `Cluster`.
        shape: sizes of a layer.
    """

    tile_back = attention_backward_pct / 100

    def known(layers: int, n: int, times: float) -> tuple[float, float]:
        """(forward, backward) of products and tiles."""
        linear, tile = rows.linear(n), tiles.triangle(n)
        return layers * (linear + tile), layers * (times * linear + tile_back * tile)

    def explained(times: float) -> tuple[float, list[float]]:
        """(squared error, [pass, layer, row beside]) where a backward takes so many times the forward."""
        columns, rest, whole = [], [], []
        for ((layers, n), ahead), (_, back) in zip(halves(forward)[0], halves(backward)[0]):
            columns += [(1.0, layers, layers * n), (1.0, 2 * layers, times * layers * n)]
            rest += [t - k for t, k in zip((ahead, back), known(layers, n, times))]
            whole += [ahead, back]
        found = nonnegative(list(zip(*columns)), rest, whole)
        off = (np.asarray(columns) @ found - rest) / whole
        return float((off**2).sum()), found

    percent = min(_BACKWARD_PCT, key=lambda p: explained(p / 100)[0])
    times = percent / 100
    fixed, per_layer, beside = explained(times)[1]

    def ahead(layers: int, n: int) -> float:
        return fixed + layers * (per_layer + beside * n) + known(layers, n, times)[0]

    def back(layers: int, n: int) -> float:
        return fixed + layers * (2 * per_layer + times * beside * n) + known(layers, n, times)[1]

    values = _values(
        row_bytes_s=_per_second(beside, 2 * shape.saved_bytes),
        layer_ns=per_layer,
        pass_ns=fixed,
        gemm_backward_pct=percent,
    )
    return Fit(values, max(error_of(ahead, halves(forward)[1]), error_of(back, halves(backward)[1])))


# Memory.


def fit_memory(curve: Curve, predicted: Sequence[int]) -> tuple[Fit, float]:
    """What a step needs whatever its rows, and how much more or less a row needs than was predicted.

    Args:
        curve: ((rows,), bytes) peaks of a forward and backward.
        predicted: [n] peaks by `ModelShape.saved_bytes`, without `base_bytes`.

    Returns:
        the fit, and measured bytes a row / predicted ones.
    """
    expected = {sizes: float(p) for (sizes, _), p in zip(curve, predicted)}
    fitted, held = halves(curve)
    base, ratio = nonnegative(
        [[1.0] * len(fitted), [expected[s] for s, _ in fitted]], [found for _, found in fitted]
    )
    error = error_of(lambda *sizes: base + ratio * expected[sizes], held)
    return Fit(_values(base_bytes=base), error), ratio
