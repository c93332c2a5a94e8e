"""One optimizer step on a mini-batch: by AugTree's public API, or by stock Megatron for comparison.

Both have the same loss functions, of the form `api.LossFn`: called with one whole sample, they return its
share of the step's loss, already divided by counts over all ranks (`Denominators`), so the normalizer is 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from torch import Tensor

from examples.grpo.rollout import padded
from megatron_augtree.data.groups import Group, Response
from megatron_augtree.mcore import api
from megatron_augtree.mcore.ddp import config_of
from megatron_augtree.rl.losses import Denominators, LossConfig, SequenceRows, nll_loss, policy_loss
from megatron_augtree.runtime.engine import reduce_metric

#: A micro-batch of stock Megatron: a batch, which of its samples, and the loss.
Job = tuple[api.Batch, int, api.LossFn]


@dataclass
class MiniBatch:
    """The samples of one optimizer step that this rank rolled out; perhaps none.

    Attributes:
        batch: what the API takes.
        responses: of every sample, with its advantage.
        denominators: counts over all ranks.
        plan: AugTree's; None for stock Megatron. Kept, so that old, reference and current log-probs are
            computed alike.
        old, ref: of every sample [R], log-probs of the policy that sampled and of the reference.
    """

    batch: api.Batch
    responses: list[Response]
    denominators: Denominators
    plan: api.StepPlan | None = None
    old: list[Tensor] | None = None
    ref: list[Tensor] | None = None


def make_mini_batch(groups: Sequence[Group], temperature: float) -> MiniBatch:
    """This rank's groups as a batch; collective, since the counts are those of all ranks."""
    responses = [response for group in groups for response in group.responses]
    tokens, sequences = pool_total([sum(sum(r.loss_mask) for r in responses), len(responses)])
    batch = api.Batch.from_groups(groups, temperature=temperature)
    return MiniBatch(batch, responses, Denominators(int(tokens), int(sequences)))


def pool_total(values: Sequence[float]) -> list[float]:
    """Sums over the ranks that hold the same parameters, each with samples of its own."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total.tolist()


# ---- losses


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy loss with its KL term; an `api.LossFn`.

    Attributes:
        work: whose log-probs, advantages and counts.
        config: which loss.
    """

    work: MiniBatch
    config: LossConfig

    def __call__(self, outputs: api.Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        number = int(outputs.index[0])
        response, logprobs = self.work.responses[number], outputs.values["logprobs"]
        old, mask = self.work.old[number], torch.tensor(_from_first(response.loss_mask))
        rows = SequenceRows(
            outputs.offsets,
            advantages=torch.full_like(old, response.advantage),
            old_logprobs=old,
            ref_logprobs=None if self.work.ref is None else self.work.ref[number],
            mask=mask,
        )
        loss, metrics = policy_loss(
            logprobs, rows, self.work.denominators, self.config, outputs.values["entropy"])
        gap = (logprobs.detach() - old)[mask]
        return loss, {**metrics, "max/kl_to_old": (torch.expm1(-gap) + gap).max()}


def _from_first(mask: Sequence[bool]) -> list[bool]:
    """The rows that outputs hold: those from the first with a loss on."""
    return list(mask[mask.index(True):])


@dataclass(frozen=True)
class SupervisedLoss:
    """The mean negative log-likelihood of supervised samples, weighted; an `api.LossFn`."""

    denominators: Denominators
    weight: float

    def __call__(self, outputs: api.Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        rows = SequenceRows(outputs.offsets)
        loss, metrics = nll_loss(outputs.values["logprobs"], rows, self.denominators)
        return self.weight * loss, {"sft_loss": metrics["loss"]}


def supervised_jobs(groups: Sequence[Group], weight: float) -> list[Job]:
    """Stock micro-batches of groups of one response; collective.

    Args:
        groups: this rank's.
        weight: of their mean negative log-likelihood in the step's loss.
    """
    made = make_mini_batch(groups, 1.0)
    loss = SupervisedLoss(made.denominators, weight)
    return [(made.batch, i, loss) for i in range(len(groups))]


# ---- by AugTree


@dataclass
class AugTreeSteps:
    """Log-probs and gradients by the public API.

    Attributes:
        handle: the bound model.
        loss: which policy loss.
    """

    handle: api.Handle
    loss: LossConfig

    def prepare(self, work: MiniBatch) -> MiniBatch:
        """Plan, once for every use of these samples; collective."""
        work.plan = api.plan(self.handle, work.batch)
        return work

    def logprobs(self, work: MiniBatch) -> list[Tensor]:
        """Of every sample [R], by the weights that the model has now; collective."""
        plan = api.plan(self.handle, work.batch, like=work.plan)
        return api.forward_logprobs(self.handle, work.batch, plan).as_list()

    def gradients(self, work: MiniBatch, supervised: Sequence[Job] | None) -> dict[str, float | str]:
        """Leave the step's reduced gradient in DDP's buffers; collective.

        Args:
            work: the samples.
            supervised: this rank's stock micro-batches, perhaps none; None where no rank has any.

        Returns:
            Metrics over all ranks, and the plan's statistics.
        """
        told: dict[str, float | str] = {}
        if supervised is not None:
            with self.handle.accumulating():  # stock micro-batches: they add to the buffers
                told |= play_stock(self.handle.model, supervised)
        plan = api.plan(self.handle, work.batch, like=work.plan)
        out = api.forward_backward(
            self.handle,
            work.batch,
            plan,
            PolicyLoss(work, self.loss),
            normalizer=1.0,
            entropy="grad" if self.loss.entropy_coef else "metric",
        )
        shadow = {name: value for name, value in out.stats.items() if name.startswith("shadow/")}
        rows = {name: out.stats[name] for name in ("rows", "unshared_rows", "note")}
        return {**told, **out.metrics, **rows, **shadow}


# ---- by stock Megatron


@dataclass
class StockSteps:
    """The same by stock Megatron: dense attention, a sample a micro-batch, nothing shared."""

    model: torch.nn.Module
    loss: LossConfig

    def prepare(self, work: MiniBatch) -> MiniBatch:
        """Nothing to plan."""
        return work

    @torch.no_grad()
    def logprobs(self, work: MiniBatch) -> list[Tensor]:
        """As `AugTreeSteps.logprobs`."""
        found = [stock_outputs(self.model(*stock_inputs(self.model, work.batch.tokens[i])), work.batch, i)
                 for i in range(len(work.responses))]
        return [outputs.values["logprobs"] for outputs in found]

    def gradients(self, work: MiniBatch, supervised: Sequence[Job] | None) -> dict[str, float | str]:
        """As `AugTreeSteps.gradients`."""
        loss = PolicyLoss(work, self.loss)
        jobs = [(work.batch, i, loss) for i in range(len(work.responses))]
        entropy = "grad" if self.loss.entropy_coef else "metric"
        told = play_stock(self.model, [*(supervised or ()), *jobs], entropy)
        (rows,) = pool_total([sum(len(tokens) - 1 for tokens in work.batch.tokens)])
        return {**told, "rows": rows, "unshared_rows": rows, "note": "stock"}


def stock_inputs(model: torch.nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor, None]:
    """(ids [1, T], positions [1, T], no mask) of a sample; its last token is not fed."""
    ids = padded([tokens[:-1].tolist() or [0]], config_of(model))
    return ids, torch.arange(ids.shape[1]).unsqueeze(0), None


def stock_outputs(logits: Tensor, batch: api.Batch, number: int, entropy: str = "metric") -> api.Outputs:
    """What the API would return of a sample, from the stock model's logits [1, T, V / tp]."""
    tokens = batch.tokens[number]
    row = torch.arange(int(batch.loss_mask[number].nonzero()[0]), len(tokens) - 1)
    rows = api.Rows(row, tokens[row + 1], batch.temperature)
    values = api.built_in_head(entropy)(logits[0].index_select(0, row), rows)
    return api.Outputs(
        torch.tensor([number]), values, torch.tensor([0, len(row)]), row, (len(tokens),), logits[:0].sum())


def play_stock(model: torch.nn.Module, jobs: Sequence[Job], entropy: str = "metric") -> dict[str, float]:
    """Megatron's own schedule, a sample a micro-batch; collective.

    Args:
        model: the model in DDP; made with `calculate_per_token_loss`, so that nothing is divided by the
            number of micro-batches.
        jobs: this rank's.
        entropy: ``metric`` or ``grad``.

    Returns:
        The losses' metrics, over all ranks.
    """
    queue = iter(jobs or [None])  # a rank without any runs one row, and takes part in the reduction

    def forward_step(iterator: None, model: torch.nn.Module) -> tuple[Tensor, Callable]:
        job = next(queue)
        tokens = torch.zeros(2, dtype=torch.int64) if job is None else job[0].tokens[job[1]]
        return model(*stock_inputs(model, tokens)), functools.partial(loss_of, job)

    def loss_of(job: Job | None, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        uncounted = torch.zeros((), dtype=torch.int)  # 0 tokens: Megatron scales nothing
        if job is None:
            return logits.sum() * 0, uncounted, {}
        batch, number, loss_fn = job
        loss, metrics = loss_fn(stock_outputs(logits, batch, number, entropy))
        return loss, uncounted, {name: float(value) for name, value in metrics.items()}

    found = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=max(len(jobs), 1),
        seq_length=1,
        micro_batch_size=1,
    )
    return _reduced(found)


def _reduced(found: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics of all ranks' micro-batches: sums, smallest or largest, as their names say."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    everyones: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, list(found), group=group)
    total: dict[str, float] = {}
    for metrics in (metrics for part in everyones for metrics in part):
        for name, value in metrics.items():
            total[name] = reduce_metric(name, total.get(name), value)
    return total
