"""``augtree trace``: planned and measured timelines in one file, for one tab of Perfetto."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_augtree.config import InputError
from megatron_augtree.runtime.trace import read_events, write_events
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.files import written
from megatron_augtree.tools.cli.output import Answer, several

HELP = "traces of ranks, planned and measured, merged into one"
EXAMPLES = """\
  augtree trace planned.json measured/*.json --out both.json
  then open both.json in ui.perfetto.dev"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("files", nargs="+", metavar="FILE",
                        help="from plan --trace, or from a run with --augtree-trace-dir")
    parser.add_argument("--out", required=True, metavar="FILE", help="the merged trace")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    data = merge_traces(args.files, args.out)
    data["out"] = args.out
    told = f"{several(data['spans'], 'span')} of {several(len(data['processes']), 'timeline')} written to " \
        f"{args.out}: open it in ui.perfetto.dev"
    return Answer(data, [told])


def merge_traces(files: Sequence[str], out: str) -> dict:
    """Write the events of several traces as one trace.

    A rank's planned timeline may be in several files (every rank's file has one, and ``plan --trace`` gives
    all): the first counts. Times are since the step began, in all of them.

    Returns:
        ``spans``, their number, and ``processes``, the names of the timelines.

    Raises:
        InputError: a file that cannot be read or is no trace, or an output that cannot be written.
    """
    merged: list[dict] = []
    owner: dict[object, int] = {}
    for number, path in enumerate(files):
        for event in _read(path):
            if owner.setdefault(event.get("pid"), number) == number:
                merged.append(event)
    with written(out, "--out") as partial:
        write_events(partial, merged)
    names = [e["args"]["name"] for e in merged if e.get("ph") == "M" and e.get("name") == "process_name"]
    return {"spans": sum(e.get("ph") == "X" for e in merged), "processes": names}


def _read(path: str) -> list[dict]:
    try:
        events = read_events(path)
        if not all(isinstance(event, dict) and isinstance(event.get("pid"), int) for event in events):
            raise ValueError("an event without a process")
        return events
    except (OSError, ValueError, RecursionError) as error:
        raise InputError("cannot read a trace", values=f"{path}: {error}",
                         rule="a trace is a file that plan --trace or --augtree-trace-dir wrote",
                         remedy="correct the path, or write the trace again") from error
