"""The work of compiling grows with spans, not with pairs of spans: counted in executed lines, not in time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.compiler import compile_pass
from megatron_augtree.planning.lanes import place
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.placement import Placement
from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.planner import decide, make_plan
from megatron_augtree.planning.schedule import Program, reverse
from megatron_augtree.planning.tree import Forest, ForestShape, from_groups, from_lengths
from megatron_augtree.planning.verify import check
from megatron_augtree.runtime.layout import PassLayout, SequenceLayout
from tests.unit.forests import forest


def files() -> list[str]:
    """Of the code that is running, innermost first."""
    frame, found = sys._getframe(), []
    while frame is not None:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return found


def lines(work: Callable[[], object]) -> int:
    """Python lines that the plug-in executes."""
    count, before = 0, sys.gettrace()

    def traced(frame, event, _):
        nonlocal count
        count += event == "line"
        return traced

    def called(frame, event, _):
        return traced if "megatron_augtree" in frame.f_code.co_filename else None

    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(before)
    assert count > 0
    return count


def wide(ranks: int) -> tuple[ForestShape, Placement]:
    """As many leaves as ranks, every one of them cut over all ranks: 2 spans a rank and leaf."""
    shape = from_lengths(16 * ranks, [4 * ranks] * ranks)
    leaves = list(range(1, ranks + 1))
    return shape, place(shape, [0], leaves, ranks, lane_degree=ranks, wide=0, pairs_per_row=50)


def group_of(ranks: int) -> Forest:
    """Tokens for `wide`."""
    answers = [([1000 + i, *range(4 * ranks - 1)], [True] * (4 * ranks)) for i in range(ranks)]
    return from_groups([(range(16 * ranks + 1), answers)])


def compiled(ranks: int, **choice) -> Program:
    shape, placement = wide(ranks)
    return compile_pass(shape, placement, **choice)


def checked(ranks: int, backward: bool) -> Callable[[], object]:
    (shape, placement), program = wide(ranks), compiled(ranks)
    area = sum(shape.area(*span) for spans in placement for span in spans)
    program = reverse(program, keep=False) if backward else program
    return lambda: check(program, area)


def laid_out(ranks: int) -> Callable[[], object]:
    (shape, placement), step = wide(ranks), group_of(ranks)
    assert step.shape == shape
    p = Pass(0, 0, "fused", tuple(range(ranks)), placement)
    plan = Plan(ranks, "augtree", shape, (p,), (Event("forward", 0), Event("backward", 0)))
    return lambda: SequenceLayout(plan, step, [PassLayout(p, step)])


def reversing(ranks: int, keep: bool, **choice) -> Callable[[], object]:
    program = compiled(ranks, **choice)
    return lambda: reverse(program, keep=keep)


STEPS: dict[str, Callable[[int], Callable[[], object]]] = {
    "compile": lambda ranks: lambda: compiled(ranks),
    "compile in pieces": lambda ranks: lambda: compiled(ranks, pieces=4),
    "compile for nodes": lambda ranks: lambda: compiled(ranks, nodes=[r // 8 for r in range(ranks)]),
    "reverse": lambda ranks: reversing(ranks, True),
    "reverse, fetching again": lambda ranks: reversing(ranks, False),
    "reverse, for nodes": lambda ranks: reversing(ranks, False, nodes=[r // 8 for r in range(ranks)]),
    "check": lambda ranks: checked(ranks, False),
    "check backwards": lambda ranks: checked(ranks, True),
    "layout": laid_out,
}


@pytest.mark.parametrize("step", STEPS)
def test_four_times_the_spans_are_at_most_five_times_the_lines(step):
    """16 ranks and leaves against 32: spans, tiles and pairs of ranks are four times as many; pairs of spans
    on two ranks would be sixteen times as many."""
    few, many = (lines(STEPS[step](ranks)) for ranks in (16, 32))
    assert many <= 5 * few


@pytest.mark.parametrize(
    "choice",
    [
        Choice(degree=4, lane_degree=4),
        Choice(degree=4, phase="phased", waves=2, chunks=2),
        Choice(degree=4, phase="phased", waves=2, together=False),
    ],
    ids=str,
)
def test_checking_a_plan_is_linear_in_its_trees(choice):
    counts = []
    for trees in (16, 64):
        shape = forest(*[from_lengths(40, [9, 5 + tree % 7, 12]) for tree in range(trees)])
        plan = build(choice, shape, trees, 20)
        counts.append(lines(plan.check))
    assert counts[1] <= 5 * counts[0]


def planned(decides: Callable, config: AugTreeConfig) -> object:
    shape, model = from_lengths(400, [50] * 3), ModelShape(2, 64, 128, 100, 2, 2, 32, 32)
    return decides(shape, model, 2, config, tree_groups=[0])


WORKS: dict[str, Callable[[], object]] = {
    "compile": lambda: compile_pass(*wide(2)),
    "decide": lambda: planned(decide, AugTreeConfig()),
    "make_plan": lambda: planned(make_plan, AugTreeConfig()),
}


@pytest.mark.parametrize("work", WORKS)
def test_the_collector_is_as_it_was(work):
    assert gc.isenabled()
    WORKS[work]()
    assert gc.isenabled()
    gc.disable()
    try:
        WORKS[work]()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_collected_while_a_step_is_planned():
    collections = []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    gc.callbacks.append(lambda phase, info: collections.append(any(f.endswith("pool.py") for f in files())))
    try:
        planned(make_plan, AugTreeConfig())
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*threshold)
    assert collections and not any(collections)


def test_the_collector_is_on_again_after_a_refusal():
    with pytest.raises(InfeasiblePlanError):
        planned(make_plan, AugTreeConfig(memory_budget_gib=1e-9))
    assert gc.isenabled()
