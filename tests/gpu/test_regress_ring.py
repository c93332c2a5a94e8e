"""The comparison with Megatron's own ring, in its dry run: both sides, their inputs and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_augtree.config import UnsupportedError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "regress_ring.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import regress_ring

    return regress_ring


@pytest.mark.parametrize("ranks", (1, 2))
def test_dry_run(ranks, tmp_path):
    """On one rank the stock side is megatron-core's own attention; on two our ring stands in its place."""
    out = tmp_path / "ring.json"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] * (ranks > 1)
    done = subprocess.run([sys.executable, *launch, str(SCRIPT), "--dry-run", "--json", str(out)],
                          capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["passed"] and report["ranks"] == ranks and report["dry_run"]
    names = {1: ["stock, one rank without ring", "ring", "augtree"],
             2: ["our ring in place of stock", "augtree"]}[ranks]
    assert list(report["sides"]) == names and all(name in done.stdout for name in names)
    first, *others = report["sides"].values()
    assert first["gradient_difference"] == 0
    for side in others:
        assert side["loss_difference"] < 1e-6 and 0 <= side["gradient_difference"] < 1e-5
        assert side["seconds"] > 0 and side["peak_bytes"] > 0


def test_a_machine_without_gpus_is_told_what_is_missing(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError) as error:
        script.check_machine()
    assert error.value.values.startswith("1 GPUs for 2 ranks, Transformer Engine is ")
    assert "--dry-run" in error.value.remedy and error.value.rule
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: object())
    script.check_machine()


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize("length", (2, 13, 24))
def test_zigzag_inputs_are_the_sequence(script, ranks, length):
    """Chunks of all ranks put together are the padded sequence; every response token is counted once."""
    tokens, prompt = list(range(100, 100 + length)), 1 + length // 3
    parts = [script.zigzag_inputs(tokens, prompt, ranks, rank) for rank in range(ranks)]
    chunk = parts[0][0].shape[1] // 2
    columns = []
    for column in range(4):
        halves = [part[column][0].split(chunk) for part in parts]
        columns.append(torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)]))
    ids, positions, labels, mask = columns
    assert ids[:length - 1].tolist() == tokens[:-1] and not ids[length - 1:].any()
    assert labels[:length - 1].tolist() == tokens[1:]
    assert positions.tolist() == list(range(2 * ranks * chunk))
    assert labels[mask.bool()].tolist() == tokens[prompt:]


def test_a_difference_is_noticed(script):
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-9])}
    same = script.Outcome(2.0, one, 1.0, 10)
    moved = script.Outcome(2.0, {**one, "a": torch.tensor([1.0, 2.1])}, 0.5, 5)
    rows = script.compare({"stock": same, "ours": moved, "again": same}, 1e-5)
    assert [row["good"] for row in rows.values()] == [True, False, True]
    assert rows["ours"]["gradient_difference"] == pytest.approx(0.05) and rows["ours"]["speedup"] == 2
    assert "WRONG" in script.table(rows).splitlines()[2]
    lost = script.Outcome(2.1, one, 1.0, 10)
    assert not script.compare({"stock": same, "ours": lost}, 1e-5)["ours"]["good"]
