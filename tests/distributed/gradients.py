"""A model's gradients after Megatron's reduction, in one piece."""

from __future__ import annotations

import torch
import torch.distributed as dist


def reduced_gradients(ddp, group, sharded: bool) -> dict[str, torch.Tensor]:
    """Every parameter's reduced gradient; under the distributed optimizer each rank has a shard of it."""
    names = {p: name for name, p in ddp.module.named_parameters() if p.requires_grad}
    if not sharded:
        return {name: p.main_grad.detach().clone() for p, name in names.items()}
    found, world, rank = {}, dist.get_world_size(group), dist.get_rank(group)
    for buffer in ddp.buffers:
        whole = []
        for bucket in buffer.buckets:
            shard = bucket.grad_data.view(-1).chunk(world)[rank].contiguous()
            parts = [torch.empty_like(shard) for _ in range(world)]
            dist.all_gather(parts, shard, group=group)
            whole.append(torch.cat(parts))
        flat = torch.cat(whole)
        for parameter, (first, last, _) in buffer.param_index_map.items():
            found[names[parameter]] = flat[first:last].view(parameter.shape).clone()
    assert found.keys() == set(names.values())
    return found
