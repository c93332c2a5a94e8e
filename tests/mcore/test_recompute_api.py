"""Recompute by pass through the API: both tiers, models bound late, hybrid models, plans of other models."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from megatron.core.transformer.module import Float16Module

from megatron_augtree.config import AugTreeConfig, InputError, UnsupportedError
from megatron_augtree.mcore import api, build, recompute
from megatron_augtree.mcore.api import planning
from megatron_augtree.mcore.update import wrap_model
from megatron_augtree.planning.candidates import Choice
from megatron_augtree.planning.candidates import build as build_plan
from megatron_augtree.planning.tree import from_sequences
from megatron_augtree.runtime.transport import LocalTransport
from tests.mcore import models
from tests.numerics import fixtures as f

LAYERS = 4
LLAMA = f.MODEL.replace("--num-layers 2", f"--num-layers {LAYERS}")
FUSED = {"lane_degree": 1}
WAVES = {"phase": "phased", "waves": 2}


@pytest.fixture(scope="module", autouse=True)
def megatron():
    build.initialize(f.parse())
    yield
    build.destroy()


@pytest.fixture(scope="module")
def lab():
    return f.Lab(LLAMA)


def handle_of(made: torch.nn.Module) -> api.Handle:
    return api.prepare_model(made, AugTreeConfig(min_shared_rows=4), transport=LocalTransport(2))


@pytest.fixture
def planned(monkeypatch):
    """Plans are of a choice from then on, also where the planner would make another."""

    def set_choice(**choice) -> None:
        def chosen(sequences, groups, model, world, config):
            forest = from_sequences(sequences, groups=groups, min_shared_rows=4)
            return forest, build_plan(Choice(degree=world, **choice), forest.shape, world, f.UNIT)

        monkeypatch.setattr(planning, "choose_plan", chosen)

    return set_choice


class Ran(Counter):
    """(kind of pass, layer) -> how often a layer ran."""

    def __init__(self, model: torch.nn.Module, plan: api.StepPlan) -> None:
        super().__init__()
        programs = {id(plan.plan.program(p.id)): p.kind for p in plan.plan.passes}

        def entered(index, module, args, kwargs):
            self[programs[id(kwargs["packed_seq_params"].context.forward)], index] += 1

        for index, layer in enumerate(model.decoder.layers):
            layer.register_forward_pre_hook(functools.partial(entered, index), with_kwargs=True)

    def of(self, kind: str) -> list[int]:
        """[layer] how often it ran in passes of a kind."""
        return [self[kind, index] for index in range(LAYERS)]


def loss_of(groups):
    answers = [r for g in groups for r in g.responses]

    def loss(o):
        return f.grpo(o.as_list()[0], answers[int(o.index)], 1), {}

    return loss


def test_waves_keep_everything_while_the_prompt_runs_again(lab, planned):
    groups, want = lab.data("ragged")
    planned(**WAVES, keep_layers=0, keep_attention=1, wave_layers=LAYERS)
    made = f.build_model(lab.args, augtree=False)
    handle, batch = handle_of(made), api.Batch.from_groups(groups)
    plan = api.plan(handle, batch)
    ran = Ran(made, plan)
    api.forward_backward(handle, batch, plan, loss_of(groups), normalizer=len(want.logprobs))
    assert ran.of("prefill") == [2] * LAYERS and ran.of("replay") == [2] * LAYERS  # two waves, once each
    assert f.err(f.gradients(made), want.grads) < 1e-10
    before = Counter(ran)
    api.forward_logprobs(handle, batch, plan)
    assert ran - before == Counter({key: count // 2 if key[0] == "prefill" else count
                                    for key, count in before.items()})


def test_micro_batches_of_a_trainers_own(lab, planned):
    groups, want = lab.data("ragged")
    planned(**FUSED, keep_layers=1, keep_attention=2)
    made = f.build_model(lab.args, augtree=False)
    handle, batch = handle_of(made), api.Batch.from_groups(groups)
    plan = api.plan(handle, batch)
    ran = Ran(made, plan)
    answers = [r for g in groups for r in g.responses]
    for mb in api.microbatches(plan):
        outputs = api.forward(handle, mb)
        total = outputs.anchor
        for i, values in zip(outputs.index.tolist(), outputs.as_list()):
            total = total + f.grpo(values, answers[i], len(want.logprobs))
        total.backward()
    assert ran.of("fused") == [2, 2, 2, 1]
    assert f.err(f.gradients(made), want.grads) < 1e-10


@pytest.mark.parametrize("late", ["before DDP", "after DDP"])
def test_models_bound_before_and_after_they_are_wrapped(lab, planned, late):
    groups, want = lab.data("ragged")
    planned(**WAVES, keep_layers=2, keep_attention=1, wave_layers=2, wave_attention=1)
    made = f.build_model(lab.args, augtree=False)
    if late == "before DDP":
        handle_of(made)
    ddp = wrap_model(made, overlap_grad_reduce=True, bucket_size=9000)
    handle, batch = handle_of(ddp), api.Batch.from_groups(groups)
    plan = api.plan(handle, batch)
    ran = Ran(made, plan)
    ddp.zero_grad_buffer()
    api.forward_backward(handle, batch, plan, loss_of(groups), normalizer=len(want.logprobs))
    assert ran.of("prefill") == [2, 2, 1, 1] and ran.of("replay") == [4, 4, 2, 2]
    grads = {name: p.main_grad for name, p in made.named_parameters()}
    assert f.err(grads, want.grads) < 1e-10


def test_a_model_in_half_precision_inside_its_wrapper(planned):
    """The same bits with and without, in bf16."""
    found = []
    for choice in ({}, {"keep_layers": 1, "keep_attention": 1, "wave_layers": 2}):
        planned(**WAVES, **choice)
        made = f.build_model(f.parse(LLAMA, "bfloat16"), augtree=False)
        handle = handle_of(Float16Module(made.config, made))
        groups = f.ragged()
        batch = api.Batch.from_groups(groups)
        plan = api.plan(handle, batch)
        ran = Ran(made, plan)
        api.forward_backward(handle, batch, plan, lambda o: (o.values["logprobs"].sum(), {}), normalizer=1)
        found.append((f.gradients(made), ran.of("prefill")))
    assert all(torch.equal(found[0][0][name], grad) for name, grad in found[1][0].items())
    assert [runs for _, runs in found] == [[1] * 4, [2, 2, 2, 1]]


def test_a_plan_of_another_model_keeps_as_many_of_the_last_layers(lab, planned):
    """``like=``: a reference or a critic may have more layers than the plan was made for, or fewer."""
    groups, _ = lab.data("ragged")
    planned(**WAVES, keep_layers=3, keep_attention=1)
    handle, batch = handle_of(f.build_model(lab.args, augtree=False)), api.Batch.from_groups(groups)
    plan = api.plan(handle, batch)
    for layers, runs in ((2, [1, 1]), (5, [2, 2, 1, 1, 1])):
        text = f.MODEL.replace("--num-layers 2", f"--num-layers {layers}")
        other = f.Lab(text)
        made = f.build_model(other.args, augtree=False)
        own = handle_of(made)
        copied = api.plan(own, batch, like=plan)
        ran = Ran(made, copied)
        api.forward_backward(own, batch, copied, lambda o: (o.values["logprobs"].sum(), {}), normalizer=1)
        assert [ran["prefill", i] for i in range(layers)] == runs


def test_what_the_model_cannot_do_is_said_when_the_plan_is_made(lab, planned, monkeypatch):
    groups, _ = lab.data("ragged")
    batch = api.Batch.from_groups(groups)
    handle = handle_of(f.build_model(lab.args, augtree=False))
    planned(**WAVES, keep_layers=LAYERS, keep_attention=1)
    with pytest.raises(InputError, match="keep_layers 4, keep_attention 1; 4 layers"):
        api.plan(handle, batch)
    planned(**WAVES, keep_layers=1, keep_attention=1)
    fine = api.plan(handle, batch)
    monkeypatch.setattr(recompute, "can_recompute", lambda stack: False)
    with pytest.raises(UnsupportedError, match="cannot recompute as a plan asks"):
        api.plan(handle, batch)
    # A plan of a model that can, for one that cannot: its first pass says so, and values alone need nothing.
    api.forward_logprobs(handle, batch, fine)
    with pytest.raises(UnsupportedError, match="the running pass recomputes layers"):
        api.forward_backward(handle, batch, fine, lambda o: (o.values["logprobs"].sum(), {}), normalizer=1)


def test_hybrid_models(monkeypatch):
    """Five layers, of attention or an MLP: counted alike. Their stack recomputes from 0.19 on."""
    models.local_final_norm(monkeypatch)
    lab = f.Lab(f.MODEL, make=models.build_hybrid)
    groups, want = lab.data("three_levels")
    batch = f.batch_of(groups, f.augtree(phase="phased", waves=2, keep_layers=2, keep_attention=1), 3)
    if not recompute.can_recompute(lab.tree.decoder):
        assert not hasattr(models.stack_module(), "checkpointed_forward")
        with pytest.raises(UnsupportedError, match="MambaStack"):
            f.play(lab.tree, batch)
        return
    runs = Counter()

    def entered(index, module, args, kwargs):
        runs[kwargs["packed_seq_params"].context.keep_layers, index] += 1

    for index, layer in enumerate(lab.tree.decoder.layers):
        layer.register_forward_pre_hook(functools.partial(entered, index), with_kwargs=True)
    assert f.worst(lab.compare(groups, want, batch)) < 1e-10
    prompts = sum(p.kind != "replay" for p in batch.plan.passes)
    assert [runs[2, index] for index in range(5)] == [2 * prompts] * 3 + [prompts] * 2
