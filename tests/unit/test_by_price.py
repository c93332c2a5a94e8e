"""Each kind of plan wins by price on a named input: what is forced otherwise costs more, or does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from megatron_augtree.config import InfeasiblePlanError
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import pairs_per_row, price
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.test_planner import AMPLE, SMALL, copies, jobs, plan_of, primitives

WIDE = ModelShape(4, 512, 2048, 4096, 8, 8, 64, 64, item_bytes=2)
MHA = ModelShape(32, 4096, 11008, 32000, 32, 32, 128, 128, gated=True, item_bytes=2)
GQA = ModelShape(28, 3584, 18944, 152064, 28, 4, 128, 128, gated=True, item_bytes=2)
#: With the flags' default of logits made at once: 256 MiB.
CHUNKED = replace(GQA, logit_rows=441)


@dataclass(frozen=True)
class Input:
    """Something to plan, and what the cheapest plan is known to show.

    Attributes:
        budget: a choice that just fits into the memory, without recompute; or GiB, where recompute is chosen
            too; None: memory is no question.
        loses: forced, these cost more.
        worse: the same plan otherwise, which costs more or does not fit.
    """

    shape: ForestShape
    world: int
    shows: Callable[[Plan], bool]
    cluster: str = "h100"
    model: ModelShape = SMALL
    budget: Choice | float | None = None
    loses: tuple[str, ...] = ()
    worse: dict[str, object] = field(default_factory=dict)


def split(plan: Plan) -> set[int]:
    """How many ranks hold rows of a leaf."""
    leaves = [n for n in range(len(plan.shape.rows)) if not plan.shape.children[n]]
    return {
        sum(any(s.node == leaf for s in spans) for p in plan.passes for spans in p.placement)
        for leaf in leaves
    }


def pairs(plan: Plan, *kinds: str) -> set[tuple[int, int]]:
    """Recompute pairs of the passes of some kinds."""
    return {(p.keep_layers, p.keep_attention) for p in plan.passes if p.kind in kinds}


def gathered_in(pieces: int) -> Callable[[Plan], bool]:
    return lambda plan: {(p.kind, p.primitive, p.pieces) for p in plan.passes} == {
        ("fused", "gather_kv", pieces)
    }


BY_PRICE = {
    "a tiny group moves nothing": Input(
        from_lengths(4, [2, 2]),
        4,
        lambda plan: primitives(plan) == {"local"},
        loses=("primitive=gather_kv", "degree=2,copies=1"),
    ),
    "a long prompt is one fused pass, gathered in one piece": Input(
        from_lengths(8192, [64] * 4),
        2,
        lambda plan: gathered_in(1)(plan) and len(plan.passes) == 1 and split(plan) == {1},
        loses=("phase=phased", "degree=1", "lane_degree=2"),
    ),
    "short prompts are copied rather than moved": Input(
        from_lengths(15, [30, 44]),
        4,
        lambda plan: copies(plan) == {2},
        cluster="a100",
        loses=("copies=1",),
    ),
    "one long response is split, short ones are whole": Input(
        from_lengths(2048, [16384, 512, 200, 100]),
        4,
        lambda plan: split(plan) == {1, 4},
        loses=("lane_degree=4", "lane_degree=1", "lane_degree=2"),
    ),
    "one response alone is split over all": Input(
        from_lengths(0, [8192]), 4, lambda plan: split(plan) == {4}, loses=("degree=1", "degree=2")
    ),
    "long responses in lanes that cut all of them": Input(
        from_lengths(8192, [8192]),
        4,
        lambda plan: split(plan) == {4},
        loses=("lane_degree=1", "lane_degree=2"),
    ),
    "leaves come in waves where memory is short": Input(
        from_lengths(4096, [256] * 8),
        2,
        lambda plan: min(jobs(plan, "prefill", "chunk")) >= 1 and min(jobs(plan, "replay")) > 1,
        model=WIDE,
        budget=Choice(degree=2, phase="phased", waves=4),
        loses=("phase=fused", "waves=1"),
    ),
    "queries move where a wave has few": Input(
        from_lengths(8192, [512] * 16),
        4,
        lambda plan: "move_q" in primitives(plan),
        model=WIDE,
        budget=Choice(degree=4, phase="phased", waves=4, primitive="move_q"),
        loses=("primitive=gather_kv",),
    ),
    "queries move where memory leaves room for little": Input(
        from_lengths(65536, [256] * 16),
        8,
        lambda plan: "move_q" in primitives(plan) and min(jobs(plan, "chunk")) > 1,
        model=CHUNKED,
        budget=6,
        loses=("primitive=gather_kv", "primitive=move_q,chunks=1"),
    ),
    "the spine comes in chunks where only they fit": Input(
        from_lengths(8192, [64] * 4),
        2,
        lambda plan: min(jobs(plan, "chunk")) >= 2,
        cluster="cpu",
        budget=Choice(degree=2, phase="phased", chunks=2, keep=False),
        loses=("chunks=1", "phase=fused"),
    ),
    "chunks and waves fill a pipeline": Input(
        from_lengths(32768, [512] * 16),
        8,
        lambda plan: min(jobs(plan, "chunk")) > 1 and min(jobs(plan, "replay")) > 1,
        model=replace(GQA, stages=4),
        loses=("phase=fused", "chunks=1", "waves=1"),
    ),
    "a gather in two pieces hides more of itself": Input(
        from_lengths(8192, [512] * 8), 4, gathered_in(2), model=MHA, loses=("pieces=1", "primitive=move_kv")
    ),
    "a gather in four pieces hides yet more": Input(
        from_lengths(16384, [512] * 8),
        8,
        gathered_in(4),
        model=MHA,
        loses=("pieces=1", "pieces=2", "primitive=move_kv"),
    ),
    "a gather over two nodes crosses once": Input(
        from_lengths(65536, [512] * 16),
        16,
        lambda plan: {p.node_ranks for p in plan.passes} == {8},
        model=GQA,
        worse={"node_ranks": 0},
    ),
    "waves fetch the next layer's prompt early": Input(
        from_lengths(32768, [1024] * 16),
        8,
        lambda plan: any(p.prefetch for p in plan.passes),
        model=CHUNKED,
        budget=27,
        worse={"prefetch": False},
    ),
    "received keys are dropped where memory is short": Input(
        from_lengths(8192, [64] * 4),
        2,
        lambda plan: not any(p.keep for p in plan.passes) and jobs(plan, "fused") == {1},
        budget=Choice(degree=2, keep=False),
        worse={"keep": True},
    ),
    "some layers keep everything and some attention": Input(
        from_lengths(0, [32768]),
        4,
        lambda plan: all(0 < x < 28 and y > 0 for x, y in pairs(plan, "fused")) and len(plan.passes) == 1,
        model=CHUNKED,
        budget=27,
        loses=("keep_layers=0,keep_attention=0", "keep_layers=0,keep_attention=28", "degree=2"),
    ),
    "waves keep everything after a prompt that mostly runs again": Input(
        from_lengths(16384, [2048] * 32),
        8,
        lambda plan: (
            pairs(plan, "replay") == {(28, 0)} and all(x < 7 for x, _ in pairs(plan, "prefill", "chunk"))
        ),
        model=CHUNKED,
        budget=20,
        loses=("phase=fused", "keep_layers=0,keep_attention=28"),
    ),
    "a dormant prompt rests in host memory": Input(
        from_lengths(32768, [64] * 4),
        2,
        lambda plan: {p.kind for p in plan.passes if p.offload} == {"chunk"},
        model=CHUNKED,
        budget=8,
        loses=("phase=fused",),
        worse={"offload": False},
    ),
}


@pytest.mark.parametrize("name", BY_PRICE)
def test_chosen_by_price(name):
    x = BY_PRICE[name]
    prices, budget, recompute = Prices(x.model, preset(x.cluster)), AMPLE, "auto"
    if isinstance(x.budget, Choice):
        unit = pairs_per_row(x.model, preset(x.cluster))
        budget = price(build(x.budget, x.shape, x.world, unit), prices).peak_bytes / GIB
        recompute = "flags"
    elif x.budget is not None:
        budget = x.budget
    rules = {"model": x.model, "cluster": x.cluster, "budget": budget, "recompute": recompute}
    plan = plan_of(x.shape, x.world, **rules)
    assert plan.mode == "augtree" and x.shows(plan), str(plan)
    for force in x.loses:
        try:
            other = plan_of(x.shape, x.world, force=force, **rules)
        except InfeasiblePlanError as error:
            assert "no plan fits" in error.what, force
        else:
            assert other.seconds > plan.seconds, force
    if x.worse:
        passes = tuple(replace(p, **x.worse) for p in plan.passes)
        other = price(replace(plan, passes=passes, _programs={}), prices)
        assert other.time_ns > plan.seconds * 1e9 or other.peak_bytes > budget * GIB


@pytest.mark.parametrize("prompt", [32768, 131072])
def test_the_cheapest_waves_are_tried_in_half_as_many_where_memory_is_short(prompt):
    """Fewer waves cost less once they give up what they receive, or the prompt rests in host memory; with all
    of them whole on ranks they were found only where that was forced."""
    rules = {"model": CHUNKED, "cluster": "h100", "budget": 27, "recompute": "auto"}
    shape = from_lengths(prompt, [4096] * 8)
    plan = plan_of(shape, 8, **rules)
    assert plan.seconds <= plan_of(shape, 8, force="lane_degree=1", **rules).seconds
    assert sum(p.kind == "replay" for p in plan.passes) < 4 and not any(p.keep for p in plan.passes)
