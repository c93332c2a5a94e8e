"""From the flags to a plan, as the launchers choose it: the mode's, or ring's where that is cheaper."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.baselines import UNSHARED
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import Considered, configured, explain, unshared_least
from megatron_augtree.tools.cli.options import config_of, model_of, step_of
from megatron_augtree.tools.lengths import Step, Trees


@dataclass(frozen=True)
class Chosen:
    """A plan and where it comes from.

    Attributes:
        step, model, config: what was planned.
        trees: the forest of the plan.
        plan: the plan.
        considered: all candidates, cheapest first; those over the budget last.
        plan_seconds: seconds that planning took, from lengths to the plan.
    """

    step: Step
    model: ModelShape
    config: AugTreeConfig
    trees: Trees
    plan: Plan
    considered: Sequence[Considered]
    plan_seconds: float

    @property
    def prices(self) -> Prices:
        """What the plan was priced with."""
        return Prices(self.model, cluster_of(self.config.cluster))

    @property
    def rows(self) -> int:
        """Rows that all ranks compute, prompt copies included."""
        return sum(self.plan.rows_of_rank(rank) for rank in range(self.plan.world))


def choose(args: argparse.Namespace) -> Chosen:
    """The plan for some flags.

    Raises:
        AugTreeError: flags that say nothing sensible, or nothing that fits.
    """
    config = config_of(args)
    cluster_of(config.cluster)
    return choose_for(step_of(args), model_of(args), args.ranks, config)


def choose_for(step: Step, model: ModelShape, world: int, config: AugTreeConfig) -> Chosen:
    """The plan for a step; errors as for `planner.make_plan`."""
    started = time.perf_counter()
    found: list[tuple[Trees, Plan, Sequence[Considered]]] = []
    refused: list[InfeasiblePlanError] = []
    model = configured(model, config)
    modes = [config.mode]
    if config.mode == "augtree" and not config.force:
        modes += UNSHARED
    for mode in modes:
        if mode in UNSHARED and found and mode != config.mode:
            shared, best = found[0][0].shape, min(item[1].seconds for item in found)
            if unshared_least(shared, model, world, config) >= best:
                continue
        trees = step.trees(mode)
        try:
            plan, considered = explain(trees.shape, model, world, config, tree_groups=trees.tree_groups,
                                       mode=mode)
        except InfeasiblePlanError as error:
            refused.append(error)
        else:
            found.append((trees, plan, considered or [_itself(plan)]))
    if not found:
        raise refused[0]
    trees, plan, _ = min(found, key=lambda item: item[1].seconds)
    every = sorted((c for _, _, part in found for c in part), key=lambda c: (not c.fits, c.time_ns))
    return Chosen(step, model, config, trees, plan, every, time.perf_counter() - started)


def alternatives(chosen: Chosen, modes: Sequence[str]) -> dict[str, Plan]:
    """Other modes' plans for the same step; those that nothing makes are left out."""
    plans = {}
    for mode in modes:
        trees = chosen.step.trees(mode)
        config = replace(chosen.config, mode=mode, force="")
        try:
            plans[mode] = explain(trees.shape, chosen.model, chosen.plan.world, config,
                                  tree_groups=trees.tree_groups, mode=mode)[0]
        except InfeasiblePlanError:
            continue  # its degree does not divide the pool
    return plans


def _itself(plan: Plan) -> Considered:
    """A baseline's only candidate."""
    return Considered(f"{plan.mode}: {plan.note}", round(plan.seconds * 1e9), plan.peak_bytes, True)
