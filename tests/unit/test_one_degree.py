"""No degree that is forced on all blocks is faster than what the planner chooses by itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.data.workloads import WORKLOADS, workload
from megatron_augtree.planning import native, one_degree
from megatron_augtree.planning.baselines import variants
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.planner import decide, make_plan
from megatron_augtree.planning.search import Search
from megatron_augtree.planning.timeline import timeline
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.tools.lengths import step_of_lengths
from megatron_augtree.tools.models import model_shape

MODEL = model_shape("qwen2.5-7b")
#: Python alone takes seconds a batch.
BATCHES = 40 if native.core() is not None else 4


def degrees(world: int) -> list[int]:
    """Of blocks that divide a pool."""
    return [degree for degree in range(1, world + 1) if world % degree == 0]


def drawn(seed: int) -> tuple[ForestShape, int, AugTreeConfig]:
    """Trees, ranks and settings of a seed."""
    draw = random.Random(seed)
    groups = workload(draw.choice(sorted(WORKLOADS)), draw.randint(1, 8), seed)
    scale = draw.choice((1, 1, 8, 256))
    groups = [(1 + prompt // scale, [1 + n // scale for n in answers]) for prompt, answers in groups]
    config = AugTreeConfig(cluster=draw.choice(("h100", "a100")), memory_budget_gib=draw.choice((60, 200)))
    return step_of_lengths(groups).merged.shape, draw.choice((4, 8, 16, 24, 64)), config


def best_forced(shape: ForestShape, world: int, config: AugTreeConfig) -> tuple[int, int]:
    """(ns, degree) of the fastest forced degree."""
    groups, found = range(len(shape.roots)), []
    for degree in degrees(world):
        try:
            forced = replace(config, force=f"degree={degree}")
            found.append((decide(shape, MODEL, world, forced, tree_groups=groups).time_ns, degree))
        except InfeasiblePlanError:
            continue
    return min(found)


@pytest.mark.parametrize("seed", range(BATCHES))
def test_no_forced_degree_is_faster(seed):
    shape, world, config = drawn(seed)
    chosen = decide(shape, MODEL, world, config, tree_groups=range(len(shape.roots)))
    forced, degree = best_forced(shape, world, config)
    assert chosen.time_ns <= forced, f"degree {degree}"


@pytest.mark.skipif(native.core() is None, reason="Python alone takes seconds")
def test_no_forced_degree_is_faster_where_ranks_have_few_rows():
    """One or two rows a rank: estimates said half as much again of wide blocks as there was."""
    prompts = (1, 3, 1, 1, 3, 3, 2, 2, 2)
    lengths = [[1 + (7 * i + 3 * k) % 4 for k in range(1 + 5 * i % 4)] for i in range(len(prompts))]
    shape = step_of_lengths(list(zip(prompts, lengths))).merged.shape
    config, groups = AugTreeConfig(cluster="cpu", memory_budget_gib=1e6), range(len(shape.roots))
    chosen = decide(shape, MODEL, 30, config, tree_groups=groups)
    assert chosen.time_ns <= best_forced(shape, 30, config)[0]


def test_degrees_that_are_passed_over_end_late():
    """On small batches most degrees are passed over, and none of those would have been the best."""
    passed = 0
    for seed in range(BATCHES // 2):
        shape, world, config = drawn(seed)
        search = Search(shape, Prices(MODEL, preset(config.cluster)), world, config, range(len(shape.roots)))
        best = search.run().time_ns
        for degree in degrees(world):
            if not one_degree.may_end(search._pool, degree, best):
                passed += 1
                found = [search._where_it_lies(x) for x in search._pool_of(degree).arrangements()]
                assert all(x.time_ns >= best for x in found), f"seed {seed}, degree {degree}"
    assert passed > BATCHES // 4


@pytest.mark.skipif(native.core() is None, reason="Python alone takes minutes")
@pytest.mark.parametrize("name, budget", [("lmsys", 27), ("openthoughts", 200), ("narrativeqa", 200)])
def test_no_forced_degree_is_faster_for_many_trees(name, budget):
    """576 nodes: too many for a search of every degree; trees that share passes are dealt out by what they
    cost as one job, and where launches rule, passes are changed from several degrees on."""
    shape = step_of_lengths(workload(name, 64, 0)).merged.shape
    config = AugTreeConfig(cluster="h100", memory_budget_gib=budget)
    chosen = decide(shape, MODEL, 64, config, tree_groups=range(64))
    assert len(shape.rows) == 576 and chosen.time_ns <= best_forced(shape, 64, config)[0]


@pytest.mark.skipif(native.core() is None, reason="Python alone takes minutes")
@pytest.mark.parametrize("name, seed", [("openthoughts", 0), ("openthoughts", 1), ("lmsys", 1)])
def test_the_best_degree_of_a_peer_is_not_faster(name, seed):
    """Balanced passes of all trees of a block, at a degree that is chosen afterwards; full recompute."""
    shape, groups = step_of_lengths(workload(name, 64, seed)).merged.shape, range(64)
    model, config = replace(MODEL, recomputed=MODEL.layers), AugTreeConfig(cluster="h100", recompute="flags")
    search = Search(shape, Prices(model, preset("h100")), 64, config, groups)
    peers = variants("dcp-fused", shape, groups, 64, search.costs(), (2, 4, 8, 16))
    fastest = min(search.costs().price(shape, recipes, events)[0] for recipes, events, _ in peers)
    assert search.run().time_ns <= fastest


@pytest.mark.skipif(native.core() is None, reason="Python alone takes minutes")
def test_no_rank_is_idle_where_launches_rule():
    shape = step_of_lengths(workload("lmsys", 64, 0)).merged.shape
    config = AugTreeConfig(cluster="h100", memory_budget_gib=27)
    plan = make_plan(shape, MODEL, 64, config, tree_groups=range(64))
    work = [0.0] * 64
    for bar in timeline(plan, Prices(MODEL, preset("h100"))):
        work[bar.rank] += bar.work
    assert min(work) > 0.9 * plan.seconds
