"""Which forest a step is planned on: groups joined, a tree a group, or nothing shared."""

from __future__ import annotations

import pytest

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.data.workloads import rollout_trees
from megatron_augtree.planning.choose import choose
from megatron_augtree.planning.planner import configured, explain
from megatron_augtree.planning.tree import TokenSequence, from_sequences
from megatron_augtree.tools.lengths import step_of_lengths, step_of_rollouts
from megatron_augtree.tools.models import model_shape

MODEL = model_shape("qwen2.5-7b")


def config_of(gib: float) -> AugTreeConfig:
    return AugTreeConfig(cluster="h100", memory_budget_gib=gib)


def seconds(trees, world: int, config: AugTreeConfig) -> float | None:
    model = configured(MODEL, config)
    try:
        return explain(trees.shape, model, world, config, tree_groups=trees.tree_groups)[0].seconds
    except InfeasiblePlanError:
        return None


@pytest.mark.parametrize("groups, world, gib", [(8, 2, 200), (8, 2, 27), (8, 2, 8), (12, 4, 27)])
def test_the_better_of_joined_groups_and_a_tree_a_group(groups: int, world: int, gib: float) -> None:
    step, config = step_of_rollouts(rollout_trees(groups, 0)), config_of(gib)
    assert step.merged.joined and not step.single.joined
    both = [seconds(trees, world, config) for trees in (step.merged, step.single)]
    chosen = choose(step.trees, MODEL, world, config)
    assert chosen.plan.seconds == min(x for x in both if x is not None)
    chosen.plan.check_fits(chosen.trees.shape, world)


def test_little_memory_takes_a_tree_a_group_where_joined_groups_do_not_fit() -> None:
    step, config = step_of_rollouts(rollout_trees(8, 0)), config_of(8)
    assert seconds(step.merged, 2, config) is None
    chosen = choose(step.trees, MODEL, 2, config)
    assert not chosen.trees.joined and chosen.plan.mode == "augtree"


def test_nothing_fits_on_any_forest() -> None:
    step = step_of_rollouts(rollout_trees(4, 0))
    with pytest.raises(InfeasiblePlanError):
        choose(step.trees, MODEL, 1, config_of(1))


def test_groups_that_share_nothing_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    step = step_of_lengths([(4096, [64] * 8)] * 4)
    choose(lambda mode: asked.append(mode) or step.trees(mode), MODEL, 4, config_of(200))
    assert asked == ["augtree"]


def test_joined_says_whether_a_tree_holds_several_groups() -> None:
    same, other = [TokenSequence([5, 6, 7, last], [True] * 3) for last in (8, 9)]
    for groups, minimum, joined in (([0, 1], 2, True), ([0, 1], 3, False), ([0, 0], 2, False)):
        forest = from_sequences([same, other], groups=groups, min_shared_rows=minimum)
        assert forest.joined == joined
        assert list(forest.tree_groups) == sorted({0, *groups[: len(forest.shape.roots)]})
