"""What ``python -m megatron_augtree.launch`` refuses before anything starts, and how ranks say it once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_augtree.mcore import launch
from megatron_augtree.mcore.megatron_lm import script, voice
from megatron_augtree.mcore.patches import release
from tests.mcore.launcher_cases import ROOT


def copy_of(folder: Path, version: str) -> Path:
    """The script of a folder that looks like a copy of Megatron-LM."""
    major, minor = version.split(".")
    (folder / "megatron" / "training").mkdir(parents=True)
    (folder / "megatron" / "core").mkdir()
    (folder / "megatron" / "core" / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\n")
    (folder / "pretrain_gpt.py").write_text("raise AssertionError('the script ran')\n")
    return folder / "pretrain_gpt.py"


@pytest.mark.parametrize(
    "version, words, told",
    [
        (None, [], "no script to run"),
        (None, ["--context-parallel-mode", "augtree"], "no script to run"),
        (None, ["nowhere/pretrain_gpt.py"], "not a script of Megatron-LM"),
        ("0.7", ["SCRIPT"], "is 0.7, megatron-core is"),
        (None, ["SCRIPT", "--context-parallel-mode", "augtre"], "did you mean augtree?"),
        (None, ["SCRIPT", "--context-parallel-mode=ring", "--loss-preset", "unknown"], "--loss-preset"),
        (None, ["SCRIPT", "--augtree-logit-chunk-mib", "much"], "--augtree-logit-chunk-mib"),
    ],
)
def test_what_cannot_run_says_why(tmp_path, monkeypatch, capfd, version, words, told):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = str(copy_of(tmp_path, version or release()))
    before = list(sys.path)
    with pytest.raises(SystemExit) as ended:
        script.run([path if word == "SCRIPT" else word for word in words])
    assert ended.value.code == launch.USER_ERROR
    message = capfd.readouterr().err
    assert told in message and "remedy:" in message and "Traceback" not in message
    assert sys.path == before


def test_the_module_runs(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_augtree.launch", "nowhere.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )
    assert ended.returncode == launch.USER_ERROR and "values: nowhere.py" in ended.stderr


def test_help_is_no_mistake():
    ended = subprocess.run(
        [sys.executable, "-m", "megatron_augtree.launch", "--help"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )
    assert ended.returncode == 0 and "MEGATRON_LM/pretrain_gpt.py" in ended.stdout and not ended.stderr


@pytest.fixture
def speak(monkeypatch, capfd):
    """Speaks as a rank of two under torchrun, whose store is this process's; what was printed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(store.port)),
                        ("TORCHELASTIC_USE_AGENT_STORE", "True"), ("TORCHELASTIC_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)

    def say(rank: int, text: str) -> str:
        monkeypatch.setenv("RANK", str(rank))
        voice.say(text, patience_s=0.2)
        return capfd.readouterr().err

    yield say
    del store  # its server lives as long as it does


def test_the_same_message_is_printed_once(speak):
    assert speak(0, "wrong flag") == "wrong flag\n"
    assert speak(1, "wrong flag") == ""
    assert speak(1, "no such file") == "rank 1: no such file\n"


def test_a_rank_that_is_alone_with_it_speaks(speak, monkeypatch):
    assert speak(1, "no such file") == "rank 1: no such file\n"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")  # no store that outlives a rank
    assert speak(0, "no such file") == "rank 0: no such file\n"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert speak(0, "no such file") == "no such file\n"
