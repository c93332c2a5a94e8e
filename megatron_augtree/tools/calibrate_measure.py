"""Times of what a step is made of, on one rank of several: stages, tiles, products, layers, peaks of memory.

Curves are measured by the pieces that a step runs: `tree_attention` on programs of equal stages, the
device's attention kernel, a model of megatron-core's modules played by the engine. All sizes of a curve are
measured in turn, round after round, so that drift of the machine hits all alike; what counts is the median of
a size's rounds, averaged over ranks, which all measure at the same time, as they do in a step.

One code serves both devices: on a GPU a `Clock` reads CUDA events, on a CPU the host's clock.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_augtree.attention.kernels import Kernel, Segment, SegmentGrad, get_kernel
from megatron_augtree.attention.merge import merge_
from megatron_augtree.config import AugTreeConfig
from megatron_augtree.data.records import Group, Response
from megatron_augtree.mcore.cpu import trim_heap
from megatron_augtree.mcore.memory import PeakMemory
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from megatron_augtree.mcore.sampler import StepBatch, plan_step
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.schedule import HOME, Payload, Program, Stage, Tile, Transfer, reverse, rows
from megatron_augtree.runtime.engine import Engine, SequenceValues
from megatron_augtree.runtime.layout import LocalRows
from megatron_augtree.runtime.logprob import row_values
from megatron_augtree.runtime.transport import DistTransport, LocalTransport
from megatron_augtree.runtime.tree_attention import PassContext, tree_attention

#: Stages of a timed program: what they cost together is divided by them.
_STAGES = 4
#: Rounds of a curve, whatever the time; and at most.
_ROUNDS = 3, 100

Key = tuple[Any, ...]


class Clock:
    """Marks in time, on the device's own stream where it has one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """Now: when all that was given to the device is done."""
        if self.device.type == "cuda":
            return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter_ns()

    def between(self, start: Any, end: Any) -> float:
        """Nanoseconds."""
        if self.device.type == "cuda":
            end.synchronize()
            return start.elapsed_time(end) * 1e6
        return end - start


@dataclass(frozen=True)
class Sizes:
    """What is measured; odd numbers of sizes, so that fits hold out those between the ends.

    Attributes:
        model: flags of the model.
        sent: rows that a rank sends in a stage.
        queries, keys: of tiles.
        squares: rows of causal tiles.
        product_rows: rows of matrix products.
        layers, model_rows: of passes.
        peak_rows: rows of passes whose peak of memory is taken.
        repeats: calls of small work between two marks.
    """

    model: str
    sent: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    squares: tuple[int, ...]
    product_rows: tuple[int, ...]
    layers: tuple[int, ...]
    model_rows: tuple[int, ...]
    peak_rows: tuple[int, ...]
    repeats: int = 4


CPU = Sizes(
    model="--hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 1024 --vocab-size 4096 "
    "--dtype float32",
    sent=(1, 32, 128, 256, 512, 1024, 2048),
    queries=(1, 8, 32, 128, 512),
    keys=(64, 256, 1024),
    squares=(16, 64, 192, 512, 1024),
    product_rows=(1, 4, 16, 64, 128, 256, 1024),
    layers=(1, 2, 4),
    model_rows=(2, 16, 64, 128, 384),
    peak_rows=(128, 192, 256, 384, 512),
)
CUDA = Sizes(
    model="--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 16384 --vocab-size 32000 --dtype bfloat16",
    sent=(1, 64, 512, 2048, 4096, 8192, 16384),
    queries=(1, 16, 64, 256, 2048),
    keys=(512, 4096, 16384),
    squares=(64, 256, 1024, 2048, 8192),
    product_rows=(1, 16, 64, 256, 1024, 4096, 8192),
    layers=(1, 2, 4),
    model_rows=(8, 128, 512, 2048, 8192),
    peak_rows=(512, 1024, 2048, 4096, 8192),
    repeats=16,
)


class Bench:
    """One rank's measurements.

    Args:
        device: of this rank.
        sizes: what is measured.
        shape: sizes of one layer of the measured model.
        local_ranks: ranks of a node; 0: all of them.
    """

    def __init__(self, device: torch.device, sizes: Sizes, shape: ModelShape, local_ranks: int = 0) -> None:
        self.device, self.sizes, self.shape = device, sizes, shape
        self.dtype = torch.bfloat16 if shape.item_bytes == 2 else torch.float32
        self.transport = DistTransport()
        self.local_ranks = local_ranks or self.transport.world
        self.kernel: Kernel = get_kernel("auto", device)
        self.clock = Clock(device)
        self.scale = shape.k_dim**-0.5
        self.rounds: dict[str, int] = {}

    # Rounds.

    def curve(
        self, name: str, cases: Mapping[Key, Callable[[], Sequence[float]]], seconds: float
    ) -> dict[Key, tuple[float, ...]]:
        """Every case in turn, round after round: [case] medians of what it returns, ns, averaged over ranks.

        Args:
            name: of the curve.
            cases: key -> a call that returns times; all ranks give the same keys in the same order.
            seconds: for all rounds; the first, which warms up, does not count.
        """
        least, most = _ROUNDS
        times: dict[Key, list[Sequence[float]]] = {key: [] for key in cases}
        until = time.monotonic() + seconds
        done = -1
        while done < least or (done < most and self._more(until)):
            for key, run in cases.items():
                found = run()
                if done >= 0:
                    times[key].append(found)
            done += 1
        self.rounds[name] = done
        mine = [[statistics.median(column) for column in zip(*found)] for found in times.values()]
        everyones = [json.loads(text) for text in self.transport.same(json.dumps(mine))]
        return {
            key: tuple(statistics.fmean(column) for column in zip(*[found[i] for found in everyones]))
            for i, key in enumerate(cases)
        }

    def _more(self, until: float) -> bool:
        """Whether all ranks have time for another round."""
        left = torch.tensor(float(time.monotonic() < until), device=self.device)
        return bool(self.transport.total(left, "min"))

    def _timed(self, run: Callable[[], object], repeats: int = 1) -> tuple[float]:
        start = self.clock.mark()
        for _ in range(repeats):
            run()
        return (self.clock.between(start, self.clock.mark()) / repeats,)

    def draw(self, count: int, heads: int, width: int) -> Tensor:
        """Random numbers ``[count, heads, width]``."""
        return torch.randn(count, heads, width, device=self.device).to(self.dtype)

    # Stages.

    def stages(
        self, sent: int, tile: tuple[int, int], *, transfers: bool, across: bool = False
    ) -> Callable[[], tuple[float]]:
        """A stage's time, as the executor runs it.

        Args:
            sent: rows whose keys and values every rank sends, where there are `transfers`.
            tile: (queries, keys) that every rank computes meanwhile; (0, 0): nothing.
            transfers: they are sent.
            across: to the next node, not to the next rank of the node.
        """
        count = max(sent, *tile)
        peers = peers_of(self.transport.world, self.local_ranks, across=across)
        program = stages_program(peers, count, sent, tile, transfers=transfers)
        context = PassContext(
            block=tuple(range(self.transport.world)),
            forward=program,
            backward=reverse(program, keep=True),
            keep=False,
            transport=self.transport,
            kernel=self.kernel,
        )
        s = self.shape
        drawn = (
            self.draw(count, s.q_heads, s.k_dim),
            self.draw(count, s.kv_heads, s.k_dim),
            self.draw(count, s.kv_heads, s.v_dim),
        )

        def run() -> tuple[float]:
            with torch.no_grad():
                # Ranks begin together: only what a stage makes them wait is the stage's.
                self.transport.total(torch.zeros(1, device=self.device))
                (ns,) = self._timed(lambda: tree_attention(*drawn, context, 0, self.scale))
            return (ns / _STAGES,)

        return run

    def bytes_of(self, sent: int) -> int:
        """Bytes of `sent` rows of keys and values."""
        return sent * self.shape.kv_bytes

    def tile_lasting(self, ns: float) -> tuple[int, int]:
        """(queries, keys) of a tile that takes about so long."""
        queries, keys = self.sizes.queries[-1] // 4, self.sizes.keys[-1]
        once = self.curve("probe", {(): self.tile(queries, keys, causal=False)}, 0.0)[()][0]
        wanted = max(16, int(keys * ns / once))
        return queries, min(wanted, 64 * keys)

    # Tiles.

    def tile(self, queries: int, keys: int, *, causal: bool) -> Callable[[], tuple[float, float]]:
        """(forward, backward) of one tile with what joins its results to others, as the executor does."""
        s = self.shape
        repeats = self._repeats(queries * keys * s.pair_flops)
        q, k, v = (
            self.draw(queries, s.q_heads, s.k_dim),
            self.draw(keys, s.kv_heads, s.k_dim),
            self.draw(keys, s.kv_heads, s.v_dim),
        )
        dout = self.draw(queries, s.q_heads, s.v_dim)
        out, lse = (x.clone() for x in self.kernel.forward([Segment(q, k, v)], causal, self.scale)[0])
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]

        def forward() -> None:
            merge_(out, lse, *self.kernel.forward([Segment(q, k, v)], causal, self.scale)[0])

        def backward() -> None:
            segment = SegmentGrad(dout, q, k, v, out, lse)
            for into, part in zip(grads, self.kernel.backward([segment], causal, self.scale)[0]):
                into += part

        return lambda: (*self._timed(forward, repeats), *self._timed(backward, repeats))

    def _repeats(self, flops: int) -> int:
        """Small work is repeated between two marks."""
        return self.sizes.repeats if flops < self.shape.linear_flops * 64 else 1

    # Products.

    def product(self, count: int) -> Callable[[], tuple[float]]:
        """The MLP's first product over so many rows."""
        s, repeats = self.shape, self._repeats(count * self.product_flops)
        x = torch.randn(count, s.hidden, device=self.device).to(self.dtype)
        weight = torch.randn(s.ffn, s.hidden, device=self.device).to(self.dtype)
        return lambda: self._timed(lambda: torch.nn.functional.linear(x, weight), repeats)

    @property
    def product_flops(self) -> int:
        """Operations of a row in `product`."""
        return 2 * self.shape.hidden * self.shape.ffn

    # Passes.

    def step(self, model: torch.nn.Module, count: int) -> PassTimer:
        """A pass of a model over one causal sequence of so many rows; the last one is scored."""
        layers = model.config.num_layers
        shape = ModelShape(**{**vars(self.shape), "layers": layers})
        return PassTimer(model, one_sequence(count, shape), self.kernel, self.clock)

    def peak(self, timer: PassTimer) -> int:
        """Bytes that a pass needs above what was there before it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            timer()
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - before
        trim_heap()
        with PeakMemory(interval_s=0.0005) as memory:
            timer()
        return memory.above_start_bytes

    def host_copy(self, megabytes: int = 256) -> Callable[[], tuple[float]]:
        """There and back again between device and pinned host memory, ns a byte of one way."""
        device = torch.empty(megabytes << 20, dtype=torch.uint8, device=self.device)
        host = torch.empty(megabytes << 20, dtype=torch.uint8, pin_memory=True)

        def both() -> None:
            host.copy_(device, non_blocking=True)
            device.copy_(host, non_blocking=True)

        return lambda: (self._timed(both)[0] / (2 * (megabytes << 20)),)


def peers_of(world: int, local_ranks: int, *, across: bool) -> list[int]:
    """[rank] to whom it sends: the next rank of its node, or, `across`, its like on the next node."""
    if across or local_ranks == 1:
        return [(rank + local_ranks) % world for rank in range(world)]
    return [rank // local_ranks * local_ranks + (rank + 1) % local_ranks for rank in range(world)]


def stages_program(
    peers: Sequence[int], count: int, sent: int, tile: tuple[int, int], *, transfers: bool
) -> Program:
    """`_STAGES` equal stages.

    Args:
        peers: [rank] to whom it sends.
        count: rows of a rank.
        sent: rows that it sends, where there are `transfers`.
        tile: (queries, keys) that it computes; (0, 0): nothing.
        transfers: they are sent; without, everything else is the same.
    """
    buffers = tuple({HOME: count, **{f"kv/{i}": sent for i in range(_STAGES)}} for _ in peers)
    tiles = (Tile(rows(HOME, [(0, tile[0])]), rows(HOME, [(0, tile[1])]), False),) if all(tile) else ()
    source, stages = rows(HOME, [(0, sent)]), []
    for i in range(_STAGES):
        sink = rows(f"kv/{i}", [(0, sent)])
        moved = [Transfer(Payload.KV, rank, peer, source, sink) for rank, peer in enumerate(peers)]
        stages.append(Stage(tuple(moved) if transfers else (), (tiles,) * len(peers)))
    return Program(len(peers), ((),) * len(peers), buffers, tuple(stages))


def one_sequence(count: int, shape: ModelShape) -> StepBatch:
    """A step of one sequence, planned for one rank."""
    tokens = tuple(i % shape.vocab for i in range(1, count + 1))
    response = Response(tokens, (False,) * (count - 1) + (True,), advantage=1.0)
    return plan_step([Group("calibration", (0,), (response,))], shape, 1, AugTreeConfig(mode="gather-reuse"))


class PassTimer:
    """Forward and backward of one pass on this rank alone, as the engine plays it.

    Args:
        model: bound by `prepare_model`.
        batch: a step of one pass.
        kernel: of attention.
        clock: of the device.
    """

    def __init__(self, model: torch.nn.Module, batch: StepBatch, kernel: Kernel, clock: Clock) -> None:
        self.model, self.clock = model, clock
        self.engine = Engine(batch.plan, batch.forest, self._values, LocalTransport(1), kernel, clock.device)
        self.turned: Any = None

    @property
    def predicted_bytes(self) -> int:
        """Peak of memory, by the planner."""
        return self.engine.plan.peak_bytes

    def __call__(self) -> tuple[float, float]:
        """(forward, backward), ns; the loss counts as forward."""
        start = self.clock.mark()
        self.engine.play(self._loss)
        end = self.clock.mark()
        return self.clock.between(start, self.turned), self.clock.between(self.turned, end)

    def _values(self, local: LocalRows, context: PassContext) -> Tensor:
        targets = torch.empty_like(local.positions)
        targets[local.scored] = local.targets
        packed = AugTreePackedSeqParams(
            positions=local.positions,
            context=context,
            scored=local.scored,
            score=lambda logits, rows: row_values(logits, targets[rows]),
            last_position=local.last_position,
        )
        return self.model(local.inputs.unsqueeze(0), None, None, packed_seq_params=packed).squeeze(0)

    def _loss(self, values: SequenceValues) -> tuple[Tensor, dict]:
        loss = -values.values.sum()
        self.turned = self.clock.mark()
        return loss, {}
