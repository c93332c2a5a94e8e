"""One optimizer step of a launcher: gradients by a plan, Megatron's DDP, Megatron's or torch's optimizer.

Neither Megatron's optimizers nor its clipping know fp64; there, and for SGD, torch's optimizers step on the
reduced `main_grad`. DDP itself reduces in the parameters' type.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_augtree.config import UnsupportedError
from megatron_augtree.mcore.shards import counts_here, tensor_parallel_group

OPTIMIZERS = ("sgd", "adam")


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the optimizer's flags, by Megatron's names."""
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument("--clip-grad", type=float, default=0.0, help="0 does not clip")
    for name, default in (
        ("--adam-beta1", 0.9),
        ("--adam-beta2", 0.999),
        ("--adam-eps", 1e-8),
        ("--sgd-momentum", 0.0),
    ):
        group.add_argument(name, type=float, default=default)


def wrap_model(
    model: GPTModel,
    *,
    distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_size: int | None = None,
) -> DistributedDataParallel:
    """Megatron's DDP over the pool: sums gradients in the parameters' type (fp32 for 16-bit models).

    Args:
        model: the bare model.
        distributed_optimizer: optimizer state is cut over the pool.
        overlap_grad_reduce: buckets are reduced at the same time; no bit changes.
        overlap_param_gather: with the distributed optimizer, parameters are gathered layer by layer while the
            next step's first forward runs.
        bucket_size: parameters that are reduced together; None is Megatron's default.
    """
    if overlap_param_gather and not (distributed_optimizer and overlap_grad_reduce):
        raise UnsupportedError(
            "parameters cannot be gathered during the forward",
            values="--overlap-param-gather",
            rule="it needs --use-distributed-optimizer and --overlap-grad-reduce",
            remedy="add both, or leave it out",
        )
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype.itemsize < 4,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        bucket_size=bucket_size,
        use_distributed_optimizer=distributed_optimizer,
    )
    return DistributedDataParallel(config, settings, model)


def wrap_as_asked(args: argparse.Namespace, model: GPTModel) -> DistributedDataParallel:
    """`wrap_model` with a launcher's flags."""
    return wrap_model(
        model,
        distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        bucket_size=args.ddp_bucket_size,
    )


@dataclass
class TorchOptimizer:
    """torch's SGD or Adam on DDP's reduced gradients, with Megatron's interface.

    Attributes:
        inner: torch's optimizer.
        clip_grad: largest norm of the gradient; 0 does not clip.
    """

    inner: torch.optim.Optimizer
    clip_grad: float = 0.0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        """Forget the gradients; DDP's buffer is zeroed by DDP."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> tuple[bool, float, None]:
        """(stepped, gradient norm before clipping, None), as Megatron's optimizers return."""
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        norm = self._norm()
        if 0 < self.clip_grad < norm:
            for parameter in self.parameters:
                parameter.grad.mul_(self.clip_grad / (norm + 1e-6))  # as torch and Megatron clip
        self.inner.step()
        self.zero_grad()
        return True, norm, None

    def _norm(self) -> float:
        """Norm of the whole model's gradient, on every tensor-parallel rank."""
        squares = [p.grad.double().square().sum() for p in self.parameters if counts_here(p)]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        group = tensor_parallel_group()
        if group is not None:
            dist.all_reduce(total, group=group)
        return math.sqrt(float(total))

    def state_dict(self) -> dict:
        """torch's own."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """torch's own."""
        self.inner.load_state_dict(state)


def make_optimizer(args: argparse.Namespace, ddp: DistributedDataParallel):
    """Megatron's Adam in fp32 and bf16, torch's optimizers for SGD and in fp64.

    Raises:
        UnsupportedError: the distributed optimizer where torch's optimizer steps.
    """
    dtype = ddp.module.config.params_dtype
    if args.optimizer == "adam" and dtype is not torch.float64:
        config = OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            use_distributed_optimizer=args.use_distributed_optimizer,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        )
        return get_megatron_optimizer(config, [ddp])
    if args.use_distributed_optimizer:
        raise UnsupportedError(
            "the distributed optimizer cannot step here",
            values=f"--use-distributed-optimizer, --optimizer {args.optimizer}, --dtype {args.dtype}",
            rule="Megatron's distributed optimizer is Adam in fp32 or bf16",
            remedy="leave --use-distributed-optimizer out, or use --optimizer adam --dtype float32",
        )
    parameters = [p for p in ddp.parameters() if p.requires_grad]
    if args.optimizer == "sgd":
        inner = torch.optim.SGD(
            parameters, lr=args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay
        )
    else:
        inner = torch.optim.AdamW(
            parameters,
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            weight_decay=args.weight_decay,
        )
    return TorchOptimizer(inner, args.clip_grad)


def pool_size() -> int:
    """Ranks that hold the same parameters."""
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True)
