"""`te_fused` against stand-ins for Transformer Engine with the signatures of its releases.

A stand-in binds its arguments to the signature of a release, asserts types and layouts, and computes by the
reference kernel. No Transformer Engine and no GPU take part.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from megatron_augtree.attention.kernels import Segment, SegmentGrad, get_kernel, te_fused
from megatron_augtree.attention.kernels.choice import choose_kernel
from megatron_augtree.config import UnsupportedError
from tests.numerics.test_cuda_flash import Gpu, play
from tests.numerics.test_kernels import draw, err, oracle
from tests.numerics.varlen_reference import reference_backward, reference_forward

# Arguments in their order; those after the colon have defaults.
_SEQUENCES = "max_seqlen_q max_seqlen_kv cu_seqlens_q cu_seqlens_kv q k v"
_FORWARD_ENDS = "attn_bias cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k page_table_v s_quantizer " \
    "o_quantizer attn_scale dropout fast_zero_fill qkv_layout"
_FORWARD_TAIL = "attn_bias_type attn_mask_type softmax_type window_size rng_gen softmax_offset " \
    "return_max_logit"
_BACKWARD_ENDS = "cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer " \
    "attn_scale dropout fast_zero_fill qkv_layout"
_BACKWARD_TAIL = "attn_bias_type attn_mask_type softmax_type window_size deterministic"
_NEWER = "bottom_right_diagonal cuda_graph"


def _releases():
    forward = f"is_training {_SEQUENCES} fake_dtype fused_attention_backend : {_FORWARD_ENDS}"
    backward = f"{_SEQUENCES} o d_o fake_dtype %s aux_ctx_tensors fused_attention_backend : {_BACKWARD_ENDS}"
    typed, untyped = backward % "dqkv_dtype", backward % ""
    formats = "o_format do_format dqkv_layout"
    return {
        "2.9": (f"{forward} {_FORWARD_TAIL}", f"{typed} {_BACKWARD_TAIL}"),
        "2.14": (f"{forward} {_FORWARD_TAIL} {_NEWER}", f"{typed} {_BACKWARD_TAIL} {_NEWER}"),
        "2.15": (f"{forward} o_format qkv_scale_inv_format {_FORWARD_TAIL} {_NEWER}",
                 f"{untyped} {formats} {_BACKWARD_TAIL} {_NEWER}"),
        "2.20": (f"{forward} o_format qkv_scale_inv_format {_FORWARD_TAIL} {_NEWER}",
                 f"{untyped} {formats} qkv_scale_inv_format {_BACKWARD_TAIL} {_NEWER}"),
    }


RELEASES = _releases()
#: What a release assumes where it is told nothing: packed rows have to be asked for.
DEFAULTS = {"qkv_layout": "sbh3d", "o_format": "sbhd", "do_format": "sbhd", "dqkv_layout": "sbh3d",
            "attn_bias_type": "no_bias", "attn_mask_type": "padding", "dropout": 0.0,
            "softmax_type": "vanilla", "window_size": (-1, -1), "fast_zero_fill": True,
            "deterministic": False}
BACKEND, DTYPES = object(), {torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}


def signature(text):
    """From ``a b : c d``: c and d have defaults."""
    needed, _, optional = text.partition(":")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in needed.split()]
    parameters += [inspect.Parameter(name, kind, default=DEFAULTS.get(name)) for name in optional.split()]
    return inspect.Signature(parameters)


class StandIn:
    """A release of Transformer Engine on some cuDNN.

    Args:
        release: key of RELEASES.
        packed: the log-sum-exp is [T, H, 1]; otherwise [n, H, max_q, 1].
    """

    TE_DType = DTYPES
    FusedAttnBackend = {"F16_arbitrary_seqlen": BACKEND}

    def __init__(self, release, packed=True):
        self.packed, self.calls = packed, []
        self.fused_attn_fwd, self.fused_attn_bwd = map(
            self._published, RELEASES[release], (self._forward, self._backward), ("fwd", "bwd"))

    def _published(self, text, compute, name):
        published = signature(text)

        def function(*args, **kwargs):
            bound = published.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.append((name, kwargs))
            return compute(SimpleNamespace(**bound.arguments))

        function.__signature__, function.__name__ = published, f"fused_attn_{name}"
        return function

    def _check(self, a):
        assert a.fused_attention_backend is BACKEND and a.qkv_layout == "thd_thd_thd"
        assert getattr(a, "o_format", "thd") == getattr(a, "do_format", "thd") == "thd"
        assert getattr(a, "dqkv_layout", "thd_thd_thd") == "thd_thd_thd"
        assert a.attn_mask_type in ("padding", "padding_causal") and a.attn_bias_type == "no_bias"
        assert a.dropout == 0.0 and a.softmax_type == "vanilla" and a.window_size == (-1, -1)
        assert type(a.attn_scale) is float and a.fake_dtype == a.q.dtype
        for x in (a.q, a.k, a.v):
            assert x.dim() == 3 and x.dtype in DTYPES and x.is_contiguous() and x.data_ptr() % 16 == 0
        assert a.q.shape[2] == a.k.shape[2] == a.v.shape[2] and a.q.shape[2] % 8 == 0
        lengths = []
        for cu, offsets, x, longest in (
                (a.cu_seqlens_q, a.cu_seqlens_q_padded, a.q, a.max_seqlen_q),
                (a.cu_seqlens_kv, a.cu_seqlens_kv_padded, a.k, a.max_seqlen_kv)):
            assert cu.dtype == torch.int32 and cu[0] == 0 and cu[-1] == x.shape[0]
            assert torch.equal(cu, offsets)
            assert type(longest) is int and longest >= cu.diff().max() and longest & (longest - 1) == 0
            lengths.append(tuple(cu.diff().tolist()))
        causal = a.attn_mask_type == "padding_causal"
        assert not causal or lengths[0] == lengths[1]
        return lengths, causal

    def _forward(self, a):
        assert a.is_training is True and a.attn_bias is None and not a.return_max_logit
        lengths, causal = self._check(a)
        out, lse = reference_forward(a.q, a.k, a.v, *lengths, causal, a.attn_scale)
        if not self.packed:
            stored = torch.full((len(lengths[0]), a.q.shape[1], a.max_seqlen_q, 1), torch.nan)
            for i, part in enumerate(lse.split(lengths[0])):
                stored[i, :, :len(part), 0] = part.T
            return out, [stored, torch.zeros(2, dtype=torch.int64)]
        return out, [lse.unsqueeze(-1).contiguous(), torch.zeros(2, dtype=torch.int64)]

    def _backward(self, a):
        lengths, causal = self._check(a)
        assert getattr(a, "dqkv_dtype", DTYPES[a.q.dtype]) == DTYPES[a.q.dtype]
        assert a.o.shape == a.d_o.shape == a.q.shape and a.o.dtype == a.d_o.dtype == a.q.dtype
        assert a.o.is_contiguous() and a.d_o.is_contiguous() and a.deterministic is False
        lse, random_state = a.aux_ctx_tensors
        assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.isfinite().any()
        assert random_state.shape == (2,) and random_state.dtype == torch.int64
        heads = a.q.shape[1]
        if self.packed:
            assert lse.shape == (a.q.shape[0], heads, 1)
            rows = lse.squeeze(-1)
        else:
            assert lse.shape == (len(lengths[0]), heads, a.max_seqlen_q, 1)
            rows = torch.cat([lse[i, :, :n, 0].T for i, n in enumerate(lengths[0])])
        grads = reference_backward(a.d_o, a.q, a.k, a.v, a.o, rows, *lengths, causal, a.attn_scale)
        return [*grads, None]


@pytest.mark.parametrize("packed", (True, False))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("widths", ((16, 16), (20, 12)), ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_every_segment_gets_its_own_numbers(release, widths, causal, packed):
    """Those of the reference kernel, rounded once to 16 bits on their way out."""
    shapes = ((9, 9), (0, 0), (70, 70)) if causal else ((1, 33), (70, 33), (0, 4), (17, 5))
    for dtype in DTYPES:
        engine = StandIn(release, packed)
        drawn = [draw(*shape, (4, 2), *widths, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        reference = get_kernel("reference", "cpu")
        for d, got in zip(drawn, play(te_fused.TeFusedKernel(engine), drawn, causal, 0.2), strict=True):
            out = got[0].to(dtype)
            ((dense, lse),) = reference.forward([Segment(*d[1:])], causal, 0.2)
            (grads,) = reference.backward([SegmentGrad(*d, out, lse)], causal, 0.2)
            for a, b in zip(got, (dense, lse, *grads), strict=True):
                assert a.dtype == torch.float32 and a.shape == b.shape
                if a.numel():
                    small = 1e-5 * float(b.abs().max()) + 1e-5
                    assert ((a - b).abs() <= torch.finfo(dtype).eps * b.abs() + small).all()
        assert [name for name, _ in engine.calls] == ["fwd", "bwd"]


def test_each_release_is_given_what_it_has():
    drawn = [draw(5, 5, (4, 2), 8, dtype=torch.bfloat16)]
    given = {}
    for release in RELEASES:
        engine = StandIn(release)
        play(te_fused.TeFusedKernel(engine), drawn, True, 0.2)
        given[release] = [set(kwargs) for _, kwargs in engine.calls]
    assert given["2.9"] == given["2.14"] and given["2.15"] == given["2.20"]
    assert given["2.15"][0] - given["2.9"][0] == {"o_format"}
    assert given["2.15"][1] - given["2.9"][1] == {"o_format", "do_format", "dqkv_layout"}
    assert given["2.9"][1] - given["2.15"][1] == {"dqkv_dtype"}


@pytest.mark.parametrize("packed", (True, False))
def test_a_backward_without_a_forward_before_it_learns_the_layout(packed):
    dout, q, k, v = draw(6, 9, (4, 2), 8, dtype=torch.bfloat16)
    out, lse, *want = oracle(dout, q, k, v, False, 0.2)
    engine = StandIn("2.15", packed)
    kernel = te_fused.TeFusedKernel(engine)
    segment = SegmentGrad(dout, q, k, v, out, lse)
    for _ in range(2):
        (grads,) = kernel.backward([segment], False, 0.2)
        assert all(err(a, b) < 0.03 for a, b in zip(grads, want, strict=True))
    assert [name for name, _ in engine.calls] == ["fwd", "bwd", "bwd"]


@pytest.mark.parametrize("packed", (True, False))
def test_rows_that_saw_nothing_get_no_gradient(packed):
    dout, q, k, v = draw(6, 6, (4, 2), 8, dtype=torch.bfloat16)
    kernel = te_fused.TeFusedKernel(StandIn("2.9", packed))
    ((out, lse),) = kernel.forward([Segment(q, k, v)], False, 0.3)
    out[2], lse[2] = 0.0, -torch.inf
    ((dq, dk, dv),) = kernel.backward([SegmentGrad(dout, q, k, v, out, lse)], False, 0.3)
    kept = torch.tensor([0, 1, 3, 4, 5])
    want = oracle(dout[kept], q[kept], k, v, False, 0.3)[2:]
    assert not dq[2].any() and all(err(a, b) < 0.03 for a, b in zip((dq[kept], dk, dv), want, strict=True))


def test_few_bounds_of_lengths():
    """cuDNN builds a graph for each: all lengths to 1000 have five."""
    assert {te_fused._bucket((n,)) for n in range(1, 1001)} == {64, 128, 256, 512, 1024}
    assert te_fused._bucket((3, 65, 7)) == 128


@pytest.mark.parametrize("release, old, new, told", (
    ("2.20", "qkv_layout", "layout", "without qkv_layout, asking for -"),
    ("2.20", "is_training", "training", "without is_training, asking for training"),
    ("2.20", " : ", " sink : ", "without -, asking for sink"),
))
def test_a_release_that_changed_is_named(monkeypatch, release, old, new, told):
    forward, backward = RELEASES[release]
    monkeypatch.setitem(RELEASES, "next", (forward.replace(old, new, 1), backward))
    with pytest.raises(UnsupportedError) as error:
        te_fused.TeFusedKernel(StandIn("next"))
    assert error.value.values == f"fused_attn_fwd: {told}" and "2.9 to 2.20" in error.value.rule


@pytest.mark.parametrize("told, dtype, width, capability, cudnn", (
    ("", torch.bfloat16, 128, (9, 0), 90600),
    ("", torch.float16, 256, (9, 0), 92000),
    ("", torch.bfloat16, 128, (10, 0), 91002),
    ("", torch.bfloat16, 128, (12, 0), 91801),
    ("compute capability 9.0, this is 8.0", torch.bfloat16, 128, (8, 0), 92000),
    ("this is 90500", torch.bfloat16, 128, (9, 0), 90500),
    ("this is 91001", torch.bfloat16, 128, (9, 0), 91001),
    ("need cuDNN 9.18.1", torch.bfloat16, 128, (12, 0), 91002),
    ("heads of 136 are wider than 128", torch.bfloat16, 136, (10, 0), 92000),
    ("not float32", torch.float32, 128, (9, 0), 92000),
))
def test_auto_takes_it_where_it_can_run(monkeypatch, told, dtype, width, capability, cudnn):
    Gpu(monkeypatch, capability=capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    assert "not installed" in te_fused.why_not(torch.device("cuda"), torch.bfloat16, 128)
    monkeypatch.setattr(te_fused.importlib.util, "find_spec", lambda name: name == "transformer_engine")
    broken = te_fused.why_not(torch.device("cuda"), dtype, width)
    assert bool(broken) and ("cannot be used" in broken) == (not told)  # found, but there is none to import
    monkeypatch.setattr(te_fused, "_transformer_engine", lambda: StandIn("2.15"))
    why = te_fused.why_not(torch.device("cuda"), dtype, width)
    assert told in why and bool(told) == bool(why)
    choice = choose_kernel("cuda", dtype, width)
    assert (choice.name == "te_fused") == (not told)
    assert choice.reason == ("the fastest here" if not told else choice.reason) and told in choice.reason
