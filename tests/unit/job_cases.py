"""Random jobs: forests, models, machines and options, as `planning.jobs` may meet them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import Phase
from hypothesis import strategies as st

from megatron_augtree.planning import fast
from megatron_augtree.planning.cluster import PRESETS, Cluster
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.tree import ForestShape
from tests.unit.forests import shapes

GQA = ModelShape(28, 3584, 18944, 152064, 28, 4, 128, 128, gated=True, item_bytes=2, logit_rows=441)
SMALL = ModelShape(4, 256, 1024, 4096, 4, 4, 64, 64)
ODD = ModelShape(7, 96, 200, 301, 6, 3, 16, 24, item_bytes=8, accum_bytes=8)
#: More bytes than any job takes.
HUGE = 1 << 60
#: A failing case is small enough as it is drawn; to shrink it takes minutes.
DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)


@dataclass(frozen=True)
class Case:
    """What `Jobs` is made of, and a block.

    Attributes:
        part: hundredths of the cheapest job's peak that the room is; 0: no limit.
    """

    shape: ForestShape
    prices: Prices
    unit: int
    options: Options
    slot_weight: int
    width: int
    part: int

    @property
    def room(self) -> int:
        """Bytes around what the cheapest job takes."""
        if not self.part:
            return HUGE
        found = self.jobs(HUGE).best(range(len(self.shape.rows)), self.width)
        return found.peak * self.part // 100 if found else 10**9

    def jobs(self, room: int) -> Jobs:
        """By whichever engine is there."""
        return fast.make_jobs(
            self.shape, self.prices, self.unit, room, self.options, self.slot_weight, world=self.width
        )


def models() -> st.SearchStrategy[ModelShape]:
    """Models under all flags."""
    flags = {
        "stages": st.sampled_from((1, 1, 2, 4)),
        "recomputed": st.sampled_from((0, 3)),
        "attention_kept": st.sampled_from((0, 2)),
        "logit_rows": st.sampled_from((0, 5, 441)),
    }
    return st.builds(lambda model, flags: replace(model, **flags), st.sampled_from((GQA, SMALL, ODD)),
                     st.fixed_dictionaries(flags))  # fmt: skip


def clusters() -> st.SearchStrategy[Cluster]:
    """Presets with nodes of several sizes, with and without overlap."""
    return st.builds(
        lambda cluster, ranks, overlap: replace(cluster, node_ranks=ranks, overlap=overlap),
        st.sampled_from([*PRESETS.values()]),
        st.sampled_from((2, 3, 8, 64)),
        st.sampled_from((True, True, True, False)),
    )


def options() -> st.SearchStrategy[Options]:
    """Everything is tried, or something is forced."""
    often = lambda usual, *others: st.sampled_from((usual,) * 3 + others)
    forced = st.builds(
        Options,
        least=often(1, 2),
        limit=often(0, 1, 2, 3),
        lane_degree=often(0, 1, 2),
        pieces=often(Options().pieces, (2,), (0,), (1, 3)),
        phased=often(1, 0, 2),
        chunks=often(Options().chunks, (3,)),
        waves=often(Options().waves, (1,), (3, 9)),
        gather=often(True, False),
        move_q=st.booleans(),
        lean=often(True, False),
        hops=often(True, False),
        prefetch=often(True, False),
        offload=often(True, False),
        copies=often(0, 1, 2),
        whole=often(-1, -2, 2),
        attention=st.sampled_from((0, 1)),
    )
    unfused = forced.map(lambda o: o._replace(fused=False, phased=2))
    return st.one_of(st.just(Options()), forced, unfused)


def scaled(factors: st.SearchStrategy[int]) -> st.SearchStrategy[ForestShape]:
    """Deep and shallow forests, several roots, from a few rows to many; scored rows do not grow alike."""

    def made(shape: ForestShape, factor: int, odd: int) -> ForestShape:
        rows = tuple(n * factor + (i * odd) % factor for i, n in enumerate(shape.rows))
        scored = tuple(min(s * factor, n) for s, n in zip(shape.scored, rows))
        return replace(shape, rows=rows, scored=scored)

    return st.builds(made, shapes(max_nodes=12, max_rows=8), factors, st.integers(0, 10**6))


FACTORS, WIDTHS = st.sampled_from((1, 7, 400, 8000)), st.sampled_from((1, 2, 3, 4, 6, 8, 16))


def cases(
    factors: st.SearchStrategy[int] = FACTORS, widths: st.SearchStrategy[int] = WIDTHS
) -> st.SearchStrategy[Case]:
    """Cases whose rows are multiplied by one of `factors`, on blocks of one of `widths`."""
    return st.builds(
        Case,
        shape=scaled(factors),
        prices=st.builds(Prices, models(), clusters()),
        unit=st.sampled_from((1, 50, 5000)),
        options=options(),
        slot_weight=st.sampled_from((0, 4, 16)),
        width=widths,
        part=st.sampled_from((0, 0, 30, 70, 90, 100, 120)),
    )
