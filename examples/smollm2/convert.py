"""SmolLM2-135M's weights as a checkpoint of `examples/pretrain_gpt.py`, and as a file for `scripts/`.

    python -m examples.smollm2.convert --out smollm2

prints the flags of the model, and where the weights are.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import sys

import torch

from megatron_augtree.mcore import launch
from megatron_augtree.mcore.arguments import DTYPES
from megatron_augtree.mcore.checkpoint import MODEL_FILE, TRACKER, made_for, save_weights
from megatron_augtree.mcore.launch import RankParser
from megatron_augtree.mcore.pretrained import Pretrained, load_gguf, load_smollm2
from megatron_augtree.mcore.weights import check_folder


def parse() -> argparse.Namespace:
    """The flags."""
    parser = RankParser(prog="convert.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of checkpoints")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="that the training will have")
    parser.add_argument("--gguf", default="", metavar="FILE", help="another llama model's file")
    return parser.parse_args()


def convert(found: Pretrained, out: str) -> str:
    """Writes the checkpoint; returns its folder.

    Raises:
        InputError: the folder cannot be written.
    """
    found.args.optimizer = "none"
    dtype = getattr(torch, found.args.dtype)
    weights = {name: value.to(dtype) for name, value in found.weights.items()}
    return save_weights(out, made_for(found.args, 1), weights)


def main() -> None:
    """Reads, converts, and says how to go on."""
    args = parse()
    check_folder(args.out, "--out")
    found = load_gguf(args.gguf, dtype=args.dtype) if args.gguf else load_smollm2(dtype=args.dtype)
    folder = convert(found, args.out)
    flags = " ".join([*found.flags, "--dtype", args.dtype])
    sys.stdout.write(f"flags of the model:\n  {flags}\n"
                     f"for examples/pretrain_gpt.py: --load {args.out} --finetune ({TRACKER} is there)\n"
                     f"for scripts/replay.py and scripts/logprobs.py: --load {folder}/{MODEL_FILE}\n")


if __name__ == "__main__":
    launch.run(main)
