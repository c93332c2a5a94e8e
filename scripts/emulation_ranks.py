"""Emulated ranks: processes that play plans in turn, and the times that they tell.

Forked, after everything is planned and compiled: what they share is in memory once, so that 64 of them fit.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from emulation import Clock, Sleeper, SleepingModel, Wire
from torch import Tensor

from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.runtime.engine import Engine, SequenceValues

#: Lag above which a step is played again, and how often at most.
LAG, TRIES = 0.02, 3


@dataclass
class Played:
    """A plan that some modes agree on.

    Attributes:
        modes: those that chose it.
        engine: plays it.
        seconds: emulated seconds of each repeat.
        lag, host: largest share of the time that was host work beyond sleeps; cores that host work kept busy.
        sent: bytes of the model that all ranks sent.
    """

    modes: list[str]
    engine: Engine
    seconds: list[float]
    lag: float = 0.0
    host: float = 0.0
    sent: int = 0

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Case:
    """Groups on the ranks of a cluster."""

    name: str
    cluster: str
    ranks: int
    dilation: float
    prices: Prices
    played: list[Played]

    @property
    def times(self) -> dict[str, tuple[float, float]]:
        """Mode -> (priced, emulated) seconds."""
        return {mode: (x.plan.seconds, x.median) for x in self.played for mode in x.modes}


def rank_main(rank: int, ranks: int, store: str, cases: Sequence[Case], repeats: int, answers) -> None:
    """Plays all plans of all cases in turn, round after round; the first rank tells the times."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for number, case in enumerate(cases):
        clock = Clock(case.dilation)
        wire = Wire(case.prices, clock)
        for x in case.played:
            x.engine.transport, x.engine.kernel = wire, Sleeper(case.prices, clock)
            x.engine.model = SleepingModel(case.prices, clock)
        for x in case.played:  # the first time much is done that is done once: not counted, hardly dilated
            clock.dilation = 1.0
            _step(x.engine, wire)
        clock.dilation = case.dilation
        for _ in range(repeats):
            for index, x in enumerate(case.played):
                for _ in range(TRIES):
                    found = _step(x.engine, wire)
                    if found["lag"] <= LAG:  # the same on all ranks
                        break
                if rank == 0:
                    answers.put((number, index, found))
    dist.barrier()
    dist.destroy_process_group()


def _step(engine: Engine, wire: Wire) -> dict[str, float]:
    """One step: emulated seconds, lag and host work as shares of them, bytes."""
    wire.reset()
    begins = torch.tensor([time.monotonic() + 0.02], dtype=torch.float64)
    begins = float(wire.total(begins, "max"))
    worked = time.process_time()
    wire.clock.start(begins)
    engine.play(_loss)
    lasted = wire.ended - begins
    mine = torch.tensor([lasted, wire.lag], dtype=torch.float64)
    slowest, lag = wire.total(mine, "max").tolist()
    mine = torch.tensor([time.process_time() - worked, wire.sent], dtype=torch.float64)
    host, sent = wire.total(mine).tolist()
    seconds = slowest / wire.clock.dilation
    return {"seconds": seconds, "lag": lag / slowest, "host": host / slowest, "sent": sent}


def _loss(whole: SequenceValues) -> tuple[Tensor, dict]:
    return whole.values.sum(), {}


def emulate(cases: Sequence[Case], repeats: int) -> Iterator[tuple[Case, Played]]:
    """Plays the cases, all on as many ranks; yields what a time has come in for.

    Raises:
        RuntimeError: a rank ended with an error; its own is on standard error.
    """
    context, ranks = multiprocessing.get_context("fork"), cases[0].ranks
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        args = (ranks, str(Path(folder) / "store"), cases, repeats, answers)
        children = [context.Process(target=rank_main, args=(r, *args), daemon=True) for r in range(ranks)]
        for child in children:
            child.start()
        try:
            for _ in range(repeats * sum(len(case.played) for case in cases)):
                number, index, found = _next(answers, children)
                x = cases[number].played[index]
                x.seconds.append(found["seconds"])
                x.lag, x.host = max(x.lag, found["lag"]), max(x.host, found["host"])
                x.sent = int(found["sent"])
                yield cases[number], x
            for child in children:
                child.join()
        finally:
            for child in children:
                child.kill()
    gc.unfreeze()


def _next(answers, children):
    while True:
        if not answers.empty():
            return answers.get()
        if any(child.exitcode for child in children):
            raise RuntimeError("an emulated rank failed")
        time.sleep(0.01)
