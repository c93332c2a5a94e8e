"""The command line: ``augtree <command>``, also ``python -m megatron_augtree <command>``.

One file a command: `HELP`, `EXAMPLES`, `add_arguments` and `run`, which gives an `output.Answer`. Only numpy
is needed, but for what a command itself is about (``doctor`` looks at torch, ``calibrate`` runs it, ``--png``
draws with matplotlib). Exit status: 0, 1 where a check failed, 2 where the input cannot be used.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.tools.cli import calibrate, doctor, estimate, explain, plan, simulate, trace, where
from megatron_augtree.tools.cli.output import show

#: Command -> its module, in the order of ``--help``.
COMMANDS = {"plan": plan, "explain": explain, "where": where, "estimate": estimate, "calibrate": calibrate,
            "doctor": doctor, "trace": trace, "simulate": simulate}  # fmt: skip


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
        raise InputError("the command line cannot be read", values=message, rule=self._rule(message),
                         remedy=f"{self.prog} --help")

    def _rule(self, message: str) -> str:
        known = [*self._option_string_actions, *self.commands]
        words = message.replace("'", " ").replace(":", " ").split()
        close = [n for word in words if word not in known
                 for n in difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=0.75)]
        return f"did you mean {close[0]}?" if close else "flags and values are as --help lists them"


def parser() -> Parser:
    """The whole command line."""
    whole = Parser(prog="augtree", description="Plans, explains and checks context parallelism that computes "
                   "a shared prompt once.", epilog="augtree COMMAND --help has flags and examples",
                   allow_abbrev=False)
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
            whole.print_help()
            return 0
        if unknown:
            whole.commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
        answer = COMMANDS[args.command].run(args)
        show(answer, sys.stdout, as_json=args.json)
        sys.stdout.flush()
    except AugTreeError as error:
        print(f"augtree: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as head, has what it wanted; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return answer.code
