"""A bound GPTModel computes a tree as the un-shared run computes its sequences, and can be unbound.

Attention is replaced by a dense one whose context is the tree's mask: what is tested here is everything
around it (positions, specs, scored rows, state dicts). The executor has its own tests.
"""

import argparse
import functools

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore import arguments, build, cpu, layer_spec
from megatron_augtree.mcore.layer_spec import AugTreeAttention, augtree_spec, prepare_model
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
}


def parse(text: str, dtype: str = "float64") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    arguments.add_model_arguments(parser)
    return parser.parse_args((BASE + text + f" --dtype {dtype}").split())


def dense_attention(q, k, v, context, layer, scale):
    """Attention under the boolean mask ``context`` [T, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    return torch.einsum("hts,shd->thd", scores.masked_fill(~context, -torch.inf).softmax(-1), v)


@pytest.fixture(scope="module", autouse=True)
def megatron():
    build.initialize(parse(""))
    yield
    build.destroy()


@pytest.fixture(autouse=True)
def dense(monkeypatch):
    monkeypatch.setattr(layer_spec, "tree_attention", dense_attention)


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

    return AugTreePackedSeqParams(positions=positions, context=mask, scored=scored, score=score)


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


@pytest.mark.parametrize("how", ["spec", "prepare"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tree_equals_unshared(how, variant):
    args, model = bound(how, VARIANTS[variant])
    want, want_grad = reference(args, WEIGHTS)
    assert all(float(grad.abs().max()) > 0 for grad in want_grad.values())
    model.zero_grad()
    got = run_tree(model)
    (got * WEIGHTS).sum().backward()
    assert float((got - want).abs().max()) < 1e-12 * float(want.abs().max())
    assert error(gradients(model), want_grad) < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_sequence_equals_unshared(variant):
    args, model = bound("prepare", VARIANTS[variant])
    (want, _), rows = reference(args, WEIGHTS, RESPONSES[2:3]), tree_rows(responses=RESPONSES[2:3])
    assert torch.equal(rows[1], torch.arange(len(rows[1])))
    assert float((run_tree(model, rows) - want).abs().max()) < 1e-12 * float(want.abs().max())


def test_positions_and_targets_matter():
    """Shifting one branch, or exchanging two branches' targets, shows."""
    args, model = bound("prepare", VARIANTS["gqa"])
    want, _ = reference(args, WEIGHTS)
    ids, positions, targets, mask, scored = tree_rows()
    shifted = positions.clone()
    shifted[-3:] += 1
    swapped = targets.clone()
    swapped[scored[[0, 5]]] = targets[scored[[5, 0]]]
    assert float((run_tree(model, (ids, shifted, targets, mask, scored)) - want).abs().max()) > 1e-3
    assert float((run_tree(model, (ids, positions, swapped, mask, scored)) - want).abs().max()) > 1e-3


def test_losses_inside_the_spine():
    """A scored token in the prompt, and a mask with gaps, as a shared assistant turn has them."""
    args, model = bound("prepare", VARIANTS["gqa"])
    stock = build.build_model(args, augtree=False, seed=1)
    ids, positions, targets, mask, _ = tree_rows()
    scored = torch.tensor([2, 3, 10, 12])
    got = run_tree(model, (ids, positions, targets, mask, scored))
    tokens = PROMPT + RESPONSES[0]
    want = list(unshared.unshared_logprobs(stock, [(tokens, [i in (3, 4, 11, 13) for i in range(16)])]))
    assert float((got - want[0]).abs().max()) < 1e-12


def test_restore_brings_stock_back_bit_for_bit():
    args = parse(VARIANTS["gqa"])
    model = build.build_model(args, augtree=False, seed=1)
    ids, positions = torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None]
    keys, names = list(model.state_dict()), [name for name, _ in model.named_parameters()]
    modules = {name: type(module) for name, module in model.named_modules()}
    stock = model(ids, positions, None)
    handle = prepare_model(model)
    assert prepare_model(model) is handle
    assert handle.model is model
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model(ids, positions, None), stock)  # a plain batch falls through
    run_tree(model)
    assert torch.equal(model(ids, positions, None), stock)
    handle.restore()
    handle.restore()
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert not any("forward" in vars(module) for module in model.modules())
    assert not model._forward_pre_hooks and not model._forward_hooks and not hasattr(model, "augtree_handle")
    assert torch.equal(model(ids, positions, None), stock)
    again = prepare_model(model)
    assert again is not handle
    want, _ = reference(args, WEIGHTS)
    assert float((run_tree(model) - want).abs().max()) < 1e-12 * float(want.abs().max())


def test_plain_batches_train_through_a_bound_model():
    args, model = bound("spec", VARIANTS["qk norm"])
    stock = build.build_model(args, augtree=False, seed=1)
    ids = torch.randint(0, 64, (3, 8), generator=torch.Generator().manual_seed(0))
    got = {}
    for net in (model, stock):
        net.zero_grad()
        net(ids, torch.arange(8)[None].expand(3, 8), None).square().sum().backward()
        got[net is stock] = gradients(net)
    assert all(torch.equal(grad, got[True][name]) for name, grad in got[False].items())


def test_state_dict_hides_the_wrapper():
    """Transformer Engine's attention has an extra state; its key stays where it was."""

    class DotProductAttention(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def get_extra_state(self):
            return torch.tensor(self.value)

        def set_extra_state(self, state):
            self.value = int(state)

    config = build.build_config(parse(""))
    holders = []
    for value in (3, 5):
        holder = torch.nn.Module()
        holder.core_attention = AugTreeAttention(config, 1, stock=DotProductAttention(value))
        holders.append(holder)
    saved = holders[0].state_dict()
    assert list(saved) == ["core_attention._extra_state"]
    holders[1].load_state_dict(saved)
    assert holders[1].core_attention.stock.value == 3
    with pytest.raises(RuntimeError, match="Unexpected key"):
        holders[1].load_state_dict({"core_attention._extra_states": torch.tensor(1)})


def test_checkpoints_load_across():
    args, model = bound("spec", VARIANTS["gqa"])
    other = build.build_model(args, augtree=False, seed=2)
    other.load_state_dict(model.state_dict())
    ids = torch.tensor([PROMPT])
    assert torch.equal(other(ids, None, None), model(ids, None, None))
    metadata = {"dp_cp_group": torch.distributed.group.WORLD}
    assert list(model.sharded_state_dict(metadata=metadata)) == \
        list(other.sharded_state_dict(metadata=metadata))


def test_only_scored_rows_are_projected_and_chunks_change_nothing(monkeypatch):
    args = parse(VARIANTS["mqa tied"])
    model = build.build_model(args, augtree=False, seed=1)
    handle = prepare_model(model)
    projection = model.output_layer.forward.__self__
    got = {}
    for chunk in (10**6, 7, 1):
        monkeypatch.setattr(projection, "budget_bytes", chunk * 64 * 8)
        model.zero_grad()
        calls = []
        logprobs = run_tree(model, calls=calls)
        forward = list(calls)
        (logprobs * WEIGHTS).sum().backward()
        got[chunk] = (logprobs.detach(), gradients(model))
        assert sum(forward) == 18 and max(forward) <= chunk
        assert len(calls) == len(forward) * (1 if len(forward) == 1 else 2)  # chunks are recomputed
    for chunk in (7, 1):
        assert float((got[chunk][0] - got[10**6][0]).abs().max()) < 1e-13
        assert error(got[chunk][1], got[10**6][1]) < 1e-12
    with torch.no_grad():
        assert torch.equal(run_tree(model), got[1][0])
    handle.restore()


@pytest.mark.parametrize("variant", ["gqa", "mqa tied", "gelu layernorm biases"])
@pytest.mark.parametrize("rows", [4, 0])
def test_nothing_scored_still_reaches_every_parameter(variant, rows):
    """A rank without a loss, or without any row, enters backward with zeros for every parameter."""
    _, model = bound("prepare", VARIANTS[variant])
    model.zero_grad()
    ids, positions, targets, mask, _ = tree_rows()
    none = torch.zeros(0, dtype=torch.long)
    out = run_tree(model, (ids[:, :rows], positions[:rows], targets[:rows], mask[:rows, :rows], none))
    torch.autograd.backward([out], [torch.zeros_like(out)])
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_wrapped_models():
    args = parse(VARIANTS["gqa"], dtype="bfloat16")
    model = build.build_model(args, augtree=False, seed=1)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(),
                                      Float16Module(model.config, model))
    handle = prepare_model(wrapped)
    assert handle.model is model and prepare_model(model) is handle
    out = run_tree(wrapped)
    assert out.dtype == torch.float32 and out.isfinite().all()


def test_the_pack_is_forgotten_after_a_failed_forward(monkeypatch):
    _, model = bound("prepare", VARIANTS["gqa"])
    ids = torch.tensor([PROMPT])
    plain = model(ids, None, None)

    def broken(*args):
        raise RuntimeError("a rank is gone")

    monkeypatch.setattr(layer_spec, "tree_attention", broken)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        run_tree(model)
    assert torch.equal(model(ids, None, None), plain)


def test_wrong_packs_are_refused():
    _, model = bound("prepare", VARIANTS["gqa"])
    ids, positions, targets, mask, scored = tree_rows()
    good = pack(targets, positions, mask, scored)
    cases = {
        "labels": lambda: model(ids, None, None, labels=ids, packed_seq_params=good),
        "attention_mask": lambda: model(ids, None, mask[None, None], packed_seq_params=good),
        "attention_mask, by name": lambda: model(ids, None, attention_mask=torch.ones(1),
                                                 packed_seq_params=good),
        r"input_ids \[2, 28\]": lambda: model(ids.expand(2, -1), None, None, packed_seq_params=good),
        r"input_ids \[1, 27\]": lambda: model(ids[:, 1:], None, None, packed_seq_params=good),
        "score is None": lambda: model(ids, None, None, packed_seq_params=AugTreePackedSeqParams(
            positions=positions, scored=scored)),
        "inference_context": lambda: model(ids, None, None, None, None, object(), good),
    }
    for found, call in cases.items():
        with pytest.raises(UnsupportedError, match=found.partition(",")[0]):
            call()
    assert torch.equal(run_tree(model), run_tree(model))


def test_attention_refuses_what_the_tree_cannot_express():
    _, model = bound("prepare", VARIANTS["gqa"])
    attention = model.decoder.layers[0].self_attention.core_attention
    _, positions, targets, mask, scored = tree_rows()
    params = pack(targets, positions, mask, scored)
    q, k = torch.zeros(28, 1, 4, 8), torch.zeros(28, 1, 2, 8)
    assert attention(q, k, k, None, packed_seq_params=params).shape == (28, 1, 32)
    for found, call in {
        "batch of 2": lambda: attention(q.expand(-1, 2, -1, -1), k, k, None, packed_seq_params=params),
        "attention_mask": lambda: attention(q, k, k, mask, packed_seq_params=params),
        "attention_bias": lambda: attention(q, k, k, None, None, mask, params),
        "key width 8, value width 4": lambda: attention(q, k, k[..., :4], None, packed_seq_params=params),
        "28 queries, 27 keys": lambda: attention(q, k[1:], k[1:], None, packed_seq_params=params),
    }.items():
        with pytest.raises(UnsupportedError, match=found):
            call()
    with pytest.raises(UnsupportedError, match="cross"):
        AugTreeAttention(model.config, 1, attention_type="cross", stock=DotProductAttention)


def test_a_spec_alone_is_not_enough():
    args = parse(VARIANTS["gqa"])
    model = build.build_model(args, augtree=True, seed=1)
    model.augtree_handle.restore()
    assert isinstance(model.decoder.layers[0].self_attention.core_attention, AugTreeAttention)
    ids = torch.tensor([PROMPT])
    stock = build.build_model(args, augtree=False, seed=1)
    assert torch.equal(model(ids, None, None), stock(ids, None, None))
    with pytest.raises(AugTreeError, match="prepare_model"):
        ids, positions, targets, mask, scored = tree_rows()
        model(ids, None, None, packed_seq_params=pack(targets, positions, mask, scored))


def test_specs_are_copied_and_walked():
    layer = get_gpt_layer_local_spec()
    block = TransformerBlockSubmodules(layer_specs=[layer, layer])
    changed = augtree_spec(augtree_spec(block))  # twice is once
    for spec in changed.layer_specs:
        core = spec.submodules.self_attention.submodules.core_attention
        assert core.func is AugTreeAttention and core.keywords == {"stock": DotProductAttention}
    assert layer.submodules.self_attention.submodules.core_attention is DotProductAttention
    with pytest.raises(UnsupportedError, match="no self attention"):
        augtree_spec(layer.submodules.mlp)


def test_other_attention_and_other_models_are_refused():
    class SoftcappedAttention(torch.nn.Module):
        pass

    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = SoftcappedAttention
    with pytest.raises(UnsupportedError, match="SoftcappedAttention"):
        augtree_spec(layer)
    model = build.build_model(parse(""), augtree=False, seed=1)
    stock = model.decoder.layers[1].self_attention.core_attention
    model.decoder.layers[1].self_attention.core_attention = SoftcappedAttention()
    with pytest.raises(UnsupportedError, match="SoftcappedAttention"):
        prepare_model(model)
    # Refused before anything was bound.
    assert type(model.decoder.layers[0].self_attention.core_attention) is DotProductAttention
    model.decoder.layers[1].self_attention.core_attention = stock
    model.decoder.layers[1].cross_attention = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match="layer 2 is a TransformerLayer"):
        prepare_model(model)
    with pytest.raises(UnsupportedError, match="model = Linear"):
        prepare_model(torch.nn.Linear(1, 1))
    model = build.build_model(parse(""), augtree=False, seed=1)
    model.config.attention_dropout = 0.1
    with pytest.raises(UnsupportedError, match="attention_dropout = 0.1"):
        prepare_model(model)


def test_weights_depend_on_seed_and_shape_only():
    state = torch.get_rng_state()
    models = {key: dict(build.build_model(parse(VARIANTS["qk norm"], key[0]), augtree=key[1],
                                          seed=key[2]).named_parameters())
              for key in (("float64", False, 1), ("float64", True, 1), ("float32", True, 1),
                          ("bfloat16", False, 1), ("float64", False, 2))}
    assert torch.equal(torch.get_rng_state(), state)
    first = models["float64", False, 1]
    for name, p in first.items():
        assert p.dtype == torch.float64
        assert torch.equal(p, models["float64", True, 1][name])
        assert torch.equal(p, models["float32", True, 1][name].double())
        assert torch.equal(p.bfloat16(), models["bfloat16", False, 1][name])
    assert not torch.equal(first["output_layer.weight"], models["float64", False, 2]["output_layer.weight"])


def test_unsupported_arguments_stop_before_anything_starts():
    with pytest.raises(UnsupportedError, match="--tensor-model-parallel-size 2"):
        build.build_model(parse("--tensor-model-parallel-size 2"), augtree=False, seed=1)


def test_oracle_masks_temperature_and_empty_sequences():
    args = parse(VARIANTS["gqa"])
    model = build.build_model(args, augtree=False, seed=1)
    tokens = PROMPT + RESPONSES[0]
    cpu.restore()  # the oracle brings its own shims
    try:
        full = next(unshared.unshared_logits(model, [(tokens, [True] * 16)]))
        mask = [i in (0, 4, 15) for i in range(16)]
        got = next(unshared.unshared_logprobs(model, [(tokens, mask)], temperature=0.7))
    finally:
        cpu.install()
    assert full.shape == (15, 64)
    want = torch.log_softmax(full / 0.7, -1)[[3, 14], [tokens[4], tokens[15]]]
    assert torch.equal(got, want)
    empty = list(unshared.unshared_logprobs(model, [([5], [True]), (tokens, [False] * 16), ([], [])]))
    assert [x.shape for x in empty] == [(0,)] * 3
    with pytest.raises(ValueError, match="3 tokens but 2"):
        list(unshared.unshared_logprobs(model, [([1, 2, 3], [True, True])]))


def test_oracle_refuses_what_does_not_fit():
    args = parse(VARIANTS["gqa"])
    need = unshared.needed_bytes(4001, [4001, 20], args)
    assert 2 * 4 * 4000**2 * 8 < need < 100 * 4 * 4000**2 * 8
    unshared.check_memory([20, 4001], args, available=2 * need)
    with pytest.raises(UnsupportedError, match="--max-response-tokens") as refused:
        unshared.check_memory([20, 4001], args, available=need)
    assert "4001 tokens" in refused.value.values
    unshared.check_memory([1, 0], args, available=0)
    unshared.check_memory([], args, available=0)
    assert 1 << 20 < unshared.available_bytes() < 1 << 50
