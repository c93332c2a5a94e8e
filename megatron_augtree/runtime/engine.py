"""Plays a plan's events around a model.

Log-probs are small, hidden states are not: after a pass's forward its scored rows' values are shared within
the block, and the loss sees *whole sequences*, as if there were no context parallelism. It answers with
gradients of logical rows; indexing adds them up to gradients of rows, and those are the roots of the pass's
backward. So a loss may couple the tokens of a sequence (GSPO) whatever the layout, and counts are global by
construction.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.attention.kernels.protocol import Kernel
from megatron_augtree.planning.compiler import compile_pass
from megatron_augtree.planning.plan import Pass, Plan
from megatron_augtree.planning.schedule import Program, reverse
from megatron_augtree.planning.timeline import span_name
from megatron_augtree.planning.tree import Forest
from megatron_augtree.runtime.buffers import to_device
from megatron_augtree.runtime.layout import LocalRows, PassLayout, SequenceLayout
from megatron_augtree.runtime.offload import HostMemory, host_streams
from megatron_augtree.runtime.prefetch import Prefetch, Split, split
from megatron_augtree.runtime.prompt_state import PromptState
from megatron_augtree.runtime.streams import Streams
from megatron_augtree.runtime.trace import Trace
from megatron_augtree.runtime.transport import Transport
from megatron_augtree.runtime.tree_attention import PassContext


@dataclass(frozen=True)
class SequenceValues:
    """Whole sequences, as a loss sees them.

    Attributes:
        index: [n] their numbers in the caller's order.
        offsets: [n + 1] int64 bounds of each one's rows.
        values: [N, k] values of their logical rows in token order: log-prob, then entropy if asked for.
    """

    index: tuple[int, ...]
    offsets: Tensor
    values: Tensor


#: Takes whole sequences, returns this call's additive share of the loss and of scalar metrics. Metrics
#: whose names begin with ``min/`` or ``max/`` are reduced so, all others are added.
LossFn = Callable[[SequenceValues], tuple[Tensor, dict[str, Tensor]]]
#: Runs the model over local rows: [n, k] values of the scored ones, connected to the graph even where
#: n is 0.
ModelFn = Callable[[LocalRows, PassContext], Tensor]


@dataclass
class StepResult:
    """What a step gave, the same on every rank.

    Attributes:
        loss: sum of the loss function's shares over all sequences.
        metrics: its metrics, reduced.
        values: [N, k] values of all logical rows in the caller's order, if they were asked for.
    """

    loss: float
    metrics: dict[str, float]
    values: Tensor | None = None


@dataclass
class _Played:
    """A pass between its forward and its backward."""

    output: Tensor
    values: Tensor
    gradient: Tensor


@dataclass
class Engine:
    """Plays one plan for one forest, any number of times.

    Attributes:
        plan, forest: the step.
        model: the model callable.
        transport, kernel: what passes run on.
        device: where local tensors are made.
        trace: where spans are recorded, or None.
        keep_attention: layers, from the first, that keep their attention where they are recomputed; -1: all.
            Of passes that do not say it themselves.
        trim: called before a pass runs, forward or backward, while others wait for their backward: gives back
            to the system what was freed around what they keep. None: freed memory stays where it is.
    """

    plan: Plan
    forest: Forest
    model: ModelFn
    transport: Transport
    kernel: Kernel
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    trace: Trace | None = None
    keep_attention: int = 0
    trim: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.plan.check_fits(self.forest.shape, self.transport.world)
        self.layouts = [PassLayout(p, self.forest) for p in self.plan.passes]
        self.sequences = SequenceLayout(self.plan, self.forest, self.layouts)
        self._backward: dict[int, Program] = {}
        self._split: dict[int, Split] = {}

    def play(
        self,
        loss_fn: LossFn | None = None,
        *,
        scale: float = 1.0,
        forward_only: bool = False,
        collect: bool = False,
    ) -> StepResult:
        """Play all events.

        Args:
            loss_fn: the loss; None only computes values.
            scale: factor on every gradient root (Megatron's loss scaling).
            forward_only: no graph, no backward.
            collect: return the values of all logical rows on every rank.

        Returns:
            The step's result.
        """
        run = _Run(self, loss_fn, scale, forward_only or loss_fn is None)
        for action, pass_id in self.plan.events:
            p = self.plan.passes[pass_id]
            if not self.transport.hosts(p.block):
                continue
            (run.forward if action == "forward" else run.backward)(p)
        return run.result(collect)

    def forward(self, p: Pass, states: dict[int, PromptState], *, forward_only: bool) -> Tensor:
        """[n, k] values of the scored rows of a pass on this process's ranks, one rank after the other.

        Args:
            p: the pass.
            states: pass -> its keys and values: of those that it reads, and its own if later ones read it.
            forward_only: nothing is kept for a backward.
        """
        local = self.layouts[p.id].local(self.transport.hosts(p.block), self.device)
        context = self.context(p, states, forward_only=forward_only)
        with context.playing():
            return self.model(local, context)

    def context(self, p: Pass, states: dict[int, PromptState], *, forward_only: bool = False) -> PassContext:
        """What attention needs to know of a pass."""
        if p.id not in self._backward:
            self._backward[p.id] = reverse(self.plan.program(p.id), keep=p.keep)
        reads = {read: states[read] for read in p.reads}
        rests = p.offload and not forward_only and self._host_streams is not None
        own_state = states.get(p.id)
        if own_state is not None:
            own_state.alone = rests
        keep_attention = self.keep_attention if p.keep_layers < 0 else p.keep_attention
        return PassContext(
            block=p.block,
            forward=self.plan.program(p.id),
            backward=self._backward[p.id],
            keep=p.keep,
            transport=self.transport,
            kernel=self.kernel,
            states=reads,
            own_state=own_state,
            trace=self.trace,
            keep_layers=p.keep_layers,
            keep_attention=0 if forward_only else keep_attention,
            prefetch=self._prefetch(p, reads) if p.prefetch else None,
            rest=HostMemory(self._host_streams, self.device) if rests else None,
        )

    def _prefetch(self, p: Pass, reads: dict[int, PromptState]) -> Prefetch | None:
        """What is sent a layer ahead; None where the pass fetches nothing from prompt state."""
        if p.id not in self._split:
            self._split[p.id] = split(self.plan.program(p.id))
        parts = self._split[p.id]
        return Prefetch(parts, p.block, self.transport, reads) if parts.ahead.transfers else None

    @functools.cached_property
    def _host_streams(self) -> Streams | None:
        return host_streams(self.device)

    def idle_context(self) -> PassContext:
        """A pass without rows on one of this process's ranks: the model runs, nothing is exchanged."""
        program = compile_pass(self.forest.shape, ((),))
        return PassContext(
            block=(self.transport.hosts(range(self.transport.world))[0],),
            forward=program,
            backward=reverse(program, keep=True),
            keep=True,
            transport=self.transport,
            kernel=self.kernel,
        )


class PassRunner:
    """One playing of a plan's passes: prompt state between them, a forward and a backward of each.

    Args:
        engine: the engine.
        forward_only: no graph, no backward.
    """

    def __init__(self, engine: Engine, forward_only: bool) -> None:
        self.engine, self.forward_only = engine, forward_only
        self.states = {pass_id: PromptState() for pass_id in engine.plan.provides}
        self._waiting: set[int] = set()

    def model_forward(self, p: Pass) -> Tensor:
        """[n, k] values of the scored rows of a pass on this process's ranks, one rank after the other."""
        self._trim(p)
        self._waiting.add(p.id)
        with torch.set_grad_enabled(not self.forward_only), self._span(p, "forward"):
            return self.engine.forward(p, self.states, forward_only=self.forward_only)

    def model_backward(self, p: Pass, output: Tensor, roots: Tensor) -> None:
        """Send a pass's gradients [n, k] through its graph, and forget its prompt state.

        Also where no row carries a loss: other ranks wait for this rank's dK and dV.
        """
        if not self.forward_only:
            self._trim(p)
            with self._span(p, "backward"):
                torch.autograd.backward([output], [roots])
        self._waiting.discard(p.id)
        self.states.pop(p.id, None)

    def _trim(self, p: Pass) -> None:
        if self.engine.trim is not None and self._waiting - {p.id}:
            self.engine.trim()

    def _span(self, p: Pass, name: str):
        trace = self.engine.trace
        rank = p.block[self.engine.transport.hosts(p.block)[0]]
        return trace.span(rank, span_name(p, name), "pass") if trace is not None else nullcontext()


class _Run(PassRunner):
    """The loss is evaluated by every rank of a block: all of them hold all groups."""

    def __init__(self, engine: Engine, loss_fn: LossFn | None, scale: float, forward_only: bool) -> None:
        super().__init__(engine, forward_only)
        self.loss_fn, self.scale = loss_fn, scale
        self.played: dict[int, _Played] = {}
        self.shares = Shares()
        self.collected: dict[int, Tensor] = {}
        self.width = 1
        self.dtype = torch.float64

    def forward(self, p: Pass) -> None:
        """Run the model over a pass; sequences that it completes go to the loss at once."""
        engine, layout = self.engine, self.engine.layouts[p.id]
        hosts = engine.transport.hosts(p.block)
        output = self.model_forward(p)
        self.width, self.dtype = output.shape[1], output.dtype
        mine = dict(zip(hosts, output.detach().split([layout.counts[r] for r in hosts])))
        values = engine.transport.share(p.block, mine, layout.counts, output.shape[1], output.detach())
        self.played[p.id] = _Played(output, values, torch.zeros_like(values))
        sequences = engine.sequences.completed[p.id]
        if sequences:
            self._complete(p, sequences)

    def _complete(self, p: Pass, sequences: Sequence[int]) -> None:
        """Whole sequences have their values: ask the loss for its share and for their gradients."""
        places = [self.engine.sequences.places(s) for s in sequences]
        parts = [self._read(*place) for place in places]
        counts = torch.tensor([0, *[len(part) for part in parts]])
        values = torch.cat(parts).requires_grad_(not self.forward_only)
        counted = 0 in self.engine.transport.hosts(p.block)
        if counted:
            self.collected |= dict(zip(sequences, parts))
        if self.loss_fn is None:
            return
        with torch.set_grad_enabled(not self.forward_only):
            loss, metrics = self.loss_fn(SequenceValues(tuple(sequences), counts.cumsum(0), values))
        if counted:
            self.shares.add(loss, metrics)
        if not self.forward_only and loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss * self.scale, values)
            for place, part in zip(places, gradient.split([len(x) for x in parts])):
                self._write(*place, part)

    def _read(self, passes: np.ndarray, slots: np.ndarray) -> Tensor:
        out = torch.empty((len(passes), self.width), dtype=self.dtype, device=self.engine.device)
        for pass_id in np.unique(passes):
            where = np.flatnonzero(passes == pass_id)
            out[self._index(where)] = self.played[int(pass_id)].values[self._index(slots[where])]
        return out

    def _write(self, passes: np.ndarray, slots: np.ndarray, gradient: Tensor) -> None:
        for pass_id in np.unique(passes):
            where = np.flatnonzero(passes == pass_id)
            self.played[int(pass_id)].gradient.index_add_(
                0, self._index(slots[where]), gradient[self._index(where)]
            )

    def _index(self, numbers: np.ndarray) -> Tensor:
        return to_device(numbers, self.engine.device)

    def backward(self, p: Pass) -> None:
        """Send a pass's gradients through its graph, and forget it."""
        played, layout = self.played.pop(p.id), self.engine.layouts[p.id]
        hosts = self.engine.transport.hosts(p.block)
        self.model_backward(
            p, played.output, torch.cat([played.gradient[layout.span(rank)] for rank in hosts])
        )

    def result(self, collect: bool) -> StepResult:
        """Loss and metrics over all ranks."""
        transport = self.engine.transport
        loss, metrics = 0.0, {}
        for text in transport.same(json.dumps(self.shares.read())):
            share, found = json.loads(text)
            loss += share
            for name, value in found.items():
                metrics[name] = reduce_metric(name, metrics.get(name), value)
        return StepResult(loss, metrics, self._collect() if collect else None)

    def _collect(self) -> Tensor:
        logical = self.engine.forest.logical
        bounds = np.concatenate([[0], np.cumsum([len(rows) for rows in logical])])
        width = int(self.engine.transport.total(torch.tensor(self.width), "max"))
        dense = torch.zeros((int(bounds[-1]), width), dtype=torch.float64)
        for sequence, part in self.collected.items():
            dense[bounds[sequence] : bounds[sequence + 1]] = part.to("cpu", torch.float64)
        return self.engine.transport.total(dense)


class Shares:
    """Shares of the loss and of metrics, call by call: only `read`, at the end, waits for the device."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._metrics: dict[str, list[Tensor]] = {}

    def add(self, loss: Tensor, metrics: Mapping[str, Tensor | float]) -> None:
        """Scalars of one call."""
        shares = {name: torch.as_tensor(value).detach().reshape(()) for name, value in metrics.items()}
        self._losses.append(loss.detach().reshape(()))
        for name, value in shares.items():
            self._metrics.setdefault(name, []).append(value)

    def read(self) -> tuple[float, dict[str, float]]:
        """The loss and the metrics of all calls."""
        metrics = {
            name: functools.reduce(functools.partial(reduce_metric, name), _numbers(values))
            for name, values in self._metrics.items()
        }
        return sum(_numbers(self._losses)), metrics


def _numbers(values: Sequence[Tensor]) -> list[float]:
    """Scalars of any type, some perhaps on a device, read at once."""
    device = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([value.double().to(device) for value in values]).tolist() if values else []


def reduce_metric(name: str, old: float | None, new: float) -> float:
    """Two shares of a metric as one: the smaller, the larger or the sum, as its name says; see `LossFn`."""
    if old is None:
        return new
    if name.startswith("min/"):
        return min(old, new)
    return max(old, new) if name.startswith("max/") else old + new
