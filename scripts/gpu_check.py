"""Does AugTree compute right, and how fast, on the GPU of this machine? One GPU, under 8 minutes.

    python scripts/gpu_check.py [--json FILE]

Needs torch 2.11 or newer, and neither Megatron nor data. Four checks:

kernels    every attention kernel that runs here, forward and backward, against attention in float64: its
           error is at most twice that of plain attention in the same 16 bits; grouped heads, odd lengths
plans      a small GPT's gradients under fused and phased plans, all ranks of a block in this process
attention  time of a tree's attention against dense attention of as many floating-point operations
step       a GPT's whole forward and backward on a shared prompt against one sequence a response

Ends with 1 where a number is wrong. Without a GPU, or with --dry-run, the same code runs small on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from small_gpt import Group, SmallGPT, dense, draw_group, flash
from torch import Tensor

from megatron_augtree.attention.kernels import Segment, SegmentGrad, choose_kernel, get_kernel
from megatron_augtree.attention.kernels.choice import why_not
from megatron_augtree.attention.merge import merge_
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.tree import Forest
from megatron_augtree.runtime.engine import Engine, SequenceValues
from megatron_augtree.runtime.transport import LocalTransport
from megatron_augtree.runtime.tree_attention import tree_attention

#: Plans of the second check: ranks of the block, and how the plan is made.
PLANS = (
    (1, {}),
    (2, {"lane_degree": 2}),
    (4, {"primitive": "move_kv", "keep": False}),
    (4, {"pieces": 2, "wide": 1}),
    (4, {"phase": "phased", "waves": 2, "chunks": 2, "primitive": "move_q", "keep": False}),
    (4, {"phase": "phased", "waves": 3, "primitive": "gather_kv", "lane_degree": 4}),
)
FLOAT32_BAR = 1e-5
#: Largest difference of two 16-bit gradients: a few per cent is rounding, a response left out is a third.
STEP_BAR = 0.25


@dataclass(frozen=True)
class Sizes:
    """How large the checks are.

    Attributes:
        heads: (query heads, KV heads), each with a head width.
        rows: unit of the kernels' segments.
        model: layers, hidden, heads, KV heads, vocabulary of the second check.
        group: prompt tokens, responses, tokens of the longest response, of the second check.
        tree: the same of the third and the fourth check; all responses are equally long.
        step_model: as `model`, of the fourth check.
        rounds: timed repetitions.
    """

    heads: tuple = (((8, 2), 128), ((8, 8), 64), ((4, 1), 80), ((4, 2), 20))
    rows: int = 256
    model: tuple = (3, 256, 4, 2, 512)
    group: tuple = (301, 5, 130)
    tree: tuple = (8192, 8, 512)
    step_model: tuple = (4, 1024, 8, 2, 8192)
    rounds: int = 5


SMALL = Sizes(rows=24, model=(2, 64, 4, 2, 64), group=(41, 4, 13), tree=(96, 3, 16),
              step_model=(2, 64, 4, 2, 64), rounds=1)


@dataclass
class Check:
    """What is checked on, and what was found.

    Attributes:
        device, dtype: of the checked computation.
        sizes: see `Sizes`.
        found: figures, for ``--json``.
        wrong: what is wrong.
        kernels: attention kernels that run here.
        began: when the check was started.
    """

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    found: dict = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        """A progress line."""
        print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", flush=True)

    def allowed(self, plain: float) -> float:
        """The largest error: twice that of plain 16-bit attention; in float32 a fixed one."""
        return FLOAT32_BAR if self.dtype == torch.float32 else 2 * plain

    def judge(self, name: str, error: float, plain: float) -> None:
        """Note an error, relative to the largest entry."""
        good = error <= self.allowed(plain)
        self.found.setdefault("errors", {})[name] = {"error": error, "plain": plain, "good": good}
        self.say(f"{'ok   ' if good else 'WRONG'} {name}: error {error:.1e}, plain {plain:.1e}")
        if not good:
            self.wrong.append(name)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a call, seconds."""
        times = []
        for _ in range(self.sizes.rounds + 2):  # the first two warm up
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest over tensors of max|a - b| / max|b|; max|b| at least 1e-3 of the largest tensor's."""
    sizes = [float(b.detach().abs().max()) for b in want]
    worst = 0.0
    for a, b, size in zip(got, want, sizes):
        distance = float((a.detach().double() - b.detach().double()).abs().max())
        worst = max(worst, distance / max(size, 1e-3 * max(sizes)) if math.isfinite(distance) else math.inf)
    return worst


# Kernels.

def check_kernels(check: Check) -> None:
    """Every kernel that runs here."""
    cpu = check.device.type == "cpu"
    for name in ("cpu_flash", "reference") if cpu else ("cuda_flash", "te_fused"):
        told = why_not(name, check.device, check.dtype, 128)
        if told:
            check.say(f"skipped kernel {name}: {told}")
            check.found.setdefault("skipped", {})[name] = told
            if name == "cuda_flash":
                check.wrong.append(f"kernel {name} does not run: {told}")
            continue
        check.kernels.append(name)
        for heads, width in check.sizes.heads:
            for causal in (True, False):
                kernel_case(check, name, heads, width, causal)


def kernel_case(check: Check, name: str, heads: tuple[int, int], width: int, causal: bool) -> None:
    """Segments of several lengths in one call; rectangles meet their keys in two pieces."""
    unit, generator = check.sizes.rows, torch.Generator().manual_seed(width)
    squares = ((unit, unit), (0, 0), (1, 1), (unit // 2 + 77, unit // 2 + 77))
    rectangles = ((1, 2 * unit + 5), (unit, unit + 3), (0, unit), (unit - 7, 4 * unit))
    drawn = [_draw(rows, keys, heads, width, generator, check) for rows, keys in
             (squares if causal else rectangles)]
    scale = 1.5 * width**-0.5
    got = _by_kernel(get_kernel(name, check.device), drawn, causal, scale)
    # Without pairs there is nothing to compare with, but the shapes.
    whole = [i for i, d in enumerate(drawn) if len(d[0]) and len(d[2])]
    for i, d in enumerate(drawn):
        shapes = [list(x.shape) for x in got[i]]
        expected = [list(d[0].shape), list(d[1].shape), list(d[2].shape), list(d[3].shape)]
        if shapes != expected or (i not in whole and any(x.any() for x in got[i])):
            check.wrong.append(f"kernel {name}: segment {i} gave {shapes}")
    want, plain = ([_by_autograd(drawn[i], causal, scale, dtype) for i in whole]
                   for dtype in (torch.float64, check.dtype))
    for place, part in enumerate(("out", "dq", "dk", "dv")):
        # One error over all segments: short ones alone hold little but rounding.
        a, b, c = (torch.cat([x[place].double() for x in each])
                   for each in ([got[i] for i in whole], want, plain))
        kind = "squares" if causal else "pieces"
        label = f"kernel {name}, heads {heads[0]}/{heads[1]} of {width}, {kind}"
        check.judge(f"{label}, {part}", error_of([a], [b]), error_of([c], [b]))


def _draw(rows: int, keys: int, heads: tuple[int, int], width: int, generator: torch.Generator,
          check: Check) -> list[Tensor]:
    """``dout, q, k, v`` in the checked type."""
    sizes = ((rows, heads[0]), (rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
    return [torch.randn(*size, width, generator=generator).to(check.device, check.dtype) for size in sizes]


def _by_kernel(kernel, drawn: list[list[Tensor]], causal: bool, scale: float) -> list[tuple[Tensor, ...]]:
    """``(out, dq, dk, dv)`` a segment; not causal, keys come in two pieces whose results are merged."""
    cuts = [[len(d[2])] if causal else [len(d[2]) // 3, len(d[2]) - len(d[2]) // 3] for d in drawn]
    keys, values = ([d[i].split(cut) for d, cut in zip(drawn, cuts)] for i in (2, 3))
    merged = [(torch.zeros_like(d[1], dtype=torch.float32),
               torch.full(d[1].shape[:2], -torch.inf, device=d[1].device)) for d in drawn]
    pieces = range(1 if causal else 2)
    for piece in pieces:
        segments = [Segment(d[1], k[piece], v[piece]) for d, k, v in zip(drawn, keys, values)]
        for into, part in zip(merged, kernel.forward(segments, causal, scale)):
            merge_(*into, *part)
    grads = [kernel.backward([SegmentGrad(d[0], d[1], k[piece], v[piece], *into)
                              for d, k, v, into in zip(drawn, keys, values, merged)], causal, scale)
             for piece in pieces]
    return [(into[0], sum(g[i][0] for g in grads), torch.cat([g[i][1] for g in grads]),
             torch.cat([g[i][2] for g in grads])) for i, into in enumerate(merged)]


def _by_autograd(drawn: list[Tensor], causal: bool, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = (x.to(dtype).requires_grad_() for x in drawn[1:])
    out, _ = dense(q, k, v, causal, scale)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), drawn[0].to(dtype))


# A whole model.

class TreeStep:
    """A policy-gradient step by a plan; gradients are left in the parameters.

    Args:
        model, group, forest, plan: the step.
        check: its device.
        kernel: name of the attention kernel.
    """

    def __init__(self, model: SmallGPT, group: Group, forest: Forest, plan: Plan, check: Check,
                 kernel: str = "auto") -> None:
        self.model, self.group = model, group
        self.engine = Engine(plan, forest, self.values, LocalTransport(plan.world),
                             get_kernel(kernel, check.device), check.device)

    def values(self, local, context) -> Tensor:
        """[n, 1] log-probs of the scored rows of a pass."""
        scale = self.model.width**-0.5
        hidden = self.model(local.inputs, local.positions, lambda q, k, v, layer: tree_attention(
            q, k, v, context, layer, scale))
        return self.model.logprobs(hidden[local.scored], local.targets).unsqueeze(-1)

    def loss(self, values: SequenceValues) -> tuple[Tensor, dict]:
        """The share of some sequences."""
        parts = values.values[:, 0].split(values.offsets.diff().tolist())
        weighted = [-self.group.advantages[i] * x.sum() for i, x in zip(values.index, parts)]
        return sum(weighted) / self.group.tokens, {}

    def __call__(self) -> float:
        """The loss."""
        return self.engine.play(self.loss).loss


def unshared_step(model: SmallGPT, group: Group, check: Check) -> Tensor:
    """The same, every response alone, by attention as one writes it down."""
    total, scale = torch.zeros((), device=check.device), model.width**-0.5
    for response, advantage in zip(group.responses, group.advantages):
        ids = torch.tensor([*group.prompt, *response], device=check.device)
        positions = torch.arange(len(ids) - 1, device=check.device)
        hidden = model(ids[:-1], positions, lambda q, k, v, layer: dense(q, k, v, True, scale)[0])
        values = model.logprobs(hidden[-len(response):], ids[-len(response):])
        share = -advantage * values.sum() / group.tokens
        share.backward()
        total = total + share.detach()
    return total


def flattened_step(model: SmallGPT, group: Group, check: Check) -> Tensor:
    """The same, all responses as one batch of equally long sequences, by torch's fused attention."""
    ids = torch.tensor([[*group.prompt, *r] for r in group.responses], device=check.device)
    count, length = ids.shape[0], ids.shape[1] - 1
    positions = torch.arange(length, device=check.device).repeat(count)
    hidden = model(ids[:, :-1].reshape(-1), positions, lambda q, k, v, layer: flash(q, k, v, count))
    answer = len(group.responses[0])
    scored = hidden.view(count, length, -1)[:, -answer:]
    values = model.logprobs(scored.reshape(count * answer, -1), ids[:, -answer:].reshape(-1))
    advantages = torch.tensor(group.advantages, device=check.device)
    loss = -(values.view(count, answer).sum(1) * advantages).sum() / group.tokens
    loss.backward()
    return loss.detach()


def gradients(model: SmallGPT) -> list[Tensor]:
    """Of all parameters; they are taken away."""
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def check_plans(check: Check) -> None:
    """Gradients of a small GPT under several plans against float64, one sequence a response."""
    sizes = check.sizes
    group = draw_group(*sizes.group, sizes.model[-1], equal=False)
    model = SmallGPT(*sizes.model).to(check.device, check.dtype)
    exact = copy.deepcopy(model).double()
    loss = unshared_step(exact, group, check)
    want = [loss, *gradients(exact)]
    plain = error_of([unshared_step(model, group, check), *gradients(model)], want)
    forest = group.forest
    for world, choice in PLANS:
        plan = build(Choice(degree=world, **choice), forest.shape, world, 10)
        plan.check()
        for kernel in check.kernels:
            loss = TreeStep(model, group, forest, plan, check, kernel)()
            got = [torch.tensor(loss, device=check.device), *gradients(model)]
            check.judge(f"plan on {world} by {kernel}: {plan.note}", error_of(got, want), plain)


# Speed.

def check_attention(check: Check) -> None:
    """A tree's attention against dense attention with as many (query, key) pairs."""
    (_, hidden, heads, kv_heads, _), (prompt, count, length) = check.sizes.step_model, check.sizes.tree
    group = draw_group(prompt, count, length, 4096, equal=True)
    forest = group.forest
    plan = build(Choice(degree=1), forest.shape, 1, 10)
    area = plan.program(0).area(0)
    engine = Engine(plan, forest, None, LocalTransport(1), get_kernel("auto", check.device), check.device)
    context, width = engine.context(plan.passes[0], {}), hidden // heads

    def timed(rows: int, attend: Callable[..., Tensor]) -> float:
        made = [torch.randn(rows, n, width, device=check.device).to(check.dtype).requires_grad_()
                for n in (heads, kv_heads, kv_heads)]
        dout = torch.randn(rows, heads, width, device=check.device).to(check.dtype)
        return check.seconds(lambda: torch.autograd.grad(attend(*made), made, dout))

    tree = timed(forest.shape.total_rows, lambda q, k, v: tree_attention(q, k, v, context, 0, width**-0.5))
    rows = math.isqrt(2 * area)
    plain = timed(rows, lambda q, k, v: flash(q, k, v, 1))
    check.found["attention"] = {"tree_s": tree, "dense_s": plain, "ratio": tree / plain, "pairs": area}
    check.say(f"attention of {count} x {length} on {prompt} rows: {1e3 * tree:.2f} ms; dense, {rows} rows "
              f"with as many pairs: {1e3 * plain:.2f} ms; ratio {tree / plain:.2f}")


def check_step(check: Check) -> None:
    """A whole forward and backward, shared prompt against one sequence a response."""
    sizes = check.sizes
    group = draw_group(*sizes.tree, sizes.step_model[-1], equal=True)
    model = SmallGPT(*sizes.step_model).to(check.device, check.dtype)
    forest = group.forest
    plan = build(Choice(degree=1), forest.shape, 1, 10)
    want = [flattened_step(model, group, check), *gradients(model)]
    step = TreeStep(model, group, forest, plan, check)
    got = [torch.tensor(step(), device=check.device), *gradients(model)]
    difference, bar = error_of(got, want), FLOAT32_BAR if check.dtype == torch.float32 else STEP_BAR
    if not difference <= bar:
        check.wrong.append(f"step: gradients differ by {difference:.1e}, more than {bar:.0e}")
    times = {}
    for name, run in (("flattened", lambda: flattened_step(model, group, check)),
                      ("tree", step)):
        if check.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(check.device)
        times[f"{name}_s"] = check.seconds(lambda run=run: (run(), gradients(model)))
        if check.device.type == "cuda":
            times[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated(check.device)
    ratio = times["flattened_s"] / times["tree_s"]
    rows = len(group.responses) * (len(group.prompt) + len(group.responses[0]) - 1)
    check.found["step"] = {**times, "speedup": ratio, "difference": difference,
                           "rows": [forest.shape.total_rows, rows]}
    check.say(f"step of {forest.shape.total_rows} rows: {1e3 * times['tree_s']:.1f} ms; flattened, {rows} "
              f"rows: {1e3 * times['flattened_s']:.1f} ms; {ratio:.2f} x as fast; gradients differ by "
              f"{difference:.1e}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    parser.add_argument("--dry-run", action="store_true",
                        help="small sizes in float32 on the CPU; so it is where there is no GPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks; 0 where all numbers are right."""
    args = parse(argv)
    dry = args.dry_run or not torch.cuda.is_available()
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float32 if dry else torch.bfloat16
    sizes = SMALL if dry else Sizes()
    if not dry and torch.cuda.get_device_properties(device).total_memory < 40 << 30:
        sizes = replace(sizes, tree=(4096, 8, 256))
    check = Check(device, dtype, sizes)
    name = "CPU, a dry run: its times mean nothing" if dry else torch.cuda.get_device_name(device)
    check.say(f"torch {torch.__version__}, {name}, {str(dtype).removeprefix('torch.')}")
    check.say(f"attention kernel: {choose_kernel(device, dtype)}")
    for run in (check_kernels, check_plans, check_attention, check_step):
        run(check)
    seconds = time.perf_counter() - check.began
    report = {"torch": torch.__version__, "device": name, "dry_run": dry, "passed": not check.wrong,
              "kernel": choose_kernel(device, dtype)._asdict(), "seconds": seconds, "wrong": check.wrong,
              **check.found}
    if args.json:
        Path(f"{args.json}.partial").write_text(json.dumps(report, indent=1))
        os.replace(f"{args.json}.partial", args.json)
    check.say("all numbers are right" if not check.wrong else "WRONG: " + "; ".join(check.wrong))
    return int(bool(check.wrong))


if __name__ == "__main__":
    sys.exit(main())
