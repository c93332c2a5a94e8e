"""The CPU shims: what they answer, that they leave no trace, and that megatron-core trains on them."""

import argparse

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import random as megatron_random

from megatron_augtree.config import UnsupportedError
from megatron_augtree.mcore import arguments, build, cpu


def _attributes() -> list:
    return [(shim.name in vars(shim.owner), getattr(shim.owner, shim.name)) for shim in cpu.SHIMS]


def _tracked(name: str) -> float:
    with megatron_random.get_cuda_rng_tracker().fork(name):
        return torch.rand(()).item()


def test_restore_leaves_no_trace_and_install_is_idempotent():
    before = _attributes()
    cpu.install()
    during = _attributes()
    cpu.install()
    assert _attributes() == during
    assert all(old != new for old, new in zip(before, during, strict=True))
    cpu.restore()
    assert _attributes() == before
    cpu.restore()
    assert _attributes() == before


def test_blocks_nest_and_restore_after_an_error():
    before = _attributes()
    with pytest.raises(KeyError), cpu.cpu_shims():
        with cpu.cpu_shims():
            pass
        assert cpu.installed()
        raise KeyError
    assert not cpu.installed()
    assert _attributes() == before


def test_tensors_land_on_the_cpu():
    x = torch.ones(3)
    with cpu.cpu_shims():
        for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0), "cpu", None):
            assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.tensor([1], device="cuda").tolist() == [1]
        assert torch.arange(3, device=torch.cuda.current_device(), pin_memory=True).tolist() == [0, 1, 2]
        assert torch.empty(2, device="meta").device.type == "meta"
        assert x.cuda(non_blocking=True) is x
        assert (x.type(), x.bfloat16().type()) == ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor")
        assert x.type(torch.float64).dtype == torch.float64
        torch.cuda.current_stream().wait_stream(torch.cuda.current_stream())
    assert x.type() == "torch.FloatTensor"


def test_refused_where_cuda_works(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES"):
        cpu.install()
    assert not cpu.installed()


@pytest.fixture
def small_args():
    parser = argparse.ArgumentParser()
    arguments.add_model_arguments(parser)
    args = parser.parse_args("--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 32 "
                             "--swiglu".split())
    build.initialize(args, seed=7)
    yield args
    build.destroy()
    assert not cpu.installed()


def test_trackers_are_seeded(small_args):
    """Queued instead of written, the states of both trackers would be the default generator's."""
    names = ("model-parallel-rng", megatron_random.get_data_parallel_rng_tracker_name())
    first = [_tracked(name) for name in names]
    assert first[0] != first[1]
    outside = torch.get_rng_state()
    assert _tracked(names[0]) != first[0]
    assert torch.equal(torch.get_rng_state(), outside)
    megatron_random.model_parallel_cuda_manual_seed(7)
    assert [_tracked(name) for name in names] == first
    megatron_random.model_parallel_cuda_manual_seed(8)
    assert _tracked(names[0]) != first[0]


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_ddp_and_megatron_optimizers_step(small_args, distributed_optimizer):
    model = build.build_model(small_args, augtree=False, seed=3)
    reference = build.build_model(small_args, augtree=False, seed=3)
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0,
                        use_distributed_optimizer=distributed_optimizer, params_dtype=torch.float32), [ddp])
    adam = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-8)
    ids, labels = torch.randint(0, 32, (2, 1, 9), generator=torch.Generator().manual_seed(0))
    for net, step in ((ddp, optimizer.step), (reference, adam.step)):
        net(ids, torch.arange(9)[None], None, labels=labels).sum().backward()
        if net is ddp:
            ddp.finish_grad_sync()
        step()
    fresh = build.build_model(small_args, augtree=False, seed=3)
    for (name, a), b, start in zip(model.named_parameters(), reference.parameters(), fresh.parameters(),
                                   strict=True):
        assert not torch.equal(a, start), name
        assert torch.allclose(a, b, atol=1e-6, rtol=0), name
