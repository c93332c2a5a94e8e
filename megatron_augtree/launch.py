"""Runs a training script of Megatron-LM, as it is, with AugTree's flags.

    torchrun --nproc-per-node 8 -m megatron_augtree.launch MEGATRON_LM/pretrain_gpt.py \\
        <Megatron's own flags> --context-parallel-mode augtree --data-path groups.jsonl.gz

Without ``--context-parallel-mode`` the script runs as if it had been started itself. Where there is no CUDA,
shims let it run on CPU over gloo (`mcore/megatron_lm/shims.py`). `mcore/megatron_lm/pretrain.py` says what is
changed under a mode, and how; ``--augtree-report`` in place of the script's flags prints it,
and ``--help`` there lists all flags, Megatron's and AugTree's.
"""

from __future__ import annotations

import sys

from megatron_augtree.config import InputError


def main() -> None:
    """Runs ``sys.argv[1]`` with the arguments behind it."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    try:
        from megatron_augtree.mcore.megatron_lm import script
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise
        sys.exit(str(InputError(
            "megatron-core is not installed",
            values=f"no module {error.name}",
            rule="the plug-in works on the installed megatron-core",
            remedy="pip install megatron-core, or put the folder of Megatron-LM on PYTHONPATH",
        )))
    script.run(sys.argv[1:])


if __name__ == "__main__":
    main()
