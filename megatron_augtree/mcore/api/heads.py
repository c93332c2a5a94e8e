"""What is kept of a scored row's logits: the built-in log-prob and entropy, and other heads.

A head is ``head(logits [n, V / tp], rows) -> {name: [n, ...]}``, with fp32 or integer values. It is called
chunk by chunk, may run again in the backward, and with n = 0 on a rank without scored rows, so it has no side
effects. Under tensor parallelism a rank's logits are its slice of the vocabulary, and all ranks of the group
call it together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_augtree.attention.merge import accumulation_dtype
from megatron_augtree.config import AugTreeError, UnsupportedError
from megatron_augtree.mcore.shards import vocabulary_shard
from megatron_augtree.runtime.logprob import row_values


@dataclass(frozen=True)
class Rows:
    """Which rows the logits are of.

    Attributes:
        index: [n] int64, their places among this rank's rows of the pass (`StepPlan.take`).
        targets: [n] int64.
        temperature: [n], or one for all.
        pass_id: the pass; -1 where nothing is shared (shadow and fallback runs).
        sample, row: where nothing is shared, the sample of the batch, and [n] row numbers in it; else None.
    """

    index: Tensor
    targets: Tensor
    temperature: Tensor | float
    pass_id: int = -1
    sample: int | None = None
    row: Tensor | None = None


Head = Callable[[Tensor, Rows], dict[str, Tensor]]

#: Entropy of rows: not at all, without gradients, or with.
ENTROPIES = ("off", "metric", "grad")


def built_in_head(entropy: str) -> Head:
    """Log-probs of the targets, and entropies if asked for; entropy changes no bit of the log-probs."""

    def head(logits: Tensor, rows: Rows) -> dict[str, Tensor]:
        shard = vocabulary_shard()
        found = {
            "logprobs": row_values(logits, rows.targets, temperature=rows.temperature, shard=shard)[:, 0]
        }
        if entropy != "off":
            given = logits if entropy == "grad" else logits.detach()
            # A call of its own: the order in which ranks add up must not depend on what else they add.
            both = row_values(given, rows.targets, temperature=rows.temperature, entropy=True, shard=shard)
            found["entropy"] = both[:, 1]
        return found

    return head


def choose_head(head: Head | None, entropy: str) -> Head:
    """The head of a call.

    Raises:
        UnsupportedError: hidden states or rewards are asked for.
        AugTreeError: neither callable nor None, or an unknown entropy.
    """
    if entropy not in ENTROPIES:
        raise AugTreeError(
            "unknown entropy",
            values=f"entropy={entropy!r}",
            rule=f"it is one of {', '.join(ENTROPIES)}",
            remedy="correct the argument",
        )
    if head is None:
        return built_in_head(entropy)
    if callable(head) and entropy == "off":
        return head
    if callable(head):
        raise AugTreeError(
            "a head and an entropy",
            values=f"entropy={entropy!r}",
            rule="a head replaces the built-in log-prob and entropy",
            remedy="return the entropy from the head (heads.built_in_head)",
        )
    raise UnsupportedError(
        "a head is a function of logits",
        values=f"head={head!r}",
        rule="it is called with the logits of scored rows. Hidden states are not kept, and a reward model "
        "needs the last token of a sample, which is not fed",
        remedy="pass head(logits, rows) -> dict; run reward models and hidden-state capture without AugTree",
    )


def value_head(logits: Tensor, rows: Rows) -> dict[str, Tensor]:
    """``values`` [n], for a critic: a model whose output layer gives one number a row."""
    del rows
    if logits.shape[-1] != 1:
        raise AugTreeError(
            "a value head on a vocabulary",
            values=f"logits [n, {logits.shape[-1]}]",
            rule="the output layer of a critic gives one number a row",
            remedy="replace model.output_layer before prepare_model",
        )
    return {"values": logits[:, 0].to(accumulation_dtype(logits.dtype))}


def topk_head(k: int) -> Head:
    """``topk_logprobs`` [n, k] and ``topk_ids`` [n, k], of the k likeliest tokens, without gradients; and
    ``logprobs`` [n] of the targets, with."""

    def head(logits: Tensor, rows: Rows) -> dict[str, Tensor]:
        shard = vocabulary_shard()
        if not 0 < k <= logits.shape[-1] * shard.size:
            raise AugTreeError(
                "more tokens are asked for than there are",
                values=f"topk_head({k}), a vocabulary of {logits.shape[-1] * shard.size}",
                rule="k is at least 1 and at most the vocabulary",
                remedy="correct k",
            )
        logprobs = row_values(logits, rows.targets, temperature=rows.temperature, shard=shard)[:, 0]
        with torch.no_grad():
            scaled = _scaled(logits, rows)
            values, own = scaled.topk(min(k, scaled.shape[-1]), dim=-1)
            ids = own + shard.rank * scaled.shape[-1]
            if shard.size > 1:
                values, ids = _joined(values, shard.group), _joined(ids, shard.group)
            values, order = values.topk(k, dim=-1)
            ids = ids.gather(-1, order)
            # Every entry's log-prob, by the same function as the targets': [n] at a time.
            found = [row_values(scaled, column, shard=shard)[:, 0] for column in ids.unbind(1)]
            found = torch.stack(found, dim=1)
        return {"logprobs": logprobs, "topk_logprobs": found, "topk_ids": ids}

    return head


def logprobs_of_head(ids_of: Callable[[Rows], Tensor]) -> Head:
    """``chosen_logprobs`` [n, k] of given tokens, with gradients (top-k distillation), and ``logprobs`` [n].

    Args:
        ids_of: rows -> [n, k] int64 tokens: of a pass, for instance what ``StepPlan.take(ids, pass_id)`` gave
            beforehand, at ``rows.index``.
    """

    def head(logits: Tensor, rows: Rows) -> dict[str, Tensor]:
        shard = vocabulary_shard()
        ids = ids_of(rows)
        wanted = torch.cat([rows.targets.unsqueeze(1), ids], dim=1)
        # A column at a time, of logits scaled once: calls keep one tensor among them, not a copy each.
        scaled = _scaled(logits, rows)
        columns = [row_values(scaled, column, shard=shard)[:, 0] for column in wanted.unbind(1)]
        return {"logprobs": columns[0], "chosen_logprobs": torch.stack(columns[1:], dim=1)}

    return head


def _scaled(logits: Tensor, rows: Rows) -> Tensor:
    """Logits divided by the temperature, in the type of the values."""
    wide, temperature = logits.to(accumulation_dtype(logits.dtype)), rows.temperature
    if isinstance(temperature, Tensor):
        return wide / temperature.to(wide.dtype).unsqueeze(-1)
    return wide / temperature if temperature != 1.0 else wide


def _joined(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[n, k] of every rank of a group, side by side."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
