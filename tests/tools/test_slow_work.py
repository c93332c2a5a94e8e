"""What takes long says so: planning without the C++ core, once, with the remedy; progress on a terminal."""

from __future__ import annotations

import io
import sys
import time
from argparse import Namespace

import pytest

from examples import pretrain_gpt
from megatron_augtree.config import NO_CORE, AugTreeConfig
from megatron_augtree.mcore import report
from megatron_augtree.mcore.megatron_lm import pretrain
from megatron_augtree.planning import native
from megatron_augtree.tools import cli
from megatron_augtree.tools.cli import doctor, progress
from tests.tools.calling import STEP


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- no C++ core


def test_the_message_is_a_line_with_a_remedy():
    assert "\n" not in NO_CORE and "pip install pybind11" in NO_CORE


@pytest.mark.parametrize("line", [
    f"plan {STEP} --json", f"explain {STEP}", f"simulate {STEP} --modes ring,paper",
    f"where {STEP} --sequence 1 --token 3"])  # fmt: skip
def test_commands_that_plan_say_once_that_there_is_no_core(capsys, line):
    with native.without_core():
        assert cli.main(line.split()) == 0
    captured = capsys.readouterr()
    assert captured.err == f"augtree: {NO_CORE}\n" and "pybind11" not in captured.out


def test_a_command_that_does_not_plan_says_nothing(capsys):
    with native.without_core():
        assert cli.main(f"estimate {STEP}".split()) == 0
    assert capsys.readouterr().err == ""


def test_doctor_says_it_in_its_line():
    with native.without_core():
        assert doctor._core() == doctor.Line("C++ core", "absent", NO_CORE)


def megatron_lm_run() -> pretrain.Run:
    args = Namespace(context_parallel_size=2, objective="grpo", global_batch_size=4)
    return pretrain.Run(args, AugTreeConfig(), None, {"train": ()}, 2)


def example_run(config: AugTreeConfig | None) -> pretrain_gpt.Training:
    args = Namespace(dtype="float32", optimizer="adam", objective="grpo", global_batch_size=4, load=None,
                     train_iters=9, finetune=False)  # fmt: skip
    return pretrain_gpt.Training(args, config, None, (), 2, None, "", None)


def test_the_launchers_say_it_at_their_start():
    runs = [megatron_lm_run(), example_run(AugTreeConfig())]
    if native.core() is not None:
        assert report.slow_planning() == [] and not any(NO_CORE in run.describe() for run in runs)
    with native.without_core():
        first, second = (run.describe().splitlines() for run in runs)
        assert first[0].startswith("AugTree: --context-parallel-mode augtree; ")
        assert (first[1:], second[1:]) == ([f"AugTree: {NO_CORE}"], [NO_CORE])
        assert NO_CORE not in example_run(None).describe()  # stock Megatron plans nothing


# ---- progress


def test_a_terminal_is_told_what_takes_long(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    with progress.working("planning ring"):
        while stream.getvalue().count("planning ring") < 2:
            time.sleep(0.01)
    assert stream.getvalue().startswith("\rplanning ring: 0 s\x1b[K")
    assert stream.getvalue().endswith("\r\x1b[K")  # the line is gone


def test_short_work_and_files_are_told_nothing(monkeypatch):
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "PATIENCE", 60.0 if stream.isatty() else 0.0)
        with progress.working("planning ring"):
            pass
        assert stream.getvalue() == ""


def test_progress_ends_with_an_error(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with pytest.raises(ValueError), progress.working("planning"):
        while not stream.getvalue():
            time.sleep(0.01)
        raise ValueError
    assert stream.getvalue().endswith("\r\x1b[K")
