"""Prefetch: a wave's prompt keys travel a layer ahead; same bits, same bytes, nothing left under way."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore.sampler import StepBatch, model_shape
from megatron_augtree.planning.schedule import Payload, promise, reverse
from megatron_augtree.runtime import prefetch, transport, tree_attention
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.prefetch import Prefetch, split
from megatron_augtree.runtime.transport import DistTransport, LocalTransport
from megatron_augtree.runtime.tree_attention import PassContext
from tests.distributed.device import Device
from tests.distributed.matrix import LLAMA
from tests.numerics import fixtures as f
from tests.numerics.test_pass_recompute import same, with_pairs

WORLD, LAYERS = 4, 4
WAVES = {"phase": "phased", "waves": 2}
PROGRAMS = {
    "waves": WAVES,
    "chunks and waves": {**WAVES, "chunks": 3},
    "pieces": {**WAVES, "pieces": 3},
    "move_kv": {**WAVES, "primitive": "move_kv"},
    "wide": {**WAVES, "lane_degree": 8},
    "wide and whole, re-fetching": {**WAVES, "chunks": 2, "wide": 1, "keep": False},
    "node by node": {**WAVES, "lane_degree": 8, "node_ranks": 2},
    "multi-hop ring": {**WAVES, "primitive": "ring", "lane_degree": 8},
    "moved queries": {**WAVES, "primitive": "move_q", "wide": 1},
}
#: Programs whose leaves also exchange keys of their own, or whose keys are handed on.
WITH_REST = ("wide", "wide and whole, re-fetching", "node by node", "multi-hop ring")


@pytest.fixture(scope="module")
def groups(megatron):
    return f.Lab(LLAMA).data("ragged")[0]


@pytest.fixture(scope="module")
def model(megatron):
    return f.build_model(f.parse(LLAMA), augtree=True)


def without(batch: StepBatch) -> StepBatch:
    passes = tuple(replace(p, prefetch=False) for p in batch.plan.passes)
    return replace(batch, plan=replace(batch.plan, passes=passes))


def batches(groups, name: str, world: int = WORLD) -> tuple[StepBatch, StepBatch]:
    """The step with its waves prefetched, and without."""
    batch = f.batch_of(groups, f.augtree(**PROGRAMS[name], prefetch=True), world)
    assert [p.prefetch for p in batch.plan.passes] == [p.kind == "replay" for p in batch.plan.passes]
    return batch, without(batch)


# The program in two parts.

@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_cut_in_two_and_nothing_is_lost(groups, name):
    plan = batches(groups, name)[0].plan
    for p in plan.passes:
        program, parts = plan.program(p.id), split(plan.program(p.id))
        ahead, rest = parts.ahead.transfers, [t for s in parts.rest.stages for t in s.transfers]
        assert sorted([*ahead, *rest], key=str) == sorted(
            (t for s in program.stages for t in s.transfers), key=str)
        assert all(t.payload is Payload.KV and t.source.buffer.startswith("state/") for t in ahead)
        assert not any(t.source.buffer.startswith("state/") and t.payload is Payload.KV for t in rest)
        assert [s.tiles for s in parts.rest.stages] == [s.tiles for s in program.stages]
        sinks = {(t.dst, t.sink.buffer) for t in ahead}
        for index, stage in enumerate(parts.rest.stages):
            used = {(rank, tile.kv.buffer) for rank, tiles in enumerate(stage.tiles) for tile in tiles}
            used |= {(t.src, t.source.buffer) for t in stage.transfers}
            assert index >= parts.first_use or not sinks & used
            assert index <= parts.last_post or not stage.transfers
        reads = p.kind == "replay" and p.primitive != "move_q"
        assert bool(ahead) == reads or (p.kind == "chunk" and p.reads)
        if p.kind == "replay":
            assert bool(rest) == (name in (*WITH_REST, "moved queries"))


# Bits and bytes.

@pytest.mark.parametrize("pair", [(-1, 0), (0, 0), (1, 2)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_and_bytes(groups, model, name, pair):
    """Also where layers run again: their repetition fetches for itself. Messages are those of the parts."""
    batch, plain = (with_pairs(b, lambda p: pair) for b in batches(groups, name))
    carried, once = LocalTransport(WORLD), LocalTransport(WORLD)
    assert same(f.play(model, batch, transport=carried), f.play(model, plain, transport=once))
    assert [t.bytes for t in carried.traffic] == [t.bytes for t in once.traffic]
    if pair != (-1, 0):
        return
    shape, plan = model_shape(model.config, f.VOCAB), batch.plan
    messages, sizes = [0] * WORLD, [{} for _ in range(WORLD)]
    for p in plan.passes:
        for made in [*f.sent_forward(plan, p), reverse(plan.program(p.id), keep=p.keep)]:
            for index, rank in enumerate(p.block):
                promised = promise(made, index, shape)
                messages[rank] += LAYERS * promised.messages
                for payload, size in promised.bytes.items():
                    sizes[rank][payload] = sizes[rank].get(payload, 0) + LAYERS * size
    assert [t.messages for t in carried.traffic] == messages
    assert [dict(t.bytes) for t in carried.traffic] == sizes


def test_forward_only_too(groups, model):
    def values(batch):
        schedule = f.AugTreeSchedule(AugTreeConfig(), transport=LocalTransport(WORLD))
        schedule(forward_step_func=f.forward_step, data_iterator=iter([batch]), model=model,
                 forward_only=True, collect=True)
        return schedule.last.values

    batch, plain = batches(groups, "wide")
    assert torch.equal(values(batch), values(plain))


@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_random_plans_equal_the_unshared_run(lab, data):
    draw = data.draw
    name = draw(st.sampled_from(list(f.DATA)))
    groups, want = lab.data(name)
    fields = {
        "phase": "phased", "waves": draw(st.integers(1, 3)), "chunks": draw(st.integers(1, 3)),
        "primitive": draw(st.sampled_from(["gather_kv", "move_kv", "ring", "move_q"])),
        "pieces": draw(st.integers(1, 3)), "lane_degree": draw(st.sampled_from([1, 2, 8])),
        "wide": draw(st.integers(0, 1)), "keep": draw(st.booleans()),
        "copies": draw(st.integers(1, 2)), "degree": draw(st.sampled_from([0, -2])),
        "keep_layers": draw(st.integers(-1, 2)), "wave_layers": draw(st.integers(-1, 2))}
    batch = f.batch_of(groups, f.augtree(**fields, prefetch=True), draw(st.sampled_from([2, 3, 4])))
    first, second = LocalTransport(batch.plan.world), LocalTransport(batch.plan.world)
    got = f.play(lab.tree, batch, transport=first)
    assert f.worst(f.errors(got, want, lab.start)) < 1e-10
    assert same(f.play(lab.tree, without(batch), transport=second), got)
    assert [t.bytes for t in first.traffic] == [t.bytes for t in second.traffic]


# Order: what is sent when.

class Log:
    """What happens in one playing of a step, in order; all ranks in one process.

    Attributes:
        events: (what, layer): ``ahead`` a layer's fetch leaves, ``land`` it lands, ``stage`` a stage posts,
            ``out`` a layer's attention is done; (``end``, fetches under way) a forward is over.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        post, land, finish = Prefetch.post, prefetch.Flight.land, Prefetch.finish
        attend, local = tree_attention._attend, LocalTransport.post

        def posted(this, layer):
            before = len(this._flights)
            post(this, layer)
            if len(this._flights) > before:
                self.events.append(("ahead", layer))

        def landed(flight):
            if flight.posted is not None:
                self.events.append(("land", flight.layer))
            land(flight)

        def attended(q, k, v, context, layer, scale):
            found = attend(q, k, v, context, layer, scale)
            self.events.append(("out", layer))
            return found

        def sent(this, *args, ahead=False):
            if not ahead:
                self.events.append(("stage", -1))
            return local(this, *args, ahead=ahead)

        def finished(this):
            finish(this)
            self.events.append(("end", len(this._flights)))

        patch.setattr(Prefetch, "post", posted)
        patch.setattr(prefetch.Flight, "land", landed)
        patch.setattr(tree_attention, "_attend", attended)
        patch.setattr(LocalTransport, "post", sent)
        patch.setattr(Prefetch, "finish", finished)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_next_layers_fetch_leaves_before_this_layers_output_is_used(groups, model, monkeypatch, name):
    batch, _ = batches(groups, name)
    batch = with_pairs(batch, lambda p: (2, 0))  # layers 0 and 1 run again in the backward
    with monkeypatch.context() as patch:
        log = Log(patch)
        f.play(model, batch)
    if name == "moved queries":
        assert not any(what in ("ahead", "land", "end") for what, _ in log.events)
        return
    waves = [p for p in batch.plan.passes if p.kind == "replay"]
    forwards, current = [], []
    for event in log.events:
        current.append(event)
        if event[0] == "end":
            # What is before the first fetch belongs to prompts.
            first = current.index(("ahead", 0))
            forwards.append(current[first:])
            current = []
    assert len(forwards) == len(waves)
    for events in forwards:
        at = {event: index for index, event in enumerate(events) if event[0] != "stage"}
        for layer in range(LAYERS):
            assert at["ahead", layer] < at["land", layer] < at["out", layer]
            if layer:
                assert at["ahead", layer] < at["out", layer - 1] < at["land", layer]
        assert ("ahead", LAYERS) not in at and events[-1] == ("end", 0)
        # No transfer of a layer's own waits behind the next layer's fetch.
        stages = [i for i, event in enumerate(events) if event[0] == "stage"]
        for layer in range(LAYERS - 1):
            mine = [i for i in stages if at.get(("out", layer - 1), -1) < i < at["out", layer]]
            assert not mine or max(mine) < at["ahead", layer + 1]
            assert bool(mine) == (name in WITH_REST)
        # One more layer's keys and values at most.
        under_way = 0
        for what, _ in events:
            under_way += (what == "ahead") - (what == "land")
            assert under_way <= 2
    # In the backward, where two layers run again, nothing is sent ahead.
    assert not any(what == "ahead" for what, _ in current)
    assert sum(what == "out" for what, _ in current) >= 2 * len(waves)


# Real messages, one rank at a time: the library notes what it is given.

def step(world: int, **choice):
    """(engine of a step of three layers of attention, a model) on a transport."""
    batch = f.batch_of(f.several(), f.augtree(**choice, prefetch=True), world)
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def attention(local, context, stop=None):
        x = table[local.inputs]
        for layer in range(3):
            if stop == (local.pass_id, layer):
                raise RuntimeError("this layer fails")
            q = x.view(-1, 4, 8)
            k, v = (q[:, :2] * 0.5).contiguous(), (q[:, 2:] * 2.0).contiguous()
            x = x + tree_attention.tree_attention(q, k, v, context, layer, 0.3).reshape(x.shape)
        return x[local.scored].sum(-1, keepdim=True)

    def engine(made, stop=None):
        def run(local, context):
            return attention(local, context, stop)

        return Engine(batch.plan, batch.forest, run, made, get_kernel("cpu_flash", "cpu"))

    return engine, batch


class Library:
    """Stands for `torch.distributed` on one rank: notes every message and whether it was waited for."""

    def __init__(self, device: Device, world: int, rank: int) -> None:
        self.messages: list[tuple[str, int, int]] = []
        self.works: list[bool] = []
        own = {"P2POp": self._operation, "batch_isend_irecv": self._batch}
        self.module = SimpleNamespace(**{**vars(device.torch_dist(world, rank)), **own})

    def _operation(self, kind, tensor, peer, group):
        return kind, tensor, peer

    def _batch(self, operations):
        for kind, tensor, peer in operations:
            self.messages.append((kind, peer, tensor.numel()))
            if kind == "irecv":
                tensor.zero_()
        number = len(self.works)
        self.works.append(False)
        return [SimpleNamespace(wait=lambda: self.works.__setitem__(number, True))]


@pytest.mark.parametrize("name", PROGRAMS)
def test_both_ends_post_the_same_messages_in_the_same_order(monkeypatch, name):
    world, seen = 4, {}
    for rank in range(world):
        library = Library(Device(), world, rank)
        with monkeypatch.context() as patch:
            patch.setattr(transport, "dist", library.module)
            engine, _ = step(world, **PROGRAMS[name])
            engine(DistTransport()).play(lambda values: (values.values.sum(), {}))
        assert all(library.works)
        seen[rank] = library.messages
    sent = 0
    for a in range(world):
        for b in range(world):
            out = [size for kind, peer, size in seen[a] if kind == "isend" and peer == b]
            into = [size for kind, peer, size in seen[b] if kind == "irecv" and peer == a]
            assert out == into
            sent += len(out)
    assert sent > 0


@pytest.mark.parametrize("rank", (0, 2))
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "moved queries"])
def test_streams_wait_for_what_they_need(monkeypatch, name, rank):
    """Packing, landing and buffers used again, on a device that knows races."""
    device = Device()
    monkeypatch.setattr(transport, "dist", device.torch_dist(WORLD, rank))
    made = DistTransport(streams=device)
    engine, batch = step(WORLD, **PROGRAMS[name])
    with device:
        for _ in range(2):
            engine(made).play(lambda values: (values.values.sum(), {}))
    assert device.races == []
    ahead = {turn for turn, _, _ in made.waits._buffers if turn >= 2}
    assert ahead == {2, 3}


@pytest.mark.parametrize("drop", ["start on compute", "work", "land on side"])
def test_a_wait_that_is_left_out_is_noticed(monkeypatch, drop):
    device = Device(drop)
    monkeypatch.setattr(transport, "dist", device.torch_dist(WORLD, 1))
    engine, _ = step(WORLD, **PROGRAMS["waves"])
    with device, torch.no_grad():
        engine(DistTransport(streams=device)).play()
    assert device.races


@pytest.mark.parametrize("layer", (0, 1, 2))
def test_nothing_is_left_under_way_when_a_layer_raises(monkeypatch, layer):
    library = Library(Device(), WORLD, 1)
    monkeypatch.setattr(transport, "dist", library.module)
    engine, batch = step(WORLD, **PROGRAMS["waves"])
    wave = next(p.id for p in batch.plan.passes if p.kind == "replay")
    contexts, playing = [], PassContext.playing

    def noted(context):
        contexts.append(context)
        return playing(context)

    monkeypatch.setattr(PassContext, "playing", noted)
    with pytest.raises(RuntimeError, match="this layer fails"):
        engine(DistTransport(), (wave, layer)).play()
    assert library.works and all(library.works)
    assert not contexts[-1].prefetch._flights and not contexts[-1].prefetch._open


def test_an_error_of_the_library_does_not_hide_the_models(monkeypatch):
    """What is under way cannot arrive when others have failed, too: the model's error is the one to tell."""
    engine, batch = step(2, **PROGRAMS["waves"])
    wave = next(p.id for p in batch.plan.passes if p.kind == "replay")
    made, land = LocalTransport(2), LocalTransport.land

    def lost(this, posted):
        if wave_runs:
            raise RuntimeError("connection closed")
        land(this, posted)

    wave_runs, begin = [], Prefetch.begin
    monkeypatch.setattr(Prefetch, "begin", lambda this: (wave_runs.append(1), begin(this)))
    monkeypatch.setattr(LocalTransport, "land", lost)
    with pytest.raises(RuntimeError, match="this layer fails"):
        engine(made, (wave, 0)).play()
