"""Log-probabilities (and entropies) of rows from their logits, in the run's own precision."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_augtree.attention.merge import accumulation_dtype


def row_values(logits: Tensor, targets: Tensor, *, temperature: float = 1.0, entropy: bool = False) -> Tensor:
    """What a loss may ask of rows.

    Args:
        logits: [n, V].
        targets: [n] int64.
        temperature: logits are divided by it, for log-prob and entropy alike.
        entropy: also the entropy of each row's distribution.

    Returns:
        [n, 1] log-probs, or [n, 2] log-probs and entropies; fp64 in fp64 runs, fp32 otherwise.
    """
    scaled = logits.to(accumulation_dtype(logits.dtype))
    if temperature != 1.0:
        scaled = scaled / temperature
    if not entropy:
        return -torch.nn.functional.cross_entropy(scaled, targets, reduction="none").unsqueeze(-1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return torch.stack([chosen, -(logprobs.exp() * logprobs).sum(-1)], dim=-1)
