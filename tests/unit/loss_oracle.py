"""Sequences with losses, and the losses in plain Python floats: what tests compare `rl.losses` with."""

import math
import random

import torch

from megatron_augtree.rl.losses import (
    AGGREGATIONS,
    PRESETS,
    Denominators,
    LossConfig,
    SequenceRows,
    count_valid,
    policy_loss,
)

FIELDS = ("logprob", "advantage", "old", "ref", "entropy")
CONSTANT = 37.0


def draw(lengths, seed=0, *, per_token=False, masked=0.25):
    """Sequences as lists of rows; a row is a dict of floats and ``valid``. Ratios spread over 0.4 .. 2.5."""
    generator = random.Random(seed)
    sequences = []
    for length in lengths:
        advantage = generator.choice([-2.0, -0.7, 0.0, 0.5, 1.5])
        rows = []
        for _ in range(length):
            logprob = -generator.uniform(0.1, 4)
            rows.append({
                "logprob": logprob,
                "advantage": generator.uniform(-2, 2) if per_token else advantage,
                "old": logprob + generator.uniform(-0.9, 0.9),
                "ref": logprob + generator.uniform(-1.5, 1.5),
                "entropy": generator.uniform(0, 3),
                "valid": generator.random() >= masked,
            })
        sequences.append(rows)
    return sequences


def oracle(sequences, config, *, tokens=None, count=None, constant=CONSTANT):
    """Loss and metrics by loops, in PPO's max form; shares nothing with the code under test."""
    valid = [[row for row in rows if row["valid"]] for rows in sequences]
    tokens = sum(map(len, valid)) if tokens is None else tokens
    count = sum(1 for rows in valid if rows) if count is None else count
    totals = {"loss": 0.0, "ratio_mean": 0.0, "kl": 0.0, "entropy": 0.0}
    totals.update({f"clip_fraction_{side}": 0.0 for side in ("low", "high", "dual")})
    ratios = []
    for rows in valid:
        total = 0.0
        for row in rows:
            exponent = row["logprob"] - row["old"]
            if config.ratio == "sequence":
                exponent = sum(other["logprob"] - other["old"] for other in rows) / len(rows)
            ratio, advantage = math.exp(exponent), row["advantage"]
            low, high = 1 - config.clip_low, 1 + config.clip_high
            held = min(max(ratio, low), high)
            term = max(-advantage * ratio, -advantage * held)
            if config.dual_clip is not None and advantage < 0:
                totals["clip_fraction_dual"] += ratio > config.dual_clip
                term = min(term, -advantage * config.dual_clip)
            totals["clip_fraction_low"] += advantage < 0 and ratio < low
            totals["clip_fraction_high"] += advantage > 0 and ratio > high
            gap = row["logprob"] - row["ref"]
            kl = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[config.kl_kind]
            totals["kl"] += kl
            totals["entropy"] += row["entropy"]
            totals["ratio_mean"] += ratio
            ratios.append(ratio)
            total += term + config.kl_coef * kl - config.entropy_coef * row["entropy"]
        totals["loss"] += total / len(rows) if config.aggregation == "seq-mean-token-mean" and rows else total
    divisor = {"token-mean": tokens, "constant": constant}.get(config.aggregation, count)
    metrics = {name: value / max(tokens, 1) for name, value in totals.items()}
    metrics["loss"] = totals["loss"] / max(divisor, 1)
    if config.dual_clip is None:
        del metrics["clip_fraction_dual"]
    metrics.update({"tokens": len([1 for rows in valid for _ in rows])})
    metrics.update({"sequences": len([rows for rows in valid if rows])})
    metrics.update({"min/ratio": min(ratios, default=math.inf), "max/ratio": max(ratios, default=-math.inf)})
    return metrics


def pack(sequences, dtype=torch.float64, **replaced):
    """Sequences -> (logprobs, rows, entropy)."""
    flat = [row for rows in sequences for row in rows]
    column = {name: torch.tensor([row[name] for row in flat], dtype=dtype) for name in FIELDS}
    column.update(replaced)
    offsets = torch.tensor([0, *(len(rows) for rows in sequences)]).cumsum(0)
    mask = torch.tensor([row["valid"] for row in flat], dtype=torch.bool)
    rows = SequenceRows(offsets, column["advantage"], column["old"], column["ref"], mask)
    return column["logprob"].requires_grad_(), rows, column["entropy"].requires_grad_()


def denominators_of(sequences, constant=CONSTANT):
    tokens, count = count_valid(pack(sequences)[1])
    return Denominators(tokens, count, constant)


def call(sequences, config, denominators=None, dtype=torch.float64):
    """Loss, metrics as floats, gradients of log-probs and entropy."""
    logprobs, rows, entropy = pack(sequences, dtype)
    denominators = denominators or denominators_of(sequences)
    share, metrics = policy_loss(logprobs, rows, denominators, config, entropy)
    assert share.dtype == dtype and share.dim() == 0
    assert not any(value.requires_grad for value in metrics.values())
    share.backward()
    entropy_grad = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return share.item(), {name: value.item() for name, value in metrics.items()}, logprobs.grad, entropy_grad


CONFIGS = {
    **{f"preset-{name}": LossConfig.preset(name) for name in PRESETS},
    **{f"aggregation-{name}": LossConfig(aggregation=name, kl_coef=0.3, entropy_coef=0.1)
       for name in AGGREGATIONS},
    **{f"kl-{kind}": LossConfig(kl_coef=0.3, kl_kind=kind) for kind in ("k1", "k2", "k3")},
    "dual": LossConfig(clip_high=0.28, dual_clip=1.6),
    "gspo-wide": LossConfig.preset("gspo", clip_low=0.1, clip_high=0.2, dual_clip=1.3, kl_coef=0.2),
    "gspo-token-mean": LossConfig.preset("gspo", clip_low=0.1, clip_high=0.2, aggregation="token-mean"),
}


def nll_rows(values_by_sequence):
    """Log-probs whose negative log-likelihoods are the given values."""
    flat = [-value for values in values_by_sequence for value in values]
    offsets = torch.tensor([0, *(len(values) for values in values_by_sequence)]).cumsum(0)
    return torch.tensor(flat, dtype=torch.float64, requires_grad=True), SequenceRows(offsets)
