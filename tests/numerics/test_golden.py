"""A golden that shares nothing: a GPT written here in plain torch, on a group file that it reads itself.

It has megatron-core's parameter names and none of its code; the plug-in reads the same file through its own
reader. Loss, log-probs and every gradient agree to 1e-10.
"""

import json
import math

import pytest
import torch

from megatron_augtree.data.groups import read_groups
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

LINES = """\
{"group": "first", "prompt": [7, 41, 3, 3, 18, 60, 22], "responses": [\
{"tokens": [5, 9, 12, 1], "advantage": 1.25, "old_logprobs": [-3.9, -4.2, -3.7, -4.6]}, \
{"tokens": [5, 9, 30], "loss_mask": [1, 0, 1], "advantage": -0.75, "old_logprobs": [-4.1, null, -4.4]}, \
{"tokens": [44], "advantage": 0.5, "old_logprobs": [-4.0]}]}
{"group": "second", "prompt": [2, 50, 50, 8], "responses": [\
{"tokens": [33, 6, 6, 59, 27, 14], "advantage": -1.5, "old_logprobs": [-4.3, -3.8, -4.5, -4.1, -3.6, -4.2]}, \
{"tokens": [21, 63], "advantage": 2.0, "old_logprobs": [-4.4, -4.0]}]}
"""


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotate(x):
    """Rotary embedding of [T, heads, 8]: pairs (i, i + 4) turn by position / 10000^(i / 4).

    The angles are of fp32, as megatron-core's are in every precision.
    """
    angles = torch.arange(len(x))[:, None] * (1 / 10000.0 ** (torch.arange(4, dtype=torch.float32) / 4))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :4], x[..., 4:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x, p):
    """4 query heads in 2 groups; a group's rows of the projection are its queries, its key, its value."""
    mixed = (x @ p["linear_qkv.weight"].T).view(len(x), 2, 4, 8)
    q, k, v = mixed[:, :, :2].reshape(len(x), 4, 8), mixed[:, :, 2], mixed[:, :, 3]
    q, k = rotate(q), rotate(k)
    out = []
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].T / math.sqrt(8)
        scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
        out.append(scores.softmax(-1) @ v[:, head // 2])
    return torch.cat(out, -1) @ p["linear_proj.weight"].T


def gpt(ids, parameters):
    """[T] ids -> [T, 64] logits."""
    x = parameters["embedding.word_embeddings.weight"][ids]
    for layer in range(2):
        start = f"decoder.layers.{layer}."
        p = {name.removeprefix(start): value for name, value in parameters.items()}
        p |= {name.removeprefix("self_attention."): value for name, value in p.items()}
        x = x + attention(norm(x, p["input_layernorm.weight"]), p)
        gate, up = (norm(x, p["pre_mlp_layernorm.weight"]) @ p["mlp.linear_fc1.weight"].T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ p["mlp.linear_fc2.weight"].T
    x = norm(x, parameters["decoder.final_layernorm.weight"])
    return x @ parameters["output_layer.weight"].T


def golden(lines, start):
    """(loss, log-probs, gradients): the clipped policy loss, mean over the tokens that carry a loss."""
    parameters = {name: value.clone().requires_grad_() for name, value in start.items()}
    total, logprobs, tokens = torch.zeros((), dtype=torch.float64), [], 0
    for group in map(json.loads, lines.splitlines()):
        for answer in group["responses"]:
            ids = torch.tensor(group["prompt"] + answer["tokens"])
            logits = gpt(ids[:-1], parameters)
            for i, token in enumerate(answer["tokens"]):
                if not answer.get("loss_mask", [1] * len(answer["tokens"]))[i]:
                    continue
                row = logits[len(group["prompt"]) - 1 + i]
                logprob = row[token] - row.exp().sum().log()
                ratio = (logprob - answer["old_logprobs"][i]).exp()
                total = total + torch.maximum(-answer["advantage"] * ratio,
                                              -answer["advantage"] * ratio.clamp(0.8, 1.2))
                logprobs.append(logprob.detach())
                tokens += 1
    loss = total / tokens
    loss.backward()
    return loss.item(), torch.stack(logprobs), {name: p.grad for name, p in parameters.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("program", [
    f.augtree(), f.augtree(lane_degree=8, primitive="move_kv", keep=False),
    f.augtree(phase="phased", waves=2, chunks=2, primitive="move_q"), f.Program("ring")], ids=str)
def test_against_a_model_written_here(lab, tmp_path, program, world):
    path = tmp_path / "groups.jsonl"
    path.write_text(LINES)
    loss, logprobs, grads = golden(LINES, lab.start)
    assert len(logprobs) == 15
    groups = read_groups(path)
    batch = f.batch_of(groups, program, world)
    if program.mode == "augtree":
        assert batch.forest.shape.total_rows < batch.unshared_rows
    got = f.play(lab.tree, batch)
    assert f.worst(f.errors(got, f.Outcome(loss, logprobs, grads), lab.start)) < 1e-10
    # Neither all clipped nor none: both branches of the loss are compared.
    old = [x for g in groups for r in g.responses for x, m in zip(r.old_logprobs, r.loss_mask) if m]
    ratios = (logprobs - torch.tensor(old)).exp()
    assert 0 < sum(0.8 < x < 1.2 for x in ratios.tolist()) < len(ratios)
