"""From the flags to a plan, as the launchers choose it: the mode's, or ring's where that is cheaper."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError, InputError
from megatron_augtree.planning.choose import choose as planning_choose
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import Considered, configured, explain
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.tools.cli.options import config_of, model_of, step_of
from megatron_augtree.tools.cli.output import several
from megatron_augtree.tools.cli.progress import working
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
        return self.plan.computed_rows


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
    _check_passes(step.trees(config.mode).shape, config)
    started = time.perf_counter()
    with working(f"planning {config.mode}"):
        found = planning_choose(step.trees, model, world, config)
    took = time.perf_counter() - started
    return Chosen(step, configured(model, config), config, found.trees, found.plan, found.considered, took)


def alternatives(chosen: Chosen, modes: Sequence[str]) -> dict[str, Plan]:
    """Other modes' plans for the same step; those that nothing makes are left out."""
    plans = {}
    for mode in modes:
        trees = chosen.step.trees(mode)
        config = replace(chosen.config, mode=mode, force="")
        try:
            with working(f"planning {mode}"):
                plans[mode] = explain(trees.shape, chosen.model, chosen.plan.world, config,
                                      tree_groups=trees.tree_groups, mode=mode)[0]
        except InfeasiblePlanError:
            continue  # its degree does not divide the pool
    return plans


def _check_passes(shape: ForestShape, config: AugTreeConfig) -> None:
    """Forced passes that the step has no rows for: found before anything is planned."""
    forced = config.forced()
    inner = [n for n, children in enumerate(shape.children) if children]
    rows, leaves = sum(shape.rows[n] for n in inner), len(shape.rows) - len(inner)
    limits = (
        ("chunks", rows, "prompt row", "a chunk has at least a row of the prompt"),
        ("waves", leaves, "response", "a wave has at least a response"),
    )
    for key, most, word, rule in limits:
        if inner and forced.get(key, 0) > most:
            raise InputError("more passes than there is to compute",
                             values=f"--force {key}={forced[key]}, {several(most, word)}", rule=rule,
                             remedy=f"force at most {key}={most}")
