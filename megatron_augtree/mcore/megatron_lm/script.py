"""Runs a script of Megatron-LM with the plug-in in place (``python -m megatron_augtree.launch``).

Two things are called ``megatron``: megatron-core of the package index, which is ``megatron.core``, and the
folder of the script, which has ``megatron.training`` and a ``megatron.core`` of its own. ``megatron`` is a
namespace package, so its parts may come from several folders. The rule here: ``megatron.core`` is the
installed one (it has its compiled helpers, and this plug-in was imported with it), all else is the script's.
Both must be of one release (major and minor). Where none is installed, put the script's folder on PYTHONPATH:
then it is the installed one.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
from megatron.core import package_info

from megatron_augtree.config import AugTreeError, InputError, UnsupportedError
from megatron_augtree.mcore.launch import USER_ERROR, RankParser, env_world
from megatron_augtree.mcore.megatron_lm import pretrain
from megatron_augtree.mcore.megatron_lm.patches import REGISTRY
from megatron_augtree.mcore.megatron_lm.shims import script_shims
from megatron_augtree.mcore.megatron_lm.voice import say
from megatron_augtree.mcore.patches import refuse_mindspeed, release

REPORT = "--augtree-report"


def run(words: list[str]) -> None:
    """Runs a script; ends the process with code 2 where an ``AugTreeError`` says what a user did wrong.

    Args:
        words: the script's path and its arguments.
    """
    try:
        script, flags = _check(words)
        with prepared(script):
            if flags == [REPORT]:
                print("\n".join(map(str, REGISTRY.report())))
                return
            _run(script, flags)
    except AugTreeError as error:
        _end(error)


def _check(words: list[str]) -> tuple[Path, list[str]]:
    """The script and its flags. AugTree's own are parsed here: before anything slow, and with one message."""
    if not words or words[0].startswith("-"):
        raise InputError(
            "no script to run",
            values=" ".join(words[:1]) or "no arguments",
            rule="the first argument is the path of a training script of Megatron-LM",
            remedy="python -m megatron_augtree.launch MEGATRON_LM/pretrain_gpt.py <its flags>",
        )
    script = Path(words[0])
    core = script.parent / "megatron" / "core" / "package_info.py"
    if not script.is_file() or not (script.parent / "megatron" / "training").is_dir():
        raise InputError(
            "this is not a script of Megatron-LM",
            values=words[0],
            rule="it is a file, and megatron/training is in its folder",
            remedy="give the path of pretrain_gpt.py in a copy of Megatron-LM",
        )
    theirs, ours = _release_of(core), release()
    if theirs != ours:
        raise UnsupportedError(
            "the script and megatron-core are of different releases",
            values=f"{script.parent} is {theirs}, megatron-core is {package_info.__version__}",
            rule="megatron.core is the installed one, megatron.training the script's, both of one release",
            remedy=f"pip install 'megatron-core=={theirs}.*', or take the script of core_v{ours}",
        )
    parser = RankParser(prog=script.name, add_help=False)
    pretrain.add_arguments(parser)
    parser.parse_known_args(words[1:])
    refuse_mindspeed()
    return script, words[1:]


def _release_of(core: Path) -> str:
    """Major and minor of a copy of Megatron-LM, read from its text."""
    text = core.read_text() if core.is_file() else ""
    numbers = [re.search(rf"^{name}\s*=\s*(\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    return ".".join(found.group(1) if found else "?" for found in numbers)


@contextlib.contextmanager
def prepared(script: Path) -> Iterator[None]:
    """Path, shims and patches that a script needs, for the length of a block."""
    folder = str(script.parent.resolve())
    sys.path.insert(0, folder)  # after megatron.core was imported: it stays the installed one
    try:
        with contextlib.nullcontext() if torch.cuda.is_available() else script_shims():
            REGISTRY.apply()
            try:
                yield
            finally:
                REGISTRY.restore()
    finally:
        sys.path.remove(folder)


def _run(script: Path, flags: list[str]) -> None:
    before = sys.argv
    sys.argv = [str(script), *flags]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before


def _end(error: AugTreeError) -> NoReturn:
    """One message, and the end of this rank; the launcher ends the others."""
    say(str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    if env_world() == 1:
        sys.exit(USER_ERROR)
    os._exit(USER_ERROR)  # tearing down a process group whose peers are gone may wait for them
