"""What a micro-batch of groups costs in shared rows, from lengths alone: for drivers without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_augtree.config import InputError


class SharedCost(NamedTuple):
    """Rows and (query, key) pairs of some samples, with and without sharing.

    Attributes:
        rows, unshared_rows: rows that are computed; linear layers cost in proportion.
        pairs, unshared_pairs: attention costs in proportion.
    """

    rows: int
    unshared_rows: int
    pairs: int
    unshared_pairs: int


def shared_cost(lengths: Sequence[int], prefixes: Sequence[int]) -> SharedCost:
    """The cost of samples as a prefix tree.

    Args:
        lengths: [n] tokens of every sample, prompt and response.
        prefixes: [n] how many first tokens a sample has in common with the sample before it; 0 for the
            first. For groups in turn: the prompt's length, and 0 for the first of each group. Exact where
            samples are sorted, or responses of a group differ from their first token on.

    Raises:
        InputError: lists of different lengths, or a prefix longer than the samples.
    """
    if len(lengths) != len(prefixes):
        raise InputError(
            "lists differ in length",
            values=f"{len(lengths)} lengths, {len(prefixes)} prefixes",
            rule="a prefix for every sample",
            remedy="give 0 where nothing is shared",
        )
    rows = pairs = unshared_rows = unshared_pairs = 0
    before = 0
    for index, (length, prefix) in enumerate(zip(lengths, prefixes)):
        if not 0 <= prefix <= min(length, before):
            raise InputError(
                "a prefix does not fit",
                values=f"sample {index}: {prefix} of {length} tokens, the sample before has {before}",
                rule="a prefix is common to a sample and the one before it",
                remedy="give 0 for the first sample of a group",
            )
        # The row of token t predicts token t + 1: samples with m common tokens share m - 1 rows.
        own, shared = max(length - 1, 0), max(prefix - 1, 0)
        rows += own - shared
        pairs += (own * (own + 1) - shared * (shared + 1)) // 2
        unshared_rows += own
        unshared_pairs += own * (own + 1) // 2
        before = length
    return SharedCost(rows, unshared_rows, pairs, unshared_pairs)
