"""A bound GPTModel computes a tree as the un-shared run computes its sequences, and can be unbound.

Attention is replaced by a dense one whose context is the tree's mask: what is tested here is everything
around it (positions, specs, scored rows, state dicts). The executor has its own tests.
"""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from megatron_augtree.mcore import build, cpu, layer_spec
from megatron_augtree.mcore.layer_spec import AugTreeAttention, prepare_model
from scripts import unshared
from tests.mcore.bound_model import (
    PROMPT,
    RESPONSES,
    VARIANTS,
    WEIGHTS,
    bound,
    dense_attention,
    error,
    gradients,
    parse,
    reference,
    run_tree,
    tree_rows,
)


@pytest.fixture(scope="module", autouse=True)
def megatron():
    build.initialize(parse(""))
    yield
    build.destroy()
    bound.cache_clear()


@pytest.fixture(autouse=True)
def dense(monkeypatch):
    monkeypatch.setattr(layer_spec, "tree_attention", dense_attention)


@pytest.mark.parametrize("how", ["spec", "prepare"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tree_equals_unshared(how, variant):
    args, model = bound(how, VARIANTS[variant])
    want, want_grad = reference(args, WEIGHTS)
    assert all(float(grad.abs().max()) > 0 for grad in want_grad.values())
    model.zero_grad()
    got = run_tree(model)
    (got * WEIGHTS).sum().backward()
    assert float((got - want).abs().max().detach()) < 1e-12 * float(want.abs().max())
    assert error(gradients(model), want_grad) < 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_sequence_equals_unshared(variant):
    args, model = bound("prepare", VARIANTS[variant])
    (want, _), rows = reference(args, WEIGHTS, RESPONSES[2:3]), tree_rows(responses=RESPONSES[2:3])
    assert torch.equal(rows[1], torch.arange(len(rows[1])))
    assert float((run_tree(model, rows) - want).abs().max().detach()) < 1e-12 * float(want.abs().max())


def test_positions_and_targets_matter():
    """Shifting one branch, or exchanging two branches' targets, shows."""
    args, model = bound("prepare", VARIANTS["gqa"])
    want, _ = reference(args, WEIGHTS)
    ids, positions, targets, mask, scored = tree_rows()
    shifted = positions.clone()
    shifted[-3:] += 1
    swapped = targets.clone()
    swapped[scored[[0, 5]]] = targets[scored[[5, 0]]]
    with torch.no_grad():
        assert float((run_tree(model, (ids, shifted, targets, mask, scored)) - want).abs().max()) > 1e-3
        assert float((run_tree(model, (ids, positions, swapped, mask, scored)) - want).abs().max()) > 1e-3


def test_losses_inside_the_spine():
    """A scored token in the prompt, and a mask with gaps, as a shared assistant turn has them."""
    args, model = bound("prepare", VARIANTS["gqa"])
    stock = build.build_model(args, augtree=False, seed=1)
    ids, positions, targets, mask, _ = tree_rows()
    scored = torch.tensor([2, 3, 10, 12])
    got = run_tree(model, (ids, positions, targets, mask, scored)).detach()
    tokens = PROMPT + RESPONSES[0]
    want = list(unshared.unshared_logprobs(stock, [(tokens, [i in (3, 4, 11, 13) for i in range(16)])]))
    assert float((got - want[0].detach()).abs().max()) < 1e-12


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
    assert float((run_tree(model).detach() - want).abs().max()) < 1e-12 * float(want.abs().max())


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
