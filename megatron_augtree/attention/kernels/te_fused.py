"""cuDNN's fused attention through Transformer Engine 2.9 to 2.20, forward and explicit backward.

``fused_attn_fwd`` and ``fused_attn_bwd`` change their arguments between releases (2.15 added formats of the
output and took the type of the gradients away), so both are called by keyword with what their signatures
have. What all releases must know is checked once; an argument that this kernel does not know, and that has no
default, is an error rather than a guess.

Rows are packed, ``thd``. Rectangles use the mask ``padding``, squares ``padding_causal``; no mask that
depends on alignment is used. The log-sum-exp is ``[Tq, Hq, 1]`` or, with some versions of cuDNN,
``[n, Hq, max_q, 1]``; the backward is given the layout that the forward returned.

No GPU has run this file yet: it is tested against stand-ins with the published signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_augtree.attention.kernels.varlen import Launch, VarlenKernel, why_not_varlen
from megatron_augtree.config import UnsupportedError

#: Given where a release has them: output formats (2.15 on), type of the gradients (until 2.14).
_SOME_FORWARD = frozenset({"o_format"})
_SOME_BACKWARD = frozenset({"o_format", "do_format", "dqkv_layout", "dqkv_dtype"})

#: cuDNN's first version with packed rows for grouped KV heads, and versions that compute them wrongly.
_OLDEST_CUDNN, _BROKEN_CUDNN = 90600, (91000, 91001)


def why_not(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Why this kernel cannot run here; empty where it can. Arguments as for ``cuda_flash.why_not``."""
    told = why_not_varlen(device, dtype)
    if told:
        return told
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    told = _gate(torch.cuda.get_device_capability(device), torch.backends.cudnn.version() or 0, width)
    if told:
        return told
    try:
        TeFusedKernel()
    except (UnsupportedError, ImportError, OSError, AttributeError, KeyError) as error:
        return f"Transformer Engine cannot be used: {str(error).splitlines()[0]}"
    return ""


def _gate(capability: tuple[int, int], cudnn: int, width: int) -> str:
    """What cuDNN needs for packed rows; ``cudnn`` as 91002 for 9.10.2. Empty where it is there."""
    if capability < (9, 0):
        return f"packed rows need compute capability 9.0, this is {capability[0]}.{capability[1]}"
    if cudnn < _OLDEST_CUDNN or cudnn in _BROKEN_CUDNN:
        return f"packed rows need cuDNN 9.6 or newer, and not 9.10.0 or 9.10.1; this is {cudnn}"
    if capability[0] == 12 and cudnn < 91801:
        return f"packed rows on compute capability 12 need cuDNN 9.18.1, this is {cudnn}"
    widest = 256 if capability[0] == 9 else 128
    return f"heads of {width} are wider than {widest}" if width > widest else ""


class TeFusedKernel(VarlenKernel):
    """See the module; the contract is ``protocol.Kernel``.

    Args:
        engine: has ``fused_attn_fwd``, ``fused_attn_bwd``, ``FusedAttnBackend`` and ``TE_DType``; Transformer
            Engine's by default.

    Raises:
        UnsupportedError: the functions take other arguments.
    """

    name = "te_fused"
    packed = True

    def __init__(self, engine: Any = None) -> None:
        self._engine = engine if engine is not None else _transformer_engine()
        self._backend = self._engine.FusedAttnBackend["F16_arbitrary_seqlen"]
        self._forward = _Adapted(self._engine.fused_attn_fwd, _SOME_FORWARD)
        self._backward = _Adapted(self._engine.fused_attn_bwd, _SOME_BACKWARD)
        self._forward.check({*_COMMON, "is_training"})
        self._backward.check({*_COMMON, "o", "d_o", "aux_ctx_tensors", "deterministic"})
        # A fact of the machine, learned from the first call.
        self._packed_lse: bool | None = None

    def _run_forward(self, launch: Launch) -> tuple[Tensor, Tensor]:
        out, aux, *_ = self._forward(is_training=True, o_format="thd", **self._common(launch))
        lse = aux[0]
        self._packed_lse = lse.dim() == 3
        return out.view(launch.q.shape), _rows_of(lse, launch)

    def _run_backward(self, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
        if self._packed_lse is None:
            self._run_forward(launch)  # only to learn the layout: a backward without any forward before it
        common = self._common(launch)
        lse = _stored_as(launch, self._packed_lse, common["max_seqlen_q"])
        # The random state of dropout, which is off.
        random_state = torch.zeros(2, dtype=torch.int64, device=launch.q.device)
        dq, dk, dv, *_ = self._backward(
            o=launch.out,
            d_o=launch.dout,
            aux_ctx_tensors=[lse, random_state],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            o_format="thd",
            do_format="thd",
            dqkv_layout="thd_thd_thd",
            dqkv_dtype=self._engine.TE_DType[launch.q.dtype],
            **common,
        )
        return dq, dk, dv

    def _common(self, launch: Launch) -> dict:
        given = {
            "max_seqlen_q": _bucket(launch.q_lengths),
            "max_seqlen_kv": _bucket(launch.k_lengths),
            "cu_seqlens_q": launch.cu_q,
            "cu_seqlens_kv": launch.cu_k,
            "q": launch.q,
            "k": launch.k,
            "v": launch.v,
            "fake_dtype": launch.q.dtype,
            "fused_attention_backend": self._backend,
            # Where sequences begin in memory: nothing lies between them.
            "cu_seqlens_q_padded": launch.cu_q,
            "cu_seqlens_kv_padded": launch.cu_k,
            "attn_scale": launch.scale,
            "dropout": 0.0,
            "qkv_layout": "thd_thd_thd",
            "attn_bias_type": "no_bias",
            "attn_mask_type": "padding_causal" if launch.causal else "padding",
        }
        return given


#: What `TeFusedKernel._common` gives to both functions.
_COMMON = frozenset({
    "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "q", "k", "v", "fake_dtype",
    "fused_attention_backend", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "attn_scale", "dropout",
    "qkv_layout", "attn_bias_type", "attn_mask_type",
})  # fmt: skip


class _Adapted:
    """A function called with those of the given keywords that its release has."""

    def __init__(self, function: Callable, optional: frozenset[str]) -> None:
        self.function, self.optional = function, optional
        self.parameters = inspect.signature(function).parameters

    def check(self, always: set[str]) -> None:
        """Refuses a function without an argument that is always given, or with one that never is.

        Raises:
            UnsupportedError: names these arguments.
        """
        known = always | self.optional
        missing = sorted(always - self.parameters.keys())
        strange = sorted(
            name for name, p in self.parameters.items() if p.default is p.empty and name not in known
        )
        if missing or strange:
            raise UnsupportedError(
                "Transformer Engine's fused attention has changed",
                values=f"{self.function.__name__}: without {', '.join(missing) or '-'}, "
                f"asking for {', '.join(strange) or '-'}",
                rule="the kernel `te_fused` knows the functions of Transformer Engine 2.9 to 2.20",
                remedy="install one of these releases, or choose the kernel `cuda_flash`",
            )

    def __call__(self, **given: Any) -> Any:
        return self.function(**{
            name: value for name, value in given.items()
            if name in self.parameters or name not in self.optional
        })  # fmt: skip


def _transformer_engine() -> SimpleNamespace:
    attention = importlib.import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
    constants = importlib.import_module("transformer_engine.pytorch.constants")
    return SimpleNamespace(
        fused_attn_fwd=attention.fused_attn_fwd,
        fused_attn_bwd=attention.fused_attn_bwd,
        FusedAttnBackend=attention.FusedAttnBackend,
        TE_DType=constants.TE_DType,
    )


def _bucket(lengths: tuple[int, ...]) -> int:
    """An upper bound of the lengths: the next power of two, at least 64.

    cuDNN builds and keeps a graph for every pair of bounds; lengths are new in every step, powers of two are
    not.
    """
    return max(64, 1 << (max(lengths) - 1).bit_length())


def _rows_of(lse: Tensor, launch: Launch) -> Tensor:
    """``[Tq, Hq]`` of a log-sum-exp ``[Tq, Hq, 1]`` or ``[n, Hq, max_q, 1]``."""
    if lse.dim() == 3:
        return lse.squeeze(-1)
    return torch.cat([lse[i, :, :rows, 0].transpose(0, 1) for i, rows in enumerate(launch.q_lengths)])


def _stored_as(launch: Launch, packed: bool, longest: int) -> Tensor:
    """The launch's log-sum-exp in the layout of this cuDNN."""
    if packed:
        return launch.lse.unsqueeze(-1).contiguous()
    heads = launch.lse.shape[1]
    stored = launch.lse.new_zeros((len(launch.q_lengths), heads, longest, 1))
    for i, part in enumerate(launch.lse.split(launch.q_lengths)):
        stored[i, :, : part.shape[0], 0] = part.transpose(0, 1)
    return stored
