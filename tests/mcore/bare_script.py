"""Runs a script of Megatron-LM on CPU with the shims alone, without the plug-in: what a stock run is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import megatron.core  # noqa: F401, the installed one, before the script's folder is on the path


def main() -> None:
    """Runs ``sys.argv[1]`` with the arguments behind it."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent.resolve()))
    from megatron_augtree.mcore.megatron_lm.shims import script_shims

    with script_shims():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
