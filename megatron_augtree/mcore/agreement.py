"""What all ranks must have alike, compared before the first exchange that would go wrong without it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.mcore.ddp import gather_parameters_now
from megatron_augtree.mcore.sampler import StepBatch
from megatron_augtree.mcore.shards import tensor_parallel_group, tensor_parallel_rank_and_size
from megatron_augtree.runtime.transport import Transport

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_ranks(transport: Transport, batch: StepBatch, failure: AugTreeError | None = None) -> None:
    """Fail on every rank, before any other exchange, where ranks hold different steps.

    Args:
        transport: the pool.
        batch: the step.
        failure: why this rank cannot play its plan, if so.

    Raises:
        AugTreeError: this rank's failure.
        InputError: names the ranks that failed, or that differ from the first.
    """
    said = f"{batch.plan.digest()}/{batch.fingerprint}" + ("/failed" if failure is not None else "")
    texts = [text for pool in everyones(transport, said) for text in pool]
    if failure is not None:
        raise failure
    failed = sorted(int(text.split("|")[0]) for text in texts if text.endswith("/failed"))
    if failed:
        raise InputError(
            "ranks cannot play their plans",
            values=f"ranks {failed}",
            rule="every rank plays the same plan, with the same model",
            remedy="see the error of these ranks",
        )
    groups = {text.split("|")[1].split("/")[1] for text in texts}
    _check(
        texts,
        f"ranks hold different {'plans' if len(groups) == 1 else 'groups'}",
        rule="every rank is given the same groups and settings",
        remedy="check --data-path, --seed and the AugTree flags on these ranks",
    )


def compare_weights(transport: Transport, model: torch.nn.Module) -> None:
    """Fail on every rank where ranks begin with different weights: gradients would be of no model at all.

    Parameters that are gathered late are gathered now: until then ranks differ in them.

    Raises:
        InputError: names the ranks that differ from the first of their pool.
    """
    gather_parameters_now(model)
    # Sums of the bits as integers wrap round, so they do not depend on the order of threads.
    sums = [p.detach().reshape(-1).view(_INTEGERS[p.element_size()]).sum(dtype=torch.int64)
            for p in model.parameters()]
    for pool in everyones(transport, " ".join(str(int(value)) for value in sums)):
        _check(
            pool,
            "ranks hold different weights",
            rule="every rank of a pool begins with the same parameters",
            remedy="check --seed, --load and the model flags on these ranks",
        )


def everyones(transport: Transport, text: str) -> list[list[str]]:
    """``rank|text`` of every process, pool by pool: tensor-parallel ranks are in different pools."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = transport.same(f"{rank}|{text}")
    group = tensor_parallel_group()
    if group is None:
        return [mine]
    pools: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(pools, mine, group=group)
    return pools


def said_by_all(transport: Transport, text: str) -> tuple[dict[int, str], list[str]]:
    """What every process says: by its number, and those of this pool in order."""
    pools = [[entry.split("|", 1) for entry in pool] for pool in everyones(transport, text)]
    mine = pools[tensor_parallel_rank_and_size()[0]]
    return {int(rank): said for pool in pools for rank, said in pool}, [said for _, said in mine]


def _check(texts: Sequence[str], what: str, *, rule: str, remedy: str) -> None:
    first = texts[0].split("|")
    others = sorted(int(rank) for rank, text in (t.split("|") for t in texts) if text != first[1])
    if others:
        raise InputError(
            what, values=f"ranks {others} differ from rank {first[0]}", rule=rule, remedy=remedy
        )


def warn(where: str, text: str) -> None:
    """A warning of the first rank, to the logger of a module."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger(where).warning(text)
