"""The public API's handle and limits: what is refused, counted, undone, and put back."""

import types

import pytest
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_augtree.config import (
    NO_CORE,
    AugTreeConfig,
    AugTreeError,
    InfeasiblePlanError,
    UnsupportedError,
)
from megatron_augtree.mcore import api, build
from megatron_augtree.mcore.api.planning import _forwards_first
from megatron_augtree.planning import native
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.planner import reordered
from tests.mcore.api_samples import FORCED, make_handle, samples, total
from tests.numerics import fixtures as f

BAR = 1e-10


@pytest.fixture(scope="module")
def lab():
    build.initialize(f.parse())
    yield f.Lab()
    build.destroy()


def test_nothing_to_train(lab):
    model = f.build_model(lab.args, augtree=False).requires_grad_(False)
    handle, batch = make_handle(lab, model=model), samples()
    plan = api.plan(handle, batch)
    with pytest.raises(AugTreeError, match="nothing to train"):
        api.forward_backward(handle, batch, plan, total, normalizer=1)
    assert api.forward_backward(handle, batch, plan, total, normalizer=1, forward_only=True).loss < 0


def test_a_limit_on_rows(lab):
    batch, handle = samples(), make_handle(lab, "", world=1)
    free = api.plan(handle, batch)
    largest = int(free.stats["rows"])
    limited = api.plan(handle, batch, max_rows=largest - 8)
    sizes = [sum(s.hi - s.lo for s in spans) for p in limited.plan.passes for spans in p.placement]
    assert max(sizes) <= largest - 8 and sum(sizes) == largest
    losses = [api.forward_backward(handle, batch, plan, total, normalizer=1).loss for plan in (free, limited)]
    assert abs(losses[0] - losses[1]) < BAR * abs(losses[0])
    with pytest.raises(InfeasiblePlanError, match="more rows than allowed"):
        api.plan(handle, batch, max_rows=1)


def test_forwards_come_first_where_they_fit(lab):
    """Trees in turn on the same ranks: one exchange, unless memory is short."""
    groups, _ = lab.data("several")
    batch = api.Batch.from_groups(groups)
    handle = make_handle(lab, "", world=1)
    plan = api.plan(handle, batch)
    passes = len(plan.plan.passes)
    turns = f.batch_of(groups, f.augtree(together=False), 1).plan
    assert len(turns.passes) > 1
    ordered = _forwards_first(handle, turns)
    kinds = [e.action for e in ordered.events]
    assert kinds == ["forward"] * len(turns.passes) + ["backward"] * len(turns.passes)
    ordered.check()
    tight = AugTreeConfig(memory_budget_gib=turns.peak_bytes / 2**30 + 1e-9)
    assert reordered(turns, ordered.events, handle.model_shape, tight) is None
    assert passes == 1 and plan.plan.events == (Event("forward", 0), Event("backward", 0))


def test_phased_plans_have_no_micro_batches(lab):
    handle, batch = make_handle(lab, FORCED[1]), samples()
    with pytest.raises(UnsupportedError, match="phase=fused"):
        list(api.microbatches(api.plan(handle, batch)))


def test_prepare_is_idempotent_and_restores(lab):
    model = f.build_model(lab.args, augtree=False)
    names = list(model.state_dict())
    handle = make_handle(lab, model=model)
    assert make_handle(lab, model=model) is handle and list(model.state_dict()) == names
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    batch = samples()
    plan = api.plan(handle, batch)
    with pytest.raises(AugTreeError, match="call prepare_model again with the wrapped model"):
        api.forward_backward(handle, batch, plan, total, normalizer=1)
    with pytest.raises(AugTreeError, match="a second time with other settings"):
        api.prepare_model([ddp], AugTreeConfig(mode="ring"))
    for setting in ({"trace_dir": "traces"}, {"guard_steps": 3}):
        with pytest.raises(AugTreeError, match="a setting that the API does not use"):
            api.prepare_model(f.build_model(lab.args, augtree=False), AugTreeConfig(**setting))
    assert api.prepare_model([ddp], handle.config) is handle and handle.model is ddp
    api.forward_backward(handle, batch, plan, total, normalizer=1)
    handle.restore()
    handle.restore()
    assert not hasattr(model, "augtree_api") and not hasattr(model, "augtree_handle")
    with pytest.raises(AugTreeError, match="several model chunks"):
        api.prepare_model([model, model], AugTreeConfig())


def test_a_missing_core_is_said_once(lab, caplog):
    with native.without_core():
        handle = make_handle(lab)
        assert api.prepare_model(handle.model, handle.config) is handle
    assert caplog.text.count(NO_CORE) == 1


def test_what_ddp_multiplies_with_is_undone(lab):
    model = f.build_model(lab.args, augtree=False)
    model.config.calculate_per_token_loss = False
    handle = make_handle(lab, model=model)
    handle.model = ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    assert handle.root_scale(4.0) == 1 / 4
    for buffer in ddp.buffers:
        buffer.gradient_scaling_factor = 1 / 8
    assert handle.root_scale(4.0) == 2.0 and handle.root_scale(0.0) == 0.0
    for buffer in ddp.buffers:
        buffer.gradient_scaling_factor = 1.0
    ddp.ddp_config.average_in_collective = True
    ddp.dp_cp_group = types.SimpleNamespace(size=lambda: 8)
    assert handle.root_scale(4.0) == 2.0
    model.config.grad_scale_func = lambda loss: loss * 1024
    assert handle.root_scale(4.0) == 2048.0
    ddp.buffers[0].gradient_scaling_factor = 0.5
    ddp.buffers.append(types.SimpleNamespace(gradient_scaling_factor=1.0))
    with pytest.raises(UnsupportedError, match="differently"):
        handle.root_scale(1.0)


def test_the_report_counts(lab):
    batch, handle = samples(), make_handle(lab, "", world=1)
    plan = api.plan(handle, batch)
    api.plan(handle, batch, like=plan)
    report = handle.report()
    assert report["plans"] == 2 and report["mode/augtree"] == 2
    assert report["rows"] == 2 * plan.stats["rows"] < report["unshared_rows"]
    assert report["unshared_rows"] == 2 * plan.stats["unshared_rows"]
    assert report["fallback"] == {} and report["shadow"] == []


@pytest.mark.parametrize("call, text", [
    (lambda h, b, p: api.plan(h, b, scope="world"), "one of pool, cp"),
    (lambda h, b, p: api.forward_backward(h, b, p, total, normalizer=-1), "normalizer=-1"),
    (lambda h, b, p: api.forward_backward(h, b, p, total, normalizer=float("nan")), "normalizer=nan"),
    (lambda h, b, p: api.forward_backward(h, b, p, total, normalizer=1, entropy="yes"), "entropy='yes'"),
    (lambda h, b, p: api.forward_backward(h, b, p, total, normalizer=1, loss_scope="step"),
     "loss_scope='step'"),
    (lambda h, b, p: api.forward_backward(h, b, p, total, normalizer=1, entropy="grad", head=api.value_head),
     "a head and an entropy"),
    (lambda h, b, p: api.forward_logprobs(h, api.Batch.empty(), p), "other samples"),
    (lambda h, b, p: api.plan(h, b, max_rows="3"), "max_rows='3'"),
    (lambda h, b, p: api.plan(h, b, like=p.plan), "like = Plan"),
    (lambda h, b, p: api.forward_logprobs(h, b, p.plan), "plan = Plan"),
    (lambda h, b, p: api.forward_backward(h, b, p, total, normalizer=None), "NoneType"),
    (lambda h, b, p: api.forward_backward(h, b, p, None, normalizer=1), "loss_fn is no function"),
    (lambda h, b, p: api.forward_backward(h, b, p, lambda o: (1.5, {}), normalizer=1), "float, dict"),
    (lambda h, b, p: api.forward_backward(h, b, p, lambda o: (total(o)[0], {1: 2.0}), normalizer=1),
     "with keys [1]"),
    (lambda h, b, p: api.forward_backward(h, b, p, lambda o: (total(o)[0], None), normalizer=1), "NoneType"),
    (lambda h, b, p: api.forward_backward(h, b, p, lambda o: o.values["logprobs"].sum(), normalizer=1),
     "1 values"),
])
def test_calls_that_cannot_be_played(lab, call, text):
    handle, batch = make_handle(lab), samples()
    plan = api.plan(handle, batch)
    with pytest.raises(AugTreeError) as error:
        call(handle, batch, plan)
    assert text in str(error.value)


def test_a_micro_batch_belongs_to_its_model(lab):
    batch, actor, reference = samples(), make_handle(lab), make_handle(lab)
    plan = api.plan(actor, batch)
    with pytest.raises(AugTreeError, match="another model"):
        api.forward(reference, next(api.microbatches(plan)))
    again = api.plan(reference, batch, like=plan)
    assert len(api.forward(reference, next(api.microbatches(again))).index) == len(batch.tokens)


def test_a_restored_handle_is_refused_and_the_model_prepares_again(lab):
    handle, batch = make_handle(lab), samples()
    plan = api.plan(handle, batch)
    micro_batch = next(api.microbatches(plan))
    handle.restore()
    for call in (
        lambda: api.plan(handle, batch),
        lambda: api.forward_logprobs(handle, batch, plan),
        lambda: api.forward_backward(handle, batch, plan, total, normalizer=1),
        lambda: api.forward(handle, micro_batch),
    ):
        with pytest.raises(AugTreeError, match="the handle was restored"):
            call()
    again = make_handle(lab, model=handle.language_model)
    assert api.forward_backward(again, batch, api.plan(again, batch), total, normalizer=1).loss


def test_like_is_for_the_same_samples_and_pool(lab):
    handle, batch = make_handle(lab), samples()
    plan = api.plan(handle, batch)
    assert api.plan(handle, batch, like=plan) is plan
    other = make_handle(lab, "", world=2)
    assert api.plan(other, samples(), like=plan).plan is plan.plan
    for wrong, text in ((make_handle(lab, "", world=3), "a pool of another size"), (other, "other samples")):
        given = batch if wrong is not other else samples(temperature=0.5)
        with pytest.raises(AugTreeError, match=text):
            api.plan(wrong, given, like=plan)


def test_shadow_refuses_context_parallel_models(lab):
    handle, batch = make_handle(lab, shadow_every=1), samples()
    plan = api.plan(handle, batch)
    handle.transformer_config.context_parallel_size = 2
    with pytest.raises(UnsupportedError, match="shadow_every=0"):
        api.forward_backward(handle, batch, plan, total, normalizer=1)
