"""The public API with all ranks of a pool in one process, against the un-shared model."""

import pytest
import torch

from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore import api, build, cpu
from tests.mcore.api_samples import FORCED, make_handle, samples
from tests.numerics import fixtures as f

BAR = 1e-10
@pytest.fixture(scope="module")
def lab():
    build.initialize(f.parse())
    yield f.Lab()
    build.destroy()


def _logits(model, batch: api.Batch):
    """Un-shared logits [T_i - 1, V] of every sample."""
    with cpu.cpu_shims():
        return [model(t[None, :-1], torch.arange(len(t) - 1)[None], None)[0] for t in batch.tokens]


def _weights(n: int, i: int) -> torch.Tensor:
    return torch.linspace(-1, 1.5, n, dtype=torch.float64) + 0.3 * i


def _parity(lab, handle, batch, share, want, **how):
    """(outputs, errors of loss and gradients): `share(outputs)` against the un-shared sum `want(logits)`."""
    plan = api.plan(handle, batch)
    out = api.forward_backward(handle, batch, plan, lambda o: (share(o), {}), normalizer=2.0, **how)
    plain = f.build_model(lab.args, augtree=False)
    total = want(_logits(plain, batch)) / 2
    total.backward()
    got = {n: p.grad for n, p in handle.language_model.named_parameters()}
    errors = {"loss": abs(out.loss / float(total) - 1), "gradients": f.err(got, f.gradients(plain))}
    return out, errors


@pytest.mark.parametrize("force", FORCED)
def test_temperatures_and_entropy_with_gradients(lab, force):
    """Samples of different temperatures share their prompt; entropy is of the scaled distribution."""
    batch = samples(temperature=[1.0, 0.5, 1.0, 2.0, 1.0])

    def share(o):
        weight = _weights(len(o.rows), int(o.index))
        return (o.values["logprobs"] * weight).sum() + 0.1 * (o.values["entropy"] * weight.square()).sum()

    def want(logits):
        total = 0
        given = zip(logits, batch.tokens, batch.loss_mask, batch.temperature)
        for i, (found, t, mask, heat) in enumerate(given):
            rows = mask.cumsum(0) > 0
            logs = torch.log_softmax(found / heat, -1)
            logprobs = (logs.gather(1, t[1:, None])[:, 0] * mask)[rows]
            entropy = (-(logs.exp() * logs).sum(-1) * mask)[rows]
            weight = _weights(len(logprobs), i)
            total = total + (logprobs * weight).sum() + 0.1 * (entropy * weight.square()).sum()
        return total

    handle = make_handle(lab, force)
    plan = api.plan(handle, batch)
    assert plan.stats["rows"] < plan.stats["unshared_rows"] - 3 * 8, "the prompt is shared by all"
    _, errors = _parity(lab, handle, batch, share, want, entropy="grad")
    assert max(errors.values()) < BAR, errors


def test_entropy_as_a_metric_has_no_gradient(lab):
    batch = samples()
    seen = []

    def loss(o):
        entropy = o.values["entropy"]
        seen.append(entropy)
        return (o.values["logprobs"] + 5 * entropy).sum(), {"max/entropy": entropy.max()}

    grads, largest = [], []
    for entropy in ("metric", "off"):
        handle = make_handle(lab)
        fn = loss if entropy == "metric" else lambda o: (o.values["logprobs"].sum(), {})
        out = api.forward_backward(handle, batch, api.plan(handle, batch), fn, normalizer=1, entropy=entropy)
        grads.append(f.gradients(handle.language_model))
        largest.append(out.metrics.get("max/entropy"))
    assert largest[0] == max(float(e.max()) for e in seen) > 0
    assert all(torch.equal(a, grads[1][name]) for name, a in grads[0].items())


def test_salts_keep_rows_apart(lab):
    salt = [torch.zeros(len(t), 2, dtype=torch.long) for t in samples().tokens]
    rows = []
    for at in (None, 4):
        if at is not None:
            salt[2][at] = 7
        handle = make_handle(lab, "")
        batch = samples(salt=salt)
        plan = api.plan(handle, batch)
        rows.append(plan.stats["rows"])
        api.forward_backward(handle, batch, plan, lambda o: (o.values["logprobs"].sum(), {}), normalizer=1)
    # Rows 3 to 7 of the prompt are computed for the salted sample alone, and so are those of the nested one.
    assert rows[1] - rows[0] >= 5


@pytest.mark.parametrize("mib", [256, 0])
def test_heads(lab, mib):
    """Top-k, log-probs of given tokens, and whole outputs, in chunks and at once."""
    batch, k = samples(), 3
    ids = [torch.randint(0, f.VOCAB, (len(t), 4), generator=torch.Generator().manual_seed(i))
           for i, t in enumerate(batch.tokens)]
    ids[4] = ids[2][: len(ids[4])]  # nested samples share rows, and so their entries
    handle = make_handle(lab)
    if not mib:
        _projection(handle).budget_bytes = 8 * f.VOCAB * 3  # three rows a chunk
    plan = api.plan(handle, batch)
    taken = {p.id: plan.take(ids, p.id) for p in plan.plan.passes}

    def ids_of(rows):
        return taken[rows.pass_id][rows.index] if rows.pass_id >= 0 else torch.zeros((0, 4), dtype=torch.long)

    top = api.forward_logprobs(handle, batch, plan, head=api.topk_head(k))
    logits = _logits(handle.language_model, batch)
    for i, (found, t, mask) in enumerate(zip(logits, batch.tokens, batch.loss_mask)):
        logs = torch.log_softmax(found.detach(), -1)
        values, chosen = logs.topk(k, -1)
        held = mask.cumsum(0) > 0
        a, b = top.offsets[i : i + 2].tolist()
        assert torch.equal(top.values["topk_ids"][a:b], (chosen * mask[:, None])[held])
        assert float((top.values["topk_logprobs"][a:b] - (values * mask[:, None])[held]).abs().max()) < 1e-12
        mine = (logs.gather(1, t[1:, None])[:, 0] * mask)[held]
        assert float((top.values["logprobs"][a:b] - mine).abs().max()) < 1e-12

    def share(o):
        weight = _weights(4, int(o.index))
        return (o.values["chosen_logprobs"].exp() * weight).sum() + o.values["logprobs"].sum()

    def want(logits):
        total = 0
        for i, (found, t, mask) in enumerate(zip(logits, batch.tokens, batch.loss_mask)):
            logs = torch.log_softmax(found, -1)[mask]
            held = int((mask.cumsum(0) > 0).sum()) - len(logs)  # exp(0) = 1 for those that are held only
            chosen = logs.gather(1, ids[i][:-1][mask]).exp()
            total = total + (chosen * _weights(4, i)).sum() + held * _weights(4, i).sum()
            total = total + logs.gather(1, t[1:][mask][:, None]).sum()
        return total

    _, errors = _parity(lab, handle, batch, share, want, head=api.logprobs_of_head(ids_of))
    assert max(errors.values()) < BAR, errors


def _projection(handle):
    return next(bound for module, bound in handle._bound._forwards
                if module is handle.language_model.output_layer)


class _LastLayer(torch.nn.Linear):
    """One number a row, called as megatron-core calls its output layer."""

    sequence_parallel = False

    def forward(self, input_, weight=None, runtime_gather_output=None):
        return super().forward(input_), None


def _critic(lab):
    model = f.build_model(lab.args, augtree=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.output_layer = _LastLayer(32, 1, dtype=torch.float64)
    return model


@pytest.mark.parametrize("force", FORCED[:2])
def test_a_critic(lab, force):
    batch = samples()
    handle = make_handle(lab, force, model=_critic(lab))
    plan = api.plan(handle, batch)
    out = api.forward_backward(
        handle, batch, plan, lambda o: ((o.values["values"] - int(o.index)).square().sum(), {}), normalizer=1,
        head=api.value_head)
    plain = _critic(lab)
    total = 0
    for i, (found, mask) in enumerate(zip(_logits(plain, batch), batch.loss_mask)):
        total = total + ((found[:, 0] * mask)[mask.cumsum(0) > 0] - i).square().sum()
    total.backward()
    got = {n: p.grad for n, p in handle.language_model.named_parameters()}
    assert abs(out.loss - float(total)) < BAR and f.err(got, f.gradients(plain)) < BAR
    with pytest.raises(AugTreeError, match="a value head on a vocabulary"):
        full = make_handle(lab)
        api.forward_logprobs(full, batch, api.plan(full, batch), head=api.value_head)


@pytest.mark.parametrize("head, error, text", [
    ("hidden_states", UnsupportedError, "needs the last token"),
    (lambda logits, rows: logits, AugTreeError, "Tensor"),
    (lambda logits, rows: {"x": 1.0}, AugTreeError, "x: float"),
    (lambda logits, rows: {"x": logits.sum()}, AugTreeError, "x: []"),
    (lambda logits, rows: {}, AugTreeError, "an empty dictionary"),
])
def test_heads_that_are_none(lab, head, error, text):
    handle, batch = make_handle(lab), samples()
    plan = api.plan(handle, batch)
    with pytest.raises(AugTreeError) as found:
        api.forward_logprobs(handle, batch, plan, head=head)
    assert text in str(found.value)


@pytest.mark.parametrize("head, text", [
    (lambda logits, rows: {"x": logits[:, : 3 if len(logits) else 5]}, ", 3], for "),
    (lambda logits, rows: {"x": logits[: max(len(logits) - 1, 0), 0]}, "x: ["),
    (lambda logits, rows: {"x" if len(logits) else "y": logits}, "x: ["),
    (lambda logits, rows: {"x": logits[:, 0] if len(logits) else rows.targets}, "x: ["),
    (lambda logits, rows: {"x": logits[[0] * (len(logits) > 0)].sum(1)[rows.index]}, "IndexError"),
])
@pytest.mark.parametrize("mib", [1, 256])
def test_a_head_that_fails_on_rows(lab, head, text, mib):
    """What it did without a row does not bind it: the call ends, is an error, and the next one works."""
    handle, batch = make_handle(lab), samples()
    plan = api.plan(handle, batch)
    with pytest.raises(AugTreeError, match="head") as found:
        api.forward_logprobs(handle, batch, plan, head=head)
    assert text in str(found.value)
    with pytest.raises((AugTreeError, IndexError)):
        api.forward(handle, next(api.microbatches(plan)), head=head)
    assert len(api.forward_logprobs(handle, batch, plan).values["logprobs"])


def test_a_head_may_keep_nothing_of_a_row(lab):
    handle, batch = make_handle(lab), samples()
    plan = api.plan(handle, batch)
    found = api.forward_logprobs(
        handle, batch, plan, head=lambda logits, rows: {"none": logits[:, :0], "one": logits[:, 0]}
    )
    assert found.values["none"].shape == (len(found.values["one"]), 0)


FROZEN = {
    "embedding": lambda name: name.startswith("embedding."),
    "all but the top layer": lambda name: "layers.1." not in name,
    "all but the head": lambda name: not name.startswith("output_layer."),
    "all but layer 0's keys and queries": lambda name: "layers.0.self_attention.linear_qkv" not in name,
    "all but one norm": lambda name: name != "decoder.layers.0.pre_mlp_layernorm.weight",
}
_FULL = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize("recompute", ["", _FULL])
@pytest.mark.parametrize("frozen", list(FROZEN))
def test_frozen_parameters(lab, frozen, recompute):
    """Ports fire or are left out as the graph has it; nothing is made for what is not trained."""
    groups, want = lab.data("three_levels")
    answers = [r for g in groups for r in g.responses]

    def loss(o):
        answer = answers[int(o.index)]
        mask = torch.tensor(answer.loss_mask)
        return f.grpo(o.as_list()[0][mask[int(mask.int().argmax()):]], answer, 1), {}

    for force in FORCED:
        model = f.build_model(f.parse(f.MODEL + recompute), augtree=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not FROZEN[frozen](name))
        handle = make_handle(lab, force, model=model)
        batch = api.Batch.from_groups(groups)
        api.forward_backward(handle, batch, api.plan(handle, batch), loss, normalizer=len(want.logprobs))
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert f.err(trained, {n: want.grads[n] for n in trained}) < BAR, (frozen, force)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("force", FORCED)
def test_old_and_current_logprobs_have_the_same_bits(lab, dtype, force):
    model = f.build_model(f.parse(dtype=dtype), augtree=False)
    handle, batch = make_handle(lab, force, model=model), samples(temperature=0.7)
    plan = api.plan(handle, batch)
    old = api.forward_logprobs(handle, batch, plan)
    reference = make_handle(lab, "", model=f.build_model(f.parse(dtype=dtype), augtree=False))
    ref = api.forward_logprobs(reference, batch, api.plan(reference, batch, like=plan), entropy=True)
    ratios, kl = [], []

    def loss(o):
        i = int(o.index)
        ratio = (o.values["logprobs"] - old.as_list()[i]).exp()
        difference = ref.as_list()[i] - o.values["logprobs"]
        ratios.append(ratio.detach())
        kl.append((difference.exp() - difference - 1).detach())
        return ratio.sum() + 0.01 * o.values["entropy"].sum(), {}

    out = api.forward_backward(handle, batch, plan, loss, normalizer=1, entropy="grad")
    assert old.values["logprobs"].dtype == torch.float32
    assert bool((torch.cat(ratios) == 1).all()) and bool((torch.cat(kl) == 0).all())
    assert torch.equal(out.outputs.values["logprobs"], old.values["logprobs"])


def test_float32_is_within_its_bar(lab):
    groups, want = lab.data("several")
    answers = [r for g in groups for r in g.responses]
    model = f.build_model(f.parse(dtype="float32"), augtree=False)
    handle, batch = make_handle(lab, "", model=model), api.Batch.from_groups(groups)

    def loss(o):
        answer = answers[int(o.index)]
        return f.grpo(o.values["logprobs"], answer, 1), {}

    api.forward_backward(handle, batch, api.plan(handle, batch), loss, normalizer=len(want.logprobs))
    assert f.err(f.gradients(model), want.grads) < 1e-5
