"""Merging of partial softmax results: case tables, every order and grouping, forwards and backwards."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.attention.kernels import Segment, SegmentGrad, get_kernel
from megatron_augtree.attention.merge import (
    _merge_without_looking_,
    accumulation_dtype,
    delta_of,
    merge_,
    synthetic_out,
)

INF = math.inf
KERNELS = ("reference", "cpu_flash")
#: lse of partials that went wrong elsewhere; -inf is a partial that saw no key.
PAIRS = ((-INF, -INF), (-INF, 2.5), (2.5, -INF), (-50.0, 60.0), (800.0, -800.0), (88.9, 0.0))
MORE = ((-INF, -INF, -INF), (-INF, 2.5, -INF), (800.0, -INF, -800.0), (88.9, 0.0, -50.0), (60.0, 60.0, 60.5),
        (-INF, -50.0, 60.0, -INF), (88.9, 88.0, -INF, 0.0), (-800.0, -799.0, -801.0, -INF))
GARBAGE = (0.0, math.nan, INF, -INF, 3e38)


def err(a, b):
    """Largest difference relative to the largest entry."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def groupings(items):
    """Every way to bracket a sequence of partials: ``abc -> (ab)c, a(bc)``."""
    if len(items) == 1:
        yield items[0]
    for cut in range(1, len(items)):
        yield from itertools.product(groupings(items[:cut]), groupings(items[cut:]))


def evaluate(tree, partials):
    """Merges ``partials[i]`` as the brackets say; leaves the partials untouched."""
    if isinstance(tree, int):
        return tuple(x.clone() for x in partials[tree])
    out, lse = evaluate(tree[0], partials)
    merge_(out, lse, *evaluate(tree[1], partials))
    return out, lse


def orders_and_groupings(count):
    for order in itertools.permutations(range(count)):
        yield from groupings(order)


def finite_algebra(partials):
    """The merged ``(out, lse)`` of one row and head by plain Python, ignoring partials that saw nothing."""
    seen = [(out.flatten().tolist(), lse.item()) for out, lse in partials if lse.item() != -INF]
    if not seen:
        return [0.0] * partials[0][0].shape[-1], -INF
    top = max(lse for _, lse in seen)
    weights = [math.exp(lse - top) for _, lse in seen]
    total = math.fsum(weights)
    columns = zip(*(out for out, _ in seen), strict=True)
    out = [math.fsum(w * x for w, x in zip(weights, column, strict=True)) / total for column in columns]
    return out, top + math.log(total)


def one_row(values, garbage, dtype):
    """A partial ``(out [1, 1, 4], lse [1, 1])`` for every lse; ``garbage`` is the out of those at -inf."""
    gen = torch.Generator().manual_seed(len(values))
    partials = []
    for value in values:
        out = torch.randn(1, 1, 4, generator=gen, dtype=torch.float64).to(dtype)
        partials.append((torch.full_like(out, garbage) if value == -INF else out,
                         torch.full((1, 1), value, dtype=dtype)))
    return partials


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
@pytest.mark.parametrize("values", PAIRS + MORE, ids=str)
def test_every_order_and_grouping(values, dtype):
    # lse itself is rounded at every merge, and weights inherit its absolute error.
    largest = max((abs(value) for value in values if value > -INF), default=0.0)
    bar = torch.finfo(dtype).eps * (4 + largest)
    for garbage in GARBAGE if -INF in values else (0.0,):
        partials = one_row(values, garbage, dtype)
        want_out, want_lse = finite_algebra(partials)
        for tree in orders_and_groupings(len(values)):
            out, lse = evaluate(tree, partials)
            assert out.isfinite().all() and not lse.isnan().any(), (tree, garbage)
            assert max(abs(a - b) for a, b in zip(out.flatten().tolist(), want_out, strict=True)) <= bar
            assert lse.item() == want_lse or abs(lse.item() - want_lse) <= bar, (tree, garbage)


@pytest.mark.parametrize("values", PAIRS + MORE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_backward_in_every_order_and_grouping(name, values):
    """A piece per lse: one key whose score is that lse, or no key at all. Dense autograd is the oracle."""
    kernel = get_kernel(name, "cpu")
    gen = torch.Generator().manual_seed(7)
    dout, v = (torch.randn(rows, 1, 4, generator=gen, dtype=torch.float64) for rows in (1, len(values)))
    q = torch.eye(4, dtype=torch.float64)[:1].unsqueeze(1)
    k = torch.randn(len(values), 1, 4, generator=gen, dtype=torch.float64)
    k[:, 0, 0] = torch.tensor(values)
    pieces = [slice(i, i + (value > -INF)) for i, value in enumerate(values)]
    partials = kernel.forward([Segment(q, k[piece], v[piece]) for piece in pieces], False, 1.0)
    for value, (out, _) in zip(values, partials, strict=True):
        if value == -INF:
            out.fill_(math.nan)
    kept = torch.tensor([value > -INF for value in values])
    want = [torch.zeros_like(q), k[:0], v[:0]]
    if kept.any():
        want = [x.clone().requires_grad_() for x in (q, k[kept], v[kept])]
        weights = torch.einsum("qhd,khd->hqk", want[0], want[1]).softmax(-1)
        want = torch.autograd.grad(torch.einsum("hqk,khd->qhd", weights, want[2]), want, dout)
    for tree in orders_and_groupings(len(values)):
        out, lse = evaluate(tree, partials)
        grads = kernel.backward([SegmentGrad(dout, q, k[p], v[p], out, lse) for p in pieces], False, 1.0)
        got = sum(dq for dq, _, _ in grads), *(torch.cat([g[i] for g in grads]) for i in (1, 2))
        for a, b in zip(got, want, strict=True):
            # lse of 800 leaves 1e-13 of its weight to rounding; gradients of weight are of order 1 x |k|.
            assert a.shape == b.shape and ((a - b).abs() <= 1e-12 * max(1.0, k[kept].abs().sum())).all()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_rows_of_one_merge_do_not_disturb_each_other(garbage):
    """All pairs of the table as rows and heads of one tensor, merged into a row range of a larger one."""
    sides = []
    for side in (0, 1):
        rows = [one_row(pair, garbage, torch.float64)[side] for pair in PAIRS]
        sides.append(tuple(torch.cat([x[i] for x in rows]).reshape(3, 2, -1) for i in (0, 1)))
    (out, lse), (part_out, part_lse) = sides
    lse, part_lse = lse.squeeze(-1), part_lse.squeeze(-1)
    wide_out, wide_lse = torch.full((9, 2, 4), 7.0).double(), torch.full((9, 2), 7.0).double()
    wide_out[4:7], wide_lse[4:7] = out, lse
    given_out, given_lse = part_out.clone(), part_lse.clone()
    merge_(wide_out[4:7], wide_lse[4:7], part_out, part_lse)
    assert part_out.equal(given_out) or garbage != garbage and part_out.isnan().equal(given_out.isnan())
    assert part_lse.equal(given_lse)
    assert (wide_out[:4] == 7).all() and (wide_out[7:] == 7).all()
    assert (wide_lse[:4] == 7).all() and (wide_lse[7:] == 7).all()
    for index, pair in enumerate(PAIRS):
        row, head = divmod(index, 2)
        want_out, want_lse = finite_algebra(one_row(pair, garbage, torch.float64))
        assert wide_out[4 + row, head].tolist() == pytest.approx(want_out, rel=1e-14, abs=1e-15)
        assert wide_lse[4 + row, head].item() == pytest.approx(want_lse, rel=1e-14)


def test_first_merge_into_an_uninitialised_accumulator_is_a_copy():
    part_out, part_lse = torch.randn(5, 2, 4), torch.randn(5, 2)
    part_out[3, 1], part_lse[3, 1] = math.nan, -INF
    # The second round keeps one head seen, so that the copy of the others goes through interpolation.
    for seen in (False, True):
        out, lse = torch.full((5, 2, 4), math.nan), torch.full((5, 2), -INF)
        if seen:
            out[0, 0], lse[0, 0] = 1.0, 0.0
        merge_(out, lse, part_out, part_lse)
        want = part_out.clone()
        want[3, 1] = 0.0
        assert torch.equal(out[1:], want[1:]) and torch.equal(lse[1:], part_lse[1:])
        assert torch.equal(out[0, 1], want[0, 1]) and seen != torch.equal(out[0, 0], want[0, 0])


def test_an_accelerator_gives_the_same_bits_without_looking():
    """The way without a question that the host would have to wait for."""
    gen = torch.Generator().manual_seed(1)
    for share in (0.0, 0.3, 1.0):
        for part_share in (0.0, 0.3, 1.0):
            sides = []
            for unseen in (share, part_share):
                out, lse = torch.randn(7, 2, 4, generator=gen), 30 * torch.randn(7, 2, generator=gen)
                nothing = torch.rand(7, 2, generator=gen) < unseen
                out.masked_fill_(nothing.unsqueeze(-1), math.nan)
                sides.append((out, lse.masked_fill_(nothing, -INF)))
            (out, lse), part = sides
            got_out, got_lse = out.clone(), lse.clone()
            merge_(out, lse, *part)
            _merge_without_looking_(got_out, got_lse, *part)
            assert torch.equal(got_out, out) and torch.equal(got_lse, lse)
    meta = torch.empty(7, 2, 4, device="meta"), torch.empty(7, 2, device="meta")
    merge_(*meta, *meta)  # a tensor without numbers cannot be looked at


def test_no_rows_and_narrow_partials():
    empty = torch.zeros(0, 2, 4), torch.zeros(0, 2)
    merge_(*empty, *empty)
    assert empty[0].shape == (0, 2, 4)
    (out, part_out), (lse, part_lse) = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2)
    wide_out, wide_lse = out.clone(), lse.clone()
    merge_(out, lse, part_out.bfloat16(), part_lse)
    merge_(wide_out, wide_lse, part_out.bfloat16().float(), part_lse)
    assert out.dtype == torch.float32 and torch.equal(out, wide_out) and torch.equal(lse, wide_lse)


def test_a_real_nan_is_not_hidden():
    """Only the -inf side is unread: a NaN among keys that were seen must reach the loss."""
    for other_row in (0.0, -INF):
        out, lse = torch.zeros(2, 1, 4), torch.tensor([[0.0], [other_row]])
        part_out = torch.ones(2, 1, 4)
        part_out[0] = math.nan
        merge_(out, lse, part_out, torch.ones(2, 1))
        assert out[0].isnan().all() and out[1].isfinite().all()


lse_values = st.one_of(st.just(-INF), st.floats(-900.0, 900.0))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5).flatmap(lambda count: st.tuples(
    st.lists(st.lists(lse_values, min_size=6, max_size=6), min_size=count, max_size=count),
    st.permutations(range(count)), st.integers(0, 2**31))))
def test_any_order_gives_the_softmax_average(drawn):
    table, order, seed = drawn
    lses = torch.tensor(table, dtype=torch.float64).reshape(len(table), 3, 2)
    outs = torch.randn(len(table), 3, 2, 4, generator=torch.Generator().manual_seed(seed)).double()
    dead = (lses == -INF).all(0)
    weights = lses.masked_fill(dead, 0.0).softmax(0).masked_fill(dead, 0.0)
    want = (weights.unsqueeze(-1) * outs).sum(0)
    outs[lses == -INF] = math.nan
    out, lse = torch.full_like(want, math.nan), torch.full_like(lses[0], -INF)
    for i in order:
        merge_(out, lse, outs[i], lses[i])
    assert (out - want).abs().max() <= 1e-12
    assert torch.equal(lse == -INF, dead)
    assert ((lse - lses.logsumexp(0))[~dead].abs() <= 1e-12 * 900).all()


# Keys and values in pieces, some of them scaled: what ring steps see when activations differ between ranks.

def split_attention(kernel, dout, q, k, v, cuts, scale, synthetic=False):
    """``out, dq, dk, dv`` of attention whose keys are met piece by piece, through merged ``(out, lse)``."""
    pieces = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    dtype = accumulation_dtype(q.dtype)
    out = torch.empty(dout.shape, dtype=dtype)
    lse = torch.full(dout.shape[:2], -INF, dtype=dtype)
    for piece in pieces:
        merge_(out, lse, *kernel.forward([Segment(q, k[piece], v[piece])], False, scale)[0])
    used = synthetic_out(dout, delta_of(dout, out)) if synthetic else out
    grads = kernel.backward([SegmentGrad(dout, q, k[p], v[p], used, lse) for p in pieces], False, scale)
    return out, sum(g[0] for g in grads), torch.cat([g[1] for g in grads]), torch.cat([g[2] for g in grads])


def dense_attention(dout, q, k, v, scale, dtype=torch.float64):
    """The same by one softmax and autograd, in ``dtype``."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype))


def scaled_pieces(heads, width, cuts, dtype, seed=0, rows=13):
    """``dout, q, k, v`` whose keys and values are x1, x3, x10, x0.1 piece by piece."""
    gen = torch.Generator().manual_seed(seed)
    dout, q = (torch.randn(rows, heads[0], width, generator=gen, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(cuts[-1], heads[1], width, generator=gen, dtype=torch.float64) for _ in range(2))
    for (a, b), factor in zip(itertools.pairwise(cuts), (1.0, 3.0, 10.0, 0.1), strict=True):
        k[a:b] *= factor
        v[a:b] *= factor
    return [x.to(dtype) for x in (dout, q, k, v)]


@pytest.mark.parametrize("synthetic", (False, True))
@pytest.mark.parametrize("width", (4, 16))
@pytest.mark.parametrize("heads", ((4, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("name", KERNELS)
def test_scaled_pieces_equal_dense_autograd(name, heads, width, synthetic):
    cuts = (0, 8, 16, 24, 32)
    for dtype, bar in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        drawn = scaled_pieces(heads, width, cuts, dtype)
        got = split_attention(get_kernel(name, "cpu"), *drawn, cuts, width**-0.5, synthetic)
        for a, b in zip(got, dense_attention(*drawn, width**-0.5), strict=True):
            assert a.dtype == dtype and err(a, b) < bar


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(sum), st.integers(0, 1000),
       st.sampled_from(KERNELS), st.sampled_from(((4, 1), (4, 2), (4, 4))), st.booleans())
def test_pieces_of_any_length_equal_dense_autograd(lengths, seed, name, heads, synthetic):
    cuts = (0, *itertools.accumulate(lengths))
    drawn = scaled_pieces(heads, 8, cuts, torch.float64, seed, rows=5)
    got = split_attention(get_kernel(name, "cpu"), *drawn, cuts, 0.3, synthetic)
    want = dense_attention(*drawn, 0.3)
    unit = max(x.abs().max() for x in want)
    assert all((a - b).abs().max() <= 1e-12 * unit for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("synthetic", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", KERNELS)
def test_scaled_pieces_in_sixteen_bits_err_at_most_twice_dense(name, dtype, synthetic):
    cuts = (0, 8, 16, 24, 32)
    drawn = scaled_pieces((4, 2), 16, cuts, dtype)
    want, stock = (dense_attention(*drawn, 0.25, dtype=kind) for kind in (torch.float64, dtype))
    got = split_attention(get_kernel(name, "cpu"), *drawn, cuts, 0.25, synthetic)
    for a, b, c in zip(got, want, stock, strict=True):
        assert a.dtype == torch.float32 and err(a, b) <= 2 * err(c, b)


def test_a_pieces_own_lse_instead_of_the_merged_one_is_seen():
    """The comparison above would notice the classic mistake."""
    cuts, kernel = (0, 8, 16, 24, 32), get_kernel("reference", "cpu")
    dout, q, k, v = scaled_pieces((4, 2), 16, cuts, torch.float64)
    want = dense_attention(dout, q, k, v, 0.25)
    out, lse = kernel.forward([Segment(q, k[:8], v[:8])], False, 0.25)[0]
    wrong = kernel.backward([SegmentGrad(dout, q, k[:8], v[:8], want[0], lse)], False, 0.25)[0]
    assert err(wrong[2], want[3][:8]) > 0.1 and err(out, want[0]) > 0.1


@pytest.mark.parametrize("exponent", (-25, -12, 0, 8))
@pytest.mark.parametrize("dtype, bar", ((torch.float64, 1e-13), (torch.float32, 1e-5)))
def test_synthetic_out_has_the_delta_of_out(dtype, bar, exponent):
    gen = torch.Generator().manual_seed(3)
    dout, out = (torch.randn(50, 3, 64, generator=gen, dtype=torch.float64).to(dtype) for _ in range(2))
    dout = dout * 10.0**exponent
    dout[4], dout[5, 1], dout[6, 0, 1:] = 0.0, 0.0, 0.0
    delta = delta_of(dout, out)
    made = synthetic_out(dout, delta)
    assert delta.shape == (50, 3) and made.shape == dout.shape and delta.dtype == made.dtype == dtype
    assert delta.double().allclose((dout.double() * out.double()).sum(-1), rtol=0.0,
                                   atol=bar * 64 * 10.0**exponent)
    back = (dout.double() * made.double()).sum(-1)
    assert ((back - delta.double()).abs() <= bar * delta.double().abs()).all()
    assert not made[4].any() and not made[5, 1].any() and delta[6, 0] != 0
    lengths = [torch.linalg.vector_norm(x.double(), dim=-1) for x in (made, out)]
    assert (lengths[0] <= lengths[1] * (1 + 1e-5)).all()


@pytest.mark.parametrize("exponent", (-25, -12, 0, 8))
def test_backward_from_delta_is_as_good_as_from_out(exponent):
    cuts = (0, 8, 16, 24, 32)
    dout, q, k, v = scaled_pieces((4, 2), 16, cuts, torch.float32)
    dout = dout * 10.0**exponent
    dout[3], dout[7, 2] = 0.0, 0.0
    want = dense_attention(dout, q, k, v, 0.25)
    for name in KERNELS:
        got = split_attention(get_kernel(name, "cpu"), dout, q, k, v, cuts, 0.25, synthetic=True)
        assert all(err(a, b) < 1e-5 for a, b in zip(got, want, strict=True))
        assert not got[1][3].any() and not got[1][7, 2].any()


def test_delta_is_summed_wide():
    dout, out = torch.full((1, 1, 4096), 1.0), torch.full((1, 1, 4096), 1.0 + 2**-12)
    assert delta_of(dout.bfloat16(), out).dtype == torch.float32
    assert delta_of(dout.bfloat16(), out).item() == 4097.0
    assert delta_of(dout.bfloat16(), out.double()).dtype == torch.float64
    assert synthetic_out(dout.bfloat16(), torch.ones(1, 1)).dtype == torch.float32
