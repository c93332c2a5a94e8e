"""Rollouts: responses sampled from the current policy by megatron-core's stock forward.

A group's samples draw from one distribution while they agree, so what is computed is a batch of *distinct*
prefixes, however many samples share one. The ranks share the prompts among them and exchange the groups:
afterwards every rank holds all of them, in one order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from examples.grpo import task
from megatron_augtree.data.groups import Group, Response

#: Prefixes computed at once: dense attention keeps heads x tokens x tokens scores for each.
_BATCH = 8

Prefix = tuple[int, ...]


@torch.no_grad()
def next_token_logprobs(model: torch.nn.Module, prefixes: Sequence[Prefix]) -> torch.Tensor:
    """[n, V] fp64 log-probs of the token after each prefix.

    Args:
        model: a ``GPTModel``; without a pack of ours its stock modules run.
        prefixes: n token lists. Shorter ones are padded behind, where causal attention does not look.
    """
    parts = []
    for start in range(0, len(prefixes), _BATCH):
        batch = prefixes[start : start + _BATCH]
        longest = max(map(len, batch))
        ids = torch.tensor([[*prefix, *[0] * (longest - len(prefix))] for prefix in batch])
        logits = model(ids, torch.arange(longest).expand_as(ids), None)
        last = torch.tensor([len(prefix) - 1 for prefix in batch])
        parts.append(logits[torch.arange(len(batch)), last].double().log_softmax(-1))
    return torch.cat(parts)


def sample(
    model: torch.nn.Module, prompts: Sequence[Prefix], count: int, draws: Sequence[torch.Generator]
) -> list[list[Response]]:
    """`count` responses to each prompt, with their log-probs under the policy that sampled them.

    Args:
        model: the policy.
        prompts: n token lists.
        count: responses a prompt.
        draws: n random states, one a prompt: what is drawn does not depend on which rank draws it.

    Returns:
        [n][count] responses without rewards.
    """
    tokens: list[list[list[int]]] = [[[] for _ in range(count)] for _ in prompts]
    logprobs: list[list[list[float]]] = [[[] for _ in range(count)] for _ in prompts]
    while True:
        going: dict[tuple[int, Prefix], list[int]] = {}
        for number, responses in enumerate(tokens):
            for index, response in enumerate(responses):
                if not task.is_over(response):
                    going.setdefault((number, tuple(response)), []).append(index)
        if not going:
            break
        table = next_token_logprobs(model, [(*prompts[number], *response) for number, response in going])
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
    seeds = [random.Random(f"samples {seed} {step} {n}").getrandbits(63) for n in mine]
    draws = [torch.Generator().manual_seed(number) for number in seeds]
    sampled = sample(model, [questions[n].prompt for n in mine], count, draws)
    everyones: list = [None] * world
    dist.all_gather_object(everyones, dict(zip(mine, sampled)), group=pool)
    found = {n: responses for part in everyones for n, responses in part.items()}
    return [rewarded(f"step-{step}-{n}", question, found[n]) for n, question in enumerate(questions)]


def rewarded(name: str, question: task.Question, responses: Sequence[Response]) -> Group:
    """A group with the task's rewards."""
    scored = [replace(r, reward=task.reward(question, r.tokens)) for r in responses]
    return Group(name, question.prompt, tuple(scored))


def accuracy(model: torch.nn.Module, questions: Sequence[task.Question], *, seed: int) -> float:
    """Share of questions that one sampled response answers, over all ranks."""
    groups = rollouts(model, questions, 1, seed=seed, step=-1)
    right = [task.is_right(question, group.responses[0].tokens) for question, group in zip(questions, groups)]
    return sum(right) / len(right)
