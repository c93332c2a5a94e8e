"""What cases of the public API are made of: a rank with models, deals of samples, and comparisons."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.mcore import api, build
from tests.distributed.api_cases import PLANS
from tests.distributed.running import PATIENCE
from tests.numerics import fixtures as f


class ApiRank:
    """One rank, with the models that all cases share."""

    def __init__(self) -> None:
        build.initialize(f.parse(), timeout_s=PATIENCE)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.lab = f.Lab()

    def handle(
        self, plan: str = "planned", scaling: str = "plain", *, stock: bool = False, args=None, **how
    ) -> api.Handle:
        """A prepared model in Megatron's DDP, under the given settings."""
        model = f.build_model(args or self.lab.args, augtree=False)
        model.config.calculate_per_token_loss = scaling != "averaged"
        if scaling == "fp16":
            model.config.grad_scale_func = lambda loss: loss * 1024.0
        if stock:
            model.config.attention_dropout = 0.1  # something that AugTree refuses, and evaluation ignores
        config = AugTreeConfig(min_shared_rows=4, **PLANS[plan])
        first = api.prepare_model(model, config, **how)
        model.config.finalize_model_grads_func = finalize_model_grads
        settings = DistributedDataParallelConfig(
            overlap_grad_reduce=scaling == "overlap",
            use_distributed_optimizer=scaling == "sharded",
            bucket_size=9000,
        )
        handle = api.prepare_model([DistributedDataParallel(model.config, settings, model)], config)
        assert handle is first and isinstance(handle.model, DistributedDataParallel)
        handle.model.zero_grad_buffer()
        if stock:
            handle.model.eval()
        return handle

    def deal(self, groups: list, how: str) -> list[int]:
        """Numbers of the responses that this rank gives."""
        of_group = [g for g, group in enumerate(groups) for _ in group.responses]
        if how == "all to the last":
            return list(range(len(of_group))) if self.rank == self.world - 1 else []
        if how == "groups":
            return [i for i, g in enumerate(of_group) if g % self.world == self.rank]
        if how == "uneven":
            return [i for i in range(len(of_group)) if min(i // 2, self.world - 1) == self.rank][::-1]
        return list(range(len(of_group)))[self.rank :: self.world]

    def step(self, handle: api.Handle, groups: list, mine: list[int], **how) -> api.StepOutput:
        """One tier-2 step with the GRPO loss of the fixtures."""
        batch, loss, tokens = batch_of(groups, mine)
        plan = api.plan(handle, batch)
        return api.forward_backward(handle, batch, plan, loss, normalizer=tokens, **how)

    def schedule(self, handle, step, loss, tokens) -> list[int]:
        """Samples that this rank's loss saw, of a plan under Megatron's own schedule."""
        seen = []

        def forward_step(iterator, model):
            assert model is handle.model
            mb = next(iterator)
            outputs = api.forward(handle, mb)
            assert tuple(outputs.index.tolist()) == mb.index
            seen.extend(mb.index)
            return outputs.anchor, functools.partial(self._loss_of, outputs, loss, tokens)

        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=api.microbatches(step),
            model=handle.model,
            num_microbatches=api.num_microbatches(step),
            seq_length=1,
            micro_batch_size=1,
        )
        return seen

    @staticmethod
    def _loss_of(outputs, loss, tokens, anchor):
        shares = [loss(one)[0] for one in single(outputs)]
        return (anchor + sum(shares)) / tokens, torch.tensor(0, dtype=torch.int), {}


def group_of(group, answer):
    """A group with one of its responses."""
    return replace(group, responses=(answer,))


def batch_of(groups: list, mine: list[int]):
    """(batch of some responses, the fixtures' GRPO loss of them, loss-bearing tokens of all)."""
    pairs = [(g, r) for g in groups for r in g.responses]
    tokens = sum(sum(r.loss_mask) for _, r in pairs)
    chosen = [pairs[i] for i in mine]
    batch = api.Batch(
        [torch.tensor([*g.prompt, *r.tokens]) for g, r in chosen],
        [torch.tensor([*[False] * (len(g.prompt) - 1), *r.loss_mask], dtype=torch.bool) for g, r in chosen],
        group=[g.name for g, _ in chosen],
    )

    def loss(outputs):
        (i,) = outputs.index.tolist()
        answer = chosen[i][1]
        mask = torch.tensor(answer.loss_mask)
        values = outputs.as_list()[0][mask[int(mask.int().argmax()) :]]
        return f.grpo(values, answer, 1), {"tokens": torch.tensor(len(values))}

    return batch, loss, tokens


def single(outputs):
    """Outputs of one sample each."""
    cuts = outputs.offsets.tolist()
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        yield api.Outputs(
            outputs.index[i : i + 1],
            {k: v[a:b] for k, v in outputs.values.items()},
            torch.tensor([0, b - a]),
            outputs.rows[a:b],
            outputs.lengths[i : i + 1],
            outputs.anchor,
        )


def distance(outputs, groups: list, mine: list[int], want: f.Outcome) -> float:
    """Of this rank's log-probs to the oracle's, relative to the largest."""
    answers = [r for g in groups for r in g.responses]
    counts = [sum(r.loss_mask) for r in answers]
    theirs = want.logprobs.split(counts)
    worst = 0.0
    for part, i in zip(outputs.as_list(), mine):
        mask = torch.tensor(answers[i].loss_mask, dtype=torch.bool)
        if mask.any():
            held = mask[int(mask.int().argmax()) :]
            assert bool((part[~held] == 0).all()), "masked rows are 0"
            worst = max(worst, float((part[held] - theirs[i]).abs().max()))
    return worst / float(want.logprobs.abs().max())


def refused(call, text: str) -> str:
    """The message of the error that a call is refused with."""
    try:
        call()
    except AugTreeError as error:
        assert text in str(error), error
        return str(error)
    raise AssertionError(f"not refused: {text}")
