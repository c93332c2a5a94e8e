"""Runs of Megatron-LM's own ``pretrain_gpt.py`` that `test_pretrain_gpt.py` compares, and their flags."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import package_info
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_augtree.data.groups import fold, read_groups, truncate, write_groups
from tests.distributed.cases import REAL
from tests.mcore import launcher_cases

ROOT = launcher_cases.ROOT
LAUNCHER = ["-m", "megatron_augtree.launch"]
#: The shims without the plug-in: what a stock run on CPU is.
BARE = [str(Path(__file__).with_name("bare_script.py"))]

_SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 64 --untie-embeddings-and-output-weights --max-position-embeddings 128 "
)
_TRAINING = "--optimizer sgd --lr 0.2 --weight-decay 0 --clip-grad 1.0 --sgd-momentum 0.0 --seed 1234 "
#: The vocabulary is 127 ids and an end, padded to 128.
MEGATRON = (
    _SHAPE + _TRAINING + "--vocab-size 127 --tokenizer-type NullTokenizer --seq-length 128 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--use-cpu-initialization --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--micro-batch-size 1 --num-workers 0 --lr-decay-style constant --log-interval 1 "
    "--tensorboard-log-interval 1 --ckpt-format torch "
)
NO_EVALUATION = "--eval-iters 0 --eval-interval 1000 "
OURS = _SHAPE + _TRAINING + "--vocab-size 128 --num-workers 0 "
GRPO = "--objective grpo --loss-preset dapo "
NEEDS_TREE = (
    "MEGATRON_LM_PATH names no copy of Megatron-LM of the installed megatron-core's release (a folder, or "
    "several with a colon between them)"
)


def megatron_lm() -> Path | None:
    """The copy of Megatron-LM that fits the installed megatron-core, of those in MEGATRON_LM_PATH."""
    installed = package_info.__version__.split(".")[:2]
    for folder in filter(None, os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep)):
        info = Path(folder) / "megatron" / "core" / "package_info.py"
        text = info.read_text() if info.is_file() else ""
        if re.findall(r"^(?:MAJOR|MINOR)\s*=\s*(\d+)", text, re.MULTILINE) == installed:
            return Path(folder)
    return None


def write_data(folder: Path) -> Path:
    """Groups of four responses, cut short: real ones where they lie beside the checkout."""
    source, path = REAL / "gsm8k_solutions.jsonl.gz", folder / "groups.jsonl.gz"
    if source.is_file():
        # What generated them is unknown: log-probs near those of a new model, so that ratios are clipped too.
        rng = random.Random(5)
        groups = [
            replace(group, responses=tuple(
                replace(r, old_logprobs=tuple(rng.uniform(-5.1, -4.6) for _ in r.tokens))
                for r in group.responses
            ))
            for group in truncate(read_groups(source, 0, 6), 40, 16)
        ]
    else:
        groups = launcher_cases.make_groups()
    write_groups(path, fold(groups, 127))
    return path


def run(
    how: list[str], tree: Path, ranks: int, flags: str, folder: Path | None = None
) -> subprocess.CompletedProcess:
    """A run of a copy's ``pretrain_gpt.py`` under torchrun, in a folder; ``how`` is `LAUNCHER` or `BARE`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [*command, *how, str(tree / "pretrain_gpt.py"), *flags.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def scalars(folder: Path, name: str) -> list[float]:
    """What Megatron wrote for TensorBoard, step by step, as fp32 has it."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars(name)]


def parameters(folder: Path, iteration: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Parameters of a checkpoint of Megatron's, of one tensor-parallel rank."""
    path = folder / f"iter_{iteration:07d}" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    model = torch.load(path, weights_only=False)["model"]
    return {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
