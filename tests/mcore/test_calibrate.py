"""Calibration on two real ranks: a file that loads and prices a plan; what cannot be measured is refused."""

import json
import os
import sys

import pytest
import torch

from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError, UnsupportedError
from megatron_augtree.planning.cluster import Cluster, load, preset
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.schedule import promise
from megatron_augtree.planning.tree import from_lengths
from megatron_augtree.tools import calibrate
from megatron_augtree.tools.calibrate_measure import CPU, CUDA, peers_of, stages_program
from megatron_augtree.tools.calibrate_ranks import SHARES, Calibration

SHAPE = ModelShape(2, 64, 128, 256, 4, 2, 16, 16)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[str, Cluster, str]:
    """(file, what `calibrate` returned, what the ranks said) of one run; the fewest rounds take seconds."""
    path = str(tmp_path_factory.mktemp("calibration") / "machine.json")
    said = os.path.join(os.path.dirname(path), "said")
    kept = os.dup(2)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 2)
        try:
            cluster = calibrate.calibrate(path, ranks=2, seconds=10)
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    with open(said) as file:
        return path, cluster, file.read()


def test_the_file_holds_what_was_returned(measured):
    path, cluster, _ = measured
    assert load(path) == cluster and cluster.node_ranks >= 2 and "CPU" in cluster.name
    assert sorted(os.listdir(os.path.dirname(path))) == ["machine.json", "said"], "nothing partial is left"


def test_the_file_says_how_it_was_made(measured):
    with open(measured[0]) as file:
        found = json.load(file)["measured"]
    assert found["ranks"] == 2 and found["nodes"] == 1 and found["torch"] == torch.__version__
    # Every quantity that is fitted has an error on sizes that it was not fitted to.
    assert set(found["held_out_error_pct"]) == set(SHARES) - {"path", "overlap"}
    assert all(error >= 0 for error in found["held_out_error_pct"].values())
    assert "one node" in found["nic"] and found["hidden_share"] <= 1
    assert 0.3 < found["bytes_a_row_measured_by_predicted"] < 3
    assert all(rounds >= 3 for rounds in found["rounds"].values())
    assert [point[0] for point in found["curves"]["stage"]] == [n * 2048 for n in CPU.sent]
    assert all(point[-1] > 0 for curve in found["curves"].values() for point in curve)


def test_quantities_are_measured_in_the_order_of_their_weight(measured):
    lines = [line.split()[0] for line in measured[2].splitlines() if line.strip()]
    assert [word for word in lines if word in SHARES] == list(SHARES)


def test_rates_are_those_of_a_computer(measured):
    """Between a hundredth and a hundredfold of a server's core."""
    cluster, known = measured[1], preset("cpu")
    for rate in ("gemm_flops", "attention_flops", "row_bytes_s", "link_bytes_s"):
        assert 0.01 < getattr(cluster, rate) / getattr(known, rate) < 100, rate
    assert cluster.nic_bytes_s == cluster.link_bytes_s and cluster.host_bytes_s == 0
    assert cluster.stage_ns + cluster.message_ns > 0 and cluster.layer_ns + cluster.pass_ns > 0


def test_it_prices_plans(measured):
    path, cluster, _ = measured
    shape = from_lengths(500, [60, 200, 90])
    plans = [
        make_plan(shape, SHAPE, 2, AugTreeConfig(cluster=machine), tree_groups=[0])
        for machine in (path, "h100")
    ]
    assert plans[0].seconds > 0 and plans[0].digest() != plans[1].digest()
    assert cluster.digest() in json.dumps(plans[0].to_json())


def test_the_table_shows_every_constant(measured):
    cluster = measured[1]
    text = calibrate.table(cluster, calibrate.nearest(cluster))
    assert f"{cluster.gemm_flops:,}" in text and f"{preset('cpu').gemm_flops:,}" in text
    assert calibrate.nearest(cluster) is preset("cpu")
    assert text.count("\n") + 1 == len(vars(cluster))
    assert calibrate.nearest(Cluster(**{**vars(cluster), "name": "NVIDIA H200, 8 ranks"})) is preset("h200")


# What cannot be measured.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--ranks 1", "--ranks 1"),
        ("--ranks -4", "--ranks -4"),
        ("--seconds 0", "--seconds 0"),
        ("--seconds nan", "--seconds nan"),
        ("--seconds inf", "--seconds inf"),
        ("--out {}/nowhere/machine.json", "nowhere"),
        ("--out {}", "--out"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate.subprocess, "run", lambda *a, **k: pytest.fail("started"))
    given = ["--out", str(tmp_path / "machine.json"), *arguments.format(tmp_path).split()]
    assert calibrate.main(given) == 2
    told = capsys.readouterr().err
    assert words in told and "rule" in told and "remedy" in told
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_fail_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(AugTreeError, match="2 ranks ended with code 1"):
        calibrate.calibrate(str(tmp_path / "machine.json"))
    assert list(tmp_path.iterdir()) == []


def test_without_torch_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="torch, megatron, psutil") as caught:
        calibrate.calibrate(str(tmp_path / "machine.json"))
    assert "pip install" in caught.value.remedy


def test_ranks_without_a_device_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InputError, match="4 ranks of a node, 3 devices"):
        Calibration("cuda", 0.0)


# What is measured.


@pytest.mark.parametrize(
    ("world", "local_ranks", "inside", "across"),
    [
        (2, 2, [1, 0], [0, 1]),
        (2, 1, [1, 0], [1, 0]),
        (4, 2, [1, 0, 3, 2], [2, 3, 0, 1]),
        (6, 3, [1, 2, 0, 4, 5, 3], [3, 4, 5, 0, 1, 2]),
    ],
)
def test_who_sends_to_whom(world, local_ranks, inside, across):
    """Inside a node nothing crosses, across nodes everything does; a rank alone on its node has no choice."""
    assert peers_of(world, local_ranks, across=False) == inside
    assert peers_of(world, local_ranks, across=True) == across


@pytest.mark.parametrize("peers", [[1, 0], [1, 2, 3, 0], [2, 3, 0, 1]], ids=str)
def test_stages_send_what_they_say(peers):
    program = stages_program(peers, 40, 24, (8, 40), transfers=True)
    for rank in range(len(peers)):
        found = promise(program, rank, SHAPE)
        assert found.bytes == {"KV": len(program.stages) * 24 * SHAPE.kv_bytes}
        assert found.messages == len(program.stages) and program.area(rank) == len(program.stages) * 8 * 40
    assert all(t.dst == peers[t.src] for stage in program.stages for t in stage.transfers)
    bare = stages_program(peers, 40, 24, (0, 0), transfers=False)
    assert not any(stage.transfers or any(stage.tiles) for stage in bare.stages)
    assert bare.buffers == program.buffers, "what differs in time is the transfers"


@pytest.mark.parametrize("sizes", [CPU, CUDA], ids=("cpu", "cuda"))
def test_both_ends_of_every_curve_are_fitted(sizes):
    for name, values in vars(sizes).items():
        if isinstance(values, tuple):
            assert len(values) % 2 and list(values) == sorted(set(values)), name
