"""Values of whole sequences to the rank that gave them, and their gradients back.

In an RL trainer every rank has its own samples, and its loss knows only those. So the values of a sequence's
rows travel from the ranks that computed them to its *giver*, and gradients travel back. Nothing else is
shared: a rank is sent what it gave.

When to exchange is decided for all ranks at once, from the plan, in *windows*. Every rank of the pool has a
clock. An event of a block stands in the window that the latest clock of its ranks shows; a forward that
completes sequences ends the window for its ranks:

    rank 0 1   | F0 ------ x | B0 ------ |          F0 completes a, B0 is its backward
    rank 2 3   | F1 F2 --- x | B2 F3 - x | B3 B1    F1 completes nothing, F2 and F3 are waves
    windows    | 0           | 1         | 2

Every rank plays its events of window w, then exchange w (x), then window w + 1. An exchange is point to
point, with counts that both ends know from the plan. A rank waits in exchange w for nothing but events of
windows up to w and for exchanges before, so there is no cyclic wait, whatever the blocks are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.planning.plan import Event, Pass, Plan
from megatron_augtree.planning.tree import Forest
from megatron_augtree.runtime.buffers import to_device
from megatron_augtree.runtime.engine import Engine, PassRunner
from megatron_augtree.runtime.layout import PassLayout, SequenceLayout
from megatron_augtree.runtime.transport import Transport


class Message(NamedTuple):
    """Rows that one rank computed and one giver asks for.

    Attributes:
        parts: (pass, [m] indices among the scored rows of the sender in it), each row once.
        count: rows of all parts.
    """

    parts: tuple[tuple[int, np.ndarray], ...]
    count: int


class Reading(NamedTuple):
    """How a giver finds its sequences' rows in what it was sent.

    Attributes:
        sequences: their numbers.
        counts: [n] logical rows of each.
        rows: [N] for every logical row, its index in the messages of all senders, one after the other.
        repeats: index lists of logical rows: a row that m of them read is in m different lists.
    """

    sequences: tuple[int, ...]
    counts: tuple[int, ...]
    rows: np.ndarray
    repeats: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Exchange:
    """What travels after one window.

    Attributes:
        messages: (sender, giver), pool ranks -> rows.
        readings: giver -> its sequences.
    """

    messages: Mapping[tuple[int, int], Message]
    readings: Mapping[int, Reading]


@dataclass(frozen=True)
class Routing:
    """A plan's events in windows, and the exchange that ends each."""

    windows: tuple[tuple[Event, ...], ...]
    exchanges: tuple[Exchange, ...]


def cut_windows(plan: Plan, completes: Sequence[bool]) -> tuple[tuple[Event, ...], ...]:
    """The plan's events by window, in their order; see the module's docstring.

    Args:
        plan: the plan.
        completes: [pass] whether its forward completes sequences.
    """
    clock, windows = [0] * plan.world, []
    for event in plan.events:
        block = plan.passes[event.pass_id].block
        window = max(clock[rank] for rank in block)
        ends = event.action == "forward" and completes[event.pass_id]
        for rank in block:
            clock[rank] = window + ends
        windows += [[] for _ in range(window + 1 - len(windows))]
        windows[window].append(event)
    return tuple(map(tuple, windows))


def pass_windows(plan: Plan) -> list[int]:
    """[pass] window of a fused plan's passes where each backward follows its forward: micro-batches.

    A rank has at most one pass in a window.
    """
    clock, windows = [0] * plan.world, []
    for p in plan.passes:
        window = max(clock[rank] for rank in p.block)
        for rank in p.block:
            clock[rank] = window + 1
        windows.append(window)
    return windows


def route(plan: Plan, forest: Forest, givers: Sequence[int], *, by_pass: bool = False) -> Routing:
    """Windows and exchanges of a plan.

    Args:
        plan, forest: the step.
        givers: [sequence] pool rank that gave it.
        by_pass: windows are micro-batches (`pass_windows`); their events are not listed.
    """
    layouts = [PassLayout(p, forest) for p in plan.passes]
    sequences = SequenceLayout(plan, forest, layouts)
    if by_pass:
        of_pass = pass_windows(plan)
        windows = ((),) * (max(of_pass, default=-1) + 1)
    else:
        windows = cut_windows(plan, [bool(found) for found in sequences.completed])
        where = {event: w for w, events in enumerate(windows) for event in events}
        of_pass = [where[Event("forward", p.id)] for p in plan.passes]
    done: list[list[int]] = [[] for _ in windows]
    for p, window in enumerate(of_pass):
        done[window] += sequences.completed[p]
    table = _Slots(plan.passes, layouts)
    return Routing(windows, tuple(_exchange(table, sequences, found, givers) for found in done))


class _Slots:
    """Scored rows of all passes, numbered through: pass after pass, block rank after block rank."""

    def __init__(self, passes: Sequence[Pass], layouts: Sequence[PassLayout]) -> None:
        counts = [count for layout in layouts for count in layout.counts]
        self.bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self.pool_rank = np.asarray([rank for p in passes for rank in p.block], np.int64)
        self.pass_id = np.asarray([p.id for p in passes for _ in p.block], np.int64)
        firsts = np.cumsum([0, *[len(p.block) for p in passes]])
        self.pass_start = self.bounds[firsts[:-1]] if len(passes) else np.zeros(0, np.int64)

    @property
    def total(self) -> int:
        return int(self.bounds[-1])

    def holder(self, slots: np.ndarray) -> np.ndarray:
        """[m] number of the (pass, block rank) that holds each."""
        return np.searchsorted(self.bounds, slots, side="right") - 1


def _exchange(
    table: _Slots, sequences: SequenceLayout, done: Sequence[int], givers: Sequence[int]
) -> Exchange:
    by_giver: dict[int, list[int]] = {}
    for sequence in done:
        by_giver.setdefault(givers[sequence], []).append(sequence)
    messages: dict[tuple[int, int], Message] = {}
    readings: dict[int, Reading] = {}
    for giver in sorted(by_giver):
        places = [sequences.places(s) for s in by_giver[giver]]
        slots = np.concatenate([table.pass_start[passes] + slot for passes, slot in places])
        wanted, inverse = np.unique(slots, return_inverse=True)
        holder = table.holder(wanted)
        source = table.pool_rank[holder]
        order = np.argsort(source, kind="stable")
        position = np.empty_like(order)
        position[order] = np.arange(len(order))
        rows = position[inverse.reshape(-1)]
        counts = tuple(len(slot) for _, slot in places)
        readings[giver] = Reading(tuple(by_giver[giver]), counts, rows, _repeats(rows))
        for rank in np.unique(source):
            mine = order[source[order] == rank]
            messages[int(rank), giver] = _message(table, wanted[mine], holder[mine])
    return Exchange(messages, readings)


def _message(table: _Slots, slots: np.ndarray, holder: np.ndarray) -> Message:
    parts = []
    for h in np.unique(holder):
        parts.append((int(table.pass_id[h]), slots[holder == h] - table.bounds[h]))
    return Message(tuple(parts), len(slots))


def _repeats(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Logical rows in lists that hold no row twice: gradients add up in one order, so to the same bits."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(rows) else order
    turn = np.arange(len(rows)) - np.repeat(first, np.diff([*first, len(rows)]))
    return tuple(np.sort(order[turn == t]) for t in range(int(turn.max()) + 1 if len(rows) else 0))


@dataclass
class Courier:
    """Carries one playing's values and gradients.

    Attributes:
        transport: the pool.
        like: [0, k] tensor of the values' type, device and width.
    """

    transport: Transport
    like: Tensor

    def __post_init__(self) -> None:
        self._mine = frozenset(self.transport.hosts(range(self.transport.world)))

    def collect(self, exchange: Exchange, values_of: Callable[[int, int], Tensor]) -> dict[int, Tensor]:
        """[N, k] values of the logical rows of every giver of this process.

        Args:
            exchange: what travels.
            values_of: (pass, pool rank) -> [n, k] values of the rank's scored rows in the pass.
        """
        sent = {
            (src, giver): torch.cat([values_of(p, src)[self._index(slots)] for p, slots in message.parts])
            for (src, giver), message in exchange.messages.items()
            if src in self._mine
        }
        arrived = self.transport.deliver(sent, self._counts(exchange), self.like)
        found = {}
        for giver, reading in exchange.readings.items():
            if giver in self._mine:
                whole = torch.cat([arrived[pair] for pair in sorted(arrived) if pair[1] == giver])
                found[giver] = whole[self._index(reading.rows)]
        return found

    def give_back(
        self,
        exchange: Exchange,
        gradients: Mapping[int, Tensor],
        gradient_of: Callable[[int, int], Tensor],
    ) -> None:
        """Gradients of logical rows to the ranks that computed them, added up by row.

        Args:
            exchange: what travelled.
            gradients: giver -> [N, k].
            gradient_of: (pass, pool rank) -> [n, k] accumulator, a view.
        """
        sent = {}
        for giver, gradient in gradients.items():
            reading = exchange.readings[giver]
            pairs = [pair for pair in sorted(exchange.messages) if pair[1] == giver]
            sizes = [exchange.messages[pair].count for pair in pairs]
            whole = self.like.new_zeros((sum(sizes), *self.like.shape[1:]))
            for logical in reading.repeats:
                whole.index_add_(0, self._index(reading.rows[logical]), gradient[self._index(logical)])
            sent |= {(giver, src): part for (src, _), part in zip(pairs, whole.split(sizes))}
        counts = {(giver, src): count for (src, giver), count in self._counts(exchange).items()}
        arrived = self.transport.deliver(sent, counts, self.like)
        for giver, src in sorted(arrived):
            if src in self._mine:
                parts = exchange.messages[src, giver].parts
                pieces = arrived[giver, src].split([len(slots) for _, slots in parts])
                for (pass_id, slots), piece in zip(parts, pieces):
                    gradient_of(pass_id, src).index_add_(0, self._index(slots), piece)

    def _counts(self, exchange: Exchange) -> dict[tuple[int, int], int]:
        return {
            pair: message.count
            for pair, message in exchange.messages.items()
            if pair[0] in self._mine or pair[1] in self._mine
        }

    def _index(self, numbers: np.ndarray) -> Tensor:
        return to_device(numbers, self.like.device)


#: Takes a giver, its sequences and their values [N, k] by logical row; returns the gradient [N, k], or None
#: for zeros. It is called for every giver of the process, in every exchange that brings it sequences.
Answer = Callable[[int, Reading, Tensor], Tensor | None]


class RoutedRun(PassRunner):
    """Plays a plan in windows: the loss of a sequence is evaluated where it was given.

    Args:
        engine: the engine.
        routing: of its plan.
        answer: what givers say to their values.
        like: [0, k] tensor of the values' type, device and width.
        forward_only: no graph, no backward.
    """

    def __init__(
        self, engine: Engine, routing: Routing, answer: Answer, like: Tensor, forward_only: bool
    ) -> None:
        super().__init__(engine, forward_only)
        self.routing, self.answer = routing, answer
        self.courier = Courier(engine.transport, like)
        self.outputs: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def play(self) -> None:
        """All windows."""
        for events, exchange in zip(self.routing.windows, self.routing.exchanges):
            for action, pass_id in events:
                p = self.engine.plan.passes[pass_id]
                if self.engine.transport.hosts(p.block):
                    (self._forward if action == "forward" else self._backward)(p)
            if exchange.messages:
                self._exchange(exchange)

    def _forward(self, p: Pass) -> None:
        output = self.model_forward(p)
        self.outputs[p.id], self.values[p.id] = output, output.detach()
        self.gradients[p.id] = torch.zeros_like(self.values[p.id])

    def _backward(self, p: Pass) -> None:
        del self.values[p.id]
        self.model_backward(p, self.outputs.pop(p.id), self.gradients.pop(p.id))

    def _exchange(self, exchange: Exchange) -> None:
        found = self.courier.collect(exchange, lambda p, rank: self._of_rank(self.values, p, rank))
        answers = {
            giver: self.answer(giver, exchange.readings[giver], values) for giver, values in found.items()
        }
        if not self.forward_only:
            gradients = {
                giver: torch.zeros_like(found[giver]) if answer is None else answer
                for giver, answer in answers.items()
            }
            self.courier.give_back(
                exchange, gradients, lambda p, rank: self._of_rank(self.gradients, p, rank)
            )

    def _of_rank(self, tensors: dict[int, Tensor], pass_id: int, rank: int) -> Tensor:
        """A rank's rows of a pass: hosted ranks lie one after the other."""
        return rows_of_rank(self.engine, tensors[pass_id], pass_id, rank)


def rows_of_rank(engine: Engine, hosted: Tensor, pass_id: int, rank: int) -> Tensor:
    """[n, k] view: one pool rank's part of the values of a pass on all ranks of this process."""
    p, layout = engine.plan.passes[pass_id], engine.layouts[pass_id]
    me = p.block.index(rank)
    start = sum(layout.counts[r] for r in engine.transport.hosts(p.block) if r < me)
    return hosted[start : start + layout.counts[me]]
