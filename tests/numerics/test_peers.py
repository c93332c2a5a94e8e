"""What the peers' planners may choose, degree by degree, against the un-shared run, in fp64: 1e-10.

`test_parity` has what every mode runs by itself; here are their other choices.
"""

import pytest

from megatron_augtree.planning.baselines import Costs, variants
from megatron_augtree.planning.recipe import plan_of
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

#: Modes with choices of their own, and how many of them a step plays at most.
MODES = {"ring-reuse-two-pass": 1, "dynamic": 2, "dynamic-reuse": 2, "dcp-phased": 2, "dcp-fused": 2,
         "paper": 7}


def plans(groups, mode: str, world: int, turn: int) -> list:
    """(forest, plan) of some of a mode's choices: others at every turn."""
    forest, tree_groups = f.forest_of(groups, mode)
    made = {}
    for recipes, events, note in variants(mode, forest.shape, tree_groups, world, Costs(f.UNIT)):
        rules = {"mode": mode, "shape": forest.shape, "world": world, "pairs_per_row": f.UNIT, "note": note}
        made.setdefault(tuple(recipes), (recipes, events, rules))
    found = list(made.values())
    step = max(1, len(found) // MODES[mode])
    return [(forest, plan_of(r, e, **rules)) for r, e, rules in found[turn % step :: step][: MODES[mode]]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("data", ["ragged", "three_levels", "several", "inner_losses"])
def test_every_choice_equals_the_unshared_run(lab, data, world):
    groups, want = lab.data(data)
    failed = {}
    for mode in MODES:
        for forest, plan in plans(groups, mode, world, turn=world + len(data)):
            found = lab.compare(groups, want, f.batch_with(groups, forest, plan))
            if not f.worst(found) < 1e-10:
                failed[mode, plan.note] = found
    assert not failed


def test_the_choices_are_many(lab):
    """Prompt copies, rounds, moved queries, mixed widths at one time: each is among what is played."""
    seen = set()
    for data in ("ragged", "three_levels", "several", "inner_losses"):
        groups, _ = lab.data(data)
        for world in (2, 3, 4, 8):
            for mode in MODES:
                for _, plan in plans(groups, mode, world, turn=world + len(data)):
                    held = [n for job in plan.jobs for n in {n for q in job for n in plan.passes[q].nodes}]
                    seen |= {(mode, "copies")} if len(held) > len(set(held)) else set()
                    seen |= {(mode, p.kind, p.primitive) for p in plan.passes}
                    seen |= {(mode, "widths")} if len({len(p.block) for p in plan.passes}) > 1 else set()
                    waves = [sum(plan.passes[p].kind == "replay" for p in job) for job in plan.jobs]
                    seen |= {(mode, "rounds")} if max(waves) > 1 else set()
    assert {("paper", "copies"), ("paper", "rounds"), ("paper", "fused", "ring"),
            ("paper", "replay", "move_q"), ("paper", "replay", "local"), ("paper", "replay", "move_kv"),
            ("dynamic", "widths"), ("dynamic", "fused", "ring"),
            ("dynamic-reuse", "widths"), ("dynamic-reuse", "fused", "gather_kv"),
            ("dcp-fused", "fused", "gather_kv"), ("dcp-phased", "prefill", "gather_kv"),
            ("dcp-phased", "replay", "gather_kv"), ("ring-reuse-two-pass", "replay", "ring")} <= seen
