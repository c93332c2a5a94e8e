"""torch's variable-length flash attention for CUDA, forward and explicit backward.

The operators are ``aten::_flash_attention_forward`` and ``_backward`` of torch 2.11 and newer, called by
keyword after their schemas were compared with what is given. The backward takes the *merged* output and
log-sum-exp, so it returns this segment's exact share of the gradients. Grouped KV heads are never expanded.

Only squares are causal, where the top-left and the bottom-right mask are the same. The log-sum-exp is
``[Hq, Tq]`` in these operators. Under ``torch.use_deterministic_algorithms`` the backward adds in a fixed
order; without it its last bits vary from run to run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_augtree.attention.kernels.varlen import Launch, VarlenKernel, why_not_varlen
from megatron_augtree.config import UnsupportedError

_GIVEN = {
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "scale",
}  # fmt: skip
#: Arguments of each operator that this kernel gives.
FORWARD_ARGUMENTS = frozenset(_GIVEN | {"return_debug_mask"})
BACKWARD_ARGUMENTS = frozenset(_GIVEN | {"grad_out", "out", "logsumexp", "rng_state", "unused"})

#: Oldest compute capability of the flash kernels.
OLDEST = (8, 0)


def why_not(device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Why this kernel cannot run here; empty where it can.

    Args:
        device: where the tensors are.
        dtype: of queries, keys and values.
        width: of the widest head.
    """
    told = why_not_varlen(device, dtype)
    if told:
        return told
    if width > CudaFlashKernel.widest:
        return f"heads of {width} are wider than {CudaFlashKernel.widest}"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        return f"compute capability {found[0]}.{found[1]} is older than {OLDEST[0]}.{OLDEST[1]}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this torch was built without flash attention"
    return _mismatch(_operator("forward"), FORWARD_ARGUMENTS) or _mismatch(
        _operator("backward"), BACKWARD_ARGUMENTS
    )


class CudaFlashKernel(VarlenKernel):
    """See the module; the contract is ``protocol.Kernel``.

    Raises:
        UnsupportedError: torch's operators take other arguments.
    """

    name = "cuda_flash"

    def __init__(self) -> None:
        self._forward, self._backward = _operator("forward"), _operator("backward")
        wrong = _mismatch(self._forward, FORWARD_ARGUMENTS) or _mismatch(self._backward, BACKWARD_ARGUMENTS)
        if wrong:
            raise UnsupportedError(
                "torch's flash attention has changed",
                values=f"torch {torch.__version__}: {wrong}",
                rule="the kernel `cuda_flash` knows the operators of torch 2.11 to 2.13",
                remedy="install one of these, or choose the kernel `reference`",
            )

    def _run_forward(self, launch: Launch) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._forward(return_debug_mask=False, **_common(launch))
        expected = (launch.q.shape[1], launch.q.shape[0])
        if tuple(lse.shape) != expected:
            raise UnsupportedError(
                "torch's flash attention returned a log-sum-exp of another shape",
                values=f"torch {torch.__version__}: {list(lse.shape)}",
                rule=f"it is [query heads, rows], {list(expected)}",
                remedy="install torch 2.11 or newer, or choose the kernel `reference`",
            )
        return out, lse.transpose(0, 1)

    def _run_backward(self, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
        return self._backward(
            grad_out=launch.dout,
            out=launch.out,
            logsumexp=launch.lse.transpose(0, 1).contiguous(),
            # The random state of dropout, which is off: read by nobody, but it has to be there.
            rng_state=torch.empty(2, dtype=torch.uint64, device=launch.q.device),
            unused=torch.empty(0, device=launch.q.device),
            **_common(launch),
        )


def _common(launch: Launch) -> dict:
    return {
        "query": launch.q,
        "key": launch.k,
        "value": launch.v,
        "cum_seq_q": launch.cu_q,
        "cum_seq_k": launch.cu_k,
        # An upper bound will do. At 1 the operator takes a path for decoding that lays heads out differently.
        "max_q": max(2, *launch.q_lengths),
        "max_k": max(2, *launch.k_lengths),
        "dropout_p": 0.0,
        "is_causal": launch.causal,
        "scale": launch.scale,
    }


def _operator(direction: str) -> Callable:
    return getattr(torch.ops.aten, f"_flash_attention_{direction}").default


def _mismatch(operator: Callable, given: frozenset[str]) -> str:
    """How an operator's arguments differ from those given; empty where they fit."""
    arguments = {argument.name: argument for argument in operator._schema.arguments}
    unknown = sorted(given - arguments.keys())
    missing = sorted(
        name for name, argument in arguments.items()
        if name not in given and not argument.has_default_value()
    )  # fmt: skip
    told = [f"no argument {', '.join(unknown)}"] if unknown else []
    told += [f"an argument {', '.join(missing)} without default"] if missing else []
    return "; ".join(told)
