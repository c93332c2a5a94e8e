"""Recompute: the same bits as without it; what is kept is neither computed nor sent again."""

import functools

import pytest
import torch

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.runtime import tree_attention
from megatron_augtree.runtime.transport import LocalTransport
from tests.distributed.matrix import LLAMA, RECOMPUTE
from tests.numerics import fixtures as f
from tests.numerics.recomputing import LAYERS, PROGRAMS, WORLD, model


@pytest.fixture(scope="module")
def groups(megatron):
    return f.Lab(LLAMA).data("ragged")[0]


def play(flags: str, keep: int, program: f.Program, groups, monkeypatch) -> tuple[f.Outcome, int, dict]:
    """(outcome, attentions computed in forward direction, bytes by payload) of a step."""
    batch, transport = f.batch_of(groups, program, WORLD), LocalTransport(WORLD)
    schedule = AugTreeSchedule(AugTreeConfig(keep_attention=keep), transport=transport)
    calls, attend = [], tree_attention._attend
    with monkeypatch.context() as patch:
        patch.setattr(tree_attention, "_attend", lambda *args: calls.append(1) or attend(*args))
        found = f.play(model(flags), batch, schedule=schedule)
    sent: dict[str, int] = {}
    for traffic in transport.traffic:
        for name, size in traffic.bytes.items():
            sent[name] = sent.get(name, 0) + size
    return found, len(calls), sent


@pytest.mark.parametrize("name", [name for name in RECOMPUTE if name != "none"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_bits_and_no_attention_twice_where_it_is_kept(groups, monkeypatch, name, program):
    flags, keep = RECOMPUTE[name]
    plain, once, sent = play("", 0, PROGRAMS[program], groups, monkeypatch)
    passes = once // LAYERS
    got, calls, again = play(flags, keep, PROGRAMS[program], groups, monkeypatch)
    assert got.loss == plain.loss and torch.equal(got.logprobs, plain.logprobs)
    assert all(torch.equal(got.grads[key], plain.grads[key]) for key in plain.grads)
    recomputed = {"block 1": 1, "block 2": 2, "block 3": 3}.get(name[5:12], LAYERS)
    repeated = recomputed - (recomputed if keep < 0 else min(keep, recomputed))
    assert calls == once + passes * repeated
    assert again == _repeated(sent, PROGRAMS[program], groups, repeated)


def _repeated(sent: dict, program: f.Program, groups, layers: int) -> dict:
    """Bytes with the forward exchange of some layers a second time."""
    batch, transport = f.batch_of(groups, program, WORLD), LocalTransport(WORLD)
    schedule = AugTreeSchedule(AugTreeConfig(), transport=transport)
    f_only = functools.partial(schedule, forward_only=True)
    f_only(forward_step_func=_values_only, data_iterator=iter([batch]), model=model(""))
    forward: dict[str, int] = {}
    for traffic in transport.traffic:
        for name, size in traffic.bytes.items():
            forward[name] = forward.get(name, 0) + size
    return {name: size + forward.get(name, 0) * layers // LAYERS for name, size in sent.items()}


def _values_only(iterator, model):
    micro = next(iterator)
    return model(micro.input_ids, None, None, packed_seq_params=micro.packed), None


def test_a_forward_without_backward_keeps_nothing(groups, monkeypatch):
    contexts, context = [], tree_attention.PassContext.__init__

    def recorded(self, *args, **kwargs):
        context(self, *args, **kwargs)
        contexts.append(self)

    monkeypatch.setattr(tree_attention.PassContext, "__init__", recorded)
    batch = f.batch_of(groups, f.augtree(), WORLD)
    schedule = AugTreeSchedule(AugTreeConfig(keep_attention=-1), transport=LocalTransport(WORLD))
    schedule(forward_step_func=_values_only, data_iterator=iter([batch]), forward_only=True,
             model=model(RECOMPUTE["full uniform 1"][0]))
    assert contexts and not any(c.kept for c in contexts)
