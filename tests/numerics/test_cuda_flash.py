"""`cuda_flash` and what it shares with other GPU kernels, against a stand-in with torch's own schema.

The stand-in computes by the reference kernel and asserts everything the real operators ask for: argument
names, types, layouts, cumulative lengths. No GPU takes part; `scripts/gpu_check.py` runs the real ones.
"""

from __future__ import annotations

import pytest
import torch

from megatron_augtree.attention.kernels import Segment, SegmentGrad, cuda_flash, get_kernel, varlen
from megatron_augtree.attention.kernels.choice import AutoKernel, choose_kernel
from megatron_augtree.config import UnsupportedError
from tests.numerics.test_kernels import draw, err, oracle
from tests.numerics.varlen_reference import reference_backward, reference_forward

NAMES = ("out", "lse", "dq", "dk", "dv")
DTYPES = (torch.bfloat16, torch.float16)


class StandIn:
    """Both operators, with the schemas of the installed torch. Attributes: the calls' segment lengths."""

    def __init__(self):
        self.calls = []
        self.forward_schema = torch.ops.aten._flash_attention_forward.default._schema
        self.backward_schema = torch.ops.aten._flash_attention_backward.default._schema

    def _accept(self, schema, given):
        """torch's own rule: every argument is known, and there unless it has a default."""
        arguments = {a.name: a for a in schema.arguments}
        assert not given.keys() - arguments.keys()
        assert all(a.has_default_value() for name, a in arguments.items() if name not in given)

    def _check(self, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale):
        for x in (query, key, value):
            assert x.dim() == 3 and x.dtype in DTYPES and x.stride(2) == 1 and x.data_ptr() % 16 == 0
            assert all(x.stride(d) * 2 % 16 == 0 and x.stride(d) > 0 for d in (0, 1))
        assert query.shape[2] == key.shape[2] == value.shape[2] and query.shape[2] % 8 == 0
        assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
        lengths = []
        for cum, x, longest in ((cum_seq_q, query, max_q), (cum_seq_k, key, max_k)):
            assert cum.dtype == torch.int32 and cum.is_contiguous() and cum[0] == 0
            assert cum[-1] == x.shape[0] and cum.diff().min() > 0
            assert type(longest) is int and longest >= max(2, int(cum.diff().max()))
            lengths.append(tuple(cum.diff().tolist()))
        assert len(lengths[0]) == len(lengths[1])
        assert dropout_p == 0.0 and type(scale) is float and type(is_causal) is bool
        assert not is_causal or lengths[0] == lengths[1]
        return lengths

    def forward(self, *, return_debug_mask, **given):
        self._accept(self.forward_schema, {**given, "return_debug_mask": return_debug_mask})
        assert return_debug_mask is False
        lengths = self._check(**given)
        self.calls.append(lengths)
        out, lse = reference_forward(given["query"], given["key"], given["value"], *lengths,
                                     given["is_causal"], given["scale"])
        empty = torch.empty(0)
        return out, lse.T.contiguous(), torch.empty(2, dtype=torch.uint64), empty, empty

    def backward(self, *, grad_out, out, logsumexp, rng_state, unused, **given):
        self._accept(self.backward_schema, {**given, "grad_out": 0, "out": 0, "logsumexp": 0, "rng_state": 0,
                                            "unused": 0})
        query = given["query"]
        assert grad_out.shape == out.shape == query.shape and grad_out.dtype == out.dtype == query.dtype
        assert grad_out.stride(2) == out.stride(2) == 1
        assert logsumexp.shape == (query.shape[1], query.shape[0]) and logsumexp.is_contiguous()
        assert logsumexp.dtype == torch.float32 and not (logsumexp == -torch.inf).any()
        assert rng_state.shape == (2,) and rng_state.dtype == torch.uint64 and unused.numel() == 0
        lengths = self._check(**given)
        self.calls.append(lengths)
        return reference_backward(grad_out, query, given["key"], given["value"], out, logsumexp.T, *lengths,
                                  given["is_causal"], given["scale"])


class Operator:
    """A function that looks like an operator."""

    def __init__(self, function, schema):
        self.function, self._schema = function, schema

    def __call__(self, *args, **kwargs):
        assert not args
        return self.function(**kwargs)


@pytest.fixture
def stand_in(monkeypatch):
    made = StandIn()
    operators = {"forward": Operator(made.forward, made.forward_schema),
                 "backward": Operator(made.backward, made.backward_schema)}
    monkeypatch.setattr(cuda_flash, "_operator", operators.__getitem__)
    return made


def play(kernel, drawn, causal, scale):
    """Results and gradients of segments, each ``(out, lse, dq, dk, dv)``."""
    results = kernel.forward([Segment(*d[1:]) for d in drawn], causal, scale)
    grads = kernel.backward([SegmentGrad(*d, *r) for d, r in zip(drawn, results, strict=True)], causal, scale)
    return [(*r, *g) for r, g in zip(results, grads, strict=True)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("widths", ((16, 16), (20, 20), (24, 16), (16, 40)), ids=str)
@pytest.mark.parametrize("heads", ((4, 1), (4, 2), (4, 4)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_segment_gets_its_own_numbers(stand_in, dtype, heads, widths, causal):
    """Those of the reference kernel, rounded once to 16 bits on their way out."""
    shapes = ((9, 9), (1, 1), (33, 33)) if causal else ((1, 33), (9, 33), (17, 2))
    drawn = [draw(*shape, heads, *widths, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    kernel, reference = cuda_flash.CudaFlashKernel(), get_kernel("reference", "cpu")
    for d, got in zip(drawn, play(kernel, drawn, causal, 0.2), strict=True):
        out = got[0].to(dtype)  # what a fused kernel keeps of it
        ((_, lse),) = reference.forward([Segment(*d[1:])], causal, 0.2)
        (grads,) = reference.backward([SegmentGrad(*d, out, lse)], causal, 0.2)
        dense = oracle(*d, causal, 0.2)[0]
        for name, a, b in zip(NAMES, got, (dense, lse, *grads), strict=True):
            assert a.dtype == torch.float32 and a.shape == b.shape
            small = 1e-5 * float(b.abs().max()) + 1e-5
            assert ((a - b).abs() <= torch.finfo(dtype).eps * b.abs() + small).all(), name
    assert [len(call[0]) for call in stand_in.calls] == [3, 3]


@pytest.mark.parametrize("causal", (False, True))
def test_segments_without_a_pair_never_reach_the_operator(stand_in, causal):
    shapes = ((0, 0), (5, 5), (0, 0)) if causal else ((0, 4), (5, 7), (3, 0))
    drawn = [draw(*shape, (4, 2), 8, dtype=torch.bfloat16) for shape in shapes]
    results = play(cuda_flash.CudaFlashKernel(), drawn, causal, 0.3)
    assert stand_in.calls == [[shapes[1][:1], shapes[1][1:]]] * 2
    for (rows, _), (out, lse, *grads), d in zip(shapes, results, drawn, strict=True):
        assert out.shape == (rows, 4, 8) and lse.shape == (rows, 4)
        assert [g.shape for g in grads] == [x.shape for x in d[1:]]
        assert all(x.dtype == torch.float32 for x in (out, lse, *grads))
    assert (results[2][1] == -torch.inf).all() and not results[2][2].any()
    assert cuda_flash.CudaFlashKernel().forward([], causal, 1.0) == []


def test_rows_that_saw_nothing_get_no_gradient(stand_in):
    dout, q, k, v = draw(6, 6, (4, 2), 8, dtype=torch.bfloat16)
    kernel = cuda_flash.CudaFlashKernel()
    ((out, lse),) = kernel.forward([Segment(q, k, v)], False, 0.3)
    out[2], lse[2] = 0.0, -torch.inf
    ((dq, dk, dv),) = kernel.backward([SegmentGrad(dout, q, k, v, out, lse)], False, 0.3)
    kept = torch.tensor([0, 1, 3, 4, 5])
    want = oracle(dout[kept], q[kept], k, v, False, 0.3)[2:]
    assert not dq[2].any() and all(err(a, b) < 0.03 for a, b in zip((dq[kept], dk, dv), want, strict=True))


def test_adjacent_segments_are_one_view_and_others_small_copies(stand_in, monkeypatch):
    dout, q, k, v = draw(30, 30, (4, 2), 8, dtype=torch.bfloat16)
    out, lse = torch.zeros(30, 4, 8), torch.zeros(30, 4)
    cuts = ((0, 4), (4, 11), (11, 30))
    adjacent = [tuple(x[lo:hi] for x in (dout, q, k, v, out, lse)) for lo, hi in cuts]
    joined = varlen.join([s[1] for s in adjacent])
    assert joined.data_ptr() == q.data_ptr() and torch.equal(joined, q)
    assert varlen.group_runs(adjacent) == [[0, 1, 2]]
    apart = [adjacent[0], adjacent[2]]
    assert torch.equal(varlen.join([s[1] for s in apart]), torch.cat([q[:4], q[11:]]))
    # The same rows twice, or rows of another tensor, are no continuation.
    assert not varlen._continues(q[:4], q[:4]) and not varlen._continues(q[:4], q.clone()[4:])
    assert varlen.group_runs(apart) == [[0, 1]]
    monkeypatch.setattr(varlen, "COPY_LIMIT", sum(x.numel() * x.element_size() for x in adjacent[0]))
    assert varlen.group_runs(apart) == [[1], [0]]
    assert varlen.group_runs(adjacent) == [[0, 1, 2]]
    # Split launches give the same numbers in the same places.
    kernel = cuda_flash.CudaFlashKernel()
    drawn = [(s[0], *s[1:4]) for s in apart]
    alone = play(kernel, drawn, True, 0.3)
    assert [call[0] for call in stand_in.calls] == [(19,), (4,), (19,), (4,)]
    monkeypatch.setattr(varlen, "COPY_LIMIT", 1 << 20)
    for a, b in zip(alone, play(kernel, drawn, True, 0.3), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_memory_layouts_that_the_operator_cannot_read_are_copied(stand_in):
    drawn = draw(12, 12, (4, 2), 8, dtype=torch.bfloat16)
    want = play(cuda_flash.CudaFlashKernel(), [drawn], True, 0.3)[0]
    kinds = (
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        lambda x: torch.cat([x, x], -1)[..., 8:],
        lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:],
        lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for kind in kinds:
        got = play(cuda_flash.CudaFlashKernel(), [[kind(x) for x in drawn]], True, 0.3)[0]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ones = torch.ones((), dtype=torch.bfloat16).expand(12, 4, 8)
    play(cuda_flash.CudaFlashKernel(), [(ones, *drawn[1:])], True, 0.3)  # no stride of 0 arrives


def test_cumulative_lengths_are_made_once():
    first = varlen.cumulative((3, 1, 5), torch.device("cpu"))
    assert first.tolist() == [0, 3, 4, 9] and first.dtype == torch.int32
    assert varlen.cumulative((3, 1, 5), torch.device("cpu")) is first


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_wider_types_are_refused(stand_in, dtype):
    _, q, k, v = draw(3, 3, (4, 2), 8, dtype=dtype)
    with pytest.raises(UnsupportedError, match="bfloat16 or float16") as error:
        cuda_flash.CudaFlashKernel().forward([Segment(q, k, v)], True, 1.0)
    assert str(dtype) in error.value.values and "`auto`" in error.value.remedy
    wide = draw(3, 3, (1, 1), 264, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="width 264"):
        cuda_flash.CudaFlashKernel().forward([Segment(*wide[1:])], True, 1.0)


def test_the_installed_torch_accepts_the_call():
    """The schemas fit, and torch's own shape functions give what the kernel expects."""
    kernel = cuda_flash.CudaFlashKernel()
    launch = varlen.Launch(
        q=torch.empty(7, 4, 16, dtype=torch.bfloat16, device="meta"),
        k=torch.empty(9, 2, 16, dtype=torch.bfloat16, device="meta"),
        v=torch.empty(9, 2, 16, dtype=torch.bfloat16, device="meta"),
        q_lengths=(3, 4), k_lengths=(5, 4),
        cu_q=torch.empty(3, dtype=torch.int32, device="meta"),
        cu_k=torch.empty(3, dtype=torch.int32, device="meta"), causal=False, scale=0.3)
    out, lse = kernel._run_forward(launch)
    assert out.shape == (7, 4, 16) and lse.shape == (7, 4)
    grads = kernel._run_backward(launch._replace(
        dout=launch.q, out=launch.q, lse=torch.empty(7, 4, device="meta")))
    assert [g.shape for g in grads] == [launch.q.shape, launch.k.shape, launch.v.shape]


def test_operators_that_changed_are_named(monkeypatch):
    schema = torch.ops.aten._flash_attention_backward.default._schema
    real = cuda_flash._operator
    monkeypatch.setattr(cuda_flash, "_operator",
                        lambda kind: Operator(None, schema) if kind == "forward" else real(kind))
    with pytest.raises(UnsupportedError) as error:
        cuda_flash.CudaFlashKernel()
    assert "no argument return_debug_mask" in error.value.values
    assert "an argument grad_out, logsumexp, out, rng_state, unused without default" in error.value.values


def test_another_shape_of_the_log_sum_exp_is_refused(stand_in, monkeypatch):
    _, q, k, v = draw(3, 3, (4, 2), 8, dtype=torch.bfloat16)
    kernel = cuda_flash.CudaFlashKernel()
    plain = kernel._forward
    monkeypatch.setattr(kernel, "_forward", lambda **given: (plain(**given)[0], torch.zeros(1, 4, 3)))
    with pytest.raises(UnsupportedError, match=r"\[1, 4, 3\]"):
        kernel.forward([Segment(q, k, v)], True, 1.0)


class Gpu:
    """What is asked of a GPU, as one that is not here would answer."""

    def __init__(self, monkeypatch, capability=(8, 0), cuda="13.0", flash=True):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)


@pytest.mark.parametrize("told, dtype, width, gpu", (
    ("", torch.bfloat16, 128, {}),
    ("", torch.float16, 256, {"capability": (12, 0)}),
    ("not built for NVIDIA", torch.bfloat16, 128, {"cuda": None}),
    ("not float32", torch.float32, 128, {}),
    ("not float64", torch.float64, 128, {}),
    ("wider than 256", torch.bfloat16, 264, {}),
    ("older than 8.0", torch.bfloat16, 128, {"capability": (7, 5)}),
    ("without flash attention", torch.bfloat16, 128, {"flash": False}),
))
def test_auto_on_a_gpu(monkeypatch, told, dtype, width, gpu):
    Gpu(monkeypatch, **gpu)
    why = cuda_flash.why_not(torch.device("cuda"), dtype, width)
    assert told in why and bool(told) == bool(why)
    choice = choose_kernel("cuda", dtype, width)
    assert choice.name == ("reference" if told else "cuda_flash") and "te_fused" in choice.reason
    assert told in str(choice)


def test_auto_decides_by_the_tensors_it_sees(monkeypatch, stand_in):
    """The choice is asked for once a type and width, and the kernel it names runs."""
    asked = []

    def choose(device, dtype, width):
        asked.append((dtype, width))
        return choose_kernel("meta" if dtype == torch.float32 else device, dtype, width)._replace(
            name="reference" if dtype == torch.float32 else "cuda_flash")

    monkeypatch.setattr("megatron_augtree.attention.kernels.choice.choose_kernel", choose)
    kernel = get_kernel("auto", "cuda")
    assert isinstance(kernel, AutoKernel)
    assert kernel.forward([], True, 1.0) == kernel.backward([], True, 1.0) == []
    for dtype in (torch.float32, torch.bfloat16):
        drawn = [draw(n, n, (4, 2), 8, dtype=dtype) for n in (5, 3)]
        for d, got in zip(drawn, play(kernel, drawn, True, 0.3), strict=True):
            assert all(err(a, b) < (1e-5 if dtype == torch.float32 else 0.03)
                       for a, b in zip(got, oracle(*d, True, 0.3), strict=True))
    assert asked == [(torch.float32, 8), (torch.bfloat16, 8)] and len(stand_in.calls) == 2
