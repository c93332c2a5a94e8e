"""What a bound model, a layer spec and the oracle refuse, with the values that they refuse."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore import build, layer_spec
from megatron_augtree.mcore.layer_spec import AugTreeAttention, augtree_spec, prepare_model
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from scripts import unshared
from tests.mcore.bound_model import PROMPT, VARIANTS, bound, dense_attention, pack, parse, run_tree, tree_rows


@pytest.fixture(scope="module", autouse=True)
def megatron():
    build.initialize(parse(""))
    yield
    build.destroy()
    bound.cache_clear()


@pytest.fixture(autouse=True)
def dense(monkeypatch):
    monkeypatch.setattr(layer_spec, "tree_attention", dense_attention)


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
        r"position_ids \[3, 1, 28\], 28 rows": lambda: model(ids, positions.expand(3, 1, -1), None,
                                                             packed_seq_params=good),
        "inference_context": lambda: model(ids, None, None, None, None, object(), good),
    }
    for found, call in cases.items():
        with pytest.raises(UnsupportedError, match=found.partition(",")[0]):
            call()
    # Position ids of a pack change nothing: the pack's own count.
    want = run_tree(model)
    for given in (positions[None], torch.zeros_like(positions)[None]):
        assert torch.equal(model(ids, given, None, packed_seq_params=good)[0, :, 0], want)


def test_case_29_plain_batches_take_the_masks_and_positions_that_stock_takes():
    args, model = bound("prepare", VARIANTS["gqa"])
    stock = build.build_model(args, augtree=False, seed=1)
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    triangle = torch.ones(1, 1, len(PROMPT), len(PROMPT), dtype=torch.bool).triu(1)
    for positions in (None, torch.arange(len(PROMPT))[None].expand(2, -1)):
        for mask in (None, triangle):
            assert torch.equal(model(ids, positions, mask), stock(ids, positions, mask))


def test_attention_refuses_what_the_tree_cannot_express():
    _, model = bound("prepare", VARIANTS["gqa"])
    attention = model.decoder.layers[0].self_attention.core_attention
    _, positions, targets, mask, scored = tree_rows()
    params = pack(targets, positions, mask, scored)
    q, k = torch.zeros(28, 1, 4, 8), torch.zeros(28, 1, 2, 8)
    assert attention(q, k, k, None, packed_seq_params=params).shape == (28, 1, 32)
    assert attention(q, k, k[..., :4], None, packed_seq_params=params).shape == (28, 1, 16)
    for found, call in {
        "batch of 2": lambda: attention(q.expand(-1, 2, -1, -1), k, k, None, packed_seq_params=params),
        "attention_mask": lambda: attention(q, k, k, mask, packed_seq_params=params),
        "attention_bias": lambda: attention(q, k, k, None, None, mask, params),
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


def test_unsupported_arguments_stop_before_anything_starts():
    with pytest.raises(UnsupportedError, match="--pipeline-model-parallel-size 2"):
        build.build_model(parse("--pipeline-model-parallel-size 2"), augtree=False, seed=1)


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
