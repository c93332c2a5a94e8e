"""Keys that cross to another node once: against the un-shared run, bytes on either path, recompute."""

import pytest
import torch

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore.sampler import model_shape
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.planning.schedule import RELAY, promise, reverse, transfer_bytes
from megatron_augtree.runtime import tree_attention
from megatron_augtree.runtime.transport import LocalTransport
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

BAR = 1e-10
PROGRAMS = [
    f.augtree(pieces=pieces, lane_degree=lane, keep=keep)
    for pieces in (1, 2, 4) for lane in (1, 8) for keep in (True, False)
] + [
    f.augtree(phase="phased", waves=2, chunks=chunks, pieces=pieces, lane_degree=lane, keep=keep)
    for chunks, pieces, lane, keep in ((1, 1, 1, True), (2, 2, 8, True), (2, 4, 1, False), (1, 2, 8, False))
] + [f.augtree(wide=2, pieces=2), f.augtree(phase="phased", waves=2, pieces=2, prefetch=True)]
#: Ranks of the pool and of a node; the last node may have fewer.
MACHINES = [(4, 2), (6, 2), (6, 4), (5, 3)]


def on(program: f.Program, node_ranks: int) -> f.Program:
    return f.Program(program.mode, (*program.choice, ("node_ranks", node_ranks)))


@pytest.mark.parametrize(("world", "node_ranks"), MACHINES)
@pytest.mark.parametrize("data", ("ragged", "three_levels", "several"))
def test_every_gather_through_relays_equals_the_unshared_run(lab, data, world, node_ranks):
    groups, want = lab.data(data)
    failed, handed_on = {}, 0
    for program in PROGRAMS:
        batch = f.batch_of(groups, on(program, node_ranks), world)
        found = lab.compare(groups, want, batch)
        if not f.worst(found) < BAR:
            failed[str(program)] = found
        handed_on += any(
            t.source.buffer.startswith("kv/")
            for p in batch.plan.passes for stage in batch.plan.program(p.id).stages for t in stage.transfers)
    assert not failed and handed_on == len(PROGRAMS)


def crossing(batch: f.StepBatch, node_ranks: int, shape) -> int:
    """Forward bytes of a layer between nodes."""
    return sum(
        transfer_bytes(t, shape)
        for p in batch.plan.passes for stage in batch.plan.program(p.id).stages for t in stage.transfers
        if p.block[t.src] // node_ranks != p.block[t.dst] // node_ranks)


@pytest.mark.parametrize("keep", (True, False))
def test_bytes_sent_are_the_bytes_promised_and_fewer_cross(lab, keep):
    """All leaves wide on two nodes of three: what three ranks fetched, one does."""
    groups, _ = lab.data("ragged")
    shape, layers = model_shape(lab.tree.config, f.VOCAB), 2
    flat = f.augtree(lane_degree=8, keep=keep, pieces=2)
    batch, transport = f.batch_of(groups, on(flat, 3), 6), LocalTransport(6)
    f.play(lab.tree, batch, transport=transport)
    (p,) = batch.plan.passes
    made = batch.plan.program(0), reverse(batch.plan.program(0), keep=keep)
    for rank, traffic in enumerate(transport.traffic):
        promised = [promise(program, rank, shape) for program in made]
        total: dict[str, int] = {}
        for name, size in (item for one in promised for item in one.bytes.items()):
            total[name] = total.get(name, 0) + layers * size
        assert dict(traffic.bytes) == total
        assert traffic.messages == layers * sum(one.messages for one in promised)
    once, thrice = crossing(batch, 3, shape), crossing(f.batch_of(groups, flat, 6), 3, shape)
    assert p.keep == keep and 0 < 2 * once < thrice


def test_what_is_only_handed_on_is_not_kept(lab, monkeypatch):
    """Rank 2 has the place of the prompt's owner in the other node, and no use for all of its keys."""
    kept, received = set(), tree_attention._received

    def recorded(held):
        found = received(held)
        kept.update((rank, name) for rank, name, _ in found)
        return found

    monkeypatch.setattr(tree_attention, "_received", recorded)
    groups, want = lab.data("ragged")
    batch = f.batch_of(groups, f.augtree(phase="phased", waves=4, node_ranks=2), 4)
    assert f.worst(lab.compare(groups, want, batch)) < BAR
    buffers = {
        (rank, name) for p in batch.plan.passes
        for rank, names in enumerate(batch.plan.program(p.id).buffers) for name in names
        if name.startswith("kv/")}
    relays = {(rank, name) for rank, name in buffers if name.endswith(RELAY)}
    assert relays and kept == buffers - relays


def test_a_recomputed_layer_repeats_the_hop_to_the_bit(lab):
    groups, _ = lab.data("three_levels")
    batch = f.batch_of(groups, f.augtree(lane_degree=8, pieces=2, node_ranks=2), 6)
    again = f.build_model(f.parse(f"{f.MODEL} --recompute-granularity full --recompute-method uniform "
                                  "--recompute-num-layers 1"), augtree=True)
    plain, kept = f.play(lab.tree, batch), []
    for keep in (0, 1):
        transport = LocalTransport(6)
        schedule = AugTreeSchedule(AugTreeConfig(keep_attention=keep), transport=transport)
        got = f.play(again, batch, schedule=schedule)
        assert got.loss == plain.loss and torch.equal(got.logprobs, plain.logprobs)
        assert all(torch.equal(got.grads[name], plain.grads[name]) for name in plain.grads)
        kept.append(sum(traffic.bytes["KV"] for traffic in transport.traffic))
    assert 4 * kept[1] == 3 * kept[0], "two layers and their repetition; one of them keeps"
