"""A small GPT in plain torch, and groups for it: for checks that need no Megatron, and no data.

The model is given rows, and how they attend.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_augtree.planning.tree import Forest, from_groups

#: (q [T, Hq, D], k, v [T, Hkv, D], layer) -> [T, Hq, D].
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class SmallGPT(nn.Module):
    """RMSNorm, grouped attention, rotary positions, SwiGLU, an untied head; weights that peak attention.

    Args:
        layers, hidden, heads, kv_heads, vocab: sizes.
        seed: of the weights.
    """

    def __init__(self, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int,
                 seed: int = 0) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        wide = 64 * (hidden * 8 // 3 // 64 + 1)
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.RMSNorm(hidden),
                "qkv": nn.Linear(hidden, (heads + 2 * kv_heads) * self.width, bias=False),
                "proj": nn.Linear(hidden, hidden, bias=False),
                "mlp_norm": nn.RMSNorm(hidden),
                "up": nn.Linear(hidden, 2 * wide, bias=False),
                "down": nn.Linear(wide, hidden, bias=False),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    std = 1.0 if name.startswith("embedding") else parameter.shape[1] ** -0.5
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn * std * (1.5 if "qkv" in name else 1.0))

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states ``[T, hidden]`` of rows ``[T]`` before the head."""
        x = self.embedding(ids)
        turns = self._rotary(positions, x.dtype)
        for number, layer in enumerate(self.layers):
            sizes = [self.heads, self.kv_heads, self.kv_heads]
            q, k, v = layer["qkv"](layer["norm"](x)).view(len(x), -1, self.width).split(sizes, 1)
            x = x + layer["proj"](attend(_turn(q, turns), _turn(k, turns), v, number).reshape(len(x), -1))
            gate, up = layer["up"](layer["mlp_norm"](x)).chunk(2, -1)
            x = x + layer["down"](functional.silu(gate) * up)
        return self.norm(x)

    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """``[n]`` log-probs of targets, in float32 or wider."""
        logits = self.head(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return -functional.cross_entropy(logits, targets, reduction="none")

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float64)
        angles = positions.to(torch.float64).unsqueeze(-1) * 10000.0 ** (-steps / self.width)
        angles = torch.cat([angles, angles], -1).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def _turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-high, low], -1) * turns[1]


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention as one writes it down, in the type of its inputs: ``out [Tq, Hq, D]``, ``lse [Tq, Hq]``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        above = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).transpose(0, 1)


def flash(q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
    """torch's fused causal attention of `batch` equally long sequences, one after the other in the rows."""
    parts = [x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
    # On a GPU by flash attention or not at all: to fall back in silence would compare with something slow.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
        out = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


@dataclass
class Group:
    """A prompt, its responses and their advantages."""

    prompt: list[int]
    responses: list[list[int]]
    advantages: list[float]

    @property
    def forest(self) -> Forest:
        """The group's tree; all response tokens are scored."""
        return from_groups([(self.prompt, [(r, [True] * len(r)) for r in self.responses])])

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return sum(map(len, self.responses))


def draw_group(prompt: int, responses: int, longest: int, vocab: int, *, equal: bool) -> Group:
    """Seeded tokens; responses differ in their first token, and in their lengths unless `equal`."""
    draw = random.Random(prompt)
    lengths = [longest if equal else max(1, longest * (i + 1) // responses) for i in range(responses)]
    made = [[i, *(draw.randrange(vocab) for _ in range(n - 1))] for i, n in enumerate(lengths)]
    return Group([draw.randrange(vocab) for _ in range(prompt)], made,
                 [draw.choice((-1, 1)) * draw.uniform(0.5, 1.5) for _ in range(responses)])
