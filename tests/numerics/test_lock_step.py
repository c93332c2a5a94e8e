"""Plans in lock-step, as the executor runs them, equal the un-shared run; other plan files are refused."""

from __future__ import annotations

import json

import pytest

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.mcore.sampler import model_shape, plan_step
from megatron_augtree.planning.lock_step import check_in_step
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

BAR = 1e-10


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("force", ["", "degree=1", "degree=2", "degree=2,phase=phased"])
@pytest.mark.parametrize("data", ["three_levels", "several"])
def test_lock_step_equals_the_unshared_run(lab, data, force, world):
    groups, want = lab.data(data)
    model = model_shape(lab.tree.config, f.VOCAB)
    batch = plan_step(groups, model, world, AugTreeConfig(force=force, min_shared_rows=4, lock_step=True))
    check_in_step(batch.plan)
    assert f.worst(lab.compare(groups, want, batch)) < BAR


def test_a_plan_file_has_to_keep_step(lab, tmp_path):
    groups, _ = lab.data("ragged")
    model, path = model_shape(lab.tree.config, f.VOCAB), tmp_path / "plan.json"
    batch = plan_step(groups, model, 2, AugTreeConfig(force="degree=1,copies=1", min_shared_rows=4))
    path.write_text(json.dumps(batch.plan.to_json()))
    again = plan_step(groups, model, 2, AugTreeConfig(plan_path=str(path), min_shared_rows=4))
    assert again.plan == batch.plan
    with pytest.raises(InfeasiblePlanError, match="ranks play 0 to 1 pass"):
        plan_step(groups, model, 2, AugTreeConfig(plan_path=str(path), min_shared_rows=4, lock_step=True))
