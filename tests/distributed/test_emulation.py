"""Dilated emulation: four processes play every mode's plan in seconds, and sleep through what they should."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_augtree.attention.kernels.protocol import Segment, SegmentGrad
from megatron_augtree.config import UnsupportedError
from megatron_augtree.planning.schedule import promise, reverse

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts():
    """The modules of scripts/, by name."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the quick run writes, and its exit status."""
    path = tmp_path_factory.mktemp("emulated") / "figures.json"
    command = [sys.executable, str(ROOT / "scripts" / "bench_emulated.py"), "--quick", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert path.is_file(), ended.stderr
    return json.loads(path.read_text()), ended


def case_of(scripts, tmp_path):
    """The case of the quick run."""
    bench = scripts("bench_emulated")
    (case,) = bench.make_cases(bench.parse(["--quick"]), 4, tmp_path)
    return case


def test_emulated_seconds_are_those_priced(report):
    found, ended = report
    (case,) = found["cases"]
    assert found["kind"] == "emulated" and "EMULATED" in ended.stdout
    assert {mode for x in case["plans"] for mode in x["modes"]} >= {"ring", "dcp-phased", "augtree"}
    for x in case["plans"]:
        # A step cannot be shorter than what it sleeps through; other work on this machine makes it longer.
        late = x["lag"] * x["emulated"]
        assert x["priced"] == pytest.approx(x["emulated"] - late, rel=0.06), x
    assert ended.returncode == bool(found["missed"])


def test_bytes_of_the_model_travel(scripts, report, tmp_path):
    """What links are charged for is what programs promise, layer by layer, forward and backward."""
    case, (found, _) = case_of(scripts, tmp_path), report
    model = case.prices.model
    assert len(case.played) == len(found["cases"][0]["plans"]), "the same plans"
    for x, row in zip(case.played, found["cases"][0]["plans"]):
        promised = 0
        for p in x.plan.passes:
            forward = x.plan.program(p.id)
            for program in (forward, reverse(forward, keep=p.keep)):
                for rank in range(len(p.block)):
                    promised += model.layers * sum(promise(program, rank, model).bytes.values())
        assert row["sent_bytes"] == promised, x.modes


def test_host_work_is_hidden_where_a_rank_sleeps(scripts):
    clock = scripts("emulation").Clock(1000.0)
    clock.start(time.monotonic())
    begun = clock.now
    for _ in range(4):
        time.sleep(0.02)  # what the host does meanwhile
        clock.work(50_000)
    assert clock.now - begun == pytest.approx(0.2)
    assert time.monotonic() - begun == pytest.approx(0.2, abs=0.02)
    time.sleep(0.03)
    assert clock.lag >= 0.03, "what no sleep hides is told"


def test_a_link_carries_one_after_the_other(scripts):
    link = scripts("emulation").Link(byte_s=0.5, message_s=1.0)
    assert link.carry(10.0, 4, 2) == (10.0, 14.0)
    assert link.carry(11.0, 2) == (14.0, 15.0), "it waits for its turn"
    assert link.carry(20.0, 2) == (20.0, 21.0), "or not at all"


@pytest.mark.parametrize("queries, keys, causal, pairs", [
    (300, 300, True, 300 * 301 // 2 + 300 * 128 // 2),  # half of the diagonal's blocks is masked
    (300, 70, False, 300 * 70),
    (5, 70, False, 128 * 70),  # a block of queries, nearly empty
])  # fmt: skip
def test_a_tile_sleeps_by_its_pairs(scripts, tmp_path, queries, keys, causal, pairs):
    emulation, prices = scripts("emulation"), case_of(scripts, tmp_path).prices
    clock, slept = emulation.Clock(1.0), []
    clock.work = slept.append
    kernel, c = emulation.Sleeper(prices, clock), prices.cluster
    q, k = torch.zeros(queries, 28, 4), torch.zeros(keys, 4, 4)
    ((out, lse),) = kernel.forward([Segment(q, k, k)], causal, 1.0)
    grads = kernel.backward([SegmentGrad(q, q, k, k, out, lse)], causal, 1.0)
    tile, merge = prices.attention.ns(pairs) + c.tile_ns, prices.merging.ns(queries)
    assert slept == [tile + merge, tile * c.attention_backward_pct // 100 + merge]
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    assert [g.shape for g in grads[0]] == [q.shape, k.shape, k.shape]


def test_what_is_not_emulated_is_refused(scripts, tmp_path):
    emulation, plan = scripts("emulation"), case_of(scripts, tmp_path).played[0].plan
    again = replace(plan, passes=tuple(replace(p, keep_layers=1) for p in plan.passes))
    with pytest.raises(UnsupportedError, match="keep_layers 1 of 2"):
        emulation.check_plan(again, 2)
