"""Log-probabilities (and entropies) of rows from their logits, in the run's own precision.

Under tensor parallelism a rank holds a slice of the vocabulary. What a row needs of the other slices is one
maximum and a few sums, so values and gradients are those of the whole vocabulary, exactly; every rank of the
group gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_augtree.attention.merge import accumulation_dtype


@dataclass(frozen=True)
class VocabularyShard:
    """The slice of the vocabulary that a rank's logits cover: `size` ranks hold equal slices in rank order.

    Attributes:
        group: ranks that hold the slices of one row; None where one rank holds all.
    """

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def reduce_(self, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Values added (or compared) over the slices, in place. All ranks have as many, perhaps none."""
        if self.size > 1 and values.numel():
            dist.all_reduce(values, op=op, group=self.group)
        return values


WHOLE = VocabularyShard()


def row_values(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    shard: VocabularyShard = WHOLE,
) -> Tensor:
    """What a loss may ask of rows.

    Args:
        logits: [n, V / slices].
        targets: [n] int64, numbers in the whole vocabulary.
        temperature: logits are divided by it, for log-prob and entropy alike; a number, or [n].
        entropy: also the entropy of each row's distribution.
        shard: the slice of the vocabulary that `logits` holds. All of its ranks call this together.

    Returns:
        [n, 1] log-probs, or [n, 2] log-probs and entropies; fp64 in fp64 runs, fp32 otherwise.
    """
    scaled = logits.to(accumulation_dtype(logits.dtype))
    if isinstance(temperature, Tensor):
        scaled = scaled / temperature.to(scaled.dtype).unsqueeze(-1)
    elif temperature != 1.0:
        scaled = scaled / temperature
    return _RowValues.apply(scaled, targets, entropy, shard)


class _RowValues(torch.autograd.Function):
    # Recomputes the softmax from logits and log-sum-exp: one [n, V] tensor is kept, not two.

    @staticmethod
    def forward(ctx, logits, targets, entropy, shard):
        largest = logits.max(dim=-1).values if logits.numel() else logits.new_zeros(logits.shape[0])
        largest = shard.reduce_(largest, dist.ReduceOp.MAX)
        weights = (logits - largest.unsqueeze(-1)).exp_()
        own = targets - shard.rank * logits.shape[-1]
        here = (own >= 0) & (own < logits.shape[-1])
        own = own.where(here, 0)
        chosen = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1)
        sums = [weights.sum(-1), torch.where(here, chosen, 0.0)]
        if entropy:
            # Of the shifted logits, so that large ones do not cancel.
            sums.append((weights * _finite(logits - largest.unsqueeze(-1))).sum(-1))
        sums = shard.reduce_(torch.stack(sums))
        lse = largest + sums[0].log()
        values = [sums[1] - lse]
        if entropy:
            values.append(sums[0].log() - sums[2] / sums[0])
        values = torch.stack(values, dim=-1)
        ctx.save_for_backward(logits, lse, values, own, here)
        return values

    @staticmethod
    def backward(ctx, gradient):
        logits, lse, values, own, here = ctx.saved_tensors
        logs = logits - lse.unsqueeze(-1)
        probs = logs.exp()
        if gradient.shape[-1] == 1:
            out = probs.mul_(-gradient)
        else:
            of_entropy = gradient[:, 1:]
            logs = _finite(logs).add_(values[:, 1:])
            out = probs.mul_(-(gradient[:, :1] + of_entropy * logs))
        out.scatter_add_(-1, own.unsqueeze(-1), torch.where(here, gradient[:, 0], 0.0).unsqueeze(-1))
        return out, None, None, None


def _finite(logs: Tensor) -> Tensor:
    """A masked entry's -inf as a finite number: its weight is 0, and 0 * -inf would be NaN."""
    return logs.clamp_(min=torch.finfo(logs.dtype).min)
