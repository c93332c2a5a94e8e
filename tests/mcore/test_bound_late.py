"""A model that is bound after Megatron's DDP was put around it, as its training loop does it."""

from __future__ import annotations

import pytest

from megatron_augtree.mcore import build, launch
from megatron_augtree.mcore.build import build_model
from megatron_augtree.mcore.layer_spec import AugTreeAttention, prepare_model
from megatron_augtree.mcore.update import wrap_model
from tests.mcore import launcher_cases as cases


@pytest.fixture(scope="module")
def args():
    args = cases.example.parser().parse_args(f"{cases.STOCK_MODEL} --data-path none --train-iters 1".split())
    launch.start(args)
    yield args
    build.destroy()


def test_the_overlapped_gather_has_a_hook_for_every_module_and_no_other(args):
    """Otherwise Megatron fails when it takes them off: before its first step, and at every evaluation."""
    model = build_model(args, augtree=False, seed=1)
    ddp = wrap_model(
        model, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    stock = set(ddp.remove_forward_pre_hook_handles)
    assert stock == set(model.modules())
    handle = prepare_model(ddp)
    hooked = set(ddp.remove_forward_pre_hook_handles)
    assert hooked == set(model.modules()) and sum(isinstance(m, AugTreeAttention) for m in hooked) == 2
    ddp.disable_forward_pre_hook(param_sync=False)
    ddp.enable_forward_pre_hook()
    handle.restore()
    assert set(ddp.remove_forward_pre_hook_handles) == stock == set(model.modules())
    ddp.disable_forward_pre_hook(param_sync=False)
    prepare_model(ddp)
    assert not ddp.remove_forward_pre_hook_handles  # off stays off
