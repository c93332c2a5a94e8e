"""Memory that passes freed goes back to the system where a budget was set and others still wait."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore import cpu
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.runtime.engine import PassRunner
from megatron_augtree.runtime.transport import LocalTransport
from tests.distributed.matrix import LLAMA
from tests.numerics import fixtures as f
from tests.numerics.recomputing import PROGRAMS, WORLD, model

#: Every other of 200 tensors of a MiB is freed; prints how many MiB came back before and after trimming.
HOLES = """
import torch
from megatron_augtree.mcore import cpu
from megatron_augtree.mcore.memory import resident_bytes
assert cpu.keep_heap()
held = [torch.ones(1 << 18) for _ in range(200)]
before = resident_bytes()
del held[::2]
freed = resident_bytes()
cpu.trim_heap()
print(before - freed >> 20, before - resident_bytes() >> 20)
"""


@pytest.fixture(scope="module")
def groups(megatron):
    return f.Lab(LLAMA).data("ragged")[0]


@pytest.mark.parametrize("program", ["fused", "waves"])
@pytest.mark.parametrize("budget", [0.0, 8.0])
def test_trims_where_other_passes_wait(groups, monkeypatch, program, budget):
    log: list = []
    for name in ("model_forward", "model_backward"):
        stock = getattr(PassRunner, name)

        def noted(run, p, *args, stock=stock, name=name):
            log.append((name, p.id))
            return stock(run, p, *args)

        monkeypatch.setattr(PassRunner, name, noted)
    monkeypatch.setattr(cpu, "trim_heap", lambda: log.append("trim"))
    batch, transport = f.batch_of(groups, PROGRAMS[program], WORLD), LocalTransport(WORLD)
    config = AugTreeConfig(memory_budget_gib=budget)
    got = f.play(model(""), batch, schedule=AugTreeSchedule(config, transport=transport))

    want, waiting = [], set()
    for action, pass_id in batch.plan.events:
        want.append((f"model_{action}", pass_id))
        if waiting - {pass_id} and budget:
            want.append("trim")
        (waiting.add if action == "forward" else waiting.discard)(pass_id)
    assert log == want
    assert ("trim" in log) == (program == "waves" and budget > 0)
    plain = f.play(model(""), batch)
    assert got.loss == plain.loss and all(torch.equal(got.grads[n], plain.grads[n]) for n in plain.grads)


def test_only_the_heap_of_a_cpu_is_trimmed():
    budget = AugTreeConfig(memory_budget_gib=1.0)
    assert cpu.trimming(budget, torch.device("cpu")) is cpu.trim_heap
    assert cpu.trimming(budget, torch.device("cuda", 0)) is None
    assert cpu.trimming(AugTreeConfig(), torch.device("cpu")) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap, read from /proc")
def test_holes_of_a_kept_heap_go_back():
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    kept, trimmed = map(int, done.stdout.split())
    assert kept < 10 and trimmed > 80, (kept, trimmed)
