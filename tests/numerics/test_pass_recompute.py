"""Recompute as a pass says it: x layers keep everything, y keep what attention gave, the rest run again."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError, UnsupportedError
from megatron_augtree.mcore import recompute
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.runtime import tree_attention
from megatron_augtree.runtime.prompt_state import PromptState
from megatron_augtree.runtime.transport import LocalTransport
from tests.distributed.matrix import LLAMA, RECOMPUTE
from tests.numerics import fixtures as f
from tests.numerics.recomputing import LAYERS, PROGRAMS, WORLD, model

#: (keep_layers, keep_attention).
PAIRS = [(0, 0), (0, 4), (0, 1), (2, 0), (2, 1), (2, 2), (3, 1), (4, 0)]


@pytest.fixture(scope="module")
def groups(megatron):
    return f.Lab(LLAMA).data("ragged")[0]


def with_pairs(batch: StepBatch, pairs) -> StepBatch:
    """The step with a recompute pair for each pass; `pairs` takes a pass."""
    passes = []
    for p in batch.plan.passes:
        layers, attention = pairs(p)
        passes.append(replace(p, keep_layers=layers, keep_attention=attention))
    return f.batch_with(batch.groups, batch.forest, replace(batch.plan, passes=tuple(passes)))


class Played:
    """A step with what ran in it.

    Attributes:
        outcome: loss, values and gradients.
        layers: (pass, layer) -> how often the layer ran.
        attention: (pass, layer) -> how often its attention was computed.
    """

    def __init__(self, made: torch.nn.Module, batch: StepBatch, monkeypatch, keep: int = 0) -> None:
        self.layers, self.attention = Counter(), Counter()
        numbers, context_of = {}, {}
        attend, engine_of = tree_attention._attend, AugTreeSchedule._engine

        def counted(q, k, v, context, layer, scale):
            self.attention[numbers[id(context)], layer] += 1
            return attend(q, k, v, context, layer, scale)

        def entered(index, module, args, kwargs):
            self.layers[numbers[id(kwargs["packed_seq_params"].context)], index] += 1

        def made_engine(schedule, *args):
            engine = engine_of(schedule, *args)
            make = engine.context

            def context(p, *rest, **how):
                found = make(p, *rest, **how)
                numbers[id(found)], context_of[p.id] = p.id, found  # kept alive, so that ids stay theirs
                return found

            monkeypatch.setattr(engine, "context", context)
            return engine

        hooks = [layer.register_forward_pre_hook(functools.partial(entered, index), with_kwargs=True)
                 for index, layer in enumerate(made.decoder.layers)]
        schedule = AugTreeSchedule(AugTreeConfig(keep_attention=keep), transport=LocalTransport(WORLD))
        try:
            with monkeypatch.context() as patch:
                patch.setattr(tree_attention, "_attend", counted)
                patch.setattr(AugTreeSchedule, "_engine", made_engine)
                self.outcome = f.play(made, batch, schedule=schedule)
        finally:
            for hook in hooks:
                hook.remove()
        assert not any(context.kept for context in context_of.values())


def same(got: f.Outcome, want: f.Outcome) -> bool:
    return (got.loss == want.loss and torch.equal(got.logprobs, want.logprobs)
            and all(torch.equal(got.grads[name], want.grads[name]) for name in want.grads))


def expected(pair: tuple[int, int]) -> tuple[list[int], list[int]]:
    """[layer] how often it runs, and how often its attention does."""
    layers, attention = pair
    again = LAYERS - layers
    return ([1 + (i < again) for i in range(LAYERS)], [1 + (attention <= i < again) for i in range(LAYERS)])


@pytest.mark.parametrize("flags", ["", RECOMPUTE["selective"][0], RECOMPUTE["full uniform 2"][0]],
                         ids=["none", "selective", "full"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_bits_and_what_is_said_runs_again(groups, monkeypatch, flags, program):
    """Whatever the model was built with: the pass's word counts, in every pass, for layers and attention."""
    batch = f.batch_of(groups, PROGRAMS[program], WORLD)
    plain = Played(model(""), batch, monkeypatch)
    assert set(plain.layers.values()) == {1} == set(plain.attention.values())
    for pair in PAIRS:
        # --augtree-keep-attention is the word for passes that have none.
        got = Played(model(flags), with_pairs(batch, lambda p, pair=pair: pair), monkeypatch, keep=-1)
        assert same(got.outcome, plain.outcome), pair
        layers, attention = expected(pair)
        for p in batch.plan.passes:
            assert [got.layers[p.id, i] for i in range(LAYERS)] == layers, (pair, p.id)
            assert [got.attention[p.id, i] for i in range(LAYERS)] == attention, (pair, p.id)


def test_passes_of_one_plan_differ(groups, monkeypatch):
    """The prompt runs again in full, waves keep everything; the chunk between has a pair of its own."""
    batch = f.batch_of(groups, PROGRAMS["waves"], WORLD)
    kinds = [p.kind for p in batch.plan.passes]
    assert kinds.count("chunk") == 2 and kinds.count("replay") == 2
    pairs = {p.id: (4, 0) if p.kind == "replay" else ((0, 0), (1, 2))[p.id % 2] for p in batch.plan.passes}
    plain = Played(model(""), batch, monkeypatch)
    got = Played(model(""), with_pairs(batch, lambda p: pairs[p.id]), monkeypatch)
    assert same(got.outcome, plain.outcome)
    for number, pair in pairs.items():
        layers, attention = expected(pair)
        assert [got.layers[number, i] for i in range(LAYERS)] == layers
        assert [got.attention[number, i] for i in range(LAYERS)] == attention
    assert len(set(pairs.values())) == 3


def test_without_a_pair_the_models_own_setting_holds(groups, monkeypatch):
    flags, keep = RECOMPUTE["full block 3, 1 keeps attention"]
    batch = f.batch_of(groups, PROGRAMS["waves"], WORLD)
    own = Played(model(flags), batch, monkeypatch, keep=keep)
    said = Played(model(""), with_pairs(batch, lambda p: (1, 1)), monkeypatch)
    assert same(own.outcome, said.outcome)
    assert own.layers == said.layers and own.attention == said.attention
    mixed = Played(model(flags), with_pairs(batch, lambda p: (4, 0) if p.kind == "replay" else (-1, 0)),
                   monkeypatch, keep=keep)
    for p in batch.plan.passes:
        want = expected((4, 0) if p.kind == "replay" else (1, 1))
        assert ([mixed.layers[p.id, i] for i in range(LAYERS)],
                [mixed.attention[p.id, i] for i in range(LAYERS)]) == want


@settings(max_examples=12, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_pairs_equal_the_unshared_run(lab, data):
    """Against the oracle, two layers: any pair in any pass, any program."""
    program = data.draw(st.sampled_from(f.PROGRAMS))
    groups, want = lab.data("three_levels")
    batch = f.batch_of(groups, program, 3)
    drawn = {}
    for p in batch.plan.passes:
        layers = data.draw(st.integers(-1, 2))
        drawn[p.id] = layers, data.draw(st.integers(0, 2 - layers)) if layers >= 0 else 0
    batch = with_pairs(batch, lambda p: drawn[p.id])
    assert f.worst(lab.compare(groups, want, batch)) < 1e-10


# Memory.

def kept_bytes(made: torch.nn.Module, batch: StepBatch, monkeypatch) -> int:
    """Most bytes that a step keeps for backwards: saved tensors of autograd, and attention that was kept.

    Parameters aside; memory that several of them share counts once.
    """
    ours = {p.untyped_storage().data_ptr() for p in made.parameters()}
    alive: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    most = 0

    class Saved:
        def __init__(self, tensor):
            storage = tensor.untyped_storage()
            self.tensor, self.key = tensor, storage.data_ptr()
            if self.key not in ours:
                alive[self.key] += 1
                sizes[self.key] = storage.nbytes()

        def __del__(self):
            alive[self.key] -= 1

    def note(*_):
        nonlocal most
        most = max(most, sum(sizes[key] for key, count in alive.items() if count > 0))

    remember, recall = tree_attention.PassContext.remember, tree_attention.PassContext.recall
    kept = {}

    def remembered(context, layer, known):
        tensors = (known.out, known.lse, *(known.received or {}).values())
        kept[id(context), layer] = list(map(Saved, tensors))
        remember(context, layer, known)

    def recalled(context, layer):
        kept.pop((id(context), layer), None)
        return recall(context, layer)

    with monkeypatch.context() as patch:
        patch.setattr(tree_attention.PassContext, "remember", remembered)
        patch.setattr(tree_attention.PassContext, "recall", recalled)
        done = made.register_forward_hook(note)
        try:
            with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
                f.play(made, batch)
        finally:
            done.remove()
    return most


@pytest.mark.parametrize("program", ["fused", "waves"])
def test_memory_grows_with_what_is_kept(groups, monkeypatch, program):
    """(0, 0) < (0, L) < (L / 2, L / 2) < (L, 0), by at least what the layers' inputs and outputs say."""
    batch = f.batch_of(groups, PROGRAMS[program], WORLD)
    found = [kept_bytes(model(""), with_pairs(batch, lambda p, pair=pair: pair), monkeypatch)
             for pair in ((0, 0), (0, LAYERS), (LAYERS // 2, LAYERS // 2), (LAYERS, 0))]
    assert found == sorted(set(found)), found
    rows = sum(batch.plan.rows_of_rank(rank) for rank in range(WORLD))
    attended = rows * 4 * (8 + 1) * 8 * LAYERS  # out and lse, fp64
    assert found[1] - found[0] >= attended
    assert found[3] == kept_bytes(model(""), batch, monkeypatch)
    assert found[3] > 3 * found[0]


def state_bytes(batch: StepBatch, monkeypatch) -> tuple[int, int]:
    """(bytes of the memory that prompt state keeps, bytes of its keys and values) of a step."""
    contexts, playing = [], tree_attention.PassContext.playing

    def noted(context):
        contexts.append(context)
        return playing(context)

    with monkeypatch.context() as patch:
        patch.setattr(tree_attention.PassContext, "playing", noted)
        patch.setattr(PromptState, "take_gradients", lambda *_: None)
        f.play(model(""), batch)
    tensors = [fields[name] for context in contexts if context.own_state is not None
               for fields in context.own_state.layers.values() for name in ("k", "v")]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(memory.values()), sum(t.numel() * t.element_size() for t in tensors)


def test_prompt_state_of_a_recomputed_layer_is_no_part_of_something_larger(groups, monkeypatch):
    """Values are a slice of the layer's QKV: kept as they lie, they would keep all of it."""
    batch = f.batch_of(groups, PROGRAMS["waves"], WORLD)
    again, wanted = state_bytes(with_pairs(batch, lambda p: (0, 0)), monkeypatch)
    whole, _ = state_bytes(with_pairs(batch, lambda p: (4, 0)), monkeypatch)
    # Where the layer keeps everything, QKV is there anyway: a copy would be one more.
    assert again == wanted < whole


# What must not leak, and what is refused.

class Broken(Exception):
    """What a layer raises."""


def test_nothing_leaks_when_the_model_raises(groups):
    made = f.build_model(f.parse(f"{LLAMA} {RECOMPUTE['selective'][0]}"), augtree=True)
    config, layer = made.config, made.decoder.layers[3]

    def setting():
        switches = [x.self_attention.checkpoint_core_attention for x in made.decoder.layers]
        return (config.recompute_granularity, config.recompute_method, config.recompute_num_layers,
                made.decoder.training, switches)

    before, inside = setting(), []

    def fail(*_):
        inside.append(setting())
        raise Broken

    hook = layer.mlp.register_forward_pre_hook(fail)
    batch = with_pairs(f.batch_of(groups, PROGRAMS["fused"], WORLD), lambda p: (2, 0))
    with pytest.raises(Broken):
        f.play(made, batch)
    hook.remove()
    assert inside == [("full", "block", 2, True, [True, True, True, False])]
    assert setting() == before == ("selective", None, None, True, [True] * 4)


def test_restore_takes_it_off_again():
    made = model(RECOMPUTE["selective"][0])
    assert "forward" in vars(made.decoder) and all("forward" in vars(x) for x in made.decoder.layers)
    made.augtree_handle.restore()
    assert "forward" not in vars(made.decoder) and not any("forward" in vars(x) for x in made.decoder.layers)
    model.cache_clear()


def test_evaluation_mode_recomputes_too(groups, monkeypatch):
    made = f.build_model(f.parse(LLAMA), augtree=True).eval()
    batch = with_pairs(f.batch_of(groups, PROGRAMS["fused"], WORLD), lambda p: (1, 0))
    got = Played(made, batch, monkeypatch)
    assert [got.layers[0, i] for i in range(LAYERS)] == [2, 2, 2, 1]
    assert not made.decoder.training


def test_without_gradients_nothing_runs_again_and_nothing_is_kept(groups, monkeypatch):
    batch = with_pairs(f.batch_of(groups, PROGRAMS["waves"], WORLD), lambda p: (0, 4))
    contexts, made = [], model("")

    def entered(module, args, kwargs):
        contexts.append(kwargs["packed_seq_params"].context)

    hooks = [x.register_forward_pre_hook(entered, with_kwargs=True) for x in made.decoder.layers]
    schedule = AugTreeSchedule(AugTreeConfig(), transport=LocalTransport(WORLD))
    schedule(forward_step_func=f.forward_step, data_iterator=iter([batch]), model=made, forward_only=True)
    for hook in hooks:
        hook.remove()
    assert len(contexts) == LAYERS * len(batch.plan.passes)
    assert not any(context.kept for context in contexts)


@pytest.mark.parametrize("pair", [(5, 0), (2, 3), (0, 5)])
def test_a_pair_beyond_the_models_layers_is_refused_before_anything_runs(groups, pair):
    batch = with_pairs(f.batch_of(groups, PROGRAMS["fused"], WORLD), lambda p: pair)
    with pytest.raises(InputError, match=f"keep_layers {pair[0]}, keep_attention {pair[1]}; 4 layers"):
        f.play(model(""), batch)


@pytest.mark.parametrize("pair", [(-2, 0), (-1, 1), (0, -1)])
def test_pairs_that_say_nothing_are_no_plan(groups, pair):
    batch = f.batch_of(groups, PROGRAMS["fused"], WORLD)
    with pytest.raises(AugTreeError, match="keep_layers"):
        with_pairs(batch, lambda p: pair)


def test_a_stack_that_cannot_is_refused_and_one_that_need_not_is_played(groups, monkeypatch):
    """The stack of hybrid models before megatron-core 0.19 knows no recompute."""
    batch = f.batch_of(groups, PROGRAMS["fused"], WORLD)
    monkeypatch.setattr(recompute, "can_recompute", lambda stack: False)
    with pytest.raises(UnsupportedError) as refused:
        f.play(model(""), with_pairs(batch, lambda p: (3, 0)))
    assert "pass 0" in refused.value.values and refused.value.rule and refused.value.remedy
    assert "TransformerBlock" in refused.value.values
    plain = f.play(model(""), batch)
    assert same(f.play(model(""), with_pairs(batch, lambda p: (4, 0))), plain)
