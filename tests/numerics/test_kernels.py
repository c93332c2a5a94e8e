"""Attention kernels against dense attention by autograd: shapes, dtypes, layouts, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from megatron_augtree.attention.kernels import KERNEL_NAMES, Segment, SegmentGrad, choose_kernel, get_kernel
from megatron_augtree.config import AugTreeError, UnsupportedError

KERNELS = ("reference", "cpu_flash")
HEADS = ((4, 1), (4, 2), (4, 4))
BARS = {torch.float64: 1e-12, torch.float32: 1e-5}


def err(a, b):
    """Largest difference relative to the largest entry."""
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def draw(rows, keys, heads, width, value_width=None, dtype=torch.float64, seed=0):
    """Random ``dout, q, k, v``; scores spread enough that attention is peaked."""
    gen = torch.Generator().manual_seed(seed)
    value_width = value_width or width
    shapes = ((rows, heads[0], value_width), (rows, heads[0], width), (keys, heads[1], width),
              (keys, heads[1], value_width))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).mul(1.5).to(dtype) for shape in shapes]


def dense(q, k, v, causal, scale):
    """Attention head by head, in the dtype of its inputs: ``out [Tq, Hq, Dv]``, ``lse [Tq, Hq]``."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * scale
        if causal:
            scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        outs.append(scores.softmax(-1) @ v[:, head // group])
        lses.append(scores.logsumexp(-1))
    return torch.stack(outs, 1), torch.stack(lses, 1)


def oracle(dout, q, k, v, causal, scale, dtype=torch.float64):
    """``out, lse, dq, dk, dv`` of dense attention computed in ``dtype``."""
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    out, lse = dense(q, k, v, causal, scale)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.to(dtype)))


def run(name, dout, q, k, v, causal, scale):
    """``out, lse, dq, dk, dv`` of one segment by a kernel."""
    kernel = get_kernel(name, "cpu")
    (out, lse), = kernel.forward([Segment(q, k, v)], causal, scale)
    grads, = kernel.backward([SegmentGrad(dout, q, k, v, out, lse)], causal, scale)
    return (out, lse, *grads)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("width", (4, 16, 80))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", KERNELS)
def test_matches_dense_autograd(name, dtype, heads, width, causal):
    for rows, keys in ((9, 9), (67, 67)) if causal else ((1, 70), (70, 3), (9, 33)):
        drawn = draw(rows, keys, heads, width, dtype=dtype, seed=rows + width)
        want = oracle(*drawn, causal, width**-0.5)
        got = run(name, *drawn, causal, width**-0.5)
        for label, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert a.dtype == dtype and a.shape == b.shape
            assert err(a, b) < BARS[dtype], (label, rows, keys)


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_single_key(name, dtype):
    """All weight is on it, so scores have no gradient: rounding of delta is all that dq and dk hold."""
    for rows, causal in ((1, True), (1, False), (6, False)):
        dout, q, k, v = draw(rows, 1, (4, 2), 16, dtype=dtype)
        out, lse, dq, dk, dv = run(name, dout, q, k, v, causal, 0.25)
        want = oracle(dout, q, k, v, causal, 0.25)
        assert torch.equal(out.double(), want[0]) and err(lse, want[1]) < BARS[dtype]
        delta = (dout * out).sum(-1).abs().max()
        assert dq.abs().max() <= BARS[dtype] * 0.25 * delta * k.abs().max()
        assert dk.abs().max() <= BARS[dtype] * 0.25 * delta * q.abs().max() * 2 * rows
        assert err(dv, want[4]) < BARS[dtype]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", KERNELS)
def test_sixteen_bits_err_at_most_twice_dense(name, dtype, causal):
    drawn = draw(45, 45, (4, 2), 16, dtype=dtype)
    want = oracle(*drawn, causal, 0.3)
    stock = oracle(*drawn, causal, 0.3, dtype=dtype)
    got = run(name, *drawn, causal, 0.3)
    for a, b, c in zip(got, want, stock, strict=True):
        assert a.dtype == torch.float32
        assert err(a, b) <= 2 * err(c, b)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("widths", ((8, 4), (4, 9)))
@pytest.mark.parametrize("name", KERNELS)
def test_unequal_widths(name, widths, heads, causal):
    drawn = draw(11, 11, heads, widths[0], value_width=widths[1])
    for a, b in zip(run(name, *drawn, causal, 0.3), oracle(*drawn, causal, 0.3), strict=True):
        assert a.shape == b.shape and err(a, b) < 1e-12


@pytest.mark.parametrize("rows, keys", ((0, 5), (5, 0), (0, 0)))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", KERNELS)
def test_empty_segments(name, dtype, rows, keys):
    drawn = draw(rows, keys, (4, 2), 8, dtype=dtype)
    for causal in (False, True) if rows == keys else (False,):
        out, lse, *grads = run(name, *drawn, causal, 1.0)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert out.shape == (rows, 4, 8) and out.dtype == wide and not out.any()
        assert lse.shape == (rows, 4) and lse.dtype == wide and (lse == -torch.inf).all()
        for grad, x in zip(grads, drawn[1:], strict=True):
            assert grad.shape == x.shape and grad.dtype == wide and not grad.any()


@pytest.mark.parametrize("name", KERNELS)
def test_rows_that_saw_nothing_get_no_gradient(name):
    dout, q, k, v = draw(6, 6, (4, 2), 8)
    out, lse, dq, _, _ = run(name, dout, q, k, v, False, 0.3)
    out[2], lse[2] = 0.0, -torch.inf
    (got,) = get_kernel(name, "cpu").backward([SegmentGrad(dout, q, k, v, out, lse)], False, 0.3)
    kept = torch.tensor([0, 1, 3, 4, 5])
    want = oracle(dout[kept], q[kept], k, v, False, 0.3)[2:]
    assert not got[0][2].any() and err(got[0][kept], want[0]) < 1e-12
    assert err(got[1], want[1]) < 1e-12 and err(got[2], want[2]) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_a_list_gives_the_bits_of_its_segments(name):
    lengths = (5, 0, 17, 1)
    drawn = [draw(n, n, (4, 2), 8, dtype=torch.float32, seed=n) for n in lengths]
    kernel = get_kernel(name, "cpu")
    results = kernel.forward([Segment(*d[1:]) for d in drawn], True, 0.3)
    grads = kernel.backward([SegmentGrad(*d, *r) for d, r in zip(drawn, results, strict=True)], True, 0.3)
    assert len(results) == len(grads) == len(lengths)
    for d, result, grad in zip(drawn, results, grads, strict=True):
        for a, b in zip((*result, *grad), run(name, *d, True, 0.3), strict=True):
            assert torch.equal(a, b)
    assert kernel.forward([], True, 0.3) == [] and kernel.backward([], True, 0.3) == []


def layouts(x):
    """The same numbers in memory layouts that callers hand over."""
    yield "packed", torch.cat([x, x, x], -1)[..., x.shape[-1]:2 * x.shape[-1]]
    yield "row range", torch.cat([x.flip(0), x, x])[x.shape[0]:2 * x.shape[0]]
    yield "heads first", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "last dimension strided", x.transpose(0, 2).contiguous().transpose(0, 2)
    yield "every second", torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("name", KERNELS)
def test_memory_layout_does_not_matter(name, causal):
    drawn = draw(13, 13, (4, 2), 8)
    kernel = get_kernel(name, "cpu")
    want = run(name, *drawn, causal, 0.3)
    for views in zip(*(layouts(x) for x in drawn), strict=True):
        dout, q, k, v = (view for _, view in views)
        (out, lse), = kernel.forward([Segment(q, k, v)], causal, 0.3)
        assert err(out, want[0]) < 1e-13 and err(lse, want[1]) < 1e-13, views[0][0]
        lse = torch.stack([want[1]] * 2, 1)[:, 1]
        lse = want[1].T.contiguous().T if views[0][0] == "heads first" else lse
        out = dict(layouts(want[0]))[views[0][0]]
        grads, = kernel.backward([SegmentGrad(dout, q, k, v, out, lse)], causal, 0.3)
        assert all(err(a, b) < 1e-13 for a, b in zip(grads, want[2:], strict=True)), views[0][0]


@pytest.mark.parametrize("name", KERNELS)
def test_a_gradient_of_ones_without_storage(name):
    _, q, k, v = draw(7, 7, (4, 4), 8)
    ones = torch.ones(()).double().expand(7, 4, 8)
    for a, b in zip(run(name, ones, q, k, v, True, 0.3), oracle(ones, q, k, v, True, 0.3), strict=True):
        assert err(a, b) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_no_graph_is_recorded(name):
    drawn = [x.requires_grad_() for x in draw(5, 5, (4, 2), 8)]
    assert not any(x.requires_grad for x in run(name, *drawn, True, 0.3))


@pytest.mark.parametrize("name", KERNELS)
def test_scores_far_outside_the_range_of_exp(name):
    q = torch.full((2, 1, 4), 40.0)
    k = torch.stack([torch.full((1, 4), sign * 40.0) for sign in (1.0, -1.0)])
    v = torch.tensor([3.0, 5.0]).reshape(2, 1, 1).expand(2, 1, 4)
    out, lse, dq, dk, dv = run(name, torch.ones(2, 1, 4), q, k, v, False, 1.0)
    assert (out == 3.0).all() and (lse == 6400.0).all()
    assert not dq.any() and not dk.any() and dv[:, 0, 0].tolist() == [2.0, 0.0]


@pytest.mark.parametrize("name", KERNELS)
def test_shapes_that_do_not_fit_are_refused(name):
    dout, q, k, v = draw(4, 6, (4, 2), 8)
    kernel = get_kernel(name, "cpu")
    with pytest.raises(UnsupportedError, match="causal=True"):
        kernel.forward([Segment(q, k, v)], True, 1.0)
    with pytest.raises(UnsupportedError, match="causal=True"):
        kernel.backward([SegmentGrad(dout, q, k, v, dout, dout[..., 0])], True, 1.0)
    for bad in (Segment(q[:, :3], k, v), Segment(q[..., :4], k, v), Segment(q, k[:5], v),
                Segment(q, k[:, :1], v)):
        with pytest.raises(UnsupportedError, match="do not fit together"):
            kernel.forward([bad], False, 1.0)


def test_get_kernel():
    names = {name: get_kernel(name, torch.device("cpu")).name for name in ("auto", "reference", "cpu_flash")}
    assert names == {"auto": "cpu_flash", "reference": "reference", "cpu_flash": "cpu_flash"}
    assert str(choose_kernel("cpu")) == "cpu_flash (the fastest here)"
    for device in ("meta", "cuda"):
        assert get_kernel("reference", device).name == "reference"
        assert get_kernel("auto", device).name == "auto"
    for name, device in (("cpu_flash", "cuda:1"), ("cuda_flash", "cpu"), ("te_fused", "cpu")):
        with pytest.raises(UnsupportedError, match=f"device {device}") as error:
            get_kernel(name, device)
        assert "`auto`" in error.value.remedy
    with pytest.raises(AugTreeError) as error:
        get_kernel("flash", "cpu")
    assert error.value.values == "kernel 'flash'" and ", ".join(KERNEL_NAMES) in error.value.rule
    assert error.value.what and error.value.remedy
