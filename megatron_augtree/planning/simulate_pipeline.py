"""1F1B (`pipeline.py`) of passes that take as long as they are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.pipeline import Hops, play
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.simulate_pass import PassTimes, Played


class Placed(NamedTuple):
    """A forward or backward of a pass on one pipeline stage, in time.

    Attributes:
        pass_id, action, stage: what.
        start: ns.
        played: how long it takes each rank.
        order: breaks ties of `start`.
    """

    pass_id: int
    action: str
    stage: int
    start: int
    played: Played
    order: int


def play_pipeline(plan: Plan, times: Sequence[PassTimes], prices: Prices) -> list[Placed]:
    """All passes on all stages.

    Args:
        plan: the plan.
        times: [pass] how long it takes.
        prices: model, with its stages, and machine.
    """
    timing, blocks = _Simulated(plan, times, prices), [p.block for p in plan.passes]
    reads = [p.reads for p in plan.passes]
    begun, _ = play(blocks, reads, plan.events, plan.world, prices.model.stages, timing)
    return [
        Placed(x.pass_id, "backward" if x.backward else "forward", x.stage, x.start,
               timing.of(x.pass_id, x.backward, x.stage), order)
        for order, x in enumerate(begun)
    ]  # fmt: skip


class _Simulated(Hops):
    """A `pipeline.Timing` of simulated passes."""

    def __init__(self, plan: Plan, times: Sequence[PassTimes], prices: Prices) -> None:
        super().__init__([p.block for p in plan.passes], [x.rows for x in times], prices, plan.world)
        self.times = times

    def of(self, pass_id: int, backward: bool, stage: int) -> Played:
        """How long it takes each rank."""
        played = self.times[pass_id].of(backward, stage == self.last)
        held = self.held(pass_id, backward, stage)
        return Played(played.end + held, played.busy, played.exposed + held)

    def lasts(self, pass_id: int, backward: bool, stage: int) -> list[int]:
        """See `Timing`."""
        return self.of(pass_id, backward, stage).end.tolist()
