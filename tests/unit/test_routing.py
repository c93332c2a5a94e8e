"""Windows and exchanges: what travels between ranks, counted by hand and by brute force."""

import random

import numpy as np
import pytest
import torch

from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.tree import ForestShape, from_groups
from megatron_augtree.runtime import routing
from megatron_augtree.runtime.layout import PassLayout, SequenceLayout
from megatron_augtree.runtime.transport import LocalTransport


def _plan(world: int, blocks: list[tuple[int, ...]], events: str) -> Plan:
    """Passes 0, 1, ... on blocks; events as "F0 B0 ..."."""
    shape = ForestShape((), (), (), ())
    passes = tuple(Pass(i, i, "fused", block, ((),) * len(block)) for i, block in enumerate(blocks))
    names = {"F": "forward", "B": "backward"}
    played = tuple(Event(names[event[0]], int(event[1:])) for event in events.split())
    return Plan(world, "augtree", shape, passes, played)


def test_the_picture_in_the_module():
    plan = _plan(4, [(0, 1), (2, 3), (2, 3), (2, 3)], "F0 B0 F1 F2 B2 F3 B3 B1")
    windows = routing.cut_windows(plan, [True, False, True, True])
    named = [" ".join(f"{action[0].upper()}{p}" for action, p in window) for window in windows]
    assert named == ["F0 F1 F2", "B0 B2 F3", "B3 B1"]


def test_a_block_of_both_waits_for_the_later_clock():
    plan = _plan(2, [(0,), (0,), (1,), (0, 1)], "F0 B0 F1 B1 F2 B2 F3 B3")
    windows = routing.cut_windows(plan, [True] * 4)
    assert [w for w, events in enumerate(windows) for e in events if e == Event("forward", 3)] == [2]
    assert routing.pass_windows(plan) == [0, 1, 0, 2]


@pytest.mark.parametrize("seed", range(30))
def test_any_plan_can_be_played_without_a_cyclic_wait(seed):
    """Ranks that run as far as they can, in any order, all reach the end."""
    draw = random.Random(seed)
    world = draw.choice([2, 3, 4])
    sizes = [draw.randint(1, world) for _ in range(draw.randint(1, 7))]
    blocks = [tuple(sorted(draw.sample(range(world), size))) for size in sizes]
    order, left = [], list(range(len(blocks)))
    running = []
    while left or running:  # a forward, or the backward of one that was played
        if left and (not running or draw.random() < 0.6):
            running.append(left.pop(0))
            order.append(f"F{running[-1]}")
        else:
            order.append(f"B{running.pop(draw.randrange(len(running)))}")
    completes = [draw.random() < 0.7 for _ in blocks]
    plan = _plan(world, blocks, " ".join(order))
    windows = routing.cut_windows(plan, completes)
    assert sorted(e for w in windows for e in w) == sorted(plan.events)
    giver = [draw.randrange(world) for _ in blocks]
    _play_greedily(plan, windows, completes, giver, draw)


def _play_greedily(plan, windows, completes, giver, draw):
    """Every rank has a list of things to do; an event needs its block's ranks, a value its sender."""
    todo = [[] for _ in range(plan.world)]
    for w, events in enumerate(windows):
        for event in events:
            for rank in plan.passes[event.pass_id].block:
                todo[rank].append(("event", event))
        done = [e.pass_id for e in events if e.action == "forward" and completes[e.pass_id]]
        for kind in ("value", "gradient"):
            for rank in range(plan.world):
                mine = [p for p in done if rank in plan.passes[p].block or giver[p] == rank]
                todo[rank] += [(kind, w, tuple(mine))] if mine else []
    posted = set()
    while any(todo):
        ranks = [r for r in range(plan.world) if todo[r] and _ready(plan, todo, r, giver, posted)]
        assert ranks, f"stuck at {[t[0] if t else None for t in todo]}"
        rank = draw.choice(ranks)
        head = todo[rank].pop(0)
        if head[0] == "event":
            for other in plan.passes[head[1].pass_id].block:
                if other != rank:
                    assert todo[other].pop(0) == head


def _ready(plan, todo, rank, giver, posted):
    head = todo[rank][0]
    if head[0] == "event":
        return all(todo[r] and todo[r][0] == head for r in plan.passes[head[1].pass_id].block)
    kind, w, passes = head
    posted.add((rank, kind, w))
    needs = set()
    for p in passes:
        block = plan.passes[p].block
        if kind == "value" and giver[p] == rank:
            needs |= {(r, kind, w) for r in block}
        if kind == "gradient" and rank in block:
            needs.add((giver[p], kind, w))
    return needs <= posted


def _step(seed: int, world: int, **choice):
    draw = random.Random(seed)
    prompt = [draw.randrange(9) for _ in range(7)]
    answers = [[draw.randrange(3) for _ in range(draw.randint(1, 6))] for _ in range(6)]
    forest = from_groups([(prompt, [(a, [draw.random() < 0.8 for _ in a]) for a in answers]),
                          (prompt[::-1], [([1, 2], [True, True])])])
    return forest, build(Choice(degree=world, **choice), forest.shape, world, 40)


@pytest.mark.parametrize("choice", [{}, {"lane_degree": 1}, {"phase": "phased", "waves": 3, "chunks": 2}])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_giver_gets_its_rows_once_and_rows_get_all_gradients(world, choice):
    forest, plan = _step(world, world, **choice)
    givers = [i % world for i in range(len(forest.paths))]
    routed = routing.route(plan, forest, givers)
    layouts = [PassLayout(p, forest) for p in plan.passes]
    sequences = SequenceLayout(plan, forest, layouts)
    rows = {(p.id, rank): layout.scored[i] for p, layout in zip(plan.passes, layouts)
            for i, rank in enumerate(p.block)}
    values = {key: torch.as_tensor(found, dtype=torch.float64)[:, None] for key, found in rows.items()}
    sums = {key: torch.zeros_like(value) for key, value in values.items()}
    courier = routing.Courier(LocalTransport(world), torch.empty((0, 1), dtype=torch.float64))
    seen = {}
    for exchange in routed.exchanges:
        for message in exchange.messages.values():
            assert all(len(np.unique(slots)) == len(slots) for _, slots in message.parts)
        found = courier.collect(exchange, lambda p, rank: values[p, rank])
        for giver, got in found.items():
            reading = exchange.readings[giver]
            for s, part in zip(reading.sequences, got.split(list(reading.counts))):
                assert givers[s] == giver and s not in seen
                seen[s] = part[:, 0].long().tolist()
        courier.give_back(exchange, {g: torch.ones_like(v) for g, v in found.items()},
                          lambda p, rank: sums[p, rank])
    assert seen == {s: logical.tolist() for s, logical in enumerate(forest.logical) if len(logical)}
    wanted = {key: np.zeros(len(found)) for key, found in rows.items()}
    for s, logical in enumerate(forest.logical):
        if len(logical):
            for p, slot in zip(*sequences.places(s)):
                bounds = np.cumsum([0, *layouts[p].counts])
                holder = int(np.searchsorted(bounds, slot, side="right")) - 1
                wanted[p, plan.passes[p].block[holder]][slot - bounds[holder]] += 1
    assert all(np.array_equal(sums[key][:, 0].numpy(), wanted[key]) for key in rows)


def test_gradients_of_a_row_add_up_in_one_order():
    lists = routing._repeats(np.asarray([3, 0, 3, 1, 3, 0]))
    assert [found.tolist() for found in lists] == [[0, 1, 3], [2, 5], [4]]
    assert routing._repeats(np.zeros(0, np.int64)) == ()
