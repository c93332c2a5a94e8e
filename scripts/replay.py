"""Replays an update: the same groups and weights, by any mode, and writes everything that can be compared.

    torchrun --nproc-per-node 2 scripts/replay.py --data groups.jsonl --groups 0:2 \
        --context-parallel-mode augtree --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
        --vocab-size 512 --dtype float64 --optimizer sgd --dump out.safetensors

`--groups A:B` is one batch, `--steps n` repeats it. The dump (safetensors) holds ``param0/<name>`` (before),
``grad/<name>`` (step 1, reduced), ``logprob`` (step 1; a value a loss-bearing logical row, ordered by group,
response, token), ``loss`` (step 1) and ``param1/<name>`` (after the last step). Its metadata are JSON:

==============  ============================================================================================
``plan``        ``digest``, ``table``, and ``json``: save it as a file for ``--augtree-plan``
``rows``        [rank] rows computed in step 1
``messages``    [rank] messages sent in step 1
``bytes``       [rank] payload -> bytes sent in step 1
``peak_bytes``  [rank] largest resident memory in step 1, above model, gradient buffers and optimizer
``seconds``     rank 0's by phase, all steps together: ``read``, ``build``, ``plan``, ``forward_backward``,
                ``optimizer``; and ``total``
``steps``       [step] loss, gradient norm before clipping, metrics of the objective
==============  ============================================================================================

Mode ``unshared`` is megatron-core's own dense attention on one process, one sequence at a time, with
log-probs by ``log_softmax`` of its logits: nothing of AugTree takes part but the shims for the CPU.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor
from unshared import check_memory, response_mask, unshared_logprobs

from megatron_augtree.config import AugTreeConfig, AugTreeError, UnsupportedError
from megatron_augtree.data.groups import Group, Response
from megatron_augtree.mcore.agreement import compare_ranks
from megatron_augtree.mcore.arguments import (
    add_augtree_arguments,
    add_model_arguments,
    augtree_config,
    augtree_flag,
    check_supported,
)
from megatron_augtree.mcore.build import build_model, check_recompute, tensor_parallel_size
from megatron_augtree.mcore.launch import (
    RankParser,
    add_data_arguments,
    agree,
    agree_on_rank_0,
    env_world,
    folded_data,
    run,
    start,
)
from megatron_augtree.mcore.memory import PeakMemory
from megatron_augtree.mcore.objective import (
    Objective,
    add_loss_arguments,
    advantages_of,
    longest_response,
    loss_config,
    loss_constant,
)
from megatron_augtree.mcore.report import Report, StepRecord, figures_of
from megatron_augtree.mcore.sampler import StepBatch, model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, pool_size, wrap_as_asked
from megatron_augtree.mcore.weights import (
    check_folder,
    check_output,
    load_weights,
    parameters_of,
    reduced_gradients,
    save_dump,
)
from megatron_augtree.rl.losses import LossConfig

UNSHARED = "unshared"


@dataclass
class Clock:
    """Seconds by phase.

    Attributes:
        seconds: phase -> seconds.
        started: when the clock was made.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the block's time to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def total(self) -> dict[str, float]:
        """Seconds by phase, and from the start until now as ``total``."""
        return {**self.seconds, "total": time.perf_counter() - self.started}


@dataclass
class Forward:
    """What the forward and backward of one step gave, before the optimizer.

    Attributes:
        loss: the step's loss.
        metrics: of the objective.
        logprobs: [N] log-probs of the loss-bearing logical rows.
    """

    loss: float
    metrics: dict[str, float]
    logprobs: Tensor


class Planned:
    """Steps of a mode that plans.

    Args:
        args: parsed.
        groups: the batch.
        ddp: the model.
    """

    def __init__(self, args: argparse.Namespace, groups: Sequence[Group],
                 ddp: DistributedDataParallel) -> None:
        self.ddp, config, loss = ddp, augtree_config(args), loss_config(args)
        shape = model_shape(ddp.module.config, args.vocab_size)
        self.batch: StepBatch = agree(lambda: plan_step(groups, shape, pool_size(), config))
        self.schedule = AugTreeSchedule(config, temperature=loss.temperature, entropy=loss.entropy_coef > 0)
        agree(lambda: compare_ranks(self.schedule.transport, self.batch))
        constant = loss_constant(args, groups, longest_response(groups))
        objective = agree(lambda: Objective(self.batch, args.objective, loss, constant))
        self.step_func = functools.partial(forward_step, loss_fn=objective)

    def forward_backward(self) -> Forward:
        """Plays the plan once; gradients are reduced."""
        (metrics,) = self.schedule(forward_step_func=self.step_func, data_iterator=iter([self.batch]),
                                   model=self.ddp, collect=True)
        return Forward(metrics["loss"], metrics, self.schedule.last.values[:, 0])

    def facts(self) -> dict[str, Any]:
        """The plan, and what was computed and sent so far."""
        plan, traffic = self.batch.plan, self.schedule.transport.traffic
        rank = self.schedule.transport.rank
        mine = {"messages": traffic[rank].messages, "bytes": dict(traffic[rank].bytes)}
        everyone = gather(mine)
        return {"plan": {"digest": plan.digest(), "table": str(plan), "json": plan.to_json()},
                "rows": [plan.rows_of_rank(r) for r in range(plan.world)],
                "messages": [one["messages"] for one in everyone],
                "bytes": [one["bytes"] for one in everyone]}


class Unshared:
    """Steps of the un-shared run; arguments as for `Planned`."""

    def __init__(self, args: argparse.Namespace, groups: Sequence[Group],
                 ddp: DistributedDataParallel) -> None:
        self.ddp, self.objective = ddp, args.objective
        self.responses: list[tuple[Group, Response, float]] = []
        for group in groups:
            advantages = [0.0] * len(group.responses)
            if args.objective == "grpo":
                advantages = agree(functools.partial(advantages_of, group, LossConfig().advantage))
            self.responses += [(group, *pair) for pair in zip(group.responses, advantages, strict=True)]
        self.count = sum(sum(response.loss_mask) for _, response, _ in self.responses)

    def forward_backward(self) -> Forward:
        """One sequence after the other, then megatron-core's own finalisation of gradients."""
        loss, logprobs = 0.0, [torch.zeros(0, dtype=next(self.ddp.parameters()).dtype)]
        for (_, response, advantage), values in zip(self.responses, self.values(), strict=True):
            logprobs.append(values.detach())
            if len(values):
                share = self.summed(values, response, advantage) / self.count
                share.backward()
                loss += float(share.detach())
        finalize_model_grads([self.ddp], None)
        return Forward(loss, {"loss": loss}, torch.cat(logprobs))

    def values(self) -> Iterator[Tensor]:
        """Log-probs of every response's loss-bearing tokens."""
        return unshared_logprobs(self.ddp.module, whole_sequences(self.responses))

    def summed(self, logprobs: Tensor, response: Response, advantage: float) -> Tensor:
        """The objective of one response, not yet divided; GRPO as its paper writes it, without KL."""
        if self.objective == "nll":
            return -logprobs.sum()
        old = logprobs.detach()
        if response.old_logprobs is not None:
            kept = [x for x, wanted in zip(response.old_logprobs, response.loss_mask, strict=True) if wanted]
            old = torch.tensor(kept, dtype=logprobs.dtype)
        ratio, limits = (logprobs - old).exp(), LossConfig()
        held = ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high)
        return -torch.minimum(ratio * advantage, held * advantage).sum()

    def facts(self) -> dict[str, Any]:
        """The same keys as of a plan."""
        rows = sum(len(group.prompt) + len(response.tokens) - 1 for group, response, _ in self.responses)
        table = f"{UNSHARED}: {rows} rows in {len(self.responses)} sequences on 1 rank"
        return {"plan": {"digest": "", "table": table, "json": None}, "rows": [rows], "messages": [0],
                "bytes": [{}]}


def whole_sequences(
        responses: Sequence[tuple[Group, Response, float]]) -> list[tuple[list[int], list[bool]]]:
    """(tokens, loss mask) of every response with its prompt."""
    found = []
    for group, response, _ in responses:
        tokens, mask = response_mask(group.prompt, response.tokens)
        mask[len(group.prompt):] = response.loss_mask
        found.append((tokens, mask))
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments that fit together.

    Raises:
        AugTreeError: any that do not.
    """
    parser = RankParser(prog="replay.py", description=__doc__.partition("\n")[0])
    add_data_arguments(parser)
    add_mode_arguments(parser)
    add_loss_arguments(parser, preset="")
    parser.add_argument("--steps", type=int, default=1, help="how often the batch is repeated")
    parser.add_argument("--dump", required=True, metavar="OUT.safetensors",
                        help="parameters, gradients, log-probs, loss; as metadata plan, traffic, seconds")
    add_optimizer_arguments(parser)
    args = parser.parse_args(argv)
    check_mode(args)
    check_loss(args)
    if args.steps < 1:
        raise AugTreeError("nothing to do", values=f"--steps {args.steps}", rule="there is at least one step",
                           remedy="correct the flag")
    check_output(args.dump, "--dump")
    return args


def add_mode_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of model and mode."""
    add_model_arguments(parser)
    add_augtree_arguments(parser, more_modes=(UNSHARED,))
    parser.epilog = (f"--context-parallel-mode {UNSHARED} is megatron-core's own dense attention, one "
                     "sequence at a time, on one process without torchrun.")


def check_mode(args: argparse.Namespace) -> None:
    """Checks model flags, mode, and what goes with it.

    Raises:
        AugTreeError: no mode, a value out of range, or flags that the mode would ignore.
    """
    check_supported(args)
    check_recompute(args)
    tensor_parallel_size(args, env_world())
    if args.context_parallel_mode is None:
        raise AugTreeError("no mode", values="--context-parallel-mode is not given",
                           rule=f"a replay computes in one of AugTree's modes, or in {UNSHARED}",
                           remedy="add --context-parallel-mode")
    if args.context_parallel_mode != UNSHARED:
        augtree_config(args)
        check_folder(args.augtree_trace_dir, "--augtree-trace-dir")
        return
    ignored = [augtree_flag(f.name) for f in dataclasses.fields(AugTreeConfig) if f.name != "mode"
               and getattr(args, augtree_flag(f.name).lstrip("-").replace("-", "_")) != f.default]
    if args.use_distributed_optimizer:
        ignored.append("--use-distributed-optimizer")
    if ignored or env_world() > 1:
        raise UnsupportedError(
            "the un-shared run stands alone", values=", ".join([*ignored, f"{env_world()} processes"]),
            rule=f"{UNSHARED} is one process, without a plan", remedy="remove these flags, and torchrun")


def check_loss(args: argparse.Namespace) -> None:
    """Checks the flags of the objective.

    Raises:
        AugTreeError: a value out of range, or a loss that the un-shared run does not have.
    """
    loss = loss_config(args)
    if args.context_parallel_mode == UNSHARED and loss != LossConfig():
        differ = [f"{f.name} {getattr(loss, f.name)}" for f in dataclasses.fields(LossConfig)
                  if getattr(loss, f.name) != f.default]
        raise UnsupportedError(
            "the un-shared run has one policy loss", values=", ".join(differ),
            rule=f"{UNSHARED} has a formula of its own, for the loss without --loss-preset and its flags",
            remedy=f"leave these flags out, or compare with another mode than {UNSHARED}")


def build(args: argparse.Namespace, groups: Sequence[Group]) -> tuple[DistributedDataParallel, Any]:
    """Model and optimizer.

    Raises:
        AugTreeError: weights that do not fit, an optimizer that cannot step, or too little memory.
    """
    alone = args.context_parallel_mode == UNSHARED
    if alone:
        check_memory([len(g.prompt) + len(r.tokens) for g in groups for r in g.responses], args)
    model = build_model(args, augtree=not alone, seed=args.seed, logit_chunk_mib=args.augtree_logit_chunk_mib)
    if args.load:
        load_weights(model, args.load)
    ddp = wrap_as_asked(args, model)
    ddp.zero_grad_buffer()  # touched, hence resident: gradients belong to the model, not to the step's peak
    return ddp, make_optimizer(args, ddp)


def gather(value: Any) -> list[Any]:
    """[rank] everyone's value."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main(argv: Sequence[str] | None = None) -> None:
    """Replays, and writes the dump on rank 0."""
    clock = Clock()
    args = agree(lambda: parse(argv))
    start(args)
    with clock("read"):
        groups = agree(lambda: folded_data(args))
    with clock("build"):
        ddp, optimizer = agree(lambda: build(args, groups))
    with clock("plan"):
        steps = (Unshared if args.context_parallel_mode == UNSHARED else Planned)(args, groups, ddp)
    replay(args, steps, ddp, optimizer, clock)
    if isinstance(steps, Planned):
        steps.schedule.write_trace()


def replay(args: argparse.Namespace, steps: Planned | Unshared, ddp: DistributedDataParallel, optimizer: Any,
           clock: Clock) -> None:
    """All steps, and the dump."""
    tensors = {f"param0/{name}": value for name, value in parameters_of(ddp.module).items()}
    metadata: dict[str, Any] = {"steps": []}
    report = Report(0, args.steps, speaks=dist.get_rank() == 0 and isinstance(steps, Planned))
    for step in range(args.steps):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        with PeakMemory() as memory, clock("forward_backward"):
            done = steps.forward_backward()
        if step == 0:
            tensors |= {f"grad/{name}": value for name, value in reduced_gradients(ddp).items()}
            exact = args.dtype == "float64"
            tensors["logprob"] = done.logprobs.to(torch.float64 if exact else torch.float32).contiguous()
            tensors["loss"] = torch.tensor(done.loss, dtype=torch.float64)
            metadata |= {**steps.facts(), "peak_bytes": gather(memory.above_start_bytes)}
        with clock("optimizer"):
            _, norm, _ = optimizer.step()
        metadata["steps"].append({**done.metrics, "loss": done.loss, "grad_norm": norm and float(norm)})
        if isinstance(steps, Planned):
            figures = figures_of(steps.schedule, steps.schedule.seconds)
            report.step(StepRecord(iteration=step + 1, loss=done.loss, grad_norm=float(norm or 0),
                                   metrics=done.metrics, **figures))
    report.close()
    tensors |= {f"param1/{name}": value for name, value in parameters_of(ddp.module).items()}
    metadata["seconds"] = clock.total()
    agree_on_rank_0(lambda: save_dump(args.dump, tensors, metadata))
    if dist.get_rank() == 0:
        sys.stdout.write(f"{metadata['plan']['table']}\nloss {done.loss:.6f}, "
                         f"{metadata['seconds']['total']:.2f} s; wrote {args.dump}\n")


if __name__ == "__main__":
    run(main)
