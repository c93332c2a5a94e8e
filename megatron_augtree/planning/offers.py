"""What the search for a job tries, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_augtree.planning.candidates import Choice

#: Stands for a piece a remote rank: ``move_kv``, the direct ring.
EVERY_RANK = 0

#: A cost that nothing comes near to; and of what was not looked at.
NEVER, SKIPPED = 1 << 61, -2


class Options(NamedTuple):
    """What is tried; a forced key leaves one value.

    Attributes:
        least: fewest ranks of a block: a primitive that moves something needs two.
        limit: most ranks of a block, 0 for any number; on more, a tree is played in parts.
        lane_degree: 0 tries all wide, whole and mixtures.
        pieces: numbers of pieces of a gather, fewest (the least work) first; `EVERY_RANK` last.
        fused: whether fused passes are tried.
        phased: whether phased plans are: 0 never, 1 where memory or a pipeline asks for them, 2 always.
        chunks, waves: numbers of passes of a phased plan.
        gather, move_q: what waves may do.
        lean: received keys may be given up.
        hops: gathers may go node by node.
        prefetch: waves may fetch the next layer's prompt keys and values early.
        offload: prefill and chunks may rest in host memory.
        copies: parts of a tree with a prompt copy each; 0 leaves them to the planner.
        whole, attention: the recompute pair of every pass; -1 leaves it to the planner, -2 to the flags.
    """

    least: int = 1
    limit: int = 0
    lane_degree: int = 0
    pieces: tuple[int, ...] = (1, 2, 4, EVERY_RANK)
    fused: bool = True
    phased: int = 1
    chunks: tuple[int, ...] = (1, 2, 4, 8)
    waves: tuple[int, ...] = (1, 2, 4, 8)
    gather: bool = True
    move_q: bool = True
    lean: bool = True
    hops: bool = True
    prefetch: bool = True
    offload: bool = True
    copies: int = 0
    whole: int = -1
    attention: int = 0


class Offer(NamedTuple):
    """A priced choice.

    Attributes:
        cost: what is compared: `time`, and under a pipeline a share of `slot`.
        time: nanoseconds of all its passes, forward and backward.
        slot: nanoseconds of its longest pass; in a pipeline without the vocabulary, which the last stage has.
        peak: bytes of its heaviest rank, above what a step needs whatever its rows.
        choice: how it is played.
    """

    cost: int
    time: int
    slot: int
    peak: int
    choice: Choice


@dataclass(frozen=True)
class Job:
    """A job on its place within a block.

    Attributes:
        nodes: of the forest, ascending.
        offset: first rank, counted from the block's.
        offer: how it is played.
    """

    nodes: tuple[int, ...]
    offset: int
    offer: Offer


def cost_of(jobs: Sequence[Job]) -> int:
    """Cost of jobs that run beside each other on parts of a block."""
    return max(job.offer.cost for job in jobs)
