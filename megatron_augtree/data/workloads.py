"""Ragged lengths as RL post-training meets them: seeded groups for planning, benchmarks and tests. Pure.

Lengths are lognormal: `p50` is the median, `sigma` the deviation of the logarithm, and draws beyond
`largest` are cut to it. Prompt figures of longreward, longalign, docqa-rl, narrativeqa and code-ocr were
measured by others with a Qwen3 tokenizer; response figures (but code-ocr's median), and what lmsys,
openthoughts and dapo-math say beyond their medians, are assumed. Same name and seed, same lengths: the
generator is the standard library's.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from megatron_augtree.config import InputError


class Lengths(NamedTuple):
    """A distribution of lengths in tokens; `sigma` 0 is always `p50`."""

    p50: int
    sigma: float
    largest: int

    def draw(self, source: random.Random) -> int:
        """One length, at least 1."""
        return min(max(1, round(self.p50 * source.lognormvariate(0.0, self.sigma))), self.largest)


class Workload(NamedTuple):
    """Lengths of prompts and of responses, and responses of a prompt."""

    prompt: Lengths
    response: Lengths
    responses: int


WORKLOADS = {
    "longreward": Workload(Lengths(16364, 0.768, 65029), Lengths(350, 0.7, 2048), 8),
    "longalign": Workload(Lengths(11490, 0.928, 53176), Lengths(300, 0.8, 2048), 8),
    "docqa-rl": Workload(Lengths(7913, 0.997, 61992), Lengths(1200, 0.8, 10240), 8),
    "narrativeqa": Workload(Lengths(50087, 0.751, 137401), Lengths(150, 0.8, 1024), 8),
    "rag": Workload(Lengths(10240, 0.0, 10240), Lengths(2048, 0.0, 2048), 32),
    "lmsys": Workload(Lengths(70, 1.2, 4096), Lengths(215, 1.0, 4096), 8),
    "openthoughts": Workload(Lengths(141, 0.8, 2048), Lengths(1907, 0.8, 16384), 8),
    "code-ocr": Workload(Lengths(424, 0.479, 2048), Lengths(8107, 0.6, 32768), 16),
    "dapo-math": Workload(Lengths(150, 0.7, 2048), Lengths(4096, 0.9, 20480), 16),
}

#: The preset of `rollout_trees`.
TREES = "multi-turn"
_POLICY, _LONGEST, _ROLLOUTS = 4800, 16384, 8
_TURN = Lengths(600, 0.8, 4096)


def workload(name: str, groups: int, seed: int) -> list[tuple[int, list[int]]]:
    """Groups of a preset.

    Args:
        name: a key of `WORKLOADS`.
        groups: how many.
        seed: of the generator.

    Returns:
        [group] (prompt tokens, response tokens).

    Raises:
        InputError: an unknown name.
    """
    if name not in WORKLOADS:
        raise InputError(
            "unknown workload",
            values=name,
            rule=f"workloads are {', '.join(WORKLOADS)}",
            remedy="correct the name",
        )
    made, source = WORKLOADS[name], random.Random(f"{name} {seed}")
    return [
        (made.prompt.draw(source), [made.response.draw(source) for _ in range(made.responses)])
        for _ in range(groups)
    ]


def rollout_trees(groups: int, seed: int) -> list[list[tuple[int, int]]]:
    """Multi-turn rollouts that branch at turns, under one policy (a system prompt) that all groups share.

    The shape of customer-service agents: a policy of 4,800 tokens, a task for each group, then turns after
    which rollouts of a group go different ways, one by one or together; at most 16,384 tokens a rollout.

    Args:
        groups: how many, of 8 rollouts each.
        seed: of the generator.

    Returns:
        [group] -> its nodes, depth first, as (parent in this list, tokens); node 0 is the policy, parent -1.
    """
    source, trees = random.Random(f"{TREES} {seed}"), []
    for _ in range(groups):
        nodes = [(-1, _POLICY)]
        _grow(source, nodes, 0, _ROLLOUTS, _LONGEST - _POLICY)
        trees.append(nodes)
    return trees


def _grow(
    source: random.Random, nodes: list[tuple[int, int]], parent: int, rollouts: int, left: int
) -> None:
    """One more turn below `parent` for some rollouts that went the same way so far, then their branches."""
    # A lone rollout goes on to its end; several keep a token each for the turns below.
    turns = source.randint(1, 8) if rollouts == 1 else 1
    tokens = min(sum(_TURN.draw(source) for _ in range(turns)), left - (rollouts - 1))
    nodes.append((parent, tokens))
    node = len(nodes) - 1
    if rollouts > 1:
        first = source.randint(1, rollouts - 1)
        for part in (first, rollouts - first):
            _grow(source, nodes, node, part, left - tokens)
