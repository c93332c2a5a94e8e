"""Lock-step: every rank of the pool plays as many passes as any other, its k-th while all others play theirs.

Experts ask for it, since the all-to-all in each of their layers joins ranks of different blocks, and so do
pipelines, where all replicas pass on as many micro-batches. All ranks begin an event, a pass's forward or
backward, together, so it lasts as long as on the slowest block:

    time = sum over events of the slowest block's + (stages - 1) * longest pass
    pass = forward + backward, each the slowest block's, without the vocabulary

`rounds.py` makes such plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_augtree.config import InfeasiblePlanError
from megatron_augtree.planning.cost import Prices, pairs_per_row
from megatron_augtree.planning.plan import Event, Plan, counted
from megatron_augtree.planning.recipe import Decision, plan_of
from megatron_augtree.planning.timeline import event_numbers, rank_times
from megatron_augtree.planning.tree import ForestShape

_RULE = "with --augtree-lock-step every rank of the pool plays the same number of passes, in the same order"

Block = Sequence[int]


def obeys(blocks: Sequence[Block], events: Sequence[Event], world: int) -> bool:
    """Whether every rank of the pool plays the same events: forward or backward, of its first, second, ...
    pass.

    Args:
        blocks: [pass] its ranks.
        events: what is played.
        world: ranks of the pool.
    """
    numbers = _numbers(blocks, events, world)
    played: list[list[tuple[str, int]]] = [[] for _ in range(world)]
    for action, pass_id in events:
        for rank in blocks[pass_id]:
            played[rank].append((action, numbers[pass_id]))
    return all(mine == played[0] for mine in played)


def lock_step_ns(plan: Plan, prices: Prices) -> int:
    """What a plan that `obeys` takes if all ranks begin each of their events together, ns.

    Args:
        plan: what is played.
        prices: model and machine.
    """
    times = [[max(column) for column in zip(*ranks)] for ranks in rank_times(plan, prices)]
    blocks = [p.block for p in plan.passes]
    events = event_numbers(blocks, plan.events, plan.world)
    numbers = _numbers(blocks, plan.events, plan.world)
    lasts: dict[int, int] = {}
    slots: dict[int, list[int]] = {}  # number of a pass -> the slowest block's forward, and backward
    for event, (action, pass_id) in zip(events, plan.events):
        backward, slot = action == "backward", slots.setdefault(numbers[pass_id], [0, 0])
        lasts[event] = max(lasts.get(event, 0), times[pass_id][backward])
        slot[backward] = max(slot[backward], times[pass_id][2 + backward])
    longest = max(map(sum, slots.values()), default=0)
    return sum(lasts.values()) + (prices.model.stages - 1) * longest


def in_step(x: Decision, shape: ForestShape, prices: Prices, world: int) -> Decision | None:
    """A plan with its time in lock-step; None where it does not keep step."""
    blocks = [range(r.start, r.start + r.width) for r in x.recipes]
    if not obeys(blocks, x.events, world):
        return None
    unit = pairs_per_row(prices.model, prices.cluster)
    plan = plan_of(x.recipes, x.events, mode=x.mode, shape=shape, world=world, pairs_per_row=unit)
    return replace(x, time_ns=lock_step_ns(plan, prices))


def check_in_step(plan: Plan) -> None:
    """Assert that a plan from elsewhere keeps step.

    Raises:
        InfeasiblePlanError: it does not.
    """
    if not obeys([p.block for p in plan.passes], plan.events, plan.world):
        passes = [0] * plan.world
        for p in plan.passes:
            for rank in p.block:
                passes[rank] += 1
        raise out_of_step(
            f"a plan in which ranks play {min(passes)} to {counted(max(passes), 'pass', 'passes')}"
        )


def out_of_step(values: str) -> InfeasiblePlanError:
    """The error of a plan, or of a step, that lock-step cannot play."""
    return InfeasiblePlanError(
        "no plan keeps all ranks in lock-step",
        values=f"--augtree-lock-step, {values}",
        rule=f"{_RULE}; blocks are equal, fill the pool, and each takes a tree or some leaves of one",
        remedy="let --context-parallel-size be the whole pool, give a step more groups, or force less",
    )


def _numbers(blocks: Sequence[Block], events: Sequence[Event], world: int) -> dict[int, int]:
    """pass -> how many passes the ranks of its block have begun before."""
    begun = [event for event in events if event.action == "forward"]
    return dict(zip((event.pass_id for event in begun), event_numbers(blocks, begun, world)))
