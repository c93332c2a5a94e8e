"""Our integer form of Megatron's dynamic context parallelism against megatron-core's own scheduler."""

from __future__ import annotations

import random

import pytest
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from megatron_augtree.planning.baselines import baseline_recipes, variants
from megatron_augtree.planning.baselines.hybrid import degrees_by_rows, greedy, rounds
from megatron_augtree.planning.tree import ForestShape


class Pool:
    """All that the scheduler asks of a process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


def lengths_of(seed: int) -> tuple[list[int], int, int]:
    """(lengths, rows a rank, ranks): a few or many, even or heavy-tailed, short pools and long."""
    draw = random.Random(seed)
    world = draw.choice([1, 2, 4, 8, 16, 32, 64])
    count = draw.choice([1, 2, 3, 8, 30, 90])
    lengths = draw.choice(
        [
            lambda: draw.randint(1, 4096),
            lambda: min(65536, 1 + int(draw.lognormvariate(7, 1.2))),
            lambda: 1000,
            lambda: draw.choice((128, 4096)),
        ]
    )
    made = [lengths() for _ in range(count)]
    widest = draw.choice([w for w in (1, 2, 4, 8, 16, 32, 64) if w <= world])
    return made, -(-max(made) // widest), world


def ranks_of(seats, world: int) -> list[list[int]]:
    """[rank] -> items in the order it plays them."""
    ranks: list[list[int]] = [[] for _ in range(world)]
    for seat in seats:
        for rank in range(seat.start, seat.start + seat.width):
            ranks[rank].append(seat.item)
    return ranks


def work(ranks: list[list[int]], lengths: list[int]) -> list[float]:
    """[rank] quadratic work, each item's shared by the ranks that play it."""
    shared = {item: sum(item in rank for rank in ranks) for rank in ranks for item in rank}
    return [sum(lengths[item] ** 2 / shared[item] for item in rank) for rank in ranks]


@pytest.mark.parametrize("chunk", range(8))
def test_degrees_rounds_and_loads_are_megatrons(chunk):
    """Same sequences on the same ranks in the same order, round by round: so degrees and loads are, too."""
    several, widened = 0, 0
    for seed in range(40 * chunk, 40 * chunk + 40):
        lengths, limit, world = lengths_of(seed)
        theirs = BalancedCPScheduler(limit, Pool(world))
        assert [theirs.gpus_needed(n) for n in lengths] == degrees_by_rows(lengths, limit, world)
        _, wanted = theirs.get_groups_and_subsamples(list(enumerate(lengths)), None)
        made = rounds(lengths, limit, world)
        assert [ranks_of(seats, world) for seats in made] == wanted, seed
        for seats, ranks in zip(made, wanted):
            assert work(ranks_of(seats, world), lengths) == work(ranks, lengths)
        several += len(made) > 1
        asked = degrees_by_rows(lengths, limit, world)
        widened += any(s.width > asked[s.item] for seats in made for s in seats)
    assert several and widened


def test_greedy_is_rarely_worse_than_rounds_and_both_are_variants():
    """Without rounds nobody waits at a barrier. Compared are the busiest ranks, over all rounds together."""
    better, total = 0, 0
    for seed in range(200):
        lengths, limit, world = lengths_of(seed)
        seats = [seat for made in rounds(lengths, limit, world) for seat in made]
        widened = [seat.width for seat in sorted(seats)]
        free = greedy(widened, [n * n for n in lengths], world)
        loads = [
            max(sum(lengths[item] ** 2 / widened[item] for item in rank) for rank in ranks_of(dealt, world))
            for dealt in (seats, free)
        ]
        better += loads[1] <= loads[0] * (1 + 1e-12)
        total += 1
    assert better >= 0.95 * total


@pytest.mark.parametrize("seed", range(6))
def test_the_mode_is_never_dearer_than_megatrons_schedule(seed):
    """By the load of the busiest rank: what ``dynamic`` runs against Megatron's rounds at every limit."""
    draw = random.Random(seed)
    lengths = tuple(min(9000, 2 + int(draw.lognormvariate(6, 1))) for _ in range(24))
    shape = ForestShape((-1,) * 24, lengths, (1,) * 24, (1,) * 24)

    def load(recipes) -> int:
        busy = [0] * 8
        for r in recipes:
            for rank in range(r.start, r.start + r.width):
                busy[rank] += lengths[r.leaves[0]] * (lengths[r.leaves[0]] + 1) // 2 // r.width
        return max(busy)

    own = load(baseline_recipes("dynamic", shape, [0] * 24, 8, 0)[0])
    theirs = [
        load(recipes) for recipes, _, note in variants("dynamic", shape, [0] * 24, 8) if "round" in note
    ]
    assert len(theirs) == 4 and own <= 1.01 * min(theirs)
