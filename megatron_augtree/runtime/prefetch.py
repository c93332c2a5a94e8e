"""Prompt keys and values of the next layer, sent while this one computes.

A wave reads prompt state, and the state of every layer is there before the wave begins. So what a layer
fetches from state may leave while the layer before it computes: under the rest of its attention, its output
projection, its MLP, and the next layer's norm and QKV. Only this is sent ahead; keys of the wave's own rows,
queries and partial results are made by the layer itself, and what is handed on inside a node has to arrive
first. They travel in their stages as always.

    without    layer l:    [stage 0 | fetch] [stage 1] ..     layer l + 1:    [stage 0 | fetch] [stage 1] ..
    with       layer l:    [stage 0] [stage 1] ..  fetch of l + 1 . . . .      [stage 0] [stage 1] ..

The order of messages is that of the program on every rank: a layer's fetch ahead is posted right behind the
last transfers of the layer before it, so it holds up none of them; the first layer's at the beginning of the
pass. It lands before the stage that first uses it. The bytes are those of the program; all stages' fetches
from one rank to another are one message. Keys and values only land by copy and tiles keep their stages, so
the bits are those of the run without.

In a recomputed layer's repetition, and where a backward fetches keys and values again, nothing is sent ahead:
there the exchange stays with the layer that repeats it. A pass ends with nothing under way, also one that
fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megatron_augtree.planning.compiler import state_buffer
from megatron_augtree.planning.schedule import Payload, Program, Stage, Transfer
from megatron_augtree.runtime.buffers import Buffers
from megatron_augtree.runtime.messages import FieldSpec
from megatron_augtree.runtime.prompt_state import PromptState
from megatron_augtree.runtime.transport import Transport


@dataclass(frozen=True)
class Split:
    """A forward program in two parts.

    Attributes:
        ahead: the transfers from prompt state, as one stage without tiles.
        rest: the program without them; its stages are the same in number and tiles.
        first_use: the stage of `rest` before which `ahead` has to have landed.
        last_post: the last stage of `rest` with transfers; 0 where none has.
    """

    ahead: Stage
    rest: Program
    first_use: int
    last_post: int


def split(program: Program) -> Split:
    """What of a forward program can be sent a layer ahead, and the rest."""
    ahead = tuple(t for stage in program.stages for t in stage.transfers if _from_state(t))
    stages = tuple(
        Stage(tuple(t for t in stage.transfers if not _from_state(t)), stage.tiles)
        for stage in program.stages
    )
    sinks = {(t.dst, t.sink.buffer) for t in ahead}
    uses = [index for index, stage in enumerate(stages) if not sinks.isdisjoint(_read(stage))]
    posts = [index for index, stage in enumerate(stages) if stage.transfers]
    return Split(
        Stage(ahead, ((),) * program.world),
        replace(program, stages=stages),
        first_use=min(uses, default=0),
        last_post=max(posts, default=0),
    )


def _from_state(transfer: Transfer) -> bool:
    return transfer.payload is Payload.KV and transfer.source.buffer.startswith(state_buffer(""))


def _read(stage: Stage) -> set[tuple[int, str]]:
    """(rank, buffer) of the keys that a stage's tiles use and its transfers hand on."""
    tiles = {(rank, tile.kv.buffer) for rank, mine in enumerate(stage.tiles) for tile in mine}
    return tiles | {(t.src, t.source.buffer) for t in stage.transfers}


@dataclass
class Flight:
    """One layer's fetch ahead.

    Attributes:
        prefetch: the pass's.
        layer: layer number.
        buffers: block rank -> the buffers that are fetched into.
        posted: what `land` takes; None once it has landed.
    """

    prefetch: Prefetch
    layer: int
    buffers: dict[int, Buffers]
    posted: object | None

    def before(self, index: int) -> bool:
        """Whether this flight has to land before stage `index` of the rest begins."""
        return self.posted is not None and index >= self.prefetch.split.first_use

    def land(self) -> None:
        """Wait for it and write it; a second call does nothing."""
        posted, self.posted = self.posted, None
        if posted is not None:
            self.prefetch.transport.land(posted)

    def after_post(self, index: int) -> None:
        """Stage `index` has posted its transfers: behind the last ones the next layer's fetch leaves."""
        if index == self.prefetch.split.last_post:
            self.prefetch.post(self.layer + 1)


@dataclass
class Prefetch:
    """What one playing of a pass's forward sends ahead.

    Attributes:
        split: its program in two parts.
        block: pool ranks of the pass.
        transport: what carries it.
        states: state of the passes it reads.
    """

    split: Split
    block: Sequence[int]
    transport: Transport
    states: Mapping[int, PromptState]
    _open: bool = False
    _flights: dict[int, Flight] = field(default_factory=dict)

    def begin(self) -> None:
        """The forward begins: the first layer's fetch leaves."""
        self._open = True
        self.post(0)

    def post(self, layer: int) -> None:
        """A layer's fetch leaves, if there is such a layer and the forward is still on."""
        hosts = self.transport.hosts(self.block)
        known = all(state.has(layer, rank) for state in self.states.values() for rank in hosts)
        if not (self._open and known):
            return
        buffers = {rank: self._sinks(layer, rank) for rank in hosts}
        held = {rank: {**buffers[rank], **self._sources(layer, rank)} for rank in hosts}
        fields = next(iter(self.states.values())).read(layer, hosts[0])
        spec = FieldSpec(
            {name: tuple(fields[name].shape[1:]) for name in ("k", "v")},
            {name: fields[name].dtype for name in ("k", "v")},
        )
        self.transport.start()
        posted = self.transport.post(self.block, self.split.ahead, held, spec, ahead=True)
        self._flights[layer] = Flight(self, layer, buffers, posted)

    def take(self, layer: int) -> Flight | None:
        """A layer's fetch, under way; None in a repetition, which fetches for itself."""
        return self._flights.pop(layer, None)

    def finish(self) -> None:
        """The forward is over."""
        self._open = False
        while self._flights:
            self._flights.popitem()[1].land()

    def abandon(self) -> None:
        """The forward failed: wait for what is under way, and let the first error be the one that is told."""
        with suppress(Exception):
            self.finish()
        self._flights.clear()

    def _sources(self, layer: int, rank: int) -> Buffers:
        return {state_buffer(pass_id): state.read(layer, rank) for pass_id, state in self.states.items()}

    def _sinks(self, layer: int, rank: int) -> Buffers:
        like = next(iter(self.states.values())).read(layer, rank)
        sizes = self.split.rest.buffers[rank]
        names = dict.fromkeys(t.sink.buffer for t in self.split.ahead.transfers if t.dst == rank)
        return {
            name: {f: like[f].new_empty((sizes[name], *like[f].shape[1:])) for f in "kv"}
            for name in names
        }
