"""No question to the device within a pass: attention runs on tensors that have no numbers to ask for."""

from __future__ import annotations

import pytest
import torch

from megatron_augtree.attention.kernels.cuda_flash import CudaFlashKernel
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.schedule import reverse
from megatron_augtree.runtime import transport
from megatron_augtree.runtime.prompt_state import PromptState
from megatron_augtree.runtime.transport import DistTransport, LocalTransport
from megatron_augtree.runtime.tree_attention import PassContext, tree_attention
from tests.distributed.device import Device, NoStreams
from tests.distributed.test_streams import CHOICES, WORLD, group

META = torch.device("meta")


class Remote(DistTransport):
    """One rank of four on a device without numbers."""

    device = META


def pools(monkeypatch):
    yield LocalTransport(WORLD)
    monkeypatch.setattr(transport, "dist", Device().torch_dist(WORLD, 1))
    yield Remote(streams=NoStreams())


@pytest.mark.parametrize("name", CHOICES)
def test_attention_asks_for_no_number(monkeypatch, name):
    """Every kernel argument, message and merge of a pass is made without looking at a tensor."""
    forest = group()
    plan = build(Choice(degree=WORLD, **CHOICES[name]), forest.shape, WORLD, 10)
    for pool in pools(monkeypatch):
        states = {pass_id: PromptState() for pass_id in plan.provides}
        graphs = {}
        for action, pass_id in plan.events:
            p = plan.passes[pass_id]
            if action == "backward":
                inputs, out = graphs.pop(pass_id)
                torch.autograd.backward([out], [torch.empty_like(out)])
                assert all(x.grad.shape == x.shape for x in inputs)
                continue
            program = plan.program(pass_id)
            context = PassContext(p.block, program, reverse(program, keep=p.keep), p.keep, pool,
                                  CudaFlashKernel(), {r: states[r] for r in p.reads}, states.get(pass_id))
            heads = ((4, 8), (2, 8), (2, 8))
            inputs = [torch.empty(sum(context.sizes), *size, dtype=torch.bfloat16, device=META,
                                  requires_grad=True) for size in heads]
            graphs[pass_id] = inputs, tree_attention(*inputs, context, 0, 0.3)
        assert not graphs
        with pytest.raises((RuntimeError, NotImplementedError)):
            float(inputs[0].detach().sum())  # what a question would do
