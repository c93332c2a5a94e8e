"""Calls the command line in this process, and what its tests plan."""

from __future__ import annotations

import json
import re

from megatron_augtree.config import NO_CORE
from megatron_augtree.planning import native
from megatron_augtree.tools import cli

MACHINE = "--ranks 2 --model smollm2-135m --cluster cpu --dtype float32"
STEP = f"--group 40:6,3x2 --group 12:5,9 {MACHINE}"
#: Rows of STEP: spines 39 and 11, responses; and what ring computes.
ROWS, UNSHARED = 39 + 6 + 3 + 3 + 11 + 5 + 9, 45 + 42 + 42 + 16 + 20


def said(stderr: str) -> str:
    """What a command says on stderr beside that there is no C++ core, where there is none."""
    return stderr if native.core() is not None else stderr.removeprefix(f"augtree: {NO_CORE}\n")


def call(capsys, line: str, code: int = 0) -> str:
    """A command's stdout."""
    assert cli.main(line.split()) == code
    captured = capsys.readouterr()
    assert said(captured.err) == ""
    return captured.out


def answer(capsys, line: str, code: int = 0) -> dict:
    """A command's JSON, which is all of its stdout."""
    return json.loads(call(capsys, f"{line} --json", code))


def refused(capsys, line: str) -> str:
    """A command's error: four parts on stderr, nothing on stdout, status 2."""
    assert cli.main(line.split()) == 2
    captured = capsys.readouterr()
    error = said(captured.err)
    assert captured.out == "" and "Traceback" not in error
    assert re.fullmatch(r"augtree: .+\n  values: .+\n  rule: .+\n  remedy: .+\n", error, re.DOTALL)
    return error
