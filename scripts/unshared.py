"""The oracle: megatron-core's own dense attention, one sequence at a time, in one process.

Nothing of the plug-in takes part in the computation but the shims that let megatron-core run on a CPU. Every
number that AugTree produces is compared with what this file produces, so it stays obvious rather than fast.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_augtree.config import UnsupportedError
from megatron_augtree.mcore.cpu import cpu_shims

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


def unshared_logits(model: torch.nn.Module,
                    sequences: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> Iterator[Tensor]:
    """Logits that predict the tokens which carry a loss, one sequence after the other.

    Args:
        model: a stock ``GPTModel`` built within the shims.
        sequences: (tokens, loss mask over these tokens) each; the first token is never predicted.

    Yields:
        ``[R, V]`` in the model's dtype, with its graph: call ``backward`` on one before taking the next, and
        only one sequence is in memory. A sequence with nothing to predict yields ``[0, V]`` without one.
    """
    for tokens, mask in sequences:
        if len(tokens) != len(mask):
            raise ValueError(f"{len(tokens)} tokens but {len(mask)} mask values")
        rows = torch.tensor([i - 1 for i in range(1, len(tokens)) if mask[i]], dtype=torch.long)
        if not len(rows):
            yield next(model.parameters()).new_zeros((0, model.vocab_size))
            continue
        with cpu_shims():
            ids = torch.tensor([tokens[:-1]])
            logits = model(ids, torch.arange(ids.shape[1])[None], None)
        yield logits[0].index_select(0, rows)


def unshared_logprobs(model: torch.nn.Module, sequences: Iterable[tuple[Sequence[int], Sequence[bool]]],
                      *, temperature: float = 1.0) -> Iterator[Tensor]:
    """Log-probabilities of the tokens that carry a loss, one sequence after the other.

    Args:
        model: as for :func:`unshared_logits`.
        sequences: as for :func:`unshared_logits`.
        temperature: divides the logits.

    Yields:
        ``[R]`` in the model's dtype, with its graph, in the order of the tokens.
    """
    sequences = list(sequences)
    for (tokens, mask), logits in zip(sequences, unshared_logits(model, sequences), strict=True):
        targets = torch.tensor([t for t, wanted in zip(tokens[1:], mask[1:], strict=True) if wanted],
                               dtype=torch.long)
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        yield logprobs.gather(1, targets[:, None]).squeeze(1)


def response_mask(prompt: Sequence[int], response: Sequence[int]) -> tuple[list[int], list[bool]]:
    """A prompt and a response as (tokens, loss mask): the response's tokens carry the loss."""
    return [*prompt, *response], [False] * len(prompt) + [True] * len(response)


def needed_bytes(length: int, lengths: Sequence[int], args: argparse.Namespace) -> int:
    """Estimate of the peak of one sequence's forward and backward above the built model, bytes.

    Args:
        length: tokens of the sequence.
        lengths: of all sequences: megatron-core keeps a causal mask for each of the last 32.
        args: of ``add_model_arguments``.
    """
    rows, item, wide = length - 1, _ITEM_BYTES[args.dtype], max(4, _ITEM_BYTES[args.dtype])
    square = args.num_attention_heads * rows * rows
    # Each layer keeps the probabilities (and its fp32 softmax in bf16); one layer at a time holds scores,
    # the shared score buffer, and the gradients of scores and probabilities.
    attention = square * (args.num_layers * (item + (4 if item == 2 else 0)) + 4 * wide)
    ffn = args.ffn_hidden_size or 4 * args.hidden_size
    activations = args.num_layers * rows * item * (20 * args.hidden_size + 6 * ffn)
    logits = 4 * rows * args.vocab_size * wide
    masks = sum(sorted({(t - 1) ** 2 for t in lengths if t <= length}, reverse=True)[:32]) + 4 * rows * rows
    return attention + activations + logits + masks


def available_bytes() -> int:
    """Memory that this process may still take, bytes: the machine's, or its control group's if smaller."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            free = min(free, int(limit.read()) - int(current.read()))
    except (OSError, ValueError, StopIteration):
        pass  # no such file, or "max": no smaller limit
    return free


def check_memory(lengths: Sequence[int], args: argparse.Namespace, *, available: int | None = None) -> None:
    """Refuses, before anything is computed, sequences whose dense attention would not fit in memory.

    Args:
        lengths: tokens of every sequence.
        args: of ``add_model_arguments``.
        available: bytes; measured where it is not given.

    Raises:
        UnsupportedError: names the longest sequence, the estimate and ``--max-response-tokens``.
    """
    longest = max(lengths, default=0)
    if longest < 2:
        return
    free = available_bytes() if available is None else available
    needed = needed_bytes(longest, lengths, args)
    if needed > 0.8 * free:
        raise UnsupportedError(
            "the un-shared run would not fit in memory",
            values=f"a sequence of {longest} tokens needs about {needed / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free",
            rule="dense attention keeps heads x tokens x tokens scores for every layer; at most 80 % of the "
            "free memory is used",
            remedy="shorten with --max-response-tokens (or --max-prompt-tokens), or use a smaller model",
        )
