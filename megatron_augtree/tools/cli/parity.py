"""A two-second parity check: a tiny model by augtree's plans on two ranks against the un-shared run, in fp64.

Needs torch and neither Megatron nor a process group: both ranks are played in this process. The un-shared run
is attention as one writes it down, a sequence after the other, and autograd's.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.tree import Forest, from_groups
from megatron_augtree.runtime.engine import Engine, SequenceValues
from megatron_augtree.runtime.transport import LocalTransport
from megatron_augtree.runtime.tree_attention import tree_attention

#: Relative error that rounding in fp64 stays far below.
BAR = 1e-10
#: Forced, so that keys travel, and so that prompt state is kept and gets gradients from waves.
PLANS = ("degree=2", "degree=2,phase=phased,waves=2")
_RANKS, _LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _VOCAB = 2, 2, 32, 4, 2, 48
_WIDTH = _HIDDEN // _HEADS
#: (q [T, Hq, D], k, v [T, Hkv, D], layer) -> [T, Hq, D].
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class TinyGPT(nn.Module):
    """Grouped attention with rotary positions, an MLP, an untied head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"qkv": (_HIDDEN, (_HEADS + 2 * _KV_HEADS) * _WIDTH), "proj": (_HIDDEN, _HIDDEN),
                 "up": (_HIDDEN, 2 * _HIDDEN), "down": (2 * _HIDDEN, _HIDDEN)}  # fmt: skip
        self.embedding = nn.Embedding(_VOCAB, _HIDDEN)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}) for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_HIDDEN, _VOCAB, bias=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                # Wide enough that attention is peaked: a missing key shows.
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.double()

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits ``[T, vocab]`` of rows ``[T]``."""
        x = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            heads = layer["qkv"](functional.layer_norm(x, x.shape[-1:])).view(len(x), -1, _WIDTH)
            q, k, v = heads.split([_HEADS, _KV_HEADS, _KV_HEADS], 1)
            mixed = attend(_turned(q, positions), _turned(k, positions), v, number)
            x = x + layer["proj"](mixed.reshape(len(x), -1))
            x = x + layer["down"](functional.gelu(layer["up"](functional.layer_norm(x, x.shape[-1:]))))
        return self.head(functional.layer_norm(x, x.shape[-1:]))


def worst_error() -> float:
    """The largest relative difference of log-probs and gradients over all plans and tensors.

    A tensor's difference is relative to its largest entry, which counts as at least 1e-3 of the largest
    tensor's.
    """
    draw = random.Random(3)
    prompt = [draw.randrange(_VOCAB) for _ in range(11)]
    answers = [[i, *(draw.randrange(_VOCAB) for _ in range(n - 1))] for i, n in enumerate((5, 1, 7, 3))]
    model = TinyGPT()
    want = _unshared(model, prompt, answers)
    forest = from_groups([(prompt, [(answer, [True] * len(answer)) for answer in answers])])
    worst = 0.0
    for force in PLANS:
        got = _by_plan(model, forest, force, len(answers))
        sizes = [float(x.abs().max()) for x in want]
        for a, b, size in zip(got, want, sizes):
            distance = float((a - b).abs().max().nan_to_num(torch.inf))
            worst = max(worst, distance / max(size, 1e-3 * max(sizes)))
    return worst


def _unshared(model: TinyGPT, prompt: list[int], answers: list[list[int]]) -> list[Tensor]:
    """[log-probs, gradients...], every response alone."""
    model.zero_grad()
    found = []
    for weight, answer in enumerate(answers, start=1):
        ids = torch.tensor([*prompt, *answer])
        logits = model(ids[:-1], torch.arange(len(ids) - 1), _dense)[-len(answer):]
        values = logits.log_softmax(-1).gather(1, ids[-len(answer):, None])[:, 0]
        (weight * values.sum()).backward()
        found.append(values.detach())
    return [torch.cat(found), *_gradients(model)]


def _by_plan(model: TinyGPT, forest: Forest, force: str, sequences: int) -> list[Tensor]:
    """The same by a plan of two ranks."""
    shape = ModelShape(_LAYERS, _HIDDEN, 2 * _HIDDEN, _VOCAB, _HEADS, _KV_HEADS, _WIDTH, _WIDTH,
                       item_bytes=8, accum_bytes=8)  # fmt: skip
    plan = make_plan(forest.shape, shape, _RANKS, AugTreeConfig(force=force), tree_groups=[0])
    seen: dict[int, Tensor] = {}

    def values(local, context) -> Tensor:
        logits = model(local.inputs, local.positions, lambda q, k, v, layer: tree_attention(
            q, k, v, context, layer, _WIDTH**-0.5))
        return logits[local.scored].log_softmax(-1).gather(1, local.targets[:, None])

    def loss(whole: SequenceValues) -> tuple[Tensor, dict]:
        parts = whole.values[:, 0].split(whole.offsets.diff().tolist())
        seen.update((i, part.detach()) for i, part in zip(whole.index, parts))
        return sum((i + 1) * part.sum() for i, part in zip(whole.index, parts)), {}

    model.zero_grad()
    Engine(plan, forest, values, LocalTransport(_RANKS), get_kernel("auto", "cpu")).play(loss)
    return [torch.cat([seen[i] for i in range(sequences)]), *_gradients(model)]


def _gradients(model: TinyGPT) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def _dense(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    k, v = (x.repeat_interleave(_HEADS // _KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * _WIDTH**-0.5
    above = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(above, -torch.inf).softmax(-1), v)


def _turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions, by complex numbers."""
    speeds = 100.0 ** (-torch.arange(0, _WIDTH, 2, dtype=torch.float64) / _WIDTH)
    angles = positions.double()[:, None, None] * speeds
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)
