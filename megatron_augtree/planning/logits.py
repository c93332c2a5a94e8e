"""Waves that make their logits once.

Scored rows beyond `ModelShape.logit_rows` have their logits made again in the backward. Waves of fewer scored
rows do not: they save a third of the vocabulary projection, for the launches of more passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_augtree.planning.candidates import Choice, split_inner
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.offers import Job, Options

#: What waves would have to obey.
_FORCED = ("least", "lane_degree", "pieces", "fused", "phased", "chunks", "gather", "move_q")


def in_small_waves(jobs: Jobs, job: Job, launch_ns: int) -> Job | None:
    """The job in waves that make their logits once, counted rank by rank; None where that is no cheaper.

    Args:
        jobs: prices of jobs.
        job: as it is played so far.
        launch_ns: what the launches of a pass take.
    """
    inner, leaves = split_inner(jobs.shape, job.nodes)
    most, width = jobs.prices.model.logit_rows, job.offer.choice.degree
    scored = sum(jobs.shape.scored[n] for n in leaves) // width
    if not inner or not 0 < most < scored or not _is_free(jobs.options):
        return None
    least, best = -(-scored // most), None
    saved = jobs.prices.vocabulary.ns(scored)
    for waves in dict.fromkeys(min(len(leaves), n) for n in (least, least + 1, 2 * least, len(leaves))):
        if waves < 2 or waves * launch_ns >= saved or waves == job.offer.choice.waves:
            continue
        for choice in _phased(job.offer.choice, waves, jobs.prices.cluster.overlap):
            offer = jobs.settle(job.nodes, choice)
            if offer.peak <= jobs.room and offer.cost < (best or job.offer).cost:
                best = offer
    return None if best is None else replace(job, offer=best)


def _is_free(options: Options) -> bool:
    """Whether nothing is forced that waves would have to obey."""
    free = options._replace(**{key: getattr(Options(), key) for key in _FORCED})
    return free == options


def _phased(choice: Choice, waves: int, overlap: bool) -> Iterator[Choice]:
    """The same lanes, and all leaves cut over the block."""
    many = choice.degree > 1
    lanes = {(choice.lane_degree, choice.wide), (choice.degree, 0)} if many else {(1, 0)}
    for lane, wide in sorted(lanes):
        yield replace(
            choice, phase="phased", chunks=1, waves=waves, lane_degree=lane, wide=wide,
            primitive="gather_kv" if many else "local", pieces=1, prefetch=overlap and many, offload=False,
        )  # fmt: skip
