"""Flags of a run inside Megatron-LM's training loop: the data, and what the loop cannot do under a mode."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from megatron_augtree.config import AugTreeError, InputError, UnsupportedError
from megatron_augtree.data import groups as group_files
from megatron_augtree.data.groups import Group
from megatron_augtree.mcore.arguments import Limit
from megatron_augtree.mcore.objective import LOSS_FLAGS

SPLITS = ("train", "valid", "test")

_PLANNED = "a step takes --global-batch-size groups, and a plan decides how its ranks compute them"
_GROUPS = "the data are groups of responses"
_DDP = "gradients are reduced by Megatron's DistributedDataParallel"
_OFF = (None, False)
_LEAVE = "leave it out"

LIMITS: tuple[Limit, ...] = (
    Limit("--micro-batch-size", "", (None, 1), _PLANNED, "set it to 1"),
    Limit("--rampup-batch-size", "", (None,), _PLANNED, _LEAVE),
    Limit("--step-batch-size-schedule", "", (None,), _PLANNED, _LEAVE),
    Limit("--decrease-batch-size-if-needed", "", _OFF, _PLANNED, _LEAVE),
    Limit("--iterations-to-skip", "", (None, []), "steps are planned in order", _LEAVE),
    Limit("--phase-transition-iterations", "", (None, []), "steps are planned in order", _LEAVE),
    Limit("--dataloader-type", "", (None, "single", "external"), _GROUPS,
          "leave it out; --shuffle changes the order of groups"),
    Limit("--mock-data", "", _OFF, _GROUPS, "use --data-path"),
    Limit("--data-args-path", "", (None,), _GROUPS, "use --data-path"),
    Limit("--per-split-data-args-path", "", (None,), _GROUPS, "use --train-data-path and --valid-data-path"),
    Limit("--sft", "", _OFF, _GROUPS, _LEAVE),
    Limit("--fim-data", "", _OFF, _GROUPS, _LEAVE),
    Limit("--perform-rl-step", "", _OFF, _GROUPS, "write groups to a file, or call mcore/api/__init__.py"),
    Limit("--full-validation", "", _OFF, "evaluation takes --eval-iters steps", _LEAVE),
    Limit("--multiple-validation-sets", "", _OFF, "evaluation takes --eval-iters steps", _LEAVE),
    Limit("--hybrid-context-parallel", "", _OFF, "the plan decides which ranks work together", _LEAVE),
    Limit("--hierarchical-context-parallel-sizes", "", (None,), "the plan decides which ranks work together",
          _LEAVE),
    Limit("--use-megatron-fsdp", "", _OFF, _DDP, "use --use-distributed-optimizer"),
    Limit("--use-torch-fsdp2", "", _OFF, _DDP, "use --use-distributed-optimizer"),
    Limit("--gtp-weight-remat-size", "", (None, 1), _DDP, _LEAVE),
    Limit("--use-legacy-models", "", _OFF, "the model is megatron-core's", _LEAVE),
    Limit("--fp16", "", _OFF, "numbers are checked in fp32 and bf16", "use --bf16"),
)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of group files that Megatron does not have."""
    group = parser.add_argument_group("groups of responses (with --context-parallel-mode)")
    group.add_argument("--groups", default=":", metavar="A:B",
                       help="of all files of --data-path together, groups A to B-1")
    group.add_argument("--fold-token-ids", action="store_true",
                       help="take ids %% the padded vocabulary: tries a small model on a large one's file")
    group.add_argument("--max-prompt-tokens", type=int, default=None,
                       help="keep the first tokens of every prompt")
    group.add_argument("--max-response-tokens", type=int, default=None, help="the same for responses")
    group.add_argument("--shuffle", action="store_true", help="every epoch in an order that --seed decides")


def check_stray(args: argparse.Namespace) -> None:
    """Without a mode: refuses flags of groups and losses, which would do nothing.

    Raises:
        AugTreeError: names them.
    """
    defaults = {"--groups": ":", "--objective": "nll", "--fold-token-ids": False, "--shuffle": False}
    flags = (*defaults, "--max-prompt-tokens", "--max-response-tokens", "--loss-preset", *LOSS_FLAGS,
             "--loss-constant")
    given = {flag: getattr(args, flag.lstrip("-").replace("-", "_")) for flag in flags}
    stray = [f"{flag} {value}" for flag, value in given.items() if value != defaults.get(flag)]
    if stray:
        raise AugTreeError(
            "flags of AugTree without a mode",
            values=", ".join(stray),
            rule="without --context-parallel-mode the script runs as it is, and these do nothing",
            remedy="add --context-parallel-mode, or remove them",
        )


def check_loop(args: argparse.Namespace) -> None:
    """Refuses what Megatron's training loop cannot do with planned steps; absent arguments pass.

    Raises:
        UnsupportedError: names every offending flag with its value, rule and remedy.
    """
    broken = [limit for limit in LIMITS
              if getattr(args, limit.argument, limit.allowed[0]) not in limit.allowed]
    if broken:
        raise UnsupportedError(
            "the training loop cannot do this under a --context-parallel-mode",
            values="; ".join(f"{limit.flag} {getattr(args, limit.argument)}" for limit in broken),
            rule="; ".join(dict.fromkeys(limit.rule for limit in broken)),
            remedy="; ".join(f"{limit.flag}: {limit.remedy}" for limit in broken),
        )


class _Ids:
    """Stands for a tokenizer: group files of these runs hold token ids."""

    vocab_size = 1 << 62
    end_of_text = 0

    def encode(self, text: str) -> Sequence[int]:
        """Refuses text; the reader adds file, line and field."""
        raise InputError(
            "text where token ids are expected",
            values="a string",
            rule="under --context-parallel-mode group files hold token ids, as rollouts wrote them",
            remedy="write ids; examples/pretrain_gpt.py reads text with --tokenizer-type ByteTokenizer",
        )


def read_splits(args: argparse.Namespace) -> dict[str, tuple[Group, ...]]:
    """The groups of training, validation and test, as `SPLITS` orders them; some may be empty.

    ``--data-path`` is all for training, unless ``--split`` divides it, in file order.

    Raises:
        InputError: no file, a file or range that cannot be used, or no groups where some are needed.
    """
    named = {name: getattr(args, f"{name}_data_path", None) for name in SPLITS}
    if bool(args.data_path) == any(named.values()):
        raise InputError(
            "no groups to train on" if not args.data_path else "two ways to name the groups",
            values="--data-path and --train-data-path, --valid-data-path, --test-data-path",
            rule="group files are given by the first, or by some of the others",
            remedy="give --data-path groups.jsonl.gz",
        )
    if args.data_path:
        groups = _read(args.data_path)
        first, end = group_files.parse_range(args.groups)
        if max(first + 1, end or 0) > len(groups):
            raise InputError(
                "the files have too few groups",
                values=f"--groups {args.groups}, {len(groups)} groups",
                rule="the range lies within the files",
                remedy="correct the range",
            )
        parts = _split(groups[first:end], args.split)
    else:
        parts = [_read(named[name] or []) for name in SPLITS]
    splits = {
        name: tuple(group_files.truncate(part, args.max_prompt_tokens, args.max_response_tokens))
        for name, part in zip(SPLITS, parts, strict=True)
    }
    _check_enough(args, splits)
    return splits


def _read(paths: Sequence[str]) -> list[Group]:
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise InputError(
            "a group file is missing",
            values=", ".join(missing),
            rule="under --context-parallel-mode the data are JSON lines of groups, plain or gzip",
            remedy="correct the path (prefixes of indexed data sets and weights are not group files)",
        )
    return [group for path in paths for group in group_files.read_groups(path, tokenizer=_Ids())]


def _split(groups: list[Group], weights: str | None) -> list[list[Group]]:
    """Groups in file order, divided as ``"8,1,1"`` says; all for training where there are no weights."""
    try:
        shares = [float(word) for word in weights.split(",")] if weights else [1.0]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLITS) or min(shares) < 0 or not sum(shares) > 0:
        raise InputError(
            "cannot read a split",
            values=f"--split {weights}",
            rule="up to three weights, for training, validation and test",
            remedy="for instance --split 8,1,1",
        )
    shares += [0.0] * (len(SPLITS) - len(shares))
    ends = [round(len(groups) * total / sum(shares)) for total in itertools.accumulate(shares)]
    return [groups[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def _check_enough(args: argparse.Namespace, splits: dict[str, tuple[Group, ...]]) -> None:
    trains = not getattr(args, "skip_train", False)
    evaluates = bool(getattr(args, "eval_iters", 0))
    for name, needed, remedy in (
        ("train", trains, "give more groups"),
        ("valid", evaluates, "use --eval-iters 0, --split 9,1, or --train-data-path and --valid-data-path"),
    ):
        if needed and not splits[name]:
            raise InputError(
                f"no groups for {'training' if name == 'train' else 'validation'}",
                values=f"--split {args.split}, --eval-iters {getattr(args, 'eval_iters', 0)}",
                rule="every part that runs has at least one group",
                remedy=remedy,
            )


def fitted(groups: Sequence[Group], args: argparse.Namespace) -> list[Group]:
    """Groups whose ids the padded vocabulary has, folded if ``--fold-token-ids`` says so.

    Raises:
        InputError: an id beyond it.
    """
    if args.fold_token_ids:
        return group_files.fold(groups, args.padded_vocab_size)
    group_files.check_vocabulary(groups, args.padded_vocab_size)
    return list(groups)
