"""Flags that commands share, and what they mean: a step of groups, a model, a machine."""

from __future__ import annotations

import argparse
import re

from megatron_augtree.config import FORCE_KEYS, MODES, AugTreeConfig, InputError
from megatron_augtree.data.groups import parse_range, read_groups
from megatron_augtree.data.workloads import TREES, WORKLOADS, rollout_trees, workload
from megatron_augtree.planning.cluster import PRESETS
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.tools.lengths import Step, step_of_groups, step_of_lengths, step_of_rollouts
from megatron_augtree.tools.models import DTYPES, MODELS, model_shape

#: Groups of ``--demo``: a long prompt with ragged answers, a shorter one with long answers, a chat.
DEMO = (
    (24576, (512, 480, 480, 2048, 300, 760, 90, 512)),
    (6144, (4096, 1024, 900, 6000)),
    (800, (700, 350, 350, 1200)),
)
#: No group, response or multiplier has more digits.
_DIGITS = 9
#: More than any run has ranks with the same parameters, or groups a step: planning them would take minutes.
MOST_RANKS, MOST_GROUPS = 16_384, 65_536
#: Flags of a group file and of a preset, and their defaults.
_ALL, _GROUPS, _SEED = ":", 64, 0


def add_step(parser: argparse.ArgumentParser) -> None:
    """Flags that say which groups."""
    group = parser.add_argument_group("groups (one of these)")
    group.add_argument("--prompt", type=positive, metavar="P", help="tokens of one group's prompt")
    group.add_argument("--responses", metavar="R1,R2xN,...",
                       help="tokens of its responses; 480x3 is three of 480")
    group.add_argument("--group", action="append", default=[], metavar="P:R1,R2xN,...",
                       help="a group in one word; may be repeated")
    group.add_argument("--groups", metavar="FILE", help="a group file (JSON lines, plain or .gz)")
    group.add_argument("--range", default=_ALL, metavar="A:B", help="groups A to B-1 of it (default all)")
    group.add_argument("--preset", choices=(*WORKLOADS, TREES), metavar="NAME",
                       help=f"seeded ragged lengths: {', '.join((*WORKLOADS, TREES))}")
    group.add_argument("--num-groups", type=_num_groups, default=_GROUPS, metavar="N",
                       help=f"groups of a preset (default {_GROUPS})")
    group.add_argument("--seed", type=int, default=_SEED, metavar="N", help=f"of a preset (default {_SEED})")
    group.add_argument("--demo", action="store_true", help="three built-in groups")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model and which ranks."""
    group = parser.add_argument_group("model and machine")
    group.add_argument("--model", default="qwen2.5-7b", metavar="NAME",
                       help=f"{', '.join(MODELS)}, or a Hugging Face config.json (default qwen2.5-7b)")
    group.add_argument("--tp", type=positive, default=1, metavar="N",
                       help="tensor-parallel ranks that share each layer (default 1)")
    group.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16",
                       help="of activations (default bfloat16)")
    group.add_argument("--cluster", default="h100", metavar="NAME",
                       help=f"constants of the machine: {', '.join(PRESETS)}, or a file that calibrate wrote "
                       "(default h100)")
    group.add_argument("--ranks", type=_ranks, default=8, metavar="N",
                       help="ranks that hold the same parameters: data- times context-parallel (default 8)")
    group.add_argument("--memory-budget-gib", type=float, default=0.0, metavar="G",
                       help="memory above the built model, GiB a rank (default the machine's)")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Flags that limit the planner."""
    group = parser.add_argument_group("planner")
    group.add_argument("--mode", choices=MODES, default="augtree", metavar="MODE",
                       help=f"{', '.join(MODES)} (default augtree)")
    group.add_argument("--context-parallel-size", type=int, default=0, metavar="N",
                       help="ranks of a block: under augtree at most, under the others exactly (default all)")
    group.add_argument("--force", default="", metavar="KEY=VALUE,...",
                       help=f"as --augtree-force: {', '.join(FORCE_KEYS)}")
    group.add_argument("--recompute", choices=("auto", "none", "full"), default="auto",
                       help="layers that run again in the backward: with a memory budget as the planner "
                       "chooses, pass by pass, otherwise none (auto, the default); none; all (full)")
    group.add_argument("--lock-step", action="store_true",
                       help="as --augtree-lock-step: every rank plays the same number of passes, together")
    group.add_argument("--min-shared-rows", type=positive, default=16, metavar="N",
                       help="groups of a file share a prompt only where it has so many rows (default 16)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``, which every command has."""
    parser.add_argument("--json", action="store_true", help="the answer as JSON, and nothing else, on stdout")


def positive(text: str) -> int:
    """A positive integer, as argparse's `type`."""
    if not re.fullmatch(f"[0-9]{{1,{_DIGITS}}}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _ranks(text: str) -> int:
    return _at_most(MOST_RANKS, text, "--ranks", "a pool has", "ranks: those that hold the same parameters",
                    "leave out the ranks of tensor and pipeline parallelism")


def _num_groups(text: str) -> int:
    return _at_most(MOST_GROUPS, text, "--num-groups", "a step has", "groups", "plan a step, not a data set")


def _at_most(most: int, text: str, flag: str, who: str, what: str, remedy: str) -> int:
    number = positive(text)
    if number > most:
        raise InputError("a number is out of range", values=f"{flag} {text}",
                         rule=f"{who} at most {most:,} {what}", remedy=remedy)
    return number


def modes(text: str) -> list[str]:
    """A list of modes, or ``all``, as argparse's `type`."""
    found = list(MODES) if text == "all" else text.split(",")
    unknown = [mode for mode in found if mode not in MODES]
    if unknown:
        # In argparse's own words, so that it is told like any other choice.
        known = ", ".join((*MODES, "all"))
        raise argparse.ArgumentTypeError(f"invalid choice: {unknown[0]!r} (choose from {known})")
    return found


def step_of(args: argparse.Namespace) -> Step:
    """The groups that the flags name.

    Raises:
        InputError: none or several of the flags, or one that cannot be read.
    """
    given = {
        "--prompt": args.prompt is not None or args.responses is not None,
        "--group": bool(args.group),
        "--groups": args.groups is not None,
        "--preset": args.preset is not None,
        "--demo": args.demo,
    }
    chosen = [flag for flag, there in given.items() if there]
    if len(chosen) != 1:
        raise InputError(
            "which groups?",
            values=" and ".join(chosen) or "no flag names any",
            rule="groups come from one of --prompt with --responses, --group, --groups, --preset, --demo",
            remedy="give one, for example --demo, or --prompt 32768 --responses 512,480x3,1024",
        )
    _refuse_stray(args)
    if args.demo:
        return step_of_lengths(DEMO)
    if args.preset == TREES:
        return step_of_rollouts(rollout_trees(args.num_groups, args.seed))
    if args.preset:
        return step_of_lengths(workload(args.preset, args.num_groups, args.seed))
    if args.groups is not None:
        start, stop = parse_range(args.range, "--range")
        return step_of_groups(read_groups(args.groups, start, stop), args.min_shared_rows)
    if args.group:
        return step_of_lengths([_group(text) for text in args.group])
    if args.prompt is None or args.responses is None:
        only = "--responses" if args.prompt is None else "--prompt"
        raise InputError("half a group", values=f"{only} alone", rule="a group has a prompt and responses",
                         remedy="give both --prompt and --responses")
    return step_of_lengths([(args.prompt, lengths_of(args.responses, "--responses"))])


def _refuse_stray(args: argparse.Namespace) -> None:
    """Flags of a group file, or of a preset, beside other groups would do nothing."""
    for stray, owner, given in (
        (args.range != _ALL, "--groups", f"--range {args.range}"),
        (args.num_groups != _GROUPS, "--preset", f"--num-groups {args.num_groups}"),
        (args.seed != _SEED, "--preset", f"--seed {args.seed}"),
    ):
        if stray and getattr(args, owner.lstrip("-")) is None:
            raise InputError("a flag that does nothing here", values=given, rule=f"it belongs to {owner}",
                             remedy=f"leave it out, or give {owner}")


def _group(text: str) -> tuple[int, list[int]]:
    prompt, colon, responses = text.partition(":")
    if not colon or not re.fullmatch(f"[0-9]{{1,{_DIGITS}}}", prompt):
        raise InputError("cannot read a group", values=f"--group {text}",
                         rule="a group is PROMPT:RESPONSES, in tokens",
                         remedy="write, for example, --group 32768:512,480x3,1024")
    return int(prompt), lengths_of(responses, f"--group {text}, at")


def lengths_of(text: str, flag: str) -> list[int]:
    """``"512,480x3"`` -> ``[512, 480, 480, 480]``.

    Raises:
        InputError: anything else, or more than a million responses.
    """
    lengths: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:x([0-9]{1,6}))?\s*", part, flags=re.ASCII)
        if not match or len(lengths) > 10**6:
            raise InputError("cannot read response lengths", values=f"{flag} {part or 'nothing'}",
                             rule="lengths in tokens, separated by commas; LENGTHxTIMES repeats one",
                             remedy="write, for example, 512,480x3,1024")
        lengths += [int(match[1])] * int(match[2] or 1)
    return lengths


def model_of(args: argparse.Namespace) -> ModelShape:
    """The model that the flags name."""
    recomputed = getattr(args, "recompute", "none") == "full"
    return model_shape(args.model, tp=args.tp, dtype=args.dtype, recomputed=recomputed)


def config_of(args: argparse.Namespace) -> AugTreeConfig:
    """The planner's configuration that the flags name; checked as the launchers check it."""
    config = AugTreeConfig(
        mode=args.mode,
        degree=args.context_parallel_size,
        force=args.force,
        memory_budget_gib=args.memory_budget_gib,
        min_shared_rows=args.min_shared_rows,
        cluster=args.cluster,
        recompute="auto" if args.recompute == "auto" else "flags",
        lock_step=args.lock_step,
    )
    config.check_forced()
    return config
