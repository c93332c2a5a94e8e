"""The paper's planner as a baseline: its configurations, where responses go, and what its score chooses."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_augtree.planning import recipe
from megatron_augtree.planning.baselines import baseline_recipes, paper, variants
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.tree import ForestShape, from_lengths
from tests.unit.test_baselines import batch, costs_of, forests, price_of


def cut(plan: Plan) -> list[tuple]:
    return [(p.kind, p.block, p.primitive, tuple(sorted(p.nodes)), p.reads) for p in plan.passes]


def test_the_papers_configurations():
    """P = 17, four responses, four ranks: the passes of some configurations, and that all are there."""
    shape = from_lengths(17, (8, 4, 4, 8))
    made = {
        note: (recipes, events) for recipes, events, note in variants("paper", shape, [0], 4, degrees=[4])
    }
    assert set(made) == {"degree 4, by score", "degree 4, ring, b = 0, s = 1"} | {
        f"degree 4, {primitive}, b = {b}, s = {s}"
        for primitive in ("move_kv", "move_q")
        for b, s in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4))
    }
    rules = {"mode": "paper", "shape": shape, "world": 4, "pairs_per_row": 1}

    def passes(name: str) -> list[tuple]:
        plan = recipe.plan_of(*made[f"degree 4, {name}"], **rules)
        plan.check(pairs=True)
        return cut(plan)

    pool = (0, 1, 2, 3)
    assert passes("ring, b = 0, s = 1") == [("fused", pool, "ring", (0, leaf), ()) for leaf in (1, 2, 3, 4)]
    # Lanes of 8 + 4 rows each, in rounds of the two long and the two short responses.
    rounds_of_two = passes("move_kv, b = 2, s = 2")
    assert [(kind, block) for kind, block, *_ in rounds_of_two] == [
        ("prefill", (0, 1)),
        *[("replay", (0, 1))] * 2,
        ("prefill", (2, 3)),
        *[("replay", (2, 3))] * 2,
    ]
    sizes = [[shape.rows[n] for n in p[3]] for p in rounds_of_two]
    assert sizes[1] == sizes[4] and sizes[2] == sizes[5] and sorted(sizes[1] + sizes[2]) == [4, 8]
    copies = passes("move_kv, b = 1, s = 4")
    assert [(kind, block, primitive) for kind, block, primitive, *_ in copies] == [
        (kind, (rank,), "local") for rank in pool for kind in ("prefill", "replay")
    ]
    assert sorted(p[3] for p in copies) == [(0,)] * 4 + [(1,), (2,), (3,), (4,)]
    assert passes("move_q, b = 1, s = 2") == [
        ("prefill", pool, "move_kv", (0,), ()),
        ("replay", pool, "move_q", (1, 2, 3, 4), (0,)),
    ]


def brute_grid(weights, rounds_, lanes) -> int:
    cells = range(rounds_ * lanes)
    best = None
    for where in itertools.product(cells, repeat=len(weights)):
        loads = [0] * (rounds_ * lanes)
        for weight, cell in zip(weights, where):
            loads[cell] += weight
        found = [max(loads[r * lanes : (r + 1) * lanes]) for r in range(rounds_)]
        if all(found):
            best = min(best or (sum(found), max(found)), (sum(found), max(found)))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_assign_grid_is_exact_for_few_responses(seed):
    draw = random.Random(seed)
    rounds_, lanes = draw.choice([(1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2)])
    weights = [draw.randint(1, 30) for _ in range(draw.randint(rounds_, 5))]
    loads = [[0] * lanes for _ in range(rounds_)]
    for weight, (round_, lane) in zip(weights, paper.assign_grid(weights, rounds_, lanes), strict=True):
        loads[round_][lane] += weight
    longest = [max(row) for row in loads]
    assert (sum(longest), max(longest)) == brute_grid(weights, rounds_, lanes)


def test_assign_grid_of_many_is_even():
    weights = [1 + 7 * i % 23 for i in range(64)]
    cells = [0] * 8
    for weight, (round_, lane) in zip(weights, paper.assign_grid(weights, 2, 4)):
        cells[4 * round_ + lane] += weight
    assert max(cells) - min(cells) <= 2


def passes_of(shape: ForestShape, name: str, budget: int = 0) -> list[tuple[str, int, str]]:
    recipes = baseline_recipes("paper", shape, [0], 8, 0, costs_of(name, 8, budget))[0]
    return [(r.kind, r.width, r.primitive) for r in recipes]


def test_the_papers_score_follows_the_shape():
    """Response-heavy: a lane a rank, each with its prompt. Prompt-heavy: one prompt on all ranks, and the few
    query rows travel. Rounds only where memory asks for them."""
    lanes = passes_of(from_lengths(142, (1907,) * 8), "paper")
    assert lanes == [("prefill", 1, "move_kv"), ("replay", 1, "move_kv")] * 8
    assert passes_of(from_lengths(16257, (128,) * 8), "paper") == [
        ("prefill", 8, "move_kv"),
        ("replay", 8, "move_q"),
    ]
    shape = from_lengths(1000, (2000,) * 8)
    ample = price_of("paper", shape, [0], 8, "h100")
    tight = passes_of(shape, "h100", ample.peak_bytes * 7 // 10)
    assert len([p for p in tight if p[0] == "replay"]) > len(
        [p for p in ample.plan.passes if p.kind == "replay"]
    )


@pytest.mark.parametrize(("prompt", "response"), [(141, 1907), (1920, 128), (1024, 1024), (32640, 128)])
@pytest.mark.parametrize("name", ["paper", "h100"])
def test_the_papers_score_is_near_the_price(prompt, response, name):
    """The paper's own shapes: its choice costs at most a tenth more than its best configuration."""
    shape, costs = from_lengths(prompt + 1, (response,) * 8), costs_of(name, 8)
    times = [costs.of(shape, made)[1] for made in variants("paper", shape, [0], 8, costs, degrees=[8])]
    assert times[0] <= 1.1 * min(times)


@pytest.mark.parametrize("seed", range(3))
def test_the_papers_lanes_are_not_dearer_than_lanes_in_turn(seed, monkeypatch):
    shape, groups = forests(batch(seed))[False]

    def times() -> dict[str, int]:
        made = variants("paper", shape, groups, 4, costs_of("h100", 4), degrees=[4])
        return {note: costs_of("h100", 4).of(shape, (r, e, note))[1] for r, e, note in made}

    exact = times()
    monkeypatch.setattr(
        paper, "assign_grid", lambda w, b, s: [(i // s * b // -(-len(w) // s), i % s) for i in range(len(w))]
    )
    naive = times()
    assert min(exact.values()) <= min(naive.values())
    assert exact["degree 4, move_kv, b = 1, s = 2"] < naive["degree 4, move_kv, b = 1, s = 2"]
