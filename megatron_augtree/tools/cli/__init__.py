"""The command line: ``augtree <command>``, also ``python -m megatron_augtree <command>``.

One file a command: `HELP`, `EXAMPLES`, `add_arguments` and `run`, which gives an `output.Answer`. Only numpy
is needed, but for what a command itself is about (``doctor`` looks at torch, ``calibrate`` runs it, ``--png``
draws with matplotlib). Exit status: 0, 1 where a check failed, 2 where the input cannot be used.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from megatron_augtree.config import NO_CORE, AugTreeError, InputError, did_you_mean
from megatron_augtree.planning import native
from megatron_augtree.tools.cli import calibrate, doctor, estimate, explain, plan, simulate, trace, where
from megatron_augtree.tools.cli.output import show

#: Command -> its module, in the order of ``--help``.
COMMANDS = {"plan": plan, "explain": explain, "where": where, "estimate": estimate, "calibrate": calibrate,
            "doctor": doctor, "trace": trace, "simulate": simulate}  # fmt: skip
#: Those that plan.
PLANNING = ("plan", "explain", "where", "simulate")
#: Flags that are called otherwise in a run, where errors have their names from.
_RENAMED = re.compile("--augtree-(?=cluster|force|lock-step|memory-budget-gib|min-shared-rows|recompute)")


class Parser(argparse.ArgumentParser):
    """Raises what is wrong in four parts instead of leaving the program.

    Attributes:
        commands: command -> its parser.
    """

    commands: Mapping[str, Parser] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        """argparse's own hook.

        Raises:
            InputError: always.
        """
        told, _, listed = message.partition(" (choose from")
        raise InputError("the command line cannot be read", values=told, remedy=f"{self.prog} --help",
                         rule=self._choice(told, listed) if listed else self._rule(message))

    def _choice(self, told: str, listed: str) -> str:
        """The rule where a value is none of a flag's few: argparse lists them all, quoted or not."""
        value = told.rpartition(": ")[2].strip("'")
        return did_you_mean(value, re.findall(r"[\w.-]+", listed), f"{self.prog} --help")

    def _rule(self, message: str) -> str:
        known = [*self._option_string_actions, *self.commands]
        words = message.replace("'", " ").replace(":", " ").split()
        close = [n for word in words if word not in known
                 for n in difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.75)]
        return f"did you mean {close[0]}?" if close else "flags and values are as --help lists them"


def parser() -> Parser:
    """The whole command line."""
    whole = Parser(prog="augtree", description="Plans, explains and checks context parallelism that computes "
                   "a shared prompt once.", allow_abbrev=False,
                   epilog="begin with: augtree plan --demo; augtree COMMAND --help has flags and examples")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, module in COMMANDS.items():
        made = commands.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False,
                                   epilog=f"examples:\n{module.EXAMPLES}",
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(made)
    whole.commands = commands.choices
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status."""
    whole = parser()
    try:
        args, unknown = whole.parse_known_args(argv)
        if args.command is None:
            if unknown:
                whole.error(f"no command before {unknown[0]}")
            whole.print_help()
            return 0
        if unknown:
            whole.commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        if args.command in PLANNING and native.core() is None:
            print(f"augtree: {NO_CORE}", file=sys.stderr, flush=True)
        answer = COMMANDS[args.command].run(args)
        show(answer, sys.stdout, as_json=args.json)
        sys.stdout.flush()
    except AugTreeError as error:
        print(f"augtree: {_with_own_flags(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as head, has what it wanted; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return answer.code


def _with_own_flags(text: str) -> str:
    """An error with the command line's names of flags."""
    return _RENAMED.sub("--", text).replace("--context-parallel-mode", "--mode")
