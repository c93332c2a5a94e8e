"""Sizes of public models, so that a plan can be priced without a checkpoint. Planning only: no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass

from megatron_augtree.config import AugTreeConfig, InputError, did_you_mean
from megatron_augtree.planning.model import ModelShape


@dataclass(frozen=True)
class PublicModel:
    """A decoder with grouped attention and a gated MLP, as its published configuration says."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


MODELS = {
    "qwen2.5-0.5b": PublicModel(24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-1.5b": PublicModel(28, 1536, 12, 2, 128, 8960, 151936),
    "qwen2.5-7b": PublicModel(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-32b": PublicModel(64, 5120, 40, 8, 128, 27648, 152064),
    "llama-3.1-8b": PublicModel(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": PublicModel(80, 8192, 64, 8, 128, 28672, 128256),
    "smollm2-135m": PublicModel(30, 576, 9, 3, 64, 1536, 49152),
}

#: Name of a type -> bytes of an element.
DTYPES = {"bfloat16": 2, "float32": 4, "float64": 8}


def find_model(name: str) -> PublicModel:
    """A model by name, or from a Hugging Face ``config.json``.

    Raises:
        InputError: neither a known name nor a file with the fields that are needed.
    """
    if name in MODELS:
        return MODELS[name]
    if name.endswith(".json"):
        return _from_config(name)
    raise InputError(
        "unknown model",
        values=f"--model {name}",
        rule=f"{did_you_mean(name, list(MODELS))}; or it is the path of a Hugging Face config.json",
        remedy="choose the one of the nearest sizes, or give the file",
    )


def _from_config(path: str) -> PublicModel:
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        heads, hidden = data["num_attention_heads"], data["hidden_size"]
        model = PublicModel(
            layers=data["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or hidden // heads,
            ffn=data["intermediate_size"],
            vocab=data["vocab_size"],
        )
        if any(type(value) is not int or value < 1 for value in vars(model).values()):
            raise ValueError("sizes are positive integers")
    except (OSError, LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise InputError(
            "cannot read a model's sizes",
            values=f"--model {path}: {type(e).__name__}: {e}",
            rule="the file is a Hugging Face config.json with num_hidden_layers, hidden_size, "
            "intermediate_size, num_attention_heads and vocab_size",
            remedy="correct the file, or choose one of the models in --help",
        ) from e
    return model


def model_shape(name: str, *, tp: int = 1, dtype: str = "bfloat16", recomputed: bool = False) -> ModelShape:
    """What one tensor-parallel rank holds of a model, as the planner wants it.

    Args:
        name: see `find_model`.
        tp: tensor-parallel ranks; sequence parallelism is taken for granted where there are several.
        dtype: of activations, a key of `DTYPES`.
        recomputed: every layer keeps its input only.

    Raises:
        InputError: an unknown model, or heads that do not divide.
    """
    model = find_model(name)
    if tp < 1 or model.heads % tp or model.ffn % tp or (model.kv_heads % tp and tp % model.kv_heads):
        raise InputError(
            "a model does not divide into tensor-parallel ranks",
            values=f"--tp {tp}: {name} has {model.heads} heads, {model.kv_heads} KV heads, FFN {model.ffn}",
            rule="--tp divides heads and FFN, and KV heads divide by it or it by them",
            remedy="choose a divisor",
        )
    item = DTYPES[dtype]
    accum, vocab = max(item, 4), -(-model.vocab // tp)
    return ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn // tp,
        vocab=vocab,
        q_heads=model.heads // tp,
        kv_heads=max(model.kv_heads // tp, 1),
        k_dim=model.head_dim,
        v_dim=model.head_dim,
        gated=True,
        item_bytes=item,
        accum_bytes=accum,
        logit_rows=max(1, (AugTreeConfig().logit_chunk_mib << 20) // (vocab * accum)),
        row_parts=tp,
        recomputed=model.layers if recomputed else 0,
    )
