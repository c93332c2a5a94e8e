"""Waves that make their logits once.

Scored rows beyond `ModelShape.logit_rows` have their logits made again in the backward. Waves of fewer scored
rows do not: they save a third of the vocabulary projection, for the launches of more passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_augtree.planning.candidates import Choice, split_inner
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.offers import Job, Offer, Options

#: What waves would have to obey.
_FORCED = ("least", "lane_degree", "pieces", "fused", "phased", "chunks", "gather", "move_q")


class SmallWaves:
    """Jobs of a batch in such waves.

    Args:
        jobs: prices of jobs.
        launch_ns: what the launches of a pass take.
    """

    def __init__(self, jobs: Jobs, launch_ns: int) -> None:
        self.jobs, self.launch_ns = jobs, launch_ns
        self._known: dict[tuple[tuple[int, ...], Choice], Offer | None] = {}
        # Nothing is forced that waves would have to obey.
        free = {key: getattr(Options(), key) for key in _FORCED}
        self._free = jobs.options._replace(**free) == jobs.options

    def of(self, job: Job) -> Job | None:
        """A job as it is played so far in waves, counted rank by rank; None where that is no cheaper."""
        key = job.nodes, job.offer.choice
        if key not in self._known:
            self._known[key] = self._cheaper(job) if self._free else None
        offer = self._known[key]
        return None if offer is None else replace(job, offer=offer)

    def _cheaper(self, job: Job) -> Offer | None:
        jobs, now = self.jobs, job.offer
        scores = jobs.shape.scored
        most, width = jobs.prices.model.logit_rows, now.choice.degree
        if not 0 < most < sum(map(scores.__getitem__, job.nodes)) // width:  # most jobs end here
            return None
        inner, leaves = split_inner(jobs.shape, job.nodes)
        scored = sum(scores[n] for n in leaves) // width
        saved = jobs.prices.vocabulary.ns(scored)
        if not inner or most >= scored or 2 * self.launch_ns >= saved:
            return None
        least, best = -(-scored // most), None
        for waves in dict.fromkeys(min(len(leaves), n) for n in (least, least + 1, 2 * least, len(leaves))):
            if waves < 2 or waves * self.launch_ns >= saved or waves == now.choice.waves:
                continue
            for choice in _phased(now.choice, waves, jobs.prices.cluster.overlap):
                offer = jobs.settle(job.nodes, choice)
                if offer.peak <= jobs.room and offer.cost < (best or now).cost:
                    best = offer
        return best


def _phased(choice: Choice, waves: int, overlap: bool) -> Iterator[Choice]:
    """The same lanes, and all leaves cut over the block."""
    many = choice.degree > 1
    lanes = {(choice.lane_degree, choice.wide), (choice.degree, 0)} if many else {(1, 0)}
    for lane, wide in sorted(lanes):
        yield replace(
            choice, phase="phased", chunks=1, waves=waves, lane_degree=lane, wide=wide,
            primitive="gather_kv" if many else "local", pieces=1, prefetch=overlap and many, offload=False,
        )  # fmt: skip
