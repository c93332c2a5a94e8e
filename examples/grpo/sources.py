"""Where the groups of a step come from, and which of them a policy loss can use.

Every rank rolls out its own groups: question n of a step belongs to one rank, and no rank sees another's
samples. What is drawn depends on the seed, the step and n, so that a run on more ranks, in another mode, or
after an interruption asks and draws the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from examples.grpo.rollout import generators, rewarded, sample
from megatron_augtree.data.groups import Group, Response
from megatron_augtree.rl.advantages import group_advantages


class Task(Protocol):
    """What a task has to offer, see `task.Retrieval`: questions, and rules for responses."""

    def questions(self, seed: int, step: int | str, count: int) -> list[Any]: ...

    def is_over(self, response: Sequence[int]) -> bool: ...

    def has_answered(self, response: Sequence[int]) -> bool: ...

    def reward(self, question: Any, response: Sequence[int]) -> float: ...

    def gold(self, question: Any) -> tuple[int, ...]: ...


def share(count: int, rank: int, world: int) -> range:
    """The numbers, of `count`, that a rank takes; none where there are more ranks than numbers."""
    return range(rank * count // world, (rank + 1) * count // world)


@dataclass(frozen=True)
class Sampled:
    """Groups sampled from the current policy (megatron-core's stock forward stands in for a server).

    Attributes:
        task: asks and rewards.
        model: the policy.
        groups, samples: of a step: questions over all ranks, and responses to each.
        seed: of questions and draws.
        temperature: of sampling.
        place: (rank, ranks) of the pool.
    """

    task: Task
    model: torch.nn.Module
    groups: int
    samples: int
    seed: int
    temperature: float
    place: tuple[int, int]

    def of_step(self, step: int) -> dict[int, Group]:
        """This rank's groups, by number, with rewards and the sampler's log-probs."""
        questions = self.task.questions(self.seed, step, self.groups)
        mine = share(self.groups, *self.place)
        sampled = sample(
            self.model,
            [questions[n].prompt for n in mine],
            self.samples,
            generators(self.seed, step, mine),
            is_over=self.task.is_over,
            temperature=self.temperature,
        )
        return {
            n: rewarded(f"step-{step}-{n}", questions[n], responses, self.task.reward)
            for n, responses in zip(mine, sampled)
        }

    def gold(self, update: str, count: int) -> list[Group]:
        """This rank's share of `count` supervised samples: groups of one response.

        Args:
            update: names the optimizer step that they are for.
            count: over all ranks.
        """
        questions = self.task.questions(self.seed, f"gold {update}", count)
        mine = [questions[n] for n in share(count, *self.place)]
        return [Group("gold", q.prompt, (answered(self.task.gold(q)),)) for q in mine]


@dataclass(frozen=True)
class Replayed:
    """Groups of a file, `count` a step and in its order, again and again; rewards are the file's.

    Attributes:
        all: the file's groups.
        count: groups of a step over all ranks.
        place: (rank, ranks) of the pool.
    """

    all: Sequence[Group]
    count: int
    place: tuple[int, int]

    def of_step(self, step: int) -> dict[int, Group]:
        """This rank's groups, by number."""
        return {n: self.all[(step * self.count + n) % len(self.all)] for n in share(self.count, *self.place)}

    def gold(self, update: str, count: int) -> list[Group]:
        """This rank's share of `count` supervised samples: the best response of the first groups."""
        mine = [self.all[n % len(self.all)] for n in share(count, *self.place)]
        best = [max(group.responses, key=lambda r: r.reward) for group in mine]
        return [Group("gold", g.prompt, (answered(r.tokens),), g.prompt_salt) for g, r in zip(mine, best)]


def answered(tokens: Sequence[int]) -> Response:
    """A response all of whose tokens carry a loss."""
    return Response(tuple(tokens), (True,) * len(tokens))


def usable(group: Group, how: str, whole: Any = None) -> Group | None:
    """The group with advantages; without what a policy loss cannot use.

    Equal rewards say nothing about better and worse: such a group, also one of a single response, is None.
    Advantages are those of the whole group, also where some of its responses are dropped afterwards.

    Args:
        group: with rewards.
        how: kind of advantage, `rl.advantages.HOWS`.
        whole: tokens -> whether a response ended by itself; where given, those that did not are dropped.
    """
    rewards = [response.reward for response in group.responses]
    if len(set(rewards)) < 2:
        return None
    advantages = group_advantages(rewards, how)
    responses = [
        replace(response, advantage=advantage)
        for response, advantage in zip(group.responses, advantages)
        if any(response.loss_mask) and (whole is None or whole(response.tokens))
    ]
    return replace(group, responses=tuple(responses)) if responses else None
