"""Megatron's own ring context parallelism and ours, side by side on the same ranks.

    torchrun --nproc-per-node 8 scripts/regress_ring.py [--json FILE]

One group of responses to one prompt, one model, the same weights. The stock side is megatron-core's model
with Transformer Engine and --context-parallel-size of all ranks: every response is a sequence of its own.
Ours is the same model, bound to AugTree, under ``ring`` and ``augtree``. Reported for each: loss, difference
of the gradients, step time, peak memory. Ends with 1 where losses or gradients differ.

With --dry-run it runs on the CPU (gloo), small and in float32. There is no stock ring there: our ``ring``
mode stands in its place, and is labelled so; one rank alone has stock attention without a ring. That tests
this script, not stock Megatron.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import functools
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_augtree.attention.kernels import choose_kernel
from megatron_augtree.config import AugTreeConfig, AugTreeError, UnsupportedError
from megatron_augtree.data.groups import Group, Response
from megatron_augtree.mcore import cpu
from megatron_augtree.mcore.layer_spec import augtree_spec, prepare_model
from megatron_augtree.mcore.memory import PeakMemory
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.sampler import model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.update import wrap_model

STOCK, STAND_IN, ALONE = "stock TE ring", "our ring in place of stock", "stock, one rank without ring"
#: Largest difference relative to the largest entry: float32, and two 16-bit runs.
BARS = {torch.float32: 1e-5, torch.bfloat16: 0.1}


@dataclass
class Outcome:
    """What a side gave.

    Attributes:
        loss: of the step.
        gradients: reduced, by parameter, on the CPU.
        seconds: of a step, the median over rounds, on the slowest rank.
        peak_bytes: above the built model, of the rank that took most.
        note: how it was computed.
    """

    loss: float
    gradients: dict[str, Tensor]
    seconds: float
    peak_bytes: int
    note: str = ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="small, in float32, on the CPU")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    for name, default, text in (
            ("prompt-tokens", 8192, "tokens of the prompt"), ("responses", 8, "responses"),
            ("response-tokens", 1024, "tokens of the longest response"), ("num-layers", 4, "layers"),
            ("hidden-size", 2048, "hidden size"), ("num-attention-heads", 16, "query heads"),
            ("num-query-groups", 4, "KV heads"), ("vocab-size", 32768, "vocabulary"),
            ("rounds", 5, "timed steps")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default {default}")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.prompt_tokens, args.responses, args.response_tokens, args.rounds = 40, 4, 14, 1
        args.num_layers, args.hidden_size, args.vocab_size = 2, 64, 64
        args.num_attention_heads, args.num_query_groups = 4, 2
    return args


def check_machine() -> None:
    """Refuses a machine without what the stock side needs.

    Raises:
        UnsupportedError: names what is missing.
    """
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    engine = importlib.util.find_spec("transformer_engine") is not None
    if gpus < local or not engine:
        raise UnsupportedError(
            "the stock ring cannot run here",
            values=f"{gpus} GPUs for {local} ranks, Transformer Engine is "
            f"{'installed' if engine else 'not installed'}",
            rule="Megatron's ring context parallelism needs a GPU a rank and Transformer Engine",
            remedy="run it where both are there, or add --dry-run, which puts our ring in its place",
        )


def start(dry: bool) -> torch.device:
    """Joins the process group, with all ranks in one context-parallel group; the device of this rank."""
    if dry:
        cpu.install()
    device = torch.device("cpu")
    if not dry:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("gloo" if dry else "nccl")
    else:
        dist.init_process_group("gloo" if dry else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    return device


def make_model(args: argparse.Namespace, *, ours: bool) -> DistributedDataParallel:
    """The model of one side in Megatron's DDP; both sides begin with the same weights."""
    dry = args.dry_run
    dtype = torch.float32 if dry else torch.bfloat16
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads, num_query_groups=args.num_query_groups,
        ffn_hidden_size=args.hidden_size * 8 // 3 // 64 * 64 + 64, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, params_dtype=dtype, bf16=not dry,
        init_method_std=args.hidden_size**-0.5, use_cpu_initialization=True, calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        # Ours moves keys and values itself: to the layers it is a model without context parallelism.
        context_parallel_size=1 if ours else dist.get_world_size(), cp_comm_type="p2p",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm") if dry \
        else get_gpt_layer_with_transformer_engine_spec()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    model = GPTModel(config, augtree_spec(spec) if ours else spec, vocab_size=args.vocab_size,
                     max_sequence_length=args.prompt_tokens + args.response_tokens,
                     position_embedding_type="rope", share_embeddings_and_output_weights=False)
    model.to(device="cpu" if dry else torch.cuda.current_device(), dtype=dtype)
    if ours:
        prepare_model(model)
    return wrap_model(model)


def make_groups(args: argparse.Namespace) -> list[Group]:
    """One group with responses of several lengths that differ in their first token, from a seed."""
    draw = random.Random(0)
    lengths = [max(1, args.response_tokens * (i + 1) // args.responses) for i in range(args.responses)]
    responses = [(i, *(draw.randrange(args.vocab_size) for _ in range(n - 1))) for i, n in enumerate(lengths)]
    prompt = tuple(draw.randrange(args.vocab_size) for _ in range(args.prompt_tokens))
    return [Group("group", prompt, tuple(Response(r, (True,) * len(r)) for r in responses))]


class Stock:
    """Megatron's own way: every response with its prompt, cut as zigzag over the context-parallel group."""

    note = "every response a sequence"

    def __init__(self, args: argparse.Namespace, groups: list[Group], device: torch.device) -> None:
        self.ddp, self.groups, self.device = make_model(args, ours=False), groups, device

    def step(self) -> float:
        """Forward, backward, reduction; the loss."""
        total = torch.zeros((), device=self.device)
        count = sum(len(r.tokens) for g in self.groups for r in g.responses)
        for group in self.groups:
            for response in group.responses:
                ids, positions, labels, mask = (x.to(self.device) for x in zigzag_inputs(
                    [*group.prompt, *response.tokens], len(group.prompt), dist.get_world_size(),
                    dist.get_rank()))
                losses = self.ddp(ids, positions, None, labels=labels)
                share = (losses.float() * mask).sum() / count
                share.backward()
                total += share.detach()
        finalize_model_grads([self.ddp], None)
        dist.all_reduce(total)
        return float(total)


def zigzag_inputs(tokens: Sequence[int], prompt: int, ranks: int, rank: int) -> list[Tensor]:
    """A rank's chunks `rank` and 2 ranks - 1 - `rank` of one sequence that was padded at its end.

    Args:
        tokens: prompt and response.
        prompt: tokens of the prompt.
        ranks, rank: of the context-parallel group.

    Returns:
        [1, T] input ids, positions, labels, and a mask of the labels that are response tokens.
    """
    rows = len(tokens) - 1
    chunk = -(-rows // (2 * ranks))
    padding = 2 * ranks * chunk - rows
    columns = ([*tokens[:-1], *[0] * padding], range(rows + padding), [*tokens[1:], *[0] * padding],
               [float(prompt - 1 <= i < rows) for i in range(rows + padding)])
    mine = [slice(c * chunk, (c + 1) * chunk) for c in (rank, 2 * ranks - 1 - rank)]
    return [torch.tensor([[x for part in mine for x in list(column)[part]]]) for column in columns]


class Ours:
    """A mode of ours on the same ranks."""

    def __init__(self, args: argparse.Namespace, groups: list[Group], mode: str) -> None:
        self.ddp = make_model(args, ours=True)
        config = AugTreeConfig(mode=mode, cluster="cpu" if args.dry_run else "h100")
        shape = model_shape(self.ddp.module.config, args.vocab_size)
        self.batch = plan_step(groups, shape, dist.get_world_size(), config)
        self.note = self.batch.plan.note
        self.schedule = AugTreeSchedule(config)
        self.forward = functools.partial(forward_step, loss_fn=Objective(self.batch, "nll"))

    def step(self) -> float:
        """Forward, backward, reduction; the loss."""
        (found,) = self.schedule(forward_step_func=self.forward, data_iterator=iter([self.batch]),
                                 model=self.ddp)
        return found["loss"]


def measure(make: Callable[[], Stock | Ours], rounds: int, device: torch.device) -> Outcome:
    """One side from building to figures; its model is gone afterwards."""
    side, times = make(), []
    side.ddp.zero_grad_buffer()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = side.step()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with PeakMemory() as memory:
            loss = side.step()
        peak = memory.above_start_bytes
    found = {name: p.main_grad.detach().float().cpu() for name, p in side.ddp.module.named_parameters()}
    for _ in range(rounds + 1):  # the first warms up
        side.ddp.zero_grad_buffer()
        dist.barrier()
        began = time.perf_counter()
        side.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    worst = torch.tensor([statistics.median(times[1:]), float(peak)], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    outcome = Outcome(loss, found, float(worst[0]), int(worst[1]), side.note)
    del side
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return outcome


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest over tensors of max|a - b| / max|b|; max|b| at least 1e-3 of the largest tensor's."""
    sizes = {name: float(b.abs().max()) for name, b in want.items()}
    floor = 1e-3 * max(sizes.values())
    return max(float((got[n] - b).abs().max()) / max(sizes[n], floor) for n, b in want.items())


def compare(sides: dict[str, Outcome], bar: float) -> dict:
    """Figures of every side against the first."""
    first = next(iter(sides.values()))
    rows = {}
    for name, side in sides.items():
        loss = abs(side.loss - first.loss) / max(abs(first.loss), 1e-12)
        gradients = difference(side.gradients, first.gradients)
        rows[name] = {"loss": side.loss, "loss_difference": loss, "gradient_difference": gradients,
                      "seconds": side.seconds, "speedup": first.seconds / side.seconds,
                      "peak_bytes": side.peak_bytes, "note": side.note,
                      "good": loss <= bar and gradients <= bar}
    return rows


def table(rows: dict) -> str:
    """The figures as text."""
    lines = [f"{'':30}{'loss':>10}{'d loss':>10}{'d grad':>10}{'step ms':>10}{'x stock':>9}{'peak MiB':>10}"]
    for name, row in rows.items():
        lines.append(
            f"{name:30}{row['loss']:10.5f}{row['loss_difference']:10.1e}{row['gradient_difference']:10.1e}"
            f"{1e3 * row['seconds']:10.1f}{row['speedup']:9.2f}{row['peak_bytes'] / 2**20:10.1f}"
            f"{'' if row['good'] else '  WRONG'}  {row['note']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all sides; 0 where their numbers agree."""
    args = parse(argv)
    if not args.dry_run:
        check_machine()
    device = start(args.dry_run)
    groups, dtype = make_groups(args), torch.float32 if args.dry_run else torch.bfloat16
    ours = {mode: functools.partial(Ours, args, groups, mode) for mode in ("ring", "augtree")}
    makers = {STOCK: functools.partial(Stock, args, groups, device), **ours}
    if args.dry_run and dist.get_world_size() > 1:
        makers = {STAND_IN: ours["ring"], "augtree": ours["augtree"]}
    elif args.dry_run:
        makers = {ALONE: makers[STOCK], **ours}
    sides = {name: measure(make, args.rounds, device) for name, make in makers.items()}
    rows = compare(sides, BARS[dtype])
    report = {"ranks": dist.get_world_size(), "torch": torch.__version__, "dry_run": args.dry_run,
              "kernel": str(choose_kernel(device, dtype, args.hidden_size // args.num_attention_heads)),
              "sides": rows, "passed": all(row["good"] for row in rows.values())}
    if dist.get_rank() == 0:
        print(f"{report['ranks']} ranks, {str(dtype).removeprefix('torch.')}, our attention kernel: "
              f"{report['kernel']}\n{table(rows)}", flush=True)
        if args.json:
            Path(f"{args.json}.partial").write_text(json.dumps(report, indent=1))
            os.replace(f"{args.json}.partial", args.json)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return int(not report["passed"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AugTreeError as error:
        # Every rank finds the same; one says it.
        if int(os.environ.get("RANK", 0)) == 0:
            print(error, file=sys.stderr)
        sys.exit(2)
