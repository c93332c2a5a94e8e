"""A prompt with branches, models bound to AugTree's pack, and the un-shared reference: for tests of binding.

Attention is replaced by a dense one whose context is the tree's mask.
"""

import argparse
import functools
from types import SimpleNamespace

import torch

from megatron_augtree.mcore import arguments, build
from megatron_augtree.mcore.layer_spec import prepare_model
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from scripts import unshared

PROMPT = [11, 3, 60, 3, 25, 7, 42, 9, 33, 1, 50]
RESPONSES = [[5, 17, 2, 2, 40], [8], [61, 4, 4, 19, 22, 0, 13, 6, 30], [12, 29, 55]]
BASE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --init-method-std 0.3 "
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
VARIANTS = {
    "gqa": LLAMA + "--group-query-attention --num-query-groups 2",
    "mqa tied": "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 1",
    "gelu layernorm biases": "--add-qkv-bias --ffn-hidden-size 48",
    "qk norm": LLAMA + "--qk-layernorm --group-query-attention --num-query-groups 2",
    "interleaved": LLAMA + "--rotary-interleaved --rotary-base 500",
    "scale and width": LLAMA + "--softmax-scale 0.9 --kv-channels 6",
    "partial": LLAMA + "--rotary-percent 0.5 --rotary-base 100",
    "partial interleaved": LLAMA + "--rotary-percent 0.5 --rotary-interleaved --rotary-base 100",
    # The prompt alone is longer than the original length; mscale enters rotation and scores.
    "yarn": LLAMA + "--position-embedding-type yarn --rotary-scaling-factor 16 --rotary-base 100 "
            "--yarn-original-max-position-embeddings 4 --mscale 1.3",
    # A base this large has wavelengths on both sides of the scaling's limits.
    "llama3 scaling": LLAMA + "--use-rope-scaling --rope-scaling-factor 8 --rotary-base 5000000",
    "interpolation": LLAMA + "--rotary-seq-len-interpolation-factor 3",
    "no positions": LLAMA + "--position-embedding-type none",
}


def parse(text: str, dtype: str = "float64") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_model_arguments(parser)
    return parser.parse_args((BASE + text + f" --dtype {dtype}").split())


def dense_attention(q, k, v, context, layer, scale):
    """Attention under the boolean mask ``context.mask`` [T, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    return torch.einsum("hts,shd->thd", scores.masked_fill(~context.mask, -torch.inf).softmax(-1), v)


def tree_rows(prompt=PROMPT, responses=RESPONSES):
    """(ids, positions, targets, mask [T, T], scored) of one prompt and its branches, row by row."""
    spine = len(prompt) - 1
    ids, positions, targets, branch = prompt[:-1], list(range(spine)), prompt[1:], [-1] * spine
    for number, response in enumerate(responses):
        tokens = [prompt[-1], *response]
        ids, targets = ids + tokens[:-1], targets + tokens[1:]
        positions = positions + list(range(spine, spine + len(response)))
        branch = branch + [number] * len(response)
    branch = torch.tensor(branch)
    mask = ((branch[None] == branch[:, None]) | (branch[None] == -1)).tril()
    return (torch.tensor([ids], dtype=torch.long), torch.tensor(positions, dtype=torch.long),
            torch.tensor(targets, dtype=torch.long), mask, torch.arange(spine, len(branch)))


def pack(targets, positions, mask, scored, calls=None) -> AugTreePackedSeqParams:
    def score(logits, rows):
        if calls is not None:
            calls.append(len(rows))
        return torch.log_softmax(logits, -1).gather(1, targets[rows][:, None])

    context = SimpleNamespace(mask=mask, keep_layers=-1, rest=None)
    return AugTreePackedSeqParams(positions=positions, context=context, scored=scored, score=score)


def run_tree(model, rows=None, calls=None) -> torch.Tensor:
    ids, positions, targets, mask, scored = rows or tree_rows()
    out = model(ids, None, None, packed_seq_params=pack(targets, positions, mask, scored, calls))
    assert out.shape == (1, len(scored), 1)
    return out[0, :, 0]


def gradients(model) -> dict:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def error(got: dict, want: dict) -> float:
    floor = 1e-3 * max(float(b.abs().max()) for b in want.values())
    return max(float((got[name] - b).abs().max()) / max(float(b.abs().max()), floor)
               for name, b in want.items())


def reference(args, weights, responses=RESPONSES) -> tuple[torch.Tensor, dict]:
    """Un-shared log-probs, and every parameter's gradient of their weighted sum."""
    model = build.build_model(args, augtree=False, seed=1)
    sequences = [unshared.response_mask(PROMPT, response) for response in responses]
    logprobs, at = [], 0
    for values in unshared.unshared_logprobs(model, sequences):
        (values * weights[at: at + len(values)]).sum().backward()
        logprobs.append(values.detach())
        at += len(values)
    return torch.cat(logprobs), gradients(model)


@functools.cache
def bound(how: str, text: str, **kwargs):
    args = parse(text)
    model = build.build_model(args, augtree=how == "spec", seed=1, **kwargs)
    prepare_model(model, **kwargs)
    return args, model


WEIGHTS = torch.linspace(-1.5, 2.0, sum(map(len, RESPONSES)), dtype=torch.float64)
