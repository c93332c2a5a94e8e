"""Fits of a calibration: constants that are known are found again, and what does not fit is said."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.planning.cluster import LIMIT, MAY_BE_0
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.tools import calibrate_fit as fit
from megatron_augtree.tools.calibrate_fit import TileTimes

SHAPE = ModelShape(1, 256, 1024, 4096, 4, 2, 64, 64, item_bytes=2)
SENT = [n * SHAPE.kv_bytes for n in (1, 32, 128, 256, 512, 1024, 2048)]
TILES = [(q, k) for q in (1, 8, 32, 128, 512) for k in (64, 256, 1024)]
SQUARES = (16, 64, 192, 512, 1024)
PASSES = [(layers, n) for n in (2, 16, 64, 128, 384) for layers in (1, 2, 4)]
#: Noise of a median, and how far constants may then be off; without noise they are found to 1e-6.
NOISE, OFF = 0.02, 0.15


def curve(sizes, time, noise: float = 0.0, seed: int = 0):
    """Times of a known machine, with seeded relative noise."""
    draw = random.Random(seed)
    keys = [s if isinstance(s, tuple) else (s,) for s in sizes]
    return [(key, time(*key) * draw.uniform(1 - noise, 1 + noise)) for key in keys]


def near(found, wanted, noise: float) -> bool:
    return abs(found / wanted - 1) <= (OFF if noise else 1e-6)


# Least squares.


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_no_other_coefficients_are_better(seed, count):
    draw = np.random.default_rng(seed)
    columns, target = draw.normal(size=(count, 7)), draw.uniform(0.1, 5, size=7)
    found = fit.nonnegative(columns, target)
    assert all(c >= 0 for c in found)

    def error(coefficients):
        return float((((np.asarray(coefficients) @ columns - target) / target) ** 2).sum())

    tried = [np.asarray(found) + d for d in draw.normal(scale=0.1, size=(200, count))]
    tried += [np.zeros(count), *draw.uniform(0, 3, size=(200, count))]
    assert all(error(found) <= error(np.maximum(t, 0)) + 1e-9 for t in tried)


def test_errors_count_relative_to_what_is_asked():
    """Two measurements that contradict each other: the larger total makes an error cheaper."""
    assert fit.nonnegative([[1, 1]], [1.0, 3.0], of=[1.0, 1000.0])[0] == pytest.approx(1.0, abs=1e-5)
    assert fit.nonnegative([[1, 1]], [1.0, 3.0], of=[1000.0, 1.0])[0] == pytest.approx(3.0, abs=1e-5)


@given(st.sampled_from(sorted(MAY_BE_0) + ["tile_rows", "gemm_flops"]), st.floats(-1e30, 1e30))
def test_constants_stay_in_range(name, value):
    assert (0 if name in MAY_BE_0 else 1) <= fit.whole(name, value) < LIMIT


# Known machines.


@pytest.mark.parametrize("noise", [0.0, NOISE])
@pytest.mark.parametrize(
    ("stage", "message", "link"), [(250_000, 90_000, 900e6), (15_000, 8_000, 380e9), (1_900_000, 0, 150e9)]
)
def test_stages(stage, message, link, noise):
    sent = [s * max(1, int(link / 1e9)) for s in SENT]  # some of them cost more than the latency
    bare = curve(sent, lambda b: stage + message + b * 1e9 / link, noise)
    found = fit.fit_stage(bare, curve(sent[:2], lambda b: stage, noise, seed=1))
    assert near(found.values["stage_ns"], stage, noise) and near(found.values["link_bytes_s"], link, noise)
    total = found.values["stage_ns"] + found.values["message_ns"]
    assert near(total, stage + message, noise)
    assert found.error <= 3 * noise + 1e-6


def test_a_stage_costs_no_more_hidden_than_bare_and_never_less_than_nothing():
    bare = curve(SENT, lambda b: 1000 + b)
    for added, stage in ((5000, 1000), (-200, 0)):
        values = fit.fit_stage(bare, [((1,), added)]).values
        assert (values["stage_ns"], values["message_ns"]) == (stage, 1000 - stage)


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_the_path_between_nodes(noise):
    found = fit.fit_path(curve(SENT, lambda b: 90_000 + b / 2, noise))
    assert near(found.values["nic_bytes_s"], 2e9, noise) and found.error <= 3 * noise + 1e-6


def test_shares_that_hide():
    assert fit.hidden_share(1000, 200, 200) == 1 and fit.hidden_share(1000, 1000, 200) == 0
    assert fit.hidden_share(1000, 600, 200) == pytest.approx(0.5)
    assert fit.hidden_share(1000, 1400, 200) == pytest.approx(-0.5)
    assert fit.hidden_share(1000, 100, 200) == 1 and fit.hidden_share(100, 100, 200) == 0


@pytest.mark.parametrize("noise", [0.0, NOISE])
@pytest.mark.parametrize("blocks", [(1, 1), (128, 128), (1, 512), (32, 1)], ids=str)
def test_tiles(blocks, noise):
    query_rows, tile_rows = blocks
    known = TileTimes(40_000, SHAPE.pair_flops / 68.0, 170.0, query_rows, tile_rows)
    bare = TileTimes(0.0, known.pair, 0.0, query_rows, tile_rows)
    found, tiles = fit.fit_tiles(
        curve(TILES, known.rectangle, noise, 1),
        curve(SQUARES, known.triangle, noise, 2),
        curve(TILES, lambda q, k: 70_000 + 2.5 * bare.rectangle(q, k), noise, 3),
        curve(SQUARES, lambda n: 70_000 + 2.5 * bare.triangle(n), noise, 4),
        SHAPE,
    )
    values = found.values
    assert near(values["tile_ns"], 40_000, noise) and near(values["attention_flops"], 68e9, noise)
    assert near(values["attention_backward_pct"], 250, noise)
    assert (values["query_rows"], values["tile_rows"]) == blocks
    assert noise or tiles.merge == pytest.approx(170.0)
    assert found.error <= 3 * noise + 1e-6


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_products(noise):
    flops = 2 * 256 * 1024
    known = curve((1, 4, 16, 64, 128, 256, 1024), lambda n: (n + 11) * flops / 88.0, noise)
    found, rows = fit.fit_products(known, flops, SHAPE)
    assert near(found.values["gemm_flops"], 88e9, noise) and abs(found.values["gemm_half_rows"] - 11) <= 1
    assert near(rows.linear(100), (100 + 11) * SHAPE.linear_flops / 88.0, noise)
    assert found.error <= 3 * noise + 1e-6


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_layers(noise):
    tiles = TileTimes(40_000, SHAPE.pair_flops / 68.0, 170.0, 1, 512)
    rows = fit.RowTimes(SHAPE.linear_flops / 88.0, 11.0)
    beside = 2 * SHAPE.saved_bytes / 9.0  # ns a row at 9 GB/s

    def forward(layers, n):
        return 3e6 + layers * (rows.linear(n) + tiles.triangle(n) + 600_000 + beside * n)

    def backward(layers, n):
        work = 1.9 * (rows.linear(n) + beside * n)
        return 3e6 + layers * (work + 2.6 * tiles.triangle(n) + 2 * 600_000)

    found = fit.fit_layers(
        curve(PASSES, forward, noise, 1), curve(PASSES, backward, noise, 2), rows, tiles, 260, SHAPE
    )
    values = found.values
    assert near(values["layer_ns"], 600_000, noise) and near(values["pass_ns"], 3_000_000, noise)
    assert near(values["gemm_backward_pct"], 190, noise)
    # What is left of a row beside products and tiles is the smallest part of it.
    assert near(values["row_bytes_s"], 9e9, noise) or noise and 5e9 < values["row_bytes_s"] < 16e9
    assert found.error <= 3 * noise + 1e-6


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_memory(noise):
    known = curve((128, 192, 256, 384, 512), lambda n: 40e6 + 0.9 * n * 200_000, noise)
    found, ratio = fit.fit_memory(known, [n * 200_000 for (n,), _ in known])
    assert near(ratio, 0.9, noise) and abs(found.values["base_bytes"] - 40e6) <= (10e6 if noise else 1)
    assert found.error <= 3 * noise + 1e-6


# What does not fit is said.


def test_the_error_is_that_of_sizes_that_were_not_fitted():
    """A machine that is half as fast at every second size: fits know nothing of them."""
    held = {s for (s,), _ in fit.halves(curve(SENT, lambda b: b))[1]}
    found = fit.fit_path(curve(SENT, lambda b: (90_000 + b) * (2 if b in held else 1)))
    assert found.values["nic_bytes_s"] == pytest.approx(1e9) and found.error == pytest.approx(0.5)


def test_both_ends_are_fitted():
    for sizes in (SENT, TILES, SQUARES, PASSES):
        fitted, held = fit.halves([(s, 1.0) for s in sizes])
        assert fitted[0][0] == sizes[0] and fitted[-1][0] == sizes[-1] and len(fitted) == len(held) + 1


def test_every_queries_and_keys_is_fitted_and_held_out():
    """A grid is cut like a chessboard."""
    for half in fit.halves([(s, 1.0) for s in TILES]):
        assert {q for (q, _), _ in half} == {q for q, _ in TILES}
        assert {k for (_, k), _ in half} == {k for _, k in TILES}
