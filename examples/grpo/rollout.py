"""Rollouts: responses sampled from the current policy by megatron-core's stock forward.

A group's samples draw from one distribution while they agree, so what is computed is a batch of *distinct*
prefixes, however many samples share one. The ranks share the prompts among them and exchange the groups:
afterwards every rank holds all of them, in one order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from examples.grpo import task
from megatron_augtree.data.groups import Group, Response

#: Prefixes computed at once, and scores of one head: dense attention keeps tokens x tokens for each.
_BATCH, _SCORES = 8, 2**24

Prefix = tuple[int, ...]


@torch.no_grad()
def next_token_logprobs(
    model: torch.nn.Module, prefixes: Sequence[Prefix], temperature: float = 1.0
) -> torch.Tensor:
    """[n, V] fp64 log-probs of the token after each prefix.

    Args:
        model: a ``GPTModel``; without a pack of ours its stock modules run.
        prefixes: n token lists, the same on tensor-parallel ranks. Shorter ones are padded behind, where
            causal attention does not look.
        temperature: logits are divided by it.
    """
    parts = []
    size = max(1, min(_BATCH, _SCORES // max(map(len, prefixes)) ** 2))
    for start in range(0, len(prefixes), size):
        batch = prefixes[start : start + size]
        ids = padded(batch, model.config)
        logits = model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
        last = torch.tensor([len(prefix) - 1 for prefix in batch])
        chosen = gather_from_tensor_model_parallel_region(logits[torch.arange(len(batch)), last])
        parts.append((chosen.double() / temperature).log_softmax(-1))
    return torch.cat(parts)


def padded(sequences: Sequence[Sequence[int]], config) -> torch.Tensor:
    """[n, T] ids; sequence parallelism cuts T into equal parts.

    Args:
        sequences: n token lists.
        config: the model's ``TransformerConfig``.
    """
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1
    longest = max(map(len, sequences))
    longest += -longest % parts
    return torch.tensor([[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences])


def sample(
    model: torch.nn.Module,
    prompts: Sequence[Prefix],
    count: int,
    draws: Sequence[torch.Generator],
    *,
    is_over: Callable[[Sequence[int]], bool] = task.is_over,
    temperature: float = 1.0,
) -> list[list[Response]]:
    """`count` responses to each prompt, with their log-probs under the policy that sampled them.

    Args:
        model: the policy.
        prompts: n token lists.
        count: responses a prompt.
        draws: n random states, one a prompt: what is drawn does not depend on which rank draws it.
        is_over: whether a response has ended.
        temperature: logits are divided by it; the log-probs are of what is drawn from.

    Returns:
        [n][count] responses without rewards.
    """
    tokens: list[list[list[int]]] = [[[] for _ in range(count)] for _ in prompts]
    logprobs: list[list[list[float]]] = [[[] for _ in range(count)] for _ in prompts]
    while True:
        going: dict[tuple[int, Prefix], list[int]] = {}
        for number, responses in enumerate(tokens):
            for index, response in enumerate(responses):
                if not is_over(response):
                    going.setdefault((number, tuple(response)), []).append(index)
        if not going:
            break
        prefixes = [(*prompts[number], *response) for number, response in going]
        table = next_token_logprobs(model, prefixes, temperature)
        for row, ((number, _), samples) in zip(table, going.items()):
            chosen = torch.multinomial(row.exp(), len(samples), replacement=True, generator=draws[number])
            for index, token in zip(samples, chosen.tolist()):
                tokens[number][index].append(token)
                logprobs[number][index].append(float(row[token]))
    return [
        [Response(tuple(t), (True,) * len(t), old_logprobs=tuple(p)) for t, p in zip(*pair)]
        for pair in zip(tokens, logprobs)
    ]


def rollouts(
    model: torch.nn.Module, questions: Sequence[task.Question], count: int, *, seed: int, step: int
) -> list[Group]:
    """The groups of one step with their rewards, the same on every rank.

    Args:
        model: the policy, the same on every rank.
        questions: the step's questions, the same on every rank.
        count: responses a group.
        seed, step: what is drawn depends on these and on the question's number only.
    """
    pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rank, world = dist.get_rank(pool), dist.get_world_size(pool)
    mine = range(rank, len(questions), world)
    sampled = sample(model, [questions[n].prompt for n in mine], count, generators(seed, step, mine))
    everyones: list = [None] * world
    dist.all_gather_object(everyones, dict(zip(mine, sampled)), group=pool)
    found = {n: responses for part in everyones for n, responses in part.items()}
    return [rewarded(f"step-{step}-{n}", question, found[n]) for n, question in enumerate(questions)]


def generators(seed: int, step: int, numbers: Iterable[int]) -> list[torch.Generator]:
    """A random state for every question of a step, by its number."""
    seeds = [random.Random(f"samples {seed} {step} {n}").getrandbits(63) for n in numbers]
    return [torch.Generator().manual_seed(number) for number in seeds]


def rewarded(
    name: str,
    question: task.Question,
    responses: Sequence[Response],
    reward: Callable[[task.Question, Sequence[int]], float] = task.reward,
) -> Group:
    """A group with its rewards, by rule."""
    scored = [replace(r, reward=reward(question, r.tokens)) for r in responses]
    return Group(name, question.prompt, tuple(scored))


def accuracy(model: torch.nn.Module, questions: Sequence[task.Question], *, seed: int) -> float:
    """Share of questions that one sampled response answers, over all ranks."""
    groups = rollouts(model, questions, 1, seed=seed, step=-1)
    right = [task.is_right(question, group.responses[0].tokens) for question, group in zip(questions, groups)]
    return sum(right) / len(right)
