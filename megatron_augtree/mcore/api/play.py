"""Tier 2: AugTree plays a whole plan, forwards and backwards, and owns scaling and reduction."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.mcore.agreement import said_by_all
from megatron_augtree.mcore.api.batch import Batch, check_batch, encode
from megatron_augtree.mcore.api.handle import Handle
from megatron_augtree.mcore.api.heads import Head, choose_head
from megatron_augtree.mcore.api.losses import Losses, check_groups
from megatron_augtree.mcore.api.model import ModelCall, model_call
from megatron_augtree.mcore.api.outputs import LossFn, Outputs, StepOutput, make_outputs
from megatron_augtree.mcore.api.planning import described, fingerprint, no_plan, refuse_if_broken
from megatron_augtree.mcore.api.shadow import Shadow, play_stock
from megatron_augtree.mcore.api.step import StepPlan
from megatron_augtree.mcore.ddp import finalize_gradients, gather_parameters, no_sync
from megatron_augtree.runtime.routing import Reading, RoutedRun

LOSS_SCOPES = ("sequence", "group")


def forward_logprobs(
    handle: Handle, batch: Batch, plan: StepPlan, *, head: Head | None = None, entropy: bool = False
) -> Outputs:
    """Values of this rank's samples without gradients: old, reference and evaluation log-probs.

    Collective over the plan's scope. With ``like=`` plans they have the bits of `forward_backward`'s.

    Args:
        handle: the model.
        batch: the samples that the plan was made for.
        plan: of `plan`.
        head: replaces the built-in log-prob, see `heads`.
        entropy: also the entropy of each row.

    Returns:
        All samples of the batch, in order; under ``scope="cp"`` on every CP peer.

    Raises:
        InputError: some rank made another call; the same on every rank.
    """
    call = _agree(handle, batch, plan, head, "metric" if entropy else "off", {"call": "forward_logprobs"})
    losses = Losses(plan, call.columns, None, 0.0, by_group=False)
    _play(call, losses, forward_only=True)
    _share_result(call, losses)
    return _outputs(call, losses)


def forward_backward(
    handle: Handle,
    batch: Batch,
    plan: StepPlan,
    loss_fn: LossFn,
    *,
    normalizer: float,
    head: Head | None = None,
    entropy: str = "off",
    loss_scope: str = "sequence",
    forward_only: bool = False,
    finalize: bool = True,
) -> StepOutput:
    """One step's forwards, losses and backwards, or an accumulated part of it.

    Afterwards the reduced gradient is d(sum of loss over calls and ranks of the pool) / d(parameters)
    / normalizer, whatever plan, degree, DDP settings and loss scaling: AugTree alone handles grad_scale_func,
    micro-batch and CP factors, DDP's averaging and num_tokens.

    Collective over the pool: every rank makes the same calls, with `Batch.empty()` where it has no samples.

    Args:
        handle: the model.
        batch: the samples that the plan was made for.
        plan: of `plan`.
        loss_fn: called with whole samples on the rank that gave them (under ``scope="cp"`` on one of the CP
            peers), once a sample, or once a group; returns the *additive* share of the loss and scalar
            metrics. It has no side effects: a shadow run calls it again. If it raises, all ranks do, after
            the step's exchanges.
        normalizer: the same on every rank, for instance the loss-bearing tokens of the whole pool. 0 gives
            zero gradients.
        head: replaces the built-in log-prob and entropy, see `heads`.
        entropy: ``"off"``, ``"metric"`` (without gradients) or ``"grad"``.
        loss_scope: ``"sequence"``, or ``"group"``: samples of one `Batch.group` key together.
        forward_only: no backward.
        finalize: reduce gradients (Megatron's finalize_model_grads). False adds them up for a later call.

    Returns:
        Loss and metrics, the same on every rank of the plan's scope, and the values of this rank's samples.

    Raises:
        InputError: some rank made another call, or a group cannot be evaluated together.
        AugTreeError: the loss function or the head failed, or returned something else than two values.
    """
    said = {
        "call": "forward_backward",
        "normalizer": normalizer,
        "loss_fn": callable(loss_fn),
        "loss_scope": loss_scope,
        "forward_only": forward_only,
        "finalize": finalize,
    }
    call = _agree(handle, batch, plan, head, entropy, said)
    normalizer = float(normalizer)
    by_group = loss_scope == "group"
    if by_group:
        check_groups(plan)
    losses = Losses(
        plan,
        call.columns,
        loss_fn,
        handle.root_scale(normalizer) if not forward_only else 0.0,
        by_group=by_group,
    )
    shadow = Shadow.due(handle, call, losses, forward_only, finalize)
    with no_sync(handle.model):
        _play(call, losses, forward_only)
        loss, metrics = _share_result(call, losses)
        if shadow is not None:
            shadow.run()
    if finalize and not forward_only:
        handle.counts["steps"] += 1
        finalize_gradients(handle.model, handle.transport("pool"))
    stats = {**plan.stats, **(shadow.found if shadow is not None else {})}
    return StepOutput(loss / normalizer if normalizer else 0.0, metrics, _outputs(call, losses), stats)


def _agree(
    handle: Handle, batch: Batch, plan: StepPlan, head: Head | None, entropy: str, said: dict
) -> ModelCall:
    """Checks this rank's call, and that all ranks of the scope make the same; errors are raised on all."""
    call, error, failure = None, "", None
    try:
        if "normalizer" in said:
            said = {**said, "normalizer": float(said["normalizer"])}
        call = _check(handle, batch, plan, head, entropy, said)
        said = {**said, "digest": plan.stats["digest"], "entropy": entropy, "columns": str(call.columns)}
        text = json.dumps({"call": said, "error": ""})
    except Exception as found:  # whatever it is, other ranks wait for this one
        failure, error = found, described(found)
        text = json.dumps({"call": {"call": said["call"]}, "error": error})
    transport = plan.transport if isinstance(plan, StepPlan) else handle.transport("pool")
    everyone, _ = said_by_all(transport, text)
    refuse_if_broken(
        everyone,
        failure,
        "a rank's call cannot be played",
        rule="every rank's arguments are usable",
        remedy="see the error of that rank",
    )
    votes = {rank: json.loads(text)["call"] for rank, text in sorted(everyone.items())}
    lowest, first = min(votes), votes[min(votes)]
    for rank, vote in votes.items():
        differ = [key for key in first if vote.get(key) != first[key]]
        if differ:
            raise InputError(
                "ranks make different calls",
                values=", ".join(
                    f"{key}: rank {lowest} {first[key]!r}, rank {rank} {vote.get(key)!r}" for key in differ
                ),
                rule="every rank of the pool makes the same calls; one without samples with Batch.empty()",
                remedy="pass the same plan, normalizer and options everywhere",
            )
    return call


def _check(
    handle: Handle, batch: Batch, plan: StepPlan, head: Head | None, entropy: str, said: dict
) -> ModelCall:
    handle.check_bound()
    normalizer = said.get("normalizer", 1.0)
    if not 0 <= normalizer < math.inf:
        raise AugTreeError(
            "a normalizer is out of range",
            values=f"normalizer={normalizer}",
            rule="it is finite and not negative",
            remedy="count the loss-bearing tokens of the pool",
        )
    if not said.get("loss_fn", True):
        raise AugTreeError(
            "the loss function cannot be called",
            values="loss_fn is no function",
            rule="loss_fn(outputs) -> (additive share of the loss, metrics)",
            remedy="pass one on every rank, also where it has no samples; forward_logprobs needs none",
        )
    if said.get("loss_scope", "sequence") not in LOSS_SCOPES:
        raise AugTreeError(
            "unknown loss scope",
            values=f"loss_scope={said['loss_scope']!r}",
            rule=f"one of {', '.join(LOSS_SCOPES)}",
            remedy="correct the argument",
        )
    trains = said["call"] == "forward_backward" and not said["forward_only"]
    if trains and not any(p.requires_grad for p in handle.model.parameters()):
        raise AugTreeError(
            "nothing to train",
            values="no parameter requires a gradient",
            rule="a backward needs one",
            remedy="call forward_logprobs, or pass forward_only=True",
        )
    if not isinstance(plan, StepPlan):
        raise no_plan("plan", plan)
    given = fingerprint(encode(check_batch(batch, handle.language_model.vocab_size)))
    if plan.handle is not handle or plan.fingerprint != given:
        raise InputError(
            "a plan is played with something else",
            values="another model" if plan.handle is not handle else "other samples",
            rule="a plan belongs to one handle and to the samples it was made for",
            remedy="plan again, with like= for the same placement",
        )
    return model_call(plan, choose_head(head, entropy))


def _play(call: ModelCall, losses: Losses, forward_only: bool) -> None:
    plan = call.step
    if plan.plan is None:
        play_stock(call, losses, forward_only)
        return
    if not any(plan.transport.hosts(p.block) for p in plan.plan.passes):
        gather_parameters(plan.handle.model)  # the others' forwards wait for it
    first = plan.numbers.start

    def answer(giver: int, reading: Reading, values: Tensor) -> Tensor | None:
        del giver
        return losses.evaluate([s - first for s in reading.sequences], values)

    RoutedRun(call.engine(), plan.routing, answer, call.like, forward_only).play()


def _share_result(call: ModelCall, losses: Losses) -> tuple[float, dict[str, float]]:
    """Loss and metrics over all ranks; an error of any loss function or head on all of them.

    Raises:
        AugTreeError: a loss function or a head failed somewhere.
    """
    if call.failures:
        losses.failure = call.failures[0]  # whatever the loss function made of its values
    texts = [json.loads(text) for text in call.step.transport.same(losses.to_json())]
    broken = {rank: text["error"] for rank, text in enumerate(texts) if text["error"]}
    if broken:
        rank, text = next(iter(broken.items()))
        raise AugTreeError(
            "a loss function or a head failed",
            values=f"ranks {sorted(broken)}; on rank {rank}: {text}",
            rule="loss_fn(outputs) -> (additive share of the loss, metrics), scalars; "
            "head(logits [n, V], rows) -> {name: [n, ...]}, of one shape and type for every n",
            remedy="mend it; gradients of this call are not usable: zero the buffers before the next",
        ) from losses.failure
    return Losses.total(texts)


def _outputs(call: ModelCall, losses: Losses) -> Outputs:
    """All own samples; where CP peers gave the same ones, each evaluated some and all get all."""
    plan = call.step
    numbers = range(len(plan.samples))
    parts = [losses.collected.get(i) for i in numbers]
    empty = [call.like.new_zeros((int(s.computed.sum()), call.columns.width)) for s in plan.samples]
    dense = torch.cat([call.like, *[e if p is None else p for p, e in zip(parts, empty)]])
    if plan.scope == "cp":
        dense = plan.transport.total(dense)
    return make_outputs(plan.samples, numbers, dense, call.columns)
