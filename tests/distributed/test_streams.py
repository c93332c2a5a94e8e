"""Transfers on a side stream: what waits for what, on a device that is not there."""

from __future__ import annotations

import pytest
import torch

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.schedule import HOME, Payload, Stage, Transfer, rows
from megatron_augtree.planning.tree import from_groups
from megatron_augtree.runtime import transport
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.messages import FieldSpec
from megatron_augtree.runtime.transport import DistTransport
from megatron_augtree.runtime.tree_attention import tree_attention
from tests.distributed.device import Device

WORLD = 4
CHOICES = {
    "gather": {"lane_degree": 4, "keep": False},
    "gather in 2": {"lane_degree": 4, "pieces": 2, "keep": False},
    "move_kv, kept": {"primitive": "move_kv"},
    "ring": {"primitive": "ring", "keep": False, "lane_degree": 4},
    "phased": {"phase": "phased", "waves": 2, "chunks": 2, "keep": False, "wide": 1},
    "phased move_q": {"phase": "phased", "waves": 2, "primitive": "move_q"},
    "phased move_q, nothing kept": {"phase": "phased", "waves": 2, "primitive": "move_q", "keep": False},
}
EVENTS = {"start on compute", "before_packing on compute", "work", "land on side"}


def group():
    """A group of five responses on a prompt of 17 tokens."""
    responses = [[20 + i, *range(30, 34 + 3 * i)] for i in range(5)]
    return from_groups([(range(17), [(tokens, [True] * len(tokens)) for tokens in responses])])


def play(monkeypatch, choice: dict, rank: int = 1, drop: str = "") -> tuple[Device, DistTransport]:
    """Three layers of attention, forward and backward, twice, on one rank of four."""
    forest = group()
    plan = build(Choice(degree=WORLD, **choice), forest.shape, WORLD, 10)
    device = Device(drop)
    monkeypatch.setattr(transport, "dist", device.torch_dist(WORLD, rank))
    made = DistTransport(streams=device)
    table = torch.randn(64, 32, requires_grad=True)

    def model(local, context):
        x = table[local.inputs]
        for layer in range(3):
            q = x.view(-1, 4, 8)
            k, v = (q[:, :2] * 0.5).contiguous(), (q[:, 2:] * 2.0).contiguous()
            x = x + tree_attention(q, k, v, context, layer, 0.3).reshape(x.shape)
        return x[local.scored].sum(-1, keepdim=True)

    engine = Engine(plan, forest, model, made, get_kernel("cpu_flash", "cpu"))
    with device:
        for _ in range(2):
            engine.play(lambda values: (values.values.sum(), {}))
    return device, made


@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("name", CHOICES)
def test_everything_waits_for_what_it_needs(monkeypatch, name, rank):
    """Packing after the producer, tiles after landing, buffers used again after their last reader."""
    device, made = play(monkeypatch, CHOICES[name], rank)
    assert device.races == []
    assert {"start on compute", "work", "land on side"} <= device.waited
    assert made.traffic[rank].messages > 0


@pytest.mark.parametrize("event", sorted(EVENTS))
def test_an_event_that_is_not_waited_for_is_noticed(monkeypatch, event):
    found = (play(monkeypatch, choice, drop=event)[0] for choice in CHOICES.values())
    first = next(device for device in found if event in device.waited)
    assert first.races or any(device.races for device in found)


@pytest.mark.parametrize("drop", ("", "land on compute"))
def test_a_message_that_is_added_is_read_before_its_buffer_is_used_again(monkeypatch, drop):
    """A rank that receives gradients in every stage and sends none: no other wait orders its additions."""
    device = Device(drop)
    monkeypatch.setattr(transport, "dist", device.torch_dist(2, 1))
    made = DistTransport(streams=device)
    spec = FieldSpec({"dk": (2, 8), "dv": (2, 8)}, {"dk": torch.float32, "dv": torch.float32})
    sent = Transfer(Payload.DKV, 0, 1, rows("kv/0", [(0, 3)]), rows(HOME, [(1, 4)]))
    stage = Stage((sent,), ((), ()))
    with device:
        held = {1: {HOME: {"dk": torch.ones(5, 2, 8), "dv": torch.ones(5, 2, 8)}}}
        made.start()
        for _ in range(4):
            made.land(made.post((0, 1), stage, held, spec))
    assert bool(device.races) == bool(drop)
    assert len(made.waits._buffers) == 2 and "land on compute" in device.waited
    assert (held[1][HOME]["dk"] == 1).all()  # the fake library receives zeros


def test_message_buffers_are_two_and_stay(monkeypatch):
    """As many as messages of two stages, however many layers, passes and steps use them."""
    _, made = play(monkeypatch, CHOICES["move_kv, kept"])
    buffers = made.waits._buffers
    assert {(turn, use) for turn, use, _ in buffers} == {(t, u) for t in (0, 1) for u in ("send", "receive")}
    assert {pair for _, use, pair in buffers if use == "send"} == {(1, r) for r in (0, 2, 3)}
    assert len(buffers) <= 2 * 2 * (WORLD - 1) < made.traffic[1].messages / 2
    longest = {key: buffer.numel() for key, buffer in buffers.items()}
    pair = next(key for key in longest)
    before = made.waits._buffers[pair]
    made.waits._filled = pair[0]
    assert made.waits.message(*pair[1:], 8).data_ptr() == before.data_ptr()
    assert made.waits.message(*pair[1:], longest[pair] + 1).numel() == longest[pair] + 1


def test_keys_of_the_next_stage_do_not_wait_for_tiles(monkeypatch):
    """In a forward of `move_kv` nothing on the side stream waits for what the stages compute."""
    device, _ = play(monkeypatch, {"primitive": "move_kv", "keep": True})
    forward = {label for label in device.waited if label.startswith("before_packing")}
    assert forward == {"before_packing on compute"}  # of the backward's gradients
    forest = group()
    plan = build(Choice(degree=WORLD, primitive="move_kv"), forest.shape, WORLD, 10)
    device = Device()
    monkeypatch.setattr(transport, "dist", device.torch_dist(WORLD, 1))
    made = DistTransport(streams=device)
    kernel = get_kernel("cpu_flash", "cpu")

    def model(local, context):
        q = torch.randn(len(local.rows), 4, 8)
        tree_attention(q, q[:, :2].contiguous(), q[:, 2:].contiguous(), context, 0, 0.3)
        return torch.zeros(len(local.scored), 1)

    with device, torch.no_grad():
        Engine(plan, forest, model, made, kernel).play()
    assert len(plan.program(0).stages) == WORLD and "before_packing on compute" not in device.waited
    assert device.races == []
