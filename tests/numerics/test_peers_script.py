"""scripts/bench_peers.py: every peer computes the un-shared run's gradients, ours to fp64's precision."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_augtree.config import UnsupportedError

SCRIPTS = Path(__file__).parents[2] / "scripts"
#: PrefixGrouper is optional.
HERE = ["stock", "augtree", "dense-mask"]
HERE += ["prefixgrouper"] if importlib.util.find_spec("prefix_grouper") else []


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    threads = torch.get_num_threads()
    yield importlib.import_module("bench_peers")
    torch.set_num_threads(threads)


def run(script, monkeypatch, tmp_path, *more: str) -> tuple[dict, int]:
    path = tmp_path / "peers.json"
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--quick", "--json", str(path), *more])
    with pytest.raises(SystemExit) as ended:
        script.main()
    return json.loads(path.read_text()), ended.value.code


def test_every_peer_is_exact(script, monkeypatch, tmp_path):
    found, code = run(script, monkeypatch, tmp_path, "--peers", ",".join(HERE), "--repeats", "2")
    (case,) = found["cases"]
    assert (found["kind"], code, set(case["peers"])) == ("measured", 0, set(HERE))
    assert case["rows"] == 95 + 13 + 26 + 40 and case["unshared_rows"] == 3 * 95 + 13 + 26 + 40
    for peer, x in case["peers"].items():
        assert x["error_fp64"] <= 1e-12 and x["error_fp32"] <= 1e-5, peer
        assert len(x["seconds"]) == 2 and x["iqr_s"][0] <= x["median_s"] <= x["iqr_s"][1]


def test_wrong_gradients_fail(script, monkeypatch, tmp_path):
    """A tree whose responses do not see their prompt is found out."""
    monkeypatch.setattr(script, "tree_attention", lambda q, k, v, *rest: v.repeat_interleave(2, 1))
    found, code = run(script, monkeypatch, tmp_path, "--peers", "augtree", "--repeats", "2")
    assert code == 1 and "error of augtree's gradients" in found["missed"][0]


def test_a_missing_peer_is_told_in_four_parts(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "prefix_grouper", None)
    with pytest.raises(UnsupportedError) as told:
        script.prefix_grouper()
    assert all((told.value.what, told.value.values, told.value.rule, told.value.remedy))
    assert "pip install prefix_grouper" in str(told.value)
