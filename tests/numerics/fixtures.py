"""The model, the data, the oracle and the yardstick that all parity tests share.

The oracle is megatron-core's dense attention, one response at a time (``scripts/unshared.py``), under
losses written here. The fixture's attention is peaked (a test measures it), so that a dropped or misplaced
key shows.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_augtree.config import MODES, AugTreeConfig
from megatron_augtree.data.groups import Group, Response, fingerprint
from megatron_augtree.mcore import arguments, build
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.sampler import StepBatch, sequences_of
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.planning import schedule as planning
from megatron_augtree.planning.baselines import UNSHARED, Costs, baseline_plan
from megatron_augtree.planning.candidates import Choice
from megatron_augtree.planning.candidates import build as build_plan
from megatron_augtree.planning.plan import Pass, Plan
from megatron_augtree.planning.tree import Forest, from_sequences
from megatron_augtree.runtime.prefetch import split
from megatron_augtree.runtime.transport import LocalTransport, Transport
from scripts.unshared import response_mask, unshared_logprobs

VOCAB = 64
MODEL = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 "
         "--group-query-attention --num-query-groups 2 --ffn-hidden-size 64 --vocab-size 64 "
         "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
         "--init-method-std 0.15")
#: What a row's linear layers cost in (query, key) pairs, where a plan is built directly.
UNIT = 40
LR = {"sgd": 0.1, "adam": 0.01}


def parse(text: str = MODEL, dtype: str = "float64") -> argparse.Namespace:
    """Model arguments by Megatron's names."""
    parser = argparse.ArgumentParser()
    arguments.add_model_arguments(parser)
    return parser.parse_args([*text.split(), "--dtype", dtype])


def build_model(args: argparse.Namespace, *, augtree: bool, seed: int = 3) -> torch.nn.Module:
    """A model with peaked attention; stock and AugTree models of one seed have the same weights."""
    model = build.build_model(args, augtree=augtree, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_qkv.weight" in name:
                parameter.mul_(1.5)
            if name.endswith("layernorm.weight"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return model


# Data.

def tokens(seed: int, count: int) -> tuple[int, ...]:
    """Seeded token ids."""
    draw = random.Random(seed)
    return tuple(draw.randrange(VOCAB) for _ in range(count))


def response(ids: Sequence[int], mask: Sequence[bool] | None = None) -> Response:
    """A response; all of its tokens carry a loss unless `mask` says otherwise."""
    return Response(tuple(ids), tuple(mask) if mask is not None else (True,) * len(ids))


def group(prompt: Sequence[int], *answers: Sequence[int] | Response, name: str = "g") -> Group:
    """A group of token lists or responses."""
    made = tuple(a if isinstance(a, Response) else response(a) for a in answers)
    return Group(name, tuple(prompt), made)


def _distinct(prompt_seed: int, prompt: int, lengths: Sequence[int]) -> Group:
    """Responses that differ in their first token."""
    answers = [(((7 * i + 1) % VOCAB), *tokens(100 * prompt_seed + i, n - 1)) if n else ()
               for i, n in enumerate(lengths)]
    return group(tokens(prompt_seed, prompt), *answers)


def ragged() -> list[Group]:
    """The fixture of the case list: P = 11, responses of 5, 1, 9 and 3 tokens."""
    return [_distinct(1, 11, [5, 1, 9, 3])]


def one_level() -> list[Group]:
    """A single response: a tree of one node, with masked tokens in its middle."""
    return [group(tokens(2, 9), response(tokens(3, 14), [i not in (4, 5, 9) for i in range(14)]))]


def three_levels() -> list[Group]:
    """Two turns: responses share a prompt, and pairs of them a first turn; only second turns are scored."""
    first, second = tokens(5, 6), (9, *tokens(6, 4))
    answers = [(*turn, tail, *tokens(50 + i, n)) for i, (turn, tail, n) in enumerate(
        [(first, 1, 4), (first, 2, 0), (first, 3, 7), (second, 4, 2), (second, 5, 5)])]
    return [group(tokens(4, 8), *[response(a, [i >= 5 for i in range(len(a))]) for a in answers])]


def inner_losses() -> list[Group]:
    """A shared assistant turn carries a loss for two of the three responses that go through it."""
    turn, user = tokens(7, 5), tokens(8, 3)
    answers = [(*turn, *user, i, *tokens(70 + i, 3 + 2 * i)) for i in range(3)]
    masks = [[t < 5 or t >= 8 for t in range(len(a))] for a in answers]
    masks[1][:5] = [False] * 5
    return [group(tokens(9, 7), *map(response, answers, masks), turn[:3], (60, 61))]


def merged() -> list[Group]:
    """Identical, nested and empty responses."""
    a = tokens(11, 6)
    return [group(tokens(10, 6), a, a, a[:2], (), (63, 5), a)]


def several() -> list[Group]:
    """Four groups: two share a spine of 8 rows, one has a prompt of one token, one a single response."""
    prompt = tokens(12, 9)
    return [
        _with(group((*prompt, 1, 2, 3), (4, 5, 6, 7), (8,), (9, 10, 11)), "a"),
        _with(group((*prompt, 30, 31), (12, 13), (14, 15, 16, 17, 18)), "b"),
        _with(group((40,), (41, 42, 43), (44, 45)), "c"),
        _with(group(tokens(13, 5), tokens(14, 6)), "d"),
    ]


def one_prompt_token() -> list[Group]:
    """P = 1 and G = 8: eight trees of one node, some of one row."""
    return [group((17,), *[(i, *tokens(20 + i, i % 4 + 2 * (i == 5))) for i in range(8)])]


def one_valid_token() -> list[Group]:
    """One token of the whole batch carries a loss; a group is fully masked."""
    last = response(tokens(31, 7), [i == 6 for i in range(7)])
    return [group(tokens(30, 6), response(tokens(32, 4), [False] * 4), last),
            group(tokens(33, 5), *[response(tokens(34 + i, 3), [False] * 3) for i in range(2)])]


def _with(made: Group, name: str) -> Group:
    return replace(made, name=name)


DATA: dict[str, Callable[[], list[Group]]] = {
    f.__name__: f for f in (ragged, one_level, three_levels, inner_losses, merged, several)}
EDGES: dict[str, Callable[[], list[Group]]] = {f.__name__: f for f in (one_prompt_token, one_valid_token)}


# The oracle.

@dataclass
class Outcome:
    """What a step gives.

    Attributes:
        loss: of the step.
        logprobs: [N] of all loss-bearing logical rows, by group, response and token.
        grads: every parameter's gradient.
    """

    loss: float
    logprobs: Tensor
    grads: dict[str, Tensor]


def sequences(groups: Iterable[Group]) -> list[tuple[list[int], list[bool]]]:
    """Every response with its prompt, and the loss mask over both."""
    out = []
    for made in groups:
        for answer in made.responses:
            ids, mask = response_mask(made.prompt, answer.tokens)
            mask[len(made.prompt):] = answer.loss_mask
            out.append((ids, mask))
    return out


def nll(logprobs: Tensor, answer: Response, tokens_: int) -> Tensor:
    """A response's share of the negative log-likelihood."""
    del answer
    return -logprobs.sum() / tokens_


def grpo(logprobs: Tensor, answer: Response, tokens_: int, low: float = 0.2, high: float = 0.2) -> Tensor:
    """A response's share of the clipped policy loss, token mean: PPO's max form."""
    old = torch.tensor([x for x, wanted in zip(answer.old_logprobs, answer.loss_mask) if wanted],
                       dtype=logprobs.dtype)
    ratio = (logprobs - old).exp()
    held = ratio.clamp(1 - low, 1 + high)
    return torch.maximum(-answer.advantage * ratio, -answer.advantage * held).sum() / tokens_


LOSSES = {"nll": nll, "grpo": grpo}


def oracle(model: torch.nn.Module, groups: Sequence[Group], kind: str | Callable = "grpo") -> Outcome:
    """The un-shared step: every response alone, with its prompt."""
    loss_of = LOSSES[kind] if isinstance(kind, str) else kind
    answers = [answer for made in groups for answer in made.responses]
    count = sum(sum(answer.loss_mask) for answer in answers)
    model.zero_grad(set_to_none=True)
    loss, logprobs = 0.0, []
    for answer, values in zip(answers, unshared_logprobs(model, sequences(groups)), strict=True):
        logprobs.append(values.detach().double())
        if len(values):
            share = loss_of(values.to(torch.promote_types(values.dtype, torch.float32)), answer, count)
            share.backward()
            loss += share.item()
    return Outcome(loss, torch.cat(logprobs), gradients(model))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Clones of the gradients; zero where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for name, p in model.named_parameters()}


def with_policy(model: torch.nn.Module, groups: Sequence[Group], seed: int = 0) -> list[Group]:
    """Groups with seeded advantages (none under 0.1) and old log-probs (ratios 0.5 to 1.5)."""
    draw = random.Random(seed)
    with torch.no_grad():
        values = iter([v.tolist() for v in unshared_logprobs(model, sequences(groups))])

    def ratio() -> float:
        # Not at the clip, where rounding would decide.
        found = draw.uniform(0.5, 1.5)
        return found if min(abs(found - 0.8), abs(found - 1.2)) > 1e-3 else ratio()

    def drawn(answer: Response) -> Response:
        current = iter(next(values))
        old = tuple(next(current) - math.log(ratio()) if wanted else math.nan for wanted in answer.loss_mask)
        return replace(answer, advantage=draw.choice([-1, 1]) * draw.uniform(0.1, 2), old_logprobs=old)

    return [replace(made, responses=tuple(map(drawn, made.responses))) for made in groups]


# The yardstick.

def err(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest over tensors of max|a - b| / max|b|, max|b| floored at 1e-3 of the largest tensor's.

    A NaN or an infinity anywhere is an infinite error.
    """
    assert got.keys() == want.keys()
    sizes = {name: float(b.detach().abs().max()) if b.numel() else 0.0 for name, b in want.items()}
    floor = 1e-3 * max(sizes.values())
    worst = 0.0
    for name, b in want.items():
        if not b.numel():
            continue
        distance = float((got[name].detach().double() - b.detach().double()).abs().max())
        scale = max(sizes[name], floor)
        if distance and not (math.isfinite(distance) and scale):
            return math.inf
        worst = max(worst, distance / scale if distance else 0.0)
    return worst


def stepped(start: dict[str, Tensor], grads: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Parameters after one step of torch's SGD or Adam (eps 1e-4)."""
    parameters = {name: torch.nn.Parameter(value.detach().clone()) for name, value in start.items()}
    for name, parameter in parameters.items():
        parameter.grad = grads[name].to(parameter.dtype)
    made = torch.optim.SGD(parameters.values(), lr=LR["sgd"]) if kind == "sgd" else \
        torch.optim.Adam(parameters.values(), lr=LR["adam"], eps=1e-4)
    made.step()
    return parameters


def errors(got: Outcome, want: Outcome, start: dict[str, Tensor], steps: Sequence[str] = ("sgd", "adam")) \
        -> dict[str, float]:
    """Every compared quantity with its error.

    Raises:
        AssertionError: a trainable tensor whose reference gradient is zero, where parity would prove nothing.
    """
    dead = [name for name, grad in want.grads.items() if not float(grad.abs().max()) > 0]
    assert not dead, f"the reference gradient is zero: {dead}"
    found = {"loss": err({"": torch.tensor(got.loss)}, {"": torch.tensor(want.loss)}),
             "logprobs": err({"": got.logprobs}, {"": want.logprobs}),
             "gradients": err(got.grads, want.grads)}
    for kind in steps:
        found[kind] = err(stepped(start, got.grads, kind), stepped(start, want.grads, kind))
    return found


def worst(found: dict[str, float]) -> float:
    """The largest error."""
    return max(found.values())


# Plans and how they are played.

@dataclass(frozen=True)
class Program:
    """How a step is computed: a baseline by name, or an AugTree choice.

    Attributes:
        mode: a baseline's name or ``augtree``.
        choice: what makes the plan, as `Choice` has it; `degree` 0 is the pool, -c the pool's c-th part.
    """

    mode: str
    choice: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.mode, *[f"{k}={v}" for k, v in self.choice]])


def augtree(**choice) -> Program:
    """An AugTree program with the given fields of `Choice`."""
    return Program("augtree", tuple(choice.items()))


BASELINES = [Program(mode) for mode in MODES if mode != "augtree"]
FUSED = [
    augtree(), augtree(pieces=2), augtree(primitive="move_kv"), augtree(keep=False),
    augtree(pieces=3, keep=False), augtree(primitive="ring"), augtree(lane_degree=2), augtree(lane_degree=8),
    augtree(lane_degree=8, keep=False, primitive="move_kv"), augtree(wide=1), augtree(wide=2, keep=False),
    augtree(degree=1), augtree(degree=1, copies=2), augtree(degree=-2, copies=2), augtree(degree=-2),
    augtree(together=False)]
PHASED = [augtree(phase="phased", waves=waves, chunks=chunks, primitive=primitive)
          for waves in (1, 2, 3) for chunks in (1, 2, 3) for primitive in ("gather_kv", "move_kv", "move_q")]
PHASED += [augtree(phase="phased", waves=2, chunks=2, primitive=primitive, keep=False, lane_degree=lane)
           for primitive in ("gather_kv", "move_q") for lane in (1, 8)]
PHASED += [augtree(phase="phased", waves=2, primitive="move_q", degree=-2, copies=2, wide=1),
           augtree(phase="phased", chunks=2, primitive="ring"), augtree(phase="phased", waves=2, degree=1)]
PROGRAMS = BASELINES + FUSED + PHASED


def forest_of(groups: Sequence[Group], mode: str, min_shared_rows: int = 4) -> tuple[Forest, list[int]]:
    """The trees that a mode computes, and each tree's group."""
    made, numbers = sequences_of(groups)
    minimum = min_shared_rows if mode == "augtree" else 1 << 62
    forest = from_sequences(made, groups=numbers, min_shared_rows=minimum, share=mode not in UNSHARED)
    first: dict[int, int] = {}
    for path, number in zip(forest.paths, numbers, strict=True):
        if path:
            first.setdefault(path[0], number)
    return forest, [first[root] for root in forest.shape.roots]


def batch_of(groups: Sequence[Group], program: Program, world: int) -> StepBatch:
    """A step whose plan is built directly, also where the planner would never choose it; checked."""
    forest, tree_groups = forest_of(groups, program.mode)
    if program.mode == "augtree":
        fields = dict(program.choice)
        degree = fields.pop("degree", 0)
        degree = degree if degree > 0 else max(1, world // max(1, -degree))
        lane = min(fields.pop("lane_degree", 1), degree)
        plan = build_plan(Choice(degree=degree, lane_degree=lane, **fields), forest.shape, world, UNIT)
    else:
        plan = baseline_plan(program.mode, forest.shape, tree_groups, world, 0, Costs(UNIT))
    return batch_with(groups, forest, plan)


def sent_forward(plan: Plan, p: Pass) -> list[planning.Program]:
    """What a layer of a pass sends in its forward: its program, or that in two parts where one goes ahead."""
    program = plan.program(p.id)
    if not p.prefetch:
        return [program]
    parts = split(program)
    return [replace(program, stages=(parts.ahead,)), parts.rest]


def batch_with(groups: Sequence[Group], forest: Forest, plan: Plan) -> StepBatch:
    """A step of a given plan; checked."""
    plan.check(pairs=True)
    return StepBatch(tuple(groups), forest, plan, fingerprint(groups))


def play(model: torch.nn.Module, batch: StepBatch, kind: str = "grpo", *,
         transport: Transport | None = None, loss_fn: Callable | None = None,
         schedule: AugTreeSchedule | None = None, **schedule_fields) -> Outcome:
    """One step of AugTree on `model`; all ranks in this process unless a transport is given."""
    transport = transport if transport is not None else LocalTransport(batch.plan.world)
    schedule = schedule or AugTreeSchedule(AugTreeConfig(mode=batch.plan.mode), transport=transport,
                                           **schedule_fields)
    model.zero_grad(set_to_none=True)
    loss_fn = loss_fn or Objective(batch, kind)
    (result,) = schedule(forward_step_func=functools.partial(forward_step, loss_fn=loss_fn),
                         data_iterator=iter([batch]), model=model, collect=True)
    return Outcome(result["loss"], schedule.last.values[:, 0].clone(), gradients(model))


class Lab:
    """A stock and an AugTree model with the same weights, and the oracle's outcomes, each computed once."""

    def __init__(self, text: str = MODEL, dtype: str = "float64", *, make: Callable = build_model) -> None:
        self.args = parse(text, dtype)
        self.stock, self.tree = (make(self.args, augtree=augtree) for augtree in (False, True))
        self.start = {name: p.detach().clone() for name, p in self.stock.named_parameters()}
        self._known: dict[tuple[str, str], tuple[list[Group], Outcome]] = {}

    def data(self, name: str, kind: str = "grpo") -> tuple[list[Group], Outcome]:
        """A data set with advantages and old log-probs, and its oracle."""
        if (name, kind) not in self._known:
            groups = with_policy(self.stock, {**DATA, **EDGES}[name]())
            self._known[name, kind] = groups, oracle(self.stock, groups, kind)
        return self._known[name, kind]

    def compare(self, groups: Sequence[Group], want: Outcome, batch: StepBatch, kind: str = "grpo", **how) \
            -> dict[str, float]:
        """Errors of a step against the oracle."""
        return errors(play(self.tree, batch, kind, **how), want, self.start)
