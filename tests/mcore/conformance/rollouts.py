"""What the trainers of this folder train on: rollouts with rewards, as RL frameworks hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.numerics import fixtures as f


@dataclass
class Rollout:
    """One sampled response.

    Attributes:
        uid: of its prompt.
        tokens: [T] prompt and response.
        prompt: tokens of the prompt.
        mask: [T - prompt] bool, response tokens that carry a loss.
        advantage: of the response.
    """

    uid: str
    tokens: Tensor
    prompt: int
    mask: Tensor
    advantage: float


def rollouts(groups: list) -> list[Rollout]:
    """All responses of some groups."""
    return [Rollout(g.name, torch.tensor([*g.prompt, *r.tokens]), len(g.prompt),
                    torch.tensor(r.loss_mask, dtype=torch.bool), r.advantage)
            for g in groups for r in g.responses]


def data(lab: f.Lab) -> list[Rollout]:
    """Groups of 3, 2, 2 and 1 responses, of which two share a long prompt, and one with masked tokens."""
    return rollouts([*lab.data("several")[0], *lab.data("one_level")[0]])


def stock_logprobs(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    """[R] log-probs of a response's tokens by the model as it is, un-shared."""
    ids = rollout.tokens[:-1].unsqueeze(0)
    logits = model(ids, torch.arange(ids.shape[1]).unsqueeze(0), None)[0, rollout.prompt - 1 :]
    return torch.log_softmax(logits, -1).gather(1, rollout.tokens[rollout.prompt :, None])[:, 0]


def policy_loss(logprobs: Tensor, rollout: Rollout) -> Tensor:
    """[R] loss of each response token: a policy gradient, and a term that is not linear in the log-prob."""
    return -rollout.advantage * (logprobs - logprobs.detach()).exp() + 0.01 * logprobs.square()
