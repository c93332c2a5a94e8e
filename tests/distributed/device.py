"""A device that is not there: streams, events and a communication library that know what waits for what.

Every torch operation is noted with the stream that it would run on and the memory that it reads and writes.
Streams have vector clocks; an event is a copy of one, a wait takes it over. Two uses of the same memory on
different streams, one of them a write, with neither waiting for the other, are a race. Numbers are computed
at once, so this finds races without the luck that a real device would need.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Event(dict):
    """A vector clock; `label` is the function that made it and its stream."""

    label = ""


class Device(TorchDispatchMode):
    """Streams ``compute``, ``side`` and ``library``; use as a context around what is watched.

    Attributes:
        races: (stream, earlier stream, operation) of every race.
        drop: labels of events that are not waited for, to see that it is noticed.
        waited: labels of all events that were waited for.
    """

    def __init__(self, drop: str = "") -> None:
        super().__init__()
        self.current, self.drop = "compute", drop
        self.races: list[tuple[str, str, str]] = []
        self.waited: set[str] = set()
        self._clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        # Memory -> (stream, whether it wrote) -> when it last did: who waits for that waits for all before.
        self._uses: dict[int, dict[tuple[str, bool], int]] = defaultdict(dict)
        self._alive: list[torch.Tensor] = []  # memory that is used again is other memory here

    # What `runtime.streams.Streams` asks for.

    @contextmanager
    def on(self, stream: str):
        """Operations inside belong to a stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def side(self):
        return self.on("side")

    def mark(self) -> Event:
        event = Event(self._clocks[self.current])
        event.label = f"{sys._getframe(1).f_code.co_name} on {self.current}"
        return event

    def wait(self, event: Event) -> None:
        self.waited.add(event.label)
        if event.label == self.drop:
            return
        clock = self._clocks[self.current]
        for stream, tick in event.items():
            clock[stream] = max(clock[stream], tick)

    # What is watched.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        arguments, returns = func._schema.arguments, func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return result  # a view touches no memory
        given = {a.name: value for a, value in zip(arguments, args)} | (kwargs or {})
        written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        clock = self._clocks[self.current]
        clock[self.current] += 1
        for name, value in given.items():
            self._use(value, name in written, func)
        if not written and "empty" not in func.__name__:
            self._use(result, True, func)
        return result

    def _use(self, values, write: bool, func) -> None:
        clock = self._clocks[self.current]
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            self._alive.append(tensor)
            uses = self._uses[tensor.untyped_storage()._cdata]
            for (stream, wrote), tick in uses.items():
                if stream != self.current and (write or wrote) and clock[stream] < tick:
                    self.races.append((self.current, stream, func.__name__))
            uses[self.current, write] = clock[self.current]

    # The communication library, as `torch.distributed`.

    def torch_dist(self, world: int, rank: int) -> SimpleNamespace:
        """Of a process group where the others send zeros."""
        return SimpleNamespace(
            get_world_size=lambda group=None: world, get_rank=lambda group=None: rank,
            get_backend=lambda group=None: "fake", all_reduce=lambda values, **_: None,
            all_gather_object=lambda texts, text, group=None: texts.__setitem__(slice(None), [text] * world),
            ReduceOp=SimpleNamespace(SUM=0, MIN=1, MAX=2), isend="isend", irecv="irecv",
            P2POp=lambda kind, tensor, peer, group: (kind, tensor),
            batch_isend_irecv=self._batch)

    def _batch(self, operations):
        started = self.mark()
        started.label = "library"
        with self.on("library"):
            self.wait(started)
            for kind, tensor in operations:
                tensor.clone() if kind == "isend" else tensor.zero_()
            done = self.mark()
        done.label = "work"
        return [SimpleNamespace(wait=lambda: self.wait(done))]


class NoStreams:
    """`Streams` of a device that does one thing after the other: the host's own memory."""

    @contextmanager
    def side(self):
        yield

    def mark(self) -> None:
        return None

    def wait(self, event: None) -> None:
        """Everything is done."""
