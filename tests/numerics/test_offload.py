"""Offload: what a dormant prompt keeps rests in host memory; a device that is not there counts the bytes."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megatron_augtree.config import AugTreeConfig, UnsupportedError
from megatron_augtree.mcore import api
from megatron_augtree.mcore.api import planning
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.runtime import engine, offload
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.offload import UNDER_WAY, HostMemory
from megatron_augtree.runtime.tree_attention import PassContext
from tests.distributed.device import Device, NoStreams
from tests.distributed.matrix import LLAMA
from tests.numerics import fixtures as f
from tests.numerics.test_pass_recompute import LAYERS, WORLD, same, state_bytes

PROGRAMS = {
    "prefill": f.augtree(phase="phased", waves=2),
    "chunks": f.augtree(phase="phased", waves=2, chunks=2),
    "chunks, wide and re-fetching": f.augtree(phase="phased", waves=2, chunks=2, lane_degree=8, keep=False),
    "move_q": f.augtree(phase="phased", waves=2, primitive="move_q"),
}
#: (keep_layers, keep_attention): nothing runs again, some layers, all but their attention, everything.
PAIRS = [(4, 0), (2, 1), (0, 4), (0, 0)]


@pytest.fixture(scope="module")
def groups(megatron):
    return f.Lab(LLAMA).data("ragged")[0]


@functools.cache
def model(flags: str = "") -> torch.nn.Module:
    return f.build_model(f.parse(f"{LLAMA} {flags}"), augtree=True)


def resting(batch: StepBatch, pair: tuple[int, int] = (-1, 0)) -> StepBatch:
    """The step with its prompts at rest, and a recompute pair everywhere."""
    passes = [replace(p, offload=p.kind in ("prefill", "chunk"), keep_layers=pair[0], keep_attention=pair[1])
              for p in batch.plan.passes]
    return f.batch_with(batch.groups, batch.forest, replace(batch.plan, passes=tuple(passes)))


class Saved:
    """What autograd saves in each pass, and what of it stays: noted at the hooks.

    Attributes:
        moved: by host memory, bytes.
        stayed: tensors that were left where they were.
        shapes: of those that moved.
        memories: one a pass.
    """

    def __init__(self) -> None:
        self.moved: dict[int, int] = {}
        self.stayed: list[torch.Tensor] = []
        self.shapes: list[tuple[int, ...]] = []
        self.memories: list[HostMemory] = []

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        put, saving = HostMemory.put, HostMemory.saving

        def noted(memory, tensor):
            size = tensor.numel() * tensor.element_size()
            self.moved[id(memory)] = self.moved.get(id(memory), 0) + size
            self.shapes.append(tuple(tensor.shape))
            return put(memory, tensor)

        def watched(memory, stays):
            self.memories.append(memory)
            hooks = saving(memory, stays)
            return _Noting(hooks, self.stayed)

        patch.setattr(HostMemory, "put", noted)
        patch.setattr(HostMemory, "saving", watched)


class _Noting:
    """Hooks that also note what stays."""

    def __init__(self, hooks, stayed: list) -> None:
        def pack(tensor):
            packed = hooks.pack_hook(tensor)
            if packed is tensor:
                stayed.append(tensor)
            return packed

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, hooks.unpack_hook)

    def __enter__(self):
        return self._hooks.__enter__()

    def __exit__(self, *error):
        return self._hooks.__exit__(*error)


@contextmanager
def device_elsewhere(monkeypatch, streams=None) -> Iterator[Saved]:
    """Host memory is another one than the device's."""
    saved = Saved()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "host_streams", lambda device: streams or NoStreams())
        saved.watch(patch)
        yield saved


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_bits(groups, monkeypatch, program, pair):
    batch = f.batch_of(groups, PROGRAMS[program], WORLD)
    plain = f.play(model(), batch)
    with device_elsewhere(monkeypatch) as saved:
        got = f.play(model(), resting(batch, pair))
    assert same(got, plain)
    prompts = [p for p in batch.plan.passes if p.kind in ("prefill", "chunk")]
    assert len(saved.memories) == len(prompts) == len(saved.moved)
    assert all(saved.moved[id(m)] == m.bytes > 0 for m in saved.memories)
    # What stays: weights, and keys and values that waves read.
    ours = {p.untyped_storage().data_ptr() for p in model().parameters()}
    stayed = [t for t in saved.stayed if t.numel()]
    weights = [t for t in stayed if t.untyped_storage().data_ptr() in ours]
    assert len(weights) >= 4 * pair[0]  # four matrices a layer
    assert {tuple(t.shape[1:]) for t in stayed if t.untyped_storage().data_ptr() not in ours} <= {(2, 8)}


def test_what_rests_is_what_would_be_kept(groups, monkeypatch):
    """Byte for byte: saved tensors of the prefill but for parameters, keys and values; fewer where layers run
    again: their inputs, attention that was kept, and what is above the layers."""
    batch = f.batch_of(groups, PROGRAMS["prefill"], WORLD)
    prefill = batch.plan.passes[0]
    rows = batch.plan.shape.rows[0]
    ours = {p.untyped_storage().data_ptr() for p in model().parameters()}
    kept: list[int] = []
    playing = PassContext.playing

    @contextmanager
    def counted(context):
        def pack(tensor):
            if tensor.untyped_storage().data_ptr() not in ours and not context.own_state.holds(tensor):
                kept.append(tensor.numel() * tensor.element_size())
            return tensor

        with playing(context):
            if context.own_state is None:
                yield
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    yield

    with monkeypatch.context() as patch:
        patch.setattr(PassContext, "playing", counted)
        f.play(model(), batch)
    moved = {}
    for pair in PAIRS:
        with device_elsewhere(monkeypatch) as saved:
            f.play(model(), resting(batch, pair))
        (memory,) = saved.memories
        moved[pair] = memory.bytes
    assert prefill.kind == "prefill" and moved[4, 0] == sum(kept)
    inputs, attended = rows * 32 * 8, rows * 4 * (8 + 1) * 8  # fp64: hidden 32; 4 heads of 8 and their lse
    received = sum(t.sink.count for s in batch.plan.program(0).stages for t in s.transfers) * 2 * 2 * 8 * 8
    assert moved[0, 4] - moved[0, 0] == LAYERS * (attended + received)
    assert moved[0, 0] >= LAYERS * inputs
    assert moved[0, 0] < moved[0, 4] < moved[2, 1] < moved[4, 0]


@pytest.mark.parametrize("pair", [(4, 0), (0, 0)])
def test_what_waves_read_stays_by_itself(groups, monkeypatch, pair):
    """Values are a slice of a layer's QKV, which goes: they are copied out of it."""
    batch = resting(f.batch_of(groups, PROGRAMS["chunks"], WORLD), pair)
    with device_elsewhere(monkeypatch):
        memory, wanted = state_bytes(batch, monkeypatch)
    assert memory == wanted > 0


def test_nothing_is_left_on_the_device(groups, monkeypatch):
    """After the forward host memory holds what rests, and no tensor waits to leave."""
    batch = resting(f.batch_of(groups, PROGRAMS["prefill"], WORLD))
    waiting = []
    settle = HostMemory.settle

    def settled(memory):
        assert len(memory._leaving) <= UNDER_WAY
        settle(memory)
        waiting.append(len(memory._leaving))

    with device_elsewhere(monkeypatch) as saved:
        monkeypatch.setattr(HostMemory, "settle", settled)
        f.play(model(), batch)
    assert waiting == [0]
    gc.collect()
    (memory,) = saved.memories
    assert memory._last() is None  # the graph is gone, and host memory with it


def test_what_is_taken_back_comes_back_ahead(monkeypatch):
    """Tensors return in the opposite order, a few before they are asked for, and only once."""
    memory, fetched = HostMemory(NoStreams(), torch.device("cpu")), []
    fetch = HostMemory._fetch

    def noted(self, resting):
        if resting.back is None:
            fetched.append(float(resting.host[0]))
        fetch(self, resting)

    monkeypatch.setattr(HostMemory, "_fetch", noted)
    items = [memory.put(torch.full((3,), float(i))) for i in range(12)]
    for i in reversed(range(12)):
        assert torch.equal(memory.get(items[i]), torch.full((3,), float(i)))
        items.pop()  # as autograd lets go of it
        assert fetched == [float(j) for j in range(11, max(i - UNDER_WAY, -1), -1)]
    kept = memory.put(torch.ones(2))
    assert torch.equal(memory.get(kept), memory.get(kept))


@pytest.mark.parametrize("drop", ["", "put on compute", "put on side", "_fetch on compute", "_fetch on side"])
def test_copies_and_computation_wait_for_each_other(groups, monkeypatch, drop):
    """On a device that knows races: every copy behind what made its tensor, every use behind its return."""
    device = Device(drop)
    batch = resting(f.batch_of(groups, PROGRAMS["prefill"], WORLD), (2, 1))
    with device_elsewhere(monkeypatch, device), device:
        f.play(model(), batch)
    assert {"put on compute", "put on side", "_fetch on compute", "_fetch on side"} <= device.waited
    if drop in ("", "_fetch on compute"):
        # New memory, here always: on a real device it is memory that earlier computation used.
        assert device.races == []
    else:
        assert device.races


def test_on_a_cpu_nothing_is_copied_and_no_hook_is_set(groups, monkeypatch):
    batch = f.batch_of(groups, PROGRAMS["prefill"], WORLD)
    monkeypatch.setattr(HostMemory, "put", lambda *_: pytest.fail("copied"))
    monkeypatch.setattr(HostMemory, "saving", lambda *_: pytest.fail("hooked"))
    assert same(f.play(model(), resting(batch)), f.play(model(), batch))
    assert offload.host_streams(torch.device("cpu")) is None


def test_without_gradients_nothing_rests(groups, monkeypatch):
    batch = resting(f.batch_of(groups, PROGRAMS["prefill"], WORLD), (0, 4))
    with device_elsewhere(monkeypatch) as saved:
        schedule = f.AugTreeSchedule(AugTreeConfig(), transport=f.LocalTransport(WORLD))
        schedule(forward_step_func=f.forward_step, data_iterator=iter([batch]), model=model(),
                 forward_only=True)
    assert not saved.memories


def test_the_output_layers_chunks_rest_too(groups, monkeypatch):
    """Checkpoints without re-entrance set hooks of their own inside; their inputs are saved outside."""
    made = f.build_model(f.parse(LLAMA), augtree=True)
    made.output_layer.forward.__self__.budget_bytes = 1  # a row a chunk
    data = f.with_policy(f.build_model(f.parse(LLAMA), augtree=False), f.inner_losses())
    batch = f.batch_of(data, PROGRAMS["chunks"], 2)
    # Shared turns carry losses, so prompts have scored rows.
    counts = Engine(batch.plan, batch.forest, None, f.LocalTransport(2), None).layouts
    scored = sum(sum(counts[p.id].counts) for p in batch.plan.passes if p.kind == "chunk")
    plain = f.play(made, batch)
    with device_elsewhere(monkeypatch) as saved:
        assert same(f.play(made, resting(batch)), plain)
    assert scored > 2 and sum(shape == (1, 1, 32) for shape in saved.shapes) >= scored


def test_fused_gradient_accumulation_is_refused_at_the_start(groups, monkeypatch):
    """It writes on the parameter that it saved; through hooks it would get another object back."""
    batch = resting(f.batch_of(groups, PROGRAMS["prefill"], WORLD))
    monkeypatch.setattr(model().config, "gradient_accumulation_fusion", True)
    with pytest.raises(UnsupportedError, match="gradient_accumulation_fusion"):
        f.play(model(), batch)


def test_the_api_plays_it(monkeypatch):
    """Tier 2 with plans at rest, as a planner under a memory limit would make them."""
    lab = f.Lab(LLAMA)
    groups, want = lab.data("ragged")
    forest, batch = f.forest_of(groups, "augtree")[0], api.Batch.from_groups(groups)
    choice = f.Choice(degree=2, phase="phased", waves=2, keep_layers=1, keep_attention=1, offload=True)
    plan = f.build_plan(choice, forest.shape, 2, f.UNIT)
    monkeypatch.setattr(planning, "choose_plan", lambda *_: (forest, plan))
    handle = api.prepare_model(f.build_model(lab.args, augtree=False), AugTreeConfig(min_shared_rows=4),
                               transport=f.LocalTransport(2))
    made = api.plan(handle, batch)
    answers = [r for g in groups for r in g.responses]

    def loss(o):
        return f.grpo(o.as_list()[0], answers[int(o.index)], 1), {}

    with device_elsewhere(monkeypatch) as saved:
        api.forward_backward(handle, batch, made, loss, normalizer=len(want.logprobs))
    grads = {name: p.grad for name, p in handle.model.named_parameters()}
    assert f.err(grads, want.grads) < 1e-10
    assert sum(m.bytes for m in saved.memories) > 0
