"""Ring and its reuse variants, gather, dynamic degrees, and balanced blocks: each a generator of recipes.

A generator yields what the mode runs first, then the other choices that its system has at that degree, so
that a planner can take the best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_augtree.planning.assign import longest_first
from megatron_augtree.planning.baselines.common import (
    LAID_WIDE,
    Lay,
    Maker,
    Recipes,
    Step,
)
from megatron_augtree.planning.baselines.hybrid import Seat, degrees_by_rows, greedy, rounds, widths
from megatron_augtree.planning.candidates import split_inner
from megatron_augtree.planning.lanes import node_costs
from megatron_augtree.planning.plan import counted
from megatron_augtree.planning.tree import ForestShape

#: (maker, nodes, first rank, ranks): adds one job.
Add = Callable[[Maker, tuple[int, ...], int, int], None]


def _ring(maker: Maker, nodes, start: int, width: int) -> None:
    maker.fused(nodes, start, width, "ring")


def _gather(maker: Maker, nodes, start: int, width: int) -> None:
    maker.fused(nodes, start, width, "gather_kv")


def _two_pass(maker: Maker, nodes, start: int, width: int) -> None:
    maker.phased(nodes, start, width, "ring")


def _per_response(maker: Maker, nodes, start: int, width: int) -> None:
    maker.phased(nodes, start, width, "ring", waves=[(leaf,) for leaf in split_inner(maker.shape, nodes)[1]])


class Seating(NamedTuple):
    """Where every tree is played, one job each, in order.

    A job costs the same on every block of its width that crosses as many nodes, so that a seating is priced
    from a table of (tree, width) without making its recipes.
    """

    note: str
    seats: list[Seat]


def in_replicas(step: Step) -> Iterator[Seating]:
    """Replicas of one degree take groups in turn, as data parallelism does; or trees, longest first."""
    note, turns = f"degree {step.degree}", step.in_turn()
    dealings = {note: turns}
    longest = longest_first(step.sizes.work, [0] * step.replicas)
    if longest != turns:
        dealings[f"{note}, longest first"] = longest
    for name, where in dealings.items():
        yield Seating(name, [Seat(t, where[t] * step.degree, step.degree) for t in step.by_group()])


def by_rows(step: Step) -> Iterator[Seating]:
    """A power of two of ranks for every tree by its rows, in Megatron's rounds or dealt out greedily.

    The limit of rows a rank is the smallest that gives the longest tree `Step.degree` ranks; degree 0 tries
    them all.
    """
    lengths, works = step.sizes.rows, step.sizes.work
    seen: list[list[Seat]] = []
    for degree in [step.degree] if step.degree else widths(step.world):
        limit = -(-max(lengths, default=1) // degree)
        made = rounds(lengths, limit, step.world)
        seats = [seat for round_ in made for seat in round_]
        asked = degrees_by_rows(lengths, limit, step.world)
        widened = [width for _, _, width in sorted(seats)]
        for name, dealt in {
            counted(len(made), "round"): seats,
            "greedy": greedy(asked, works, step.world),
            "widened, greedy": greedy(widened, works, step.world),
        }.items():
            known = sorted(dealt)
            if known not in seen:
                seen.append(known)
                yield Seating(f"degree {degree} for the longest, {limit} rows a rank, {name}", dealt)


def seat(shape: ForestShape, add: Add, seating: Seating) -> Recipes:
    """The recipes of a seating."""
    trees, maker = shape.trees, Maker(shape)
    for tree, start, width in seating.seats:
        add(maker, trees[tree], start, width)
    return maker.made(seating.note)


def _cheapest_first(step: Step, found: list[Recipes]) -> Iterator[Recipes]:
    """The cheapest, then the others as they come."""
    keys = [step.costs.of(step.shape, made) for made in found]
    best = keys.index(min(keys))
    yield found[best]
    yield from (made for index, made in enumerate(found) if index != best)


#: Modes in which every tree is one job: how trees are seated, and the job.
SEATED: dict[str, tuple[Callable[[Step], Iterator[Seating]], Add]] = {
    "ring": (in_replicas, _ring),
    "ring-reuse": (in_replicas, _ring),
    "ring-reuse-two-pass": (in_replicas, _two_pass),
    "ring-reuse-per-response": (in_replicas, _per_response),
    "gather-reuse": (in_replicas, _gather),
    "dynamic": (by_rows, _ring),
    "dynamic-reuse": (by_rows, _gather),
}


def seated(mode: str) -> Callable[[Step], Iterator[Recipes]]:
    """A mode of `SEATED`. Ranks by rows: the cheapest is run. Replicas: groups in turn are."""
    seatings, add = SEATED[mode]

    def make(step: Step) -> Iterator[Recipes]:
        found = (seat(step.shape, add, seating) for seating in seatings(step))
        yield from _cheapest_first(step, list(found)) if seatings is by_rows else found

    return make


# Balanced blocks.

#: (maker, nodes, first rank, ranks, how leaves lie): adds one job.
AddLaid = Callable[[Maker, tuple[int, ...], int, int, Lay], None]

#: Jobs of a replica, one after the other.
_Jobs = list[tuple[tuple[int, ...], Lay]]


def _lays(step: Step, inner: Sequence[int], leaves: Sequence[int]) -> list[Lay]:
    """Ways to place leaves that can pay, keys in one piece: all wide; whole, where no leaf is much longer
    than a rank's share; those beyond a whole, a half or a quarter share wide and the others whole."""
    if step.degree == 1:
        return [LAID_WIDE]
    nodes = (*inner, *leaves)
    cost = dict(zip(nodes, node_costs(step.shape, nodes, step.costs.pairs_per_row)))
    share = sum(cost.values()) // step.degree
    found = [LAID_WIDE]
    if leaves and 2 * max(cost[n] for n in leaves) <= 3 * share:
        found.append(Lay(1))
    for part in (1, 2, 4):
        wide = sum(cost[n] * part > share for n in leaves)
        if 0 < wide < len(leaves) and Lay(1, wide) not in found:
            found.append(Lay(1, wide))
    return found


def _blocks(maker: Maker, nodes: tuple[int, ...], start: int, width: int, how: Lay) -> None:
    maker.fused(nodes, start, width, "gather_kv", how)


def _phased_blocks(maker: Maker, nodes: tuple[int, ...], start: int, width: int, how: Lay) -> None:
    maker.phased(nodes, start, width, "gather_kv", how)


def balanced(add: AddLaid) -> Callable[[Step], Iterator[Recipes]]:
    """Leaves where they balance best; a replica's trees in turn or in one batch, whichever is cheaper.

    Trees go longest first to the replica that is free first, or to replicas in turn where that is cheaper.
    Keys are gathered in as many pieces as hide best under tiles: DCP cuts its work into divisions for that.
    """

    def make(step: Step) -> Iterator[Recipes]:
        singles = [_best_lay(step, add, tuple(nodes)) for nodes in step.trees]
        plans: dict[str, list[_Jobs]] = {}
        dealings = {", longest first": longest_first([time for time, _ in singles], [0] * step.replicas)}
        for dealing, where in {**dealings, ", groups in turn": step.in_turn()}.items():
            options = [_options(step, add, singles, where, replica) for replica in range(step.replicas)]
            for name, jobs in {
                "the cheaper of both": [_cheapest(step, add, ways) for ways in options],
                "a pass a tree": [ways[0] for ways in options],
                "one pass": [ways[-1] for ways in options],
            }.items():
                if jobs not in plans.values():
                    plans[name + dealing] = jobs
        yield from _cheapest_first(step, [_of_replicas(step, add, j, name) for name, j in plans.items()])

    return make


def _options(
    step: Step, add: AddLaid, singles: list[tuple[int, Lay]], where: list[int], replica: int
) -> list[_Jobs]:
    """A replica's trees in turn, and all in one batch."""
    mine = [t for t in step.by_group() if where[t] == replica]
    options = [[(tuple(step.trees[t]), singles[t][1]) for t in mine]]
    if len(mine) > 1:
        nodes = tuple(sorted(n for t in mine for n in step.trees[t]))
        options.append([(nodes, _best_lay(step, add, nodes)[1])])
    return options


def _of_replicas(step: Step, add: AddLaid, jobs: list[_Jobs], name: str) -> Recipes:
    maker = Maker(step.shape)
    for replica, mine in enumerate(jobs):
        for nodes, how in mine:
            add(maker, nodes, replica * step.degree, step.degree, how)
    return maker.made(f"degree {step.degree}, balanced, {name}")


def _cheapest(step: Step, add: AddLaid, options: list[_Jobs]) -> _Jobs:
    """The cheapest way to compute a replica's trees."""
    if len(options) == 1:
        return options[0]
    alone = replace(step, world=step.degree)
    return min(options, key=lambda jobs: step.costs.of(step.shape, _of_replicas(alone, add, [jobs], "")))


def _best_lay(step: Step, add: AddLaid, nodes: tuple[int, ...]) -> tuple[int, Lay]:
    """(time, how) of the cheapest way to play one job: first where leaves lie, then the pieces."""

    def cost(how: Lay) -> tuple[bool, int]:
        maker = Maker(step.shape)
        add(maker, nodes, 0, step.degree, how)
        return step.costs.of(step.shape, maker.made(""))

    inner, leaves = split_inner(step.shape, nodes)
    best = min(_lays(step, inner if add is _blocks else (), leaves), key=cost)
    best = min([best, *[best._replace(pieces=k) for k in (2, 4) if k < step.degree]], key=cost)
    return cost(best)[1], best


dcp_fused = balanced(_blocks)
dcp_phased = balanced(_phased_blocks)
