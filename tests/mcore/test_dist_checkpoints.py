"""Checkpoints by megatron-core's dist_checkpointing: across modes and degrees, and no key of ours in them.

One torchrun a world size runs all of its cases (``dist_checkpoint_cases.py``); plain Megatron on one rank is
this process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.serialization import load_plain_tensors

from megatron_augtree.mcore import build
from megatron_augtree.mcore.layer_spec import AugTreeAttention, prepare_model
from tests.distributed.launching import launch
from tests.mcore import dist_checkpoint_cases as cases
from tests.mcore import launcher_cases
from tests.numerics import fixtures as f

PLAIN = cases.SITES["plain 1"]
BARS = {"float32": 1e-5, "float64": 1e-10}


@dataclass
class Results:
    """What all ranks found: ``ranks[world]`` is a list with an entry a rank."""

    root: Path
    plain: dict
    ranks: dict[int, list[dict]]


@pytest.fixture(scope="module", autouse=True)
def megatron():
    cases.enter(PLAIN)
    yield
    build.destroy()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    root = tmp_path_factory.mktemp("checkpoints")
    data = launcher_cases.write_data(root)
    plain, ranks = {"same": cases.save_all(PLAIN, root)}, {}
    for world in (2, 4):
        result = root / f"{world}.json"
        output = launch("../mcore/dist_checkpoint_cases.py", world, data, root, result)
        told = "\n".join(path.read_text() for path in sorted(root.glob(f"{world}.json.*")))
        assert result.exists(), told or output
        ranks[world] = json.loads(result.read_text())
    for kind in cases.KINDS:
        for site, source in cases.loads(kind):
            if site == PLAIN.name:
                plain[f"{kind} from {source}"] = cases.load_from(PLAIN, cases.SITES[source], kind, root)
    return Results(root, plain, ranks)


def of(results: Results, site: str) -> list[dict]:
    """[rank] what a site's ranks found."""
    found = results.ranks.get(cases.SITES[site].world)
    return [results.plain] if found is None else [rank[site] for rank in found]


LOADS = [pytest.param(kind, site, source, id=f"{kind}: {source} -> {site}")
         for kind in cases.KINDS for site, source in cases.loads(kind)]


@pytest.mark.parametrize("kind, site, source", LOADS)
def test_the_next_step_is_that_of_the_run_that_saved(results, kind, site, source):
    bar = BARS[cases.KINDS[kind][1]]
    for rank in of(results, site):
        errors = rank[f"{kind} from {source}"]
        assert errors.keys() == {"loss", "grad/", "param/"}
        assert all(error < bar for error in errors.values()), errors


@pytest.mark.parametrize("kind, site, source", LOADS)
def test_what_was_loaded_is_what_was_saved(results, kind, site, source):
    """Weights, moments and main parameters, saved again by who loaded them, have the same names and bits."""
    there = cases.folder_of(results.root, source, kind)
    here = cases.copy_of(results.root, site, source, kind)
    assert cases.keys_of(there) == cases.keys_of(here)
    theirs, ours = ({name: value for name, value in load_plain_tensors(str(path)).items()
                     if isinstance(value, torch.Tensor)} for path in (there, here))
    moments = sum("exp_avg" in name or "momentum" in name for name in theirs)
    assert moments >= (2 if kind == "dp_reshardable" else 9)
    weights = sum(value.numel() for name, value in theirs.items() if "optimizer" not in name)
    for name in launcher_cases.differing(theirs, ours):
        # Between the parameters of a bucket, this type saves memory that nobody wrote.
        gaps = theirs[name].numel() - weights
        assert kind == "dp_reshardable" and "bucket" in name and gaps < 0.1 * weights
        assert int((theirs[name] != ours[name]).sum()) <= gaps


@pytest.mark.parametrize("site", cases.SITES)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_same_ranks_go_on_to_the_bit(results, kind, site):
    assert [rank["same"][kind] for rank in of(results, site)] == [[]] * cases.SITES[site].world


@pytest.mark.parametrize("site", [site for site in cases.SITES if site != PLAIN.name])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_no_key_of_ours(results, kind, site):
    stock, ours = (cases.keys_of(cases.folder_of(results.root, name, kind)) for name in (PLAIN.name, site))
    # The distributed optimizer numbers its objects by tensor-parallel rank.
    extra = {key for key in ours - stock if "dp_group_idx_1" not in key}
    assert stock <= ours and not extra and len(stock) > 10


@pytest.mark.parametrize("site", [site for site in cases.SITES if site != PLAIN.name])
def test_the_launcher_resumes_here_and_elsewhere(results, site):
    for rank in of(results, site):
        found = rank["launcher"]
        assert found["same"] and not found["differing"] and len(set(found["losses"])) == 4
        for loss, want in zip(found.get("from 2", []), found["losses"][2:], strict=False):
            assert abs(loss - want) < 1e-5 * abs(want)
    assert ("from 2" in found) == (site != "augtree 2")


# --- state dicts of the wrapper --------------------------------------------------------------------------


class DotProductAttention(torch.nn.Module):
    """A stand-in for Transformer Engine's: an extra state, and a hook that forgives its absence by name."""

    def __init__(self, config=None, layer_number=0, **kwargs):
        super().__init__()
        self.config, self.state = config, None
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.register_load_state_dict_post_hook(forgive_extra_states)

    def get_extra_state(self):
        return torch.tensor([7, 7], dtype=torch.uint8)

    def set_extra_state(self, state):
        self.state = state


def forgive_extra_states(module, keys):
    for name in [name for name in keys.missing_keys if "core_attention._extra_state" in name]:
        keys.missing_keys.remove(name)


def models(wrapped: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A stock model and an AugTree one whose core attentions are the stand-in."""
    args, made = cases.arguments(PLAIN), []
    for how in ("", wrapped):
        model = f.build_model(args, augtree=False)
        for number, layer in enumerate(model.decoder.layers, 1):
            core = DotProductAttention(model.config)
            layer.self_attention.core_attention = (
                AugTreeAttention(model.config, number, stock=core) if how == "spec" else core)
        if how:
            prepare_model(model)
        made.append(model)
    return made[0], made[1]


CORE = "decoder.layers.1.self_attention.core_attention."


@pytest.mark.parametrize("wrapped", ["spec", "prepare"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_state_dicts_are_the_stock_models(wrapped, prefix):
    stock, ours = models(wrapped)
    theirs, mine = (model.state_dict(prefix=prefix) for model in (stock, ours))
    assert list(mine) == list(theirs) and mine._metadata == theirs._metadata
    assert prefix + CORE + "_extra_state" in mine and prefix + CORE + "bias" in mine
    holders = [torch.nn.ModuleDict({"model": model}) for model in (stock, ours)]
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.add_(1)
    holders[1].load_state_dict(holders[0].state_dict(), strict=True)
    tensors = [{name: value for name, value in holder.state_dict().items() if value is not None}
               for holder in holders]
    assert not launcher_cases.differing(*tensors) and "model." + CORE + "bias" in tensors[0]
    core = ours.decoder.layers[1].self_attention.core_attention
    assert core.stock.state.tolist() == [7, 7] and float(core.stock.bias.detach()[0]) == 1
    holders[0].load_state_dict(holders[1].state_dict(), strict=True)


@pytest.mark.parametrize("wrapped", ["spec", "prepare"])
def test_wrong_keys_have_the_stock_models_names(wrapped):
    told = []
    for model in models(wrapped):
        state = {name: value for name, value in model.state_dict().items()
                 if "core_attention._extra_state" not in name}
        model.load_state_dict(state, strict=True)  # forgiven
        state[CORE + "scale"] = state.pop(CORE + "bias")
        found = model.load_state_dict(state, strict=False)
        told.append((found.missing_keys, found.unexpected_keys))
        with pytest.raises(RuntimeError, match=CORE + "bias"):
            model.load_state_dict(state, strict=True)
    assert told == [([CORE + "bias"], [CORE + "scale"])] * 2


@pytest.mark.parametrize("wrapped", ["spec", "prepare"])
def test_sharded_state_dicts_are_the_stock_models(wrapped):
    theirs, mine = ({name: (type(value), value.key) for name, value in model.sharded_state_dict("m.").items()}
                    for model in models(wrapped))
    assert mine == theirs and {"m." + CORE + "bias", "m." + CORE + "_extra_state"} <= mine.keys()
