"""Models that AugTree supports, played by the executor on ranks of one process, against the un-shared run.

tests/mcore/test_binding.py covers the flags of the plain ``GPTModel`` around a dense attention; here are
rotary variants, hybrid models, unequal widths and settings without a flag, with traffic between ranks.
"""

import dataclasses
import functools
import warnings

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore import build, selfcheck
from megatron_augtree.mcore.layer_spec import AugTreeAttention, prepare_model
from tests.mcore import models
from tests.numerics import fixtures as f

BAR = 1e-10
#: A shifted branch is far above it.
SEEN = 1e-5

ROTARY = {
    "case 8 partial rotary": "--rotary-percent 0.5",
    "case 8 partial interleaved rotary": "--rotary-percent 0.5 --rotary-interleaved",
    # Beyond the original length from the fifth row on; mscale enters rotation and so the scores.
    "case 8 YaRN": "--position-embedding-type yarn --rotary-scaling-factor 16 --mscale 1.3 "
                   "--yarn-original-max-position-embeddings 4",
    "llama 3 scaling": "--use-rope-scaling --rope-scaling-factor 8 --rotary-base 5000000",
    "interpolation": "--rotary-seq-len-interpolation-factor 3",
}
MODELS = {
    "hybrid": ("", models.build_hybrid),
    "hybrid without positions": ("--position-embedding-type none", models.build_hybrid),
    "case 43 key width 8, value width 4": (
        "", functools.partial(models.build_gpt, attention=models.NarrowValues)),
    "rotary on every other layer": ("", functools.partial(models.build_gpt, no_rope_freq=[1, 0])),
    "case 42 layer scaling": (
        "", functools.partial(models.build_gpt, apply_query_key_layer_scaling=True,
                              attention_softmax_in_fp32=True)),
}
WIDE = f.augtree(lane_degree=8)
PHASED = f.augtree(phase="phased", waves=2, chunks=2, primitive="move_q")


@pytest.fixture(scope="module", autouse=True)
def megatron():
    build.initialize(f.parse())
    yield
    build.destroy()


@pytest.fixture(autouse=True)
def norms(monkeypatch):
    models.local_final_norm(monkeypatch)


@functools.cache
def lab(name: str) -> f.Lab:
    text, make = MODELS.get(name) or (ROTARY.get(name, ""), f.build_model)
    return f.Lab(f"{f.MODEL} {text}", make=make)


@pytest.mark.parametrize("name", [*ROTARY, *MODELS])
def test_models_equal_the_unshared_run(name):
    groups, want = lab(name).data("three_levels")
    for world, program in ((2, WIDE), (4, PHASED), (3, f.augtree())):
        found = lab(name).compare(groups, want, f.batch_of(groups, program, world))
        assert f.worst(found) < BAR, (world, str(program), found)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_variants_are_not_the_plain_one(name):
    """Were a setting lost on both sides, parity would not show it."""
    groups, _ = lab("plain").data("three_levels")
    assert f.err({"": f.oracle(lab(name).stock, groups).logprobs},
                 {"": f.oracle(lab("plain").stock, groups).logprobs}) > SEEN


@pytest.mark.parametrize("name", ["plain", *ROTARY])
def test_case_8_shifting_one_branch_by_one_shows(name):
    groups, want = lab(name).data("ragged")
    for program in (WIDE, PHASED):
        batch = f.batch_of(groups, program, 4)
        shape = batch.forest.shape
        positions = batch.forest.positions.copy()
        leaf = batch.forest.paths[2][-1]
        positions[shape.offsets[leaf]: shape.offsets[leaf + 1]] += 1
        shifted = dataclasses.replace(batch, forest=dataclasses.replace(batch.forest, positions=positions))
        assert f.err(f.play(lab(name).tree, batch).grads, want.grads) < BAR
        assert f.err(f.play(lab(name).tree, shifted).grads, want.grads) > SEEN


def test_hybrid_models_are_bound_by_their_attention_layers():
    made = models.build_hybrid(f.parse(), augtree=False)
    keys, ids = list(made.state_dict()), torch.tensor([f.tokens(1, 9)])
    modules = {name: type(module) for name, module in made.named_modules()}
    plain = made(ids, None, None)
    handle = prepare_model(made)
    assert prepare_model(made) is handle and list(made.state_dict()) == keys
    bound = [m for m in made.modules() if isinstance(m, AugTreeAttention)]
    # Keys of the prompt state, whatever numbers megatron-core gave the layers.
    assert [attention.layer for attention in bound] == [0, 1, 2]
    assert torch.equal(made(ids, None, None), plain)
    handle.restore()
    assert {name: type(module) for name, module in made.named_modules()} == modules
    assert torch.equal(made(ids, None, None), plain)


@pytest.mark.parametrize(("pattern", "named"), [("M*-M", (1, 4)), ("**M", (3,))])
def test_recurrent_layers_are_refused_by_number(pattern, named):
    made = models.build_hybrid(f.parse(), augtree=False, pattern=pattern)
    with pytest.raises(UnsupportedError) as refused:
        prepare_model(made)
    assert refused.value.values == "; ".join(f"layer {number} is a MambaLayer" for number in named)
    assert "recurrent" in refused.value.rule and "* and -" in refused.value.remedy


def test_linear_attention_is_refused_by_name():
    class GatedDeltaNet(torch.nn.Module):
        pass

    made = models.build_hybrid(f.parse(), augtree=False)
    made.decoder.layers[3].self_attention = GatedDeltaNet()
    with pytest.raises(UnsupportedError, match="layer 4 is a TransformerLayer with GatedDeltaNet"):
        prepare_model(made)


@pytest.mark.parametrize("kind", ["no_mask", "padding", "arbitrary"])
def test_case_59_attention_that_is_not_causal_is_refused(kind):
    made = f.build_model(f.parse(), augtree=False)
    made.decoder.layers[1].self_attention.attn_mask_type = getattr(AttnMaskType, kind)
    with pytest.raises(UnsupportedError, match=f"layer 2 has attn_mask_type {kind}"):
        prepare_model(made)


def test_the_self_check_agrees_and_notices(monkeypatch, capsys):
    """Here its numbers; as a command, that it needs nothing of this process."""
    assert 0 < max(selfcheck.run().values()) < 1e-12
    plain = f.build_model.__globals__["build"].prepare_model

    def unbound(model, **kwargs):
        handle = plain(model, **kwargs)
        del model.rotary_pos_emb.forward  # as if a release had moved what is bound
        return handle

    monkeypatch.setattr(build, "prepare_model", unbound)
    with pytest.raises(AugTreeError, match="a bound model does not compute"):
        selfcheck.run()


class Ended:
    def __init__(self, returncode: int, stderr: str) -> None:
        self.returncode, self.stderr = returncode, stderr


@pytest.mark.parametrize("version", ["0.15.3", "0.17.1", "0.20.0rc1", "1.0"])
def test_unknown_releases_warn_once_and_are_checked(monkeypatch, version):
    started = []

    def run(command, env, **_):
        started.append(command)
        assert "RANK" not in env and env["CUDA_VISIBLE_DEVICES"] == ""
        return Ended(0, "")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("megatron.core.__version__", version)
    monkeypatch.setattr(selfcheck.subprocess, "run", run)
    first, second = (f.build_model(f.parse(), augtree=False) for _ in range(2))
    with pytest.warns(UserWarning, match=f"tested with megatron-core 0.16 and 0.19, this is {version}"):
        prepare_model(first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_model(second)
    assert [command[1:] for command in started] == [["-m", "megatron_augtree.mcore.selfcheck"]]


def test_an_unknown_release_that_disagrees_is_refused(monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", "0.21.0")
    monkeypatch.setattr(selfcheck.subprocess, "run", lambda *_, **__: Ended(1, "TypeError: moved"))
    made = f.build_model(f.parse(), augtree=False)
    with pytest.warns(UserWarning), pytest.raises(UnsupportedError) as refused:
        prepare_model(made)
    assert refused.value.values == "megatron-core 0.21.0: TypeError: moved"
    assert refused.value.rule and refused.value.remedy
    assert not any(isinstance(module, AugTreeAttention) for module in made.modules())


def test_the_self_check_is_a_command():
    """Started as prepare_model starts it, with an unknown release."""
    with pytest.warns(UserWarning, match="this is 99.0"):
        selfcheck.check_release("99.0")
