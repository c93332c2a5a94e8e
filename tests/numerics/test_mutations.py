"""Parity must notice each of these mistakes: a check that a dropped branch passes proves nothing.

Every mutation runs the step of a parity test with one thing broken; the un-broken step passes beside it.
The mutation "a rank is skipped in the gradient reduction" needs processes: tests/distributed.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from megatron_augtree.attention.kernels import CpuFlashKernel, Segment, get_kernel
from megatron_augtree.mcore import objective
from megatron_augtree.planning.schedule import Payload, Program, Rows, Stage, rows
from megatron_augtree.rl.losses import Denominators
from megatron_augtree.runtime import engine, tree_attention
from megatron_augtree.runtime.prompt_state import PromptState
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

BAR = 1e-10
#: A mistake in a small corner still has to be far above the bar.
SEEN = 1e-5

FUSED = f.augtree()
WIDE = f.augtree(lane_degree=8)
MOVED = f.augtree(phase="phased", waves=2, primitive="move_q")
CHUNKED = f.augtree(phase="phased", waves=2, chunks=2)


def gradients_differ(lab, data, batch, kind="grpo") -> float:
    """Error of the gradients, infinite where they are not finite."""
    _, want = lab.data(data, kind)
    return f.err(f.play(lab.tree, batch, kind).grads, want.grads)


def notices(lab, monkeypatch, mutate, data="ragged", program=FUSED, world=4, kind="grpo"):
    """The step passes; with `mutate` applied it fails."""
    groups, _ = lab.data(data, kind)
    assert gradients_differ(lab, data, f.batch_of(groups, program, world), kind) < BAR
    with monkeypatch.context() as patch:
        batch = mutate(patch, f.batch_of(groups, program, world))
        assert gradients_differ(lab, data, batch, kind) > SEEN


def without(program: Program, payload: Payload, node: int) -> tuple[Program, int]:
    """A backward program that loses the rows of one node from the transfers of a payload, and how many."""
    lost, stages = 0, []
    leaves_home = payload is Payload.DPARTIAL  # dK, dV and dQ land there
    for stage in program.stages:
        kept = []
        for t in stage.transfers:
            rank, end = (t.src, t.source) if leaves_home else (t.dst, t.sink)
            if t.payload is not payload or end.buffer != "home":
                kept.append(t)
                continue
            offset, gone = 0, set()
            for span in program.home[rank]:
                if span.node == node:
                    gone |= set(range(offset, offset + span.hi - span.lo))
                offset += span.hi - span.lo
            keep = [row not in gone for row in _numbers(end)]
            lost += keep.count(False)
            if any(keep):
                kept.append(t._replace(source=_pick(t.source, keep), sink=_pick(t.sink, keep)))
        stages.append(Stage(tuple(kept), stage.tiles))
    return dataclasses.replace(program, stages=tuple(stages)), lost


def _numbers(end: Rows) -> list[int]:
    return [row for lo, hi in end.ranges for row in range(lo, hi)]


def _pick(end: Rows, keep: list[bool]) -> Rows:
    return rows(end.buffer, [(row, row + 1) for row, wanted in zip(_numbers(end), keep) if wanted])


def leaves(batch) -> list[int]:
    """Leaf nodes, longest first."""
    shape = batch.plan.shape
    return sorted((n for n in range(len(shape.rows)) if not shape.children[n]), key=lambda n: -shape.rows[n])


@pytest.mark.parametrize("payload, program", [
    (Payload.DKV, WIDE), (Payload.DQ, MOVED), (Payload.DPARTIAL, MOVED)], ids=["dkv", "dq", "dpartial"])
@pytest.mark.parametrize("which", range(3))
def test_a_gradient_payload_of_one_leaf_is_lost(lab, monkeypatch, payload, program, which):
    losses = []

    def mutate(patch, batch):
        node, reverse = leaves(batch)[which], engine.reverse

        def forgetful(made, *, keep):
            program, lost = without(reverse(made, keep=keep), payload, node)
            losses.append(lost)
            return program

        patch.setattr(engine, "reverse", forgetful)
        return batch

    notices(lab, monkeypatch, mutate, program=program)
    assert sum(losses) > 0


@pytest.mark.parametrize("rank", range(4))
def test_the_spines_gradient_from_one_lane_is_lost(lab, monkeypatch, rank):
    """dK and dV that one rank (with its whole leaf) sends to the spine's owners."""

    def mutate(patch, batch):
        reverse = engine.reverse

        def forgetful(made, *, keep):
            program = reverse(made, keep=keep)
            stages = [Stage(tuple(t for t in s.transfers if t.src != rank), s.tiles) for s in program.stages]
            assert sum(len(s.transfers) for s in stages) < sum(len(s.transfers) for s in program.stages)
            return dataclasses.replace(program, stages=tuple(stages))

        patch.setattr(engine, "reverse", forgetful)
        return batch

    notices(lab, monkeypatch, mutate)


@pytest.mark.parametrize("program", [FUSED, MOVED, CHUNKED], ids=str)
def test_one_branchs_positions_are_shifted_by_one(lab, monkeypatch, program):
    for which in (0, 1, 2):
        def mutate(patch, batch, which=which):
            node, offsets = leaves(batch)[which], batch.forest.shape.offsets
            positions = batch.forest.positions.copy()
            positions[offsets[node]:offsets[node + 1]] += 1
            return dataclasses.replace(batch, forest=dataclasses.replace(batch.forest, positions=positions))

        notices(lab, monkeypatch, mutate, program=program)


@pytest.mark.parametrize("world", [1, 4])
def test_two_branches_targets_are_swapped(lab, monkeypatch, world):
    def mutate(patch, batch):
        a, b = (batch.forest.shape.offsets[n] for n in leaves(batch)[:2])
        targets = batch.forest.targets.copy()
        assert targets[a] != targets[b]
        targets[[a, b]] = targets[[b, a]]
        return dataclasses.replace(batch, forest=dataclasses.replace(batch.forest, targets=targets))

    notices(lab, monkeypatch, mutate, world=world)


@pytest.mark.parametrize("data", ["merged", "inner_losses"])
@pytest.mark.parametrize("kind", ["nll", "grpo"])
def test_a_shared_loss_row_counts_once_instead_of_m_times(lab, monkeypatch, data, kind):
    def once(self, passes, slots, gradient):
        for pass_id in np.unique(passes):
            where = np.flatnonzero(passes == pass_id)
            into = self.played[int(pass_id)].gradient
            into[torch.as_tensor(slots[where])] = gradient[torch.as_tensor(where)]

    def mutate(patch, batch):
        patch.setattr(engine._Run, "_write", once)
        return batch

    notices(lab, monkeypatch, mutate, data=data, kind=kind)


@pytest.mark.parametrize("program", [f.augtree(degree=1), MOVED], ids=["by block", "by wave"])
@pytest.mark.parametrize("kind", ["nll", "grpo"])
def test_denominators_are_local(lab, monkeypatch, program, kind):
    """Each call divides by its own tokens: a mean of means."""
    call = objective.Objective.__call__

    def local(self, sequences):
        self._denominators = Denominators(int(sequences.offsets[-1]), len(sequences.index))
        return call(self, sequences)

    def mutate(patch, batch):
        patch.setattr(objective.Objective, "__call__", local)
        return batch

    notices(lab, monkeypatch, mutate, data="several", program=program, kind=kind)


@pytest.mark.parametrize("program", [MOVED, CHUNKED], ids=str)
def test_prompt_state_of_step_1_is_read_in_step_2(lab, monkeypatch, program):
    groups, first = lab.data("ragged")
    batch = f.batch_of(groups, program, 4)
    moved = f.stepped(lab.start, first.grads, "sgd")

    def second_step() -> float:
        for model in (lab.stock, lab.tree):
            for name, parameter in model.named_parameters():
                parameter.data.copy_(moved[name])
        return f.err(f.play(lab.tree, batch).grads, f.oracle(lab.stock, groups).grads)

    memory, made = {}, itertools.count()

    class Stale(PromptState):
        def __init__(self):
            super().__init__()
            self.number = next(made) % len(batch.plan.provides)

        def keep(self, layer, rank, k, v):
            first = memory.setdefault((self.number, layer, rank), (k.detach(), v.detach()))
            super().keep(layer, rank, *first)

    try:
        f.play(lab.tree, batch)
        assert second_step() < BAR
        _reset(lab)
        monkeypatch.setattr(engine, "PromptState", Stale)
        assert f.err(f.play(lab.tree, batch).grads, first.grads) < BAR
        assert second_step() > SEEN
    finally:
        _reset(lab)


def _reset(lab) -> None:
    for model in (lab.stock, lab.tree):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(lab.start[name])


@pytest.mark.parametrize("program", [FUSED, WIDE, CHUNKED], ids=str)
def test_a_tiles_own_lse_instead_of_the_merged_one(lab, monkeypatch, program):
    forward, backward = CpuFlashKernel.forward, CpuFlashKernel.backward

    def own(self, segments, causal, scale):
        seen = forward(self, [Segment(s.q, s.k, s.v) for s in segments], causal, scale)
        return backward(self, [s._replace(lse=lse) for s, (_, lse) in zip(segments, seen)], causal, scale)

    def mutate(patch, batch):
        assert isinstance(get_kernel("auto", "cpu"), CpuFlashKernel)
        patch.setattr(CpuFlashKernel, "backward", own)
        return batch

    notices(lab, monkeypatch, mutate, program=program)


def test_a_merge_that_keeps_one_sides_lse(lab, monkeypatch):
    def mutate(patch, batch):
        def careless(out, lse, part_out, part_lse):
            merge(out, lse, part_out, part_lse)
            lse.copy_(part_lse)

        merge = tree_attention.merge_
        patch.setattr(tree_attention, "merge_", careless)
        return batch

    notices(lab, monkeypatch, mutate)


def test_the_yardstick_sees_nan_small_tensors_and_dead_references(lab):
    """Ways in which a comparison passes by itself."""
    want = {"big": torch.tensor([100.0]), "small": torch.tensor([1.0, 1e-6])}
    assert f.err({"big": torch.tensor([math.nan]), "small": want["small"]}, want) == math.inf
    assert f.err({"big": torch.tensor([100.0]), "small": torch.tensor([1.0, math.inf])}, want) == math.inf
    assert f.err({"big": torch.tensor([100.0]), "small": torch.tensor([0.5, 0])}, want) == pytest.approx(0.5)
    floored = {"big": torch.tensor([100.0]), "none": torch.tensor([1e-9])}
    got = {"big": floored["big"], "none": torch.tensor([0.01])}
    assert f.err(got, floored) == pytest.approx(0.1, rel=1e-3)
    dead = f.Outcome(1.0, torch.ones(1), {name: torch.zeros_like(p) for name, p in lab.start.items()})
    with pytest.raises(AssertionError, match="reference gradient is zero"):
        f.errors(dead, dead, lab.start)
