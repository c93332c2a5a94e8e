"""What launchers share: one voice for all ranks, peaks of memory, weights in and out of files."""

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megatron_augtree.config import InputError
from megatron_augtree.mcore import arguments, build, launch, weights
from megatron_augtree.mcore.memory import PeakMemory

ROOT = Path(__file__).parents[2]


class TestWeights:
    def test_plain_names_win_then_after_then_before(self, tmp_path):
        model = torch.nn.Linear(2, 2)
        named = dict(model.named_parameters())
        values = {prefix: {f"{prefix}{n}": torch.full_like(p, i) for n, p in named.items()}
                  for i, prefix in enumerate(("", "param1/", "param0/"))}
        for first, prefixes in enumerate((("", "param1/", "param0/"), ("param1/", "param0/"), ("param0/",))):
            save_file({k: v for p in prefixes for k, v in values[p].items()}, tmp_path / "w.safetensors")
            weights.load_weights(model, str(tmp_path / "w.safetensors"))
            assert all(torch.all(p == first) for p in model.parameters())

    @pytest.mark.parametrize(("tensors", "words"), [
        ({"weight": torch.zeros(2, 2)}, "1 missing, for instance bias"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, r"weight \[2, 3\] instead of \[2, 2\]"),
        ({"other": torch.zeros(1)}, "2 missing"),
    ])
    def test_what_does_not_fit_is_refused_and_changes_nothing(self, tmp_path, tensors, words):
        model = torch.nn.Linear(2, 2)
        before = weights.parameters_of(model)
        save_file(tensors, tmp_path / "w.safetensors")
        with pytest.raises(InputError, match=words):
            weights.load_weights(model, str(tmp_path / "w.safetensors"))
        assert all(torch.equal(before[n], p) for n, p in model.named_parameters())

    def test_not_a_safetensors_file(self, tmp_path):
        (tmp_path / "w").write_text("no")
        with pytest.raises(InputError, match="--load"):
            weights.load_weights(torch.nn.Linear(1, 1), str(tmp_path / "w"))

    def test_a_failed_dump_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "o.safetensors"
        path.write_text("old")
        monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(InputError, match="o.safetensors: full"):
            weights.save_dump(str(path), {"a": torch.zeros(1)}, {"b": 1})
        assert os.listdir(tmp_path) == ["o.safetensors"] and path.read_text() == "old"


    def test_folders_are_made_or_refused(self, tmp_path):
        weights.check_folder("", "--save")
        weights.check_folder(str(tmp_path / "a" / "b"), "--save")
        assert os.listdir(tmp_path / "a") == ["b"] and os.listdir(tmp_path / "a" / "b") == []
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "folder"):
            with pytest.raises(InputError, match=f"--save {path}"):
                weights.check_folder(str(path), "--save")


class TestLaunch:
    def test_agree_returns_or_ends(self, capfd):
        assert launch.agree(lambda: 3) == 3

        def fail():
            raise InputError("a thing is wrong", values="x 1", rule="x is 2", remedy="write 2")

        with pytest.raises(SystemExit) as end:
            launch.agree(fail)
        assert end.value.code == launch.USER_ERROR
        lines = capfd.readouterr().err.splitlines()
        assert lines == ["a thing is wrong", "  values: x 1", "  rule: x is 2", "  remedy: write 2"]

    def test_only_rank_0_works_for_all(self, monkeypatch):
        done = []
        launch.agree_on_rank_0(lambda: done.append(0))
        monkeypatch.setattr(launch, "env_rank", lambda: 1)
        launch.agree_on_rank_0(lambda: done.append(1))
        assert done == [0]

    def test_all_groups_have_the_timeout_of_the_flag_once_a_run_has_started(self, monkeypatch):
        """Also the default group, which votes made before, with patience for ranks that start late."""
        parser = argparse.ArgumentParser()
        arguments.add_model_arguments(parser)
        launch.add_data_arguments(parser)
        shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 8 --data none"
        assert parser.parse_args(shape.split()).distributed_timeout_minutes == 10
        args = parser.parse_args(f"{shape} --distributed-timeout-minutes 3".split())
        monkeypatch.setenv("RANK", "0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                                timeout=launch._JOIN_TIMEOUT)
        try:
            launch.start(args)
            for group in (dist.group.WORLD, parallel_state.get_data_parallel_group(True)):
                assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(minutes=3)
        finally:
            build.destroy()

    @pytest.mark.parametrize(("error", "lost"), [
        (RuntimeError("[/p/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:4: reset"), True),
        (torch.distributed.DistNetworkError("closed"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("/gloo/"), False),
    ])
    def test_lost_peers_are_told_from_faults(self, error, lost):
        assert launch.is_lost_peer(error) == lost

    def test_a_rank_that_is_stopped_says_so(self, tmp_path):
        """SIGTERM ends a rank with a message and code 1 also while its main thread waits in C."""
        ready = tmp_path / "ready"
        text = ("import ctypes, pathlib\nfrom megatron_augtree.mcore import launch\n"
                f"launch.run(lambda: (pathlib.Path({str(ready)!r}).touch(), "
                "[ctypes.CDLL(None).sleep(600) for _ in range(9)]))\n")
        env = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", text], env=env,
                                   stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 120
            while not ready.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, message = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 1 and message.startswith("rank 1: a peer was lost")

    def test_an_interrupted_rank_says_so_and_ends_without_its_peers(self, monkeypatch, capfd):
        """Ctrl-C is no Exception; a rank that waits at exit for its peers would have to be killed."""
        ended = []
        monkeypatch.setattr(launch, "env_world", lambda: 2)
        monkeypatch.setattr(launch, "_watch_for_stop", lambda: None)
        monkeypatch.setattr(launch.os, "_exit", ended.append)

        def main():
            raise KeyboardInterrupt

        launch.run(main)
        assert ended == [130] and capfd.readouterr().err == "rank 0: interrupted\n"

    def test_a_killed_rank_leaves_no_data_worker_behind(self):
        """Also where the worker has a step ready that is larger than a pipe."""
        text = ("import os, signal, time\n"
                "from megatron_augtree.config import AugTreeConfig\n"
                "from megatron_augtree.data.groups import Group, Response\n"
                "from megatron_augtree.mcore.sampler import GroupSampler, step_loader\n"
                "from megatron_augtree.planning.model import ModelShape\n"
                "groups = [Group('g', tuple(range(99999)), (Response((1,), (True,)),))]\n"
                "loader = iter(step_loader(groups, GroupSampler(1, 1, steps=9), "
                "ModelShape(1, 8, 8, 8, 1, 1, 8, 8), 1, AugTreeConfig(), workers=1))\n"
                "next(loader)\n"
                "time.sleep(1)\n"
                "os.kill(os.getpid(), signal.SIGKILL)\n")
        command = [sys.executable, "-W", "ignore", "-c", text]
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
                              start_new_session=True) as process:
            try:
                process.communicate(timeout=45)  # ends when the last process with the pipe has
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL


def test_peak_memory_sees_a_short_lived_tensor():
    with PeakMemory() as memory:
        tensor = torch.ones(64 << 18)  # 64 MiB
        time.sleep(0.05)
        del tensor
    assert 48 << 20 <= memory.above_start_bytes <= 96 << 20  # the system counts pages with a delay
