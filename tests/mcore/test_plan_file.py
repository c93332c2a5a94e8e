"""A plan from a file is played on the forest that it was made for: groups joined, or a tree a group."""

from __future__ import annotations

import json

import pytest

from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.data.records import Group, Response
from megatron_augtree.mcore.sampler import plan_step, sequences_of
from megatron_augtree.planning.choose import WITHIN, merging
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.tree import from_sequences

MODEL = ModelShape(2, 32, 64, 128, 4, 2, 8, 8)


def groups() -> list[Group]:
    """Three groups that begin alike."""
    policy = list(range(1, 40))
    answers = tuple(Response(tokens=(50 + i, 60), loss_mask=(True, True), reward=0.0) for i in range(3))
    return [Group(f"group {g}", (*policy, 90 + g), answers) for g in range(3)]


@pytest.mark.parametrize("mode", ["augtree", WITHIN])
def test_a_plan_finds_its_forest(mode: str, tmp_path) -> None:
    sequences, numbers = sequences_of(groups())
    forest = from_sequences(sequences, groups=numbers, **merging(mode, 16))
    assert forest.joined == (mode == "augtree")
    plan = make_plan(forest.shape, MODEL, 2, AugTreeConfig(), tree_groups=forest.tree_groups)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    step = plan_step(groups(), MODEL, 2, AugTreeConfig(plan_path=str(path)))
    assert step.forest.shape == forest.shape and step.plan.digest() == plan.digest()


def test_a_plan_of_another_step_is_refused(tmp_path) -> None:
    sequences, numbers = sequences_of(groups()[:2])
    forest = from_sequences(sequences, groups=numbers)
    plan = make_plan(forest.shape, MODEL, 2, AugTreeConfig(), tree_groups=forest.tree_groups)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    with pytest.raises(AugTreeError, match="plan"):
        plan_step(groups(), MODEL, 2, AugTreeConfig(plan_path=str(path)))
