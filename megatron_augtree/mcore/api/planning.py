"""Collective planning: every rank's samples become one forest and one plan, the same on all ranks.

Each rank checks its own batch; one small exchange says how much everyone has and whether anyone has an error,
which is then raised on every rank. The samples travel as bytes in one sum of zero-padded tensors, samples are
numbered rank by rank, and planning is pure, so no rank has to be told the plan: they compare digests.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_augtree.config import AugTreeError, InfeasiblePlanError, InputError
from megatron_augtree.mcore.agreement import everyones, said_by_all
from megatron_augtree.mcore.api.batch import (
    Batch,
    Sample,
    check_batch,
    decode,
    encode,
    group_numbers,
    sequences_of,
)
from megatron_augtree.mcore.api.handle import Handle
from megatron_augtree.mcore.api.step import StepPlan
from megatron_augtree.mcore.recompute import cannot_play
from megatron_augtree.mcore.sampler import choose_plan
from megatron_augtree.planning.cluster import GIB
from megatron_augtree.planning.placement import count
from megatron_augtree.planning.plan import Event, Plan
from megatron_augtree.planning.planner import reordered
from megatron_augtree.planning.tree import Forest, TokenSequence
from megatron_augtree.runtime.transport import Transport

SCOPES = ("pool", "cp")


def plan(
    handle: Handle,
    batch: Batch,
    *,
    scope: str = "pool",
    like: StepPlan | None = None,
    max_rows: int | None = None,
) -> StepPlan:
    """Trees and a plan for some samples. Collective over the scope's ranks; on the CPU.

    A handle's first plan also compares the scope and the weights of all ranks of the pool.

    Args:
        handle: the model.
        batch: this rank's samples; `Batch.empty()` where it has none.
        scope: ``"pool"``: every rank of DP x CP gives its own samples. ``"cp"``: the CP peers give the same
            samples, data-parallel replicas plan separately.
        like: a plan of the same samples, of this model or another: their placement is used again, so that
            old, reference and current log-probs are computed alike, to the bit.
        max_rows: most rows that a rank computes in one pass.

    Returns:
        The plan. `StepPlan.stats`: ``mode``, ``digest``, ``note``, ``fallback`` (a reason, or empty) and as
        numbers ``rows``, ``unshared_rows``, ``samples``, ``seconds`` (predicted), ``gib`` (predicted peak of
        a rank above the model), ``plan_seconds``.

    Raises:
        InputError: some rank's batch cannot be used; the same on every rank.
        InfeasiblePlanError: no plan fits the limits; the same on every rank.
    """
    handle.compare_scopes(scope if scope in SCOPES else "pool")
    transport = handle.transport(scope if scope in SCOPES else "pool")
    samples, blob, error, failure = [], b"", "", None
    try:
        _check_arguments(scope, max_rows)
        handle.check_bound()
        samples = check_batch(batch, handle.language_model.vocab_size)
        blob = encode(samples)
        error = _unlike(like, scope, handle, blob) if like is not None else ""
    except Exception as found:  # whatever it is, other ranks wait for this one
        failure, error = found, described(found)
    call = {
        "call": "plan",
        "scope": scope,
        "like": like.stats["digest"] if isinstance(like, StepPlan) else None,
        "max_rows": repr(max_rows),
        "config": str(handle.config),
    }
    size = [len(blob), len(samples)]
    sizes = _vote(transport, error, call, size, fingerprint(blob) if scope == "cp" else "", failure)
    handle.compare_weights()
    handle.counts["plans"] += 1
    if like is not None:
        _count(handle, like)
        # Another model (a reference, a critic) has its own engine; the placement is the same.
        return like if like.handle is handle else replace(like, handle=handle, engines={})
    if handle.fallback is not None:
        made = _stock_plan(handle, scope, samples, blob, max(n for _, n in sizes))
    else:
        everyone = [blob] if scope == "cp" else _gather(transport, blob, [n for n, _ in sizes])
        made = _make(handle, scope, samples, everyone, fingerprint(blob), max_rows)
        _compare_plans(transport, str(made.stats["digest"]), everyone)
    _count(handle, made)
    return made


def _check_arguments(scope: str, max_rows: int | None) -> None:
    good = (
        (scope in SCOPES, f"scope={scope!r}", f"scope is one of {', '.join(SCOPES)}"),
        (max_rows is None or isinstance(max_rows, int), f"max_rows={max_rows!r}", "it is an int, or None"),
    )
    for holds, values, rule in good:
        if not holds:
            raise AugTreeError(
                "an argument of plan is of no use", values=values, rule=rule, remedy="correct the argument"
            )


def _unlike(like: StepPlan, scope: str, handle: Handle, blob: bytes) -> str:
    if not isinstance(like, StepPlan):
        raise no_plan("like", like)
    rules = (
        ((like.plan is None) == (handle.fallback is not None), "a model that runs stock, or the other way"),
        (like.plan is None or like.plan.world == handle.transport(scope).world, "a pool of another size"),
        (like.scope == scope, "another scope"),
        (like.fingerprint == fingerprint(blob), "other samples"),
    )
    what = "; ".join(text for good, text in rules if not good)
    if not what:
        return ""
    return str(
        InputError(
            "like= is a plan of something else",
            values=what,
            rule="its samples have the same tokens, masks, salts, groups and temperatures, in the same order",
            remedy="plan anew, or give the same samples",
        )
    )


def no_plan(name: str, given: object) -> InputError:
    """What is wrong with an argument that is something else than a `StepPlan`."""
    return InputError(
        "an argument is not a plan",
        values=f"{name} = {type(given).__name__}",
        rule="it is a StepPlan",
        remedy="pass what plan(handle, batch) returned",
    )


def _vote(
    transport: Transport,
    error: str,
    call: dict[str, Any],
    size: list[int],
    common: str,
    failure: Exception | None,
) -> list[list[int]]:
    """[bytes, samples] of every rank; an error of any is raised on all, tensor-parallel peers included."""
    said = json.dumps({"error": error, "call": call, "size": size, "common": common})
    everyone, pool = said_by_all(transport, said)
    refuse_if_broken(
        everyone,
        failure,
        "a rank's batch cannot be used",
        rule="every rank gives samples that fit together, or none",
        remedy="see the error of that rank; Batch.empty() stands for no samples",
    )
    votes = {rank: json.loads(text) for rank, text in sorted(everyone.items())}
    lowest, first = min(votes), votes[min(votes)]
    for field_name, what in (
        ("call", "ranks plan with different arguments"),
        ("common", "context-parallel ranks hold different samples"),
    ):
        others = [rank for rank, vote in votes.items() if vote[field_name] != first[field_name]]
        if others:
            raise InputError(
                what,
                values=f"ranks {others} differ from rank {lowest}"
                + (f": {votes[others[0]]['call']} and {first['call']}" if field_name == "call" else ""),
                rule='every rank of the scope makes the same call; under scope="cp" with the same batch',
                remedy='mend the call, or use scope="pool" for samples of each rank\'s own',
            )
    return [json.loads(text)["size"] for text in pool]


def described(error: Exception) -> str:
    """An error in words; of one that is not ours also its kind."""
    return str(error) if isinstance(error, AugTreeError) else f"{type(error).__name__}: {error}"


def refuse_if_broken(
    everyone: Mapping[int, str], failure: Exception | None, what: str, *, rule: str, remedy: str
) -> None:
    """Fail on every rank where any says an ``error`` in its JSON text; `failure` is this rank's own.

    Raises:
        InputError: names the ranks, with the first one's error.
    """
    errors = {rank: json.loads(text)["error"] for rank, text in sorted(everyone.items())}
    broken = {rank: error for rank, error in errors.items() if error}
    if broken:
        rank, text = next(iter(broken.items()))
        raise InputError(
            what, values=f"ranks {sorted(broken)}; of rank {rank}: {text}", rule=rule, remedy=remedy
        ) from failure


def _gather(transport: Transport, blob: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Every rank's bytes: a sum of tensors that are zero but for each rank's own part."""
    if len(sizes) == 1:
        return [blob]
    rank = transport.rank
    starts = np.concatenate([[0], np.cumsum(sizes)])
    whole = torch.zeros(int(starts[-1]), dtype=torch.uint8)
    whole[int(starts[rank]) : int(starts[rank + 1])] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    data = transport.total(whole).cpu().numpy().tobytes()
    return [data[a:b] for a, b in zip(starts, starts[1:])]


def _make(
    handle: Handle, scope: str, samples: list[Sample], everyone: list[bytes], own: str, max_rows: int | None
) -> StepPlan:
    started = time.perf_counter()
    transport = handle.transport(scope)
    by_rank = [decode(blob) for blob in everyone]
    pool = [sample for found in by_rank for sample in found]
    givers = [rank for rank, found in enumerate(by_rank) for _ in found]
    groups = group_numbers(pool, givers)
    sequences = sequences_of(pool)
    forest, made = _choose(sequences, groups, handle, transport.world, max_rows)
    made = _forwards_first(handle, made)
    failure = cannot_play(handle.model, made)
    if failure is not None:
        raise failure
    owners = givers if scope == "pool" else [g % transport.world for g in groups]
    rank = transport.rank if scope == "pool" else 0
    first = sum(len(found) for found in by_rank[:rank])
    stats = {
        "mode": made.mode,
        "digest": made.digest(),
        "note": made.note,
        "fallback": "",
        "rows": float(forest.shape.total_rows),
        "unshared_rows": float(sum(len(s.tokens) - 1 for s in pool)),
        "samples": float(len(pool)),
        "seconds": made.seconds,
        "gib": made.peak_bytes / GIB,
        "plan_seconds": time.perf_counter() - started,
    }
    return StepPlan(
        handle,
        scope,
        samples,
        range(first, first + len(samples)),
        owners,
        groups,
        made,
        forest,
        _heat(pool, forest),
        own,
        stats,
    )


def _heat(pool: Sequence[Sample], forest: Forest) -> np.ndarray | float:
    """Temperature of every row; one number where all samples have the same."""
    different = {s.temperature for s in pool}
    if len(different) <= 1:
        return different.pop() if different else 1.0
    heat = np.ones(forest.shape.total_rows)
    for sample, rows in zip(pool, forest.logical):
        heat[rows] = sample.temperature
    return heat


def _forwards_first(handle: Handle, made: Plan) -> Plan:
    """All forwards of a fused plan before its backwards, where that fits in memory.

    Blocks then exchange values once. Otherwise a block of one pass waits for the first of several of another.
    """
    if any(p.kind != "fused" for p in made.passes) or len({p.block for p in made.passes}) == len(made.passes):
        return made
    ids = range(len(made.passes))
    events = [*[Event("forward", i) for i in ids], *[Event("backward", i) for i in reversed(ids)]]
    return reordered(made, events, handle.model_shape, handle.config) or made


def _choose(
    sequences: Sequence[TokenSequence],
    groups: Sequence[int],
    handle: Handle,
    world: int,
    max_rows: int | None,
) -> tuple[Forest, Plan]:
    """Trees and plan; where `max_rows` is less than a pass of the best plan has, the cheapest in waves."""
    model, config = handle.model_shape, handle.config
    best = choose_plan(sequences, groups, model, world, config)
    if max_rows is None or _largest(best[1]) <= max_rows:
        return best
    found = []
    for chunks in (1, 2, 4, 8, 16) if not config.force and config.mode == "augtree" else ():
        for waves in (1, 2, 4, 8, 16, 32):
            forced = replace(config, force=f"phase=phased,chunks={chunks},waves={waves}")
            with suppress(InfeasiblePlanError):
                found.append(choose_plan(sequences, groups, model, world, forced))
    fitting = [pair for pair in found if _largest(pair[1]) <= max_rows]
    if not fitting:
        least = min([best, *found], key=lambda pair: _largest(pair[1]))[1]
        raise InfeasiblePlanError(
            "a pass has more rows than allowed",
            values=f"max_rows={max_rows}; the smallest passes found have {_largest(least)} rows on a rank "
            f"({least.note})",
            rule="a rank computes at most max_rows rows in one pass",
            remedy="give fewer or shorter samples a call, add ranks, or raise max_rows",
        )
    return min(fitting, key=lambda pair: pair[1].seconds)


def _largest(made: Plan) -> int:
    """Most rows of a rank in one pass."""
    return max((count(spans) for p in made.passes for spans in p.placement), default=0)


def _stock_plan(handle: Handle, scope: str, samples: list[Sample], blob: bytes, most: int) -> StepPlan:
    transport = handle.transport(scope)
    rows = sum(len(s.tokens) - 1 for s in samples)
    rank = transport.rank
    groups = group_numbers(samples, [0] * len(samples))
    owners = [rank if scope == "pool" else group % transport.world for group in groups]
    stats = {
        "mode": "stock",
        "digest": "stock",
        "note": "",
        "fallback": str(handle.fallback),
        "rows": float(rows),
        "unshared_rows": float(rows),
        "samples": float(len(samples)),
        "seconds": 0.0,
        "gib": 0.0,
        "plan_seconds": 0.0,
    }
    return StepPlan(
        handle,
        scope,
        samples,
        range(len(samples)),
        owners,
        groups,
        None,
        None,
        1.0,
        fingerprint(blob),
        stats,
        stock_micro_batches=most,
    )


def _compare_plans(transport: Transport, digest: str, everyone: Sequence[bytes]) -> None:
    """Also over tensor-parallel peers: they have to give the same samples."""
    pools = everyones(transport, f"{digest}/{fingerprint(b''.join(everyone))}")
    texts = [text.split("|") for pool in pools for text in pool]
    others = sorted(int(rank) for rank, text in texts if text != texts[0][1])
    if others:
        same_samples = len({text.split("/")[1] for _, text in texts}) == 1
        raise InputError(
            "ranks made different plans" if same_samples else "tensor-parallel ranks hold different samples",
            values=f"ranks {others} differ from rank {texts[0][0]}",
            rule="tensor-parallel ranks give the same samples; the same samples, model and settings give the "
            "same plan on every rank",
            remedy="check the batches of these ranks, and that all run one version with one AugTreeConfig",
        )


def _count(handle: Handle, made: StepPlan) -> None:
    handle.counts[f"mode/{made.stats['mode']}"] += 1
    handle.counts["rows"] += int(made.stats["rows"])
    handle.counts["unshared_rows"] += int(made.stats["unshared_rows"])
    if made.stats["fallback"]:
        handle.counts[f"fallback/{made.stats['fallback']}"] += 1


def fingerprint(blob: bytes) -> str:
    """Hash of encoded samples."""
    return hashlib.sha256(blob).hexdigest()[:16]
