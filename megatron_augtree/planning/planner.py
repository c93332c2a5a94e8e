"""From lengths to a plan: candidates, feasible ones, the cheapest.

Planning is pure and deterministic: integers only, ties go to the earlier candidate, so the same lengths give
the same plan, on every rank and machine. The search (`search.py`) prices one tree on one block (`jobs.py`)
and the batch over the pool (`pool.py`); the peers' plans (`baselines/`) are candidates too (`rivals.py`), so
that none is ever cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.planning.cost import NS, Prices, pairs_per_row
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.plan import Event, Plan, with_note
from megatron_augtree.planning.price import Priced, price, price_recipes
from megatron_augtree.planning.recipe import Decision, plan_of
from megatron_augtree.planning.schedule import uncollected
from megatron_augtree.planning.search import Considered, Search, budget_of
from megatron_augtree.planning.tree import ForestShape

__all__ = [
    "Considered",
    "Priced",
    "configured",
    "decide",
    "explain",
    "make_plan",
    "pairs_per_row",
    "price",
    "price_recipes",
    "reordered",
    "unshared_least",
]


def make_plan(
    shape: ForestShape,
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
    *,
    tree_groups: Sequence[int],
    mode: str | None = None,
    own: bool = False,
) -> Plan:
    """The plan of a mode: under ``augtree`` the cheapest that fits, otherwise the baseline's, priced.

    Args:
        shape: the forest of the step, shared as the mode shares.
        model: sizes of the model.
        world: ranks of the pool.
        config: limits and forced choices.
        tree_groups: [tree] number of the (first) group behind each root.
        mode: another mode than `config.mode`: a baseline as a candidate of ``augtree``, under its limits.
        own: the baseline's own choice instead of its cheapest.

    Raises:
        InfeasiblePlanError: a forced choice, or under ``augtree`` the memory budget, that nothing satisfies.
    """
    return explain(shape, model, world, config, tree_groups=tree_groups, mode=mode, own=own)[0]


@uncollected()  # nothing that is made here lies in a cycle
def explain(
    shape: ForestShape,
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
    *,
    tree_groups: Sequence[int],
    mode: str | None = None,
    own: bool = False,
) -> tuple[Plan, list[Considered]]:
    """`make_plan`, with all candidates that were looked at, cheapest first; those over the budget last."""
    decision, search = _decide(shape, model, world, config, tree_groups, mode, own)
    cluster = search.prices.cluster
    rules = {"shape": shape, "world": world, "pairs_per_row": search.unit, "note": decision.note}
    plan = plan_of(decision.recipes, decision.events, mode=decision.mode, **rules)
    plan = with_note(plan, plan.note, decision.time_ns / NS, decision.peak_bytes, cluster.digest())
    plan.check(budget_bytes=search.budget if config.mode == "augtree" else 0)
    considered = sorted(search.considered, key=lambda c: (not c.fits, c.time_ns))
    return plan, considered


def decide(
    shape: ForestShape,
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
    *,
    tree_groups: Sequence[int],
    mode: str | None = None,
) -> Decision:
    """`make_plan` up to the decision: the plan is chosen and priced, its rows are not placed."""
    with uncollected():
        return _decide(shape, model, world, config, tree_groups, mode)[0]


def _decide(shape, model, world, config, tree_groups, mode, own=False) -> tuple[Decision, Search]:
    search = Search(shape, Prices(model, cluster_of(config.cluster)), world, config, tree_groups)
    if (mode or config.mode) == "augtree":
        return search.run(), search
    best = search.baseline(mode or config.mode, own)
    if config.mode == "augtree" and best.peak_bytes > search.budget:
        raise search.over_budget(best.note, best.peak_bytes)
    return best, search


def configured(model: ModelShape, config: AugTreeConfig) -> ModelShape:
    """The model as the settings run it: layers that keep attention, rows whose logits are made at once."""
    kept = model.recomputed if config.keep_attention < 0 else min(model.recomputed, config.keep_attention)
    logits = (config.logit_chunk_mib << 20) // (model.vocab * max(4, model.item_bytes))
    return replace(model, attention_kept=kept, logit_rows=max(1, logits))


def unshared_least(shape: ForestShape, model: ModelShape, world: int, config: AugTreeConfig) -> float:
    """Seconds that a mode which shares nothing takes at the least: sequences spread evenly, a pass each.

    Args:
        shape: the shared forest of the step.
        model, world, config: as for `make_plan`.
    """
    prices = Prices(model, cluster_of(config.cluster))
    lengths = [(ends, shape.starts[n] + shape.rows[n]) for n, ends in enumerate(shape.ends) if ends]
    count = len(lengths)
    alone = ForestShape((-1,) * count, tuple(rows for _, rows in lengths), (0,) * count, (1,) * count)
    jobs = Jobs(alone, prices, 1, 0, Options())
    return sum(ends * jobs.floor((n,), 1) for n, (ends, _) in enumerate(lengths)) / world / NS


def reordered(plan: Plan, events: Sequence[Event], model: ModelShape, config: AugTreeConfig) -> Plan | None:
    """The plan with its events in another order, or None where that does not fit in memory."""
    cluster = cluster_of(config.cluster)
    made = replace(plan, events=tuple(events), _programs=plan._programs)
    peak = price(made, Prices(model, cluster)).peak_bytes
    return replace(made, peak_bytes=peak) if peak <= budget_of(config, cluster) else None
