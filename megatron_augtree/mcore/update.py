"""One optimizer step of a launcher: gradients by a plan, Megatron's DDP, Megatron's or torch's optimizer.

Neither Megatron's optimizers nor its clipping know fp64; there, and for SGD, torch's optimizers step on the
reduced `main_grad`. DDP itself reduces in the parameters' type.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_augtree.config import UnsupportedError

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


def wrap_model(model: GPTModel, *, distributed_optimizer: bool = False) -> DistributedDataParallel:
    """Megatron's DDP over the pool: sums gradients in the parameters' type (fp32 for 16-bit models)."""
    config = model.config
    config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.params_dtype.itemsize < 4,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
    )
    return DistributedDataParallel(config, settings, model)


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
        limit = self.clip_grad or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        self.inner.step()
        self.zero_grad()
        return True, norm, None

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
