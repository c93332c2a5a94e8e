"""The check of a GPU: as it is started, on this machine's GPU or in its dry run; and what it must notice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_augtree.attention.kernels import CpuFlashKernel
from megatron_augtree.runtime import tree_attention
from tests.unit.test_layering import imported

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch):
    """The script as a module; its folder is where it finds the small model."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


def test_as_it_is_started(tmp_path):
    out = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run([sys.executable, str(SCRIPTS / "gpu_check.py"), "--json", str(out)],
                          capture_output=True, text=True, env=environment, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["passed"] and report["wrong"] == [] and report["dry_run"] != torch.cuda.is_available()
    assert report["errors"] and all(found["good"] for found in report["errors"].values())
    assert sum(name.startswith("plan") for name in report["errors"]) >= 6
    assert report["attention"]["ratio"] > 0 and report["step"]["speedup"] > 0
    assert report["step"]["rows"][0] < report["step"]["rows"][1]
    assert "attention kernel: " in done.stdout and "all numbers are right" in done.stdout
    assert not list(tmp_path.glob("*.partial"))


def test_it_imports_no_megatron():
    allowed = {"torch", "small_gpt", *sys.stdlib_module_names}
    layers = ("planning", "attention", "runtime")
    for name in ("gpu_check.py", "small_gpt.py"):
        source = (SCRIPTS / name).read_text()
        ast.parse(source)
        for module in imported(source):
            top, _, rest = module.partition(".")
            assert top in allowed or (top == "megatron_augtree" and rest.startswith(layers)), module


def test_a_wrong_kernel_is_noticed(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "PLANS", script.PLANS[:1])
    backward = CpuFlashKernel.backward

    def wrong(self, segments, causal, scale):
        return [(dq, dk * 1.001, dv) for dq, dk, dv in backward(self, segments, causal, scale)]

    monkeypatch.setattr(CpuFlashKernel, "backward", wrong)
    assert script.main(["--dry-run"]) == 1
    told = capsys.readouterr().out
    assert "WRONG kernel cpu_flash, heads 8/2 of 128, squares, dk" in told
    assert "ok    kernel reference, heads 8/2 of 128, squares, dk" in told
    assert "WRONG plan on 1 by cpu_flash" in told and "ok    plan on 1 by reference" in told
    assert "step: gradients differ" in told.splitlines()[-1]


def test_a_wrong_executor_is_noticed(script, monkeypatch, capsys):
    """One leaf's gradients of the prompt's values are lost."""
    monkeypatch.setattr(script, "check_kernels", lambda check: check.kernels.append("cpu_flash"))
    add, calls = tree_attention.add_, []

    def forgetful(tensor, rows, part):
        calls.append(rows)
        if len(calls) % 6 or len(rows.ranges) > 1:
            add(tensor, rows, part)

    monkeypatch.setattr(tree_attention, "add_", forgetful)
    assert script.main(["--dry-run"]) == 1
    assert capsys.readouterr().out.count("WRONG plan") == len(script.PLANS)


def test_a_gpu_is_asked_for_its_own_kernels(script, capsys):
    """On a GPU the CPU's kernels would be no check of it; a missing flash kernel is an error."""
    check = script.Check(torch.device("cuda"), torch.bfloat16, script.SMALL)
    script.check_kernels(check)
    assert check.kernels == [] and list(check.found["skipped"]) == ["cuda_flash", "te_fused"]
    assert [text.split(":")[0] for text in check.wrong] == ["kernel cuda_flash does not run"]
    assert capsys.readouterr().out.count("skipped kernel") == 2
    assert check.allowed(0.5) == 1.0
