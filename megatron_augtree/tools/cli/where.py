"""``augtree where``: which ranks compute a response's token."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple

from megatron_augtree.config import InputError
from megatron_augtree.planning.plan import Plan
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.choose import choose
from megatron_augtree.tools.cli.output import Answer, Table, several
from megatron_augtree.tools.lengths import Trees

HELP = "the rank, pass and local row that compute a response's token"
EXAMPLES = """\
  augtree where --demo --sequence 3 --token 24600
  augtree where --groups groups.jsonl.gz --range 0:4 --ranks 4 --sequence 5 --token 1500"""


class Row(NamedTuple):
    """A row of the forest: its node, and its place among the node's rows."""

    node: int
    row: int


class Place(NamedTuple):
    """Where a row is computed: the pass, the pool rank, and its index among the rank's rows of that pass."""

    pass_id: int
    rank: int
    index: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--sequence", type=_natural, required=True, metavar="N",
                        help="counted from 0, group by group, response by response")
    parser.add_argument("--token", type=_natural, required=True, metavar="N",
                        help="counted from 0 at the prompt's first; token 0 is nobody's target")
    options.add_step(parser)
    options.add_machine(parser)
    options.add_choice(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    chosen = choose(args)
    trees, plan = chosen.trees, chosen.plan
    if args.sequence >= len(trees.paths):
        raise InputError("no such sequence", values=f"--sequence {args.sequence}",
                         rule=f"there are {len(trees.paths)}, counted from 0: a group's responses follow "
                         "each other", remedy="choose a smaller number")
    row = row_of(trees, args.sequence, args.token)
    places = locate(plan, row)
    group, response = chosen.step.names[args.sequence]
    sharing = sum(row.node in path for path in trees.paths)
    data = {
        "sequence": args.sequence, "token": args.token, "group": group, "response": response,
        "node": row.node, "row": row.row, "node_rows": trees.shape.rows[row.node],
        "sequences_sharing": sharing, "mode": plan.mode, "note": plan.note,
        "places": [{**place._asdict(), "kind": plan.passes[place.pass_id].kind} for place in places],
    }  # fmt: skip
    kind = "response" if not trees.shape.children[row.node] else "shared prompt"
    told = (
        f"token {args.token} of sequence {args.sequence} (group {group}, response {response}) is predicted "
        f"by row {row.row} of node {row.node}, a {kind} of {several(trees.shape.rows[row.node], 'row')} that "
        f"{several(sharing, 'sequence')} {'has' if sharing == 1 else 'have'}"
    )
    rows = [(str(p.rank), str(p.pass_id), plan.passes[p.pass_id].kind, str(p.index)) for p in places]
    columns = ("rank", "pass", "kind", "local row")
    answer: list[str | Table] = [told, Table(columns, rows, right=frozenset(("rank", "pass", "local row")))]
    if len(places) > 1:
        answer.append(f"{len(places)} prompt copies: each serves the responses of its own block")
    return Answer(data, answer)


def row_of(trees: Trees, sequence: int, token: int) -> Row:
    """The row whose target is a token of a sequence.

    Raises:
        InputError: token 0, or one beyond the sequence.
    """
    for node in trees.paths[sequence]:
        row = token - 1 - trees.shape.starts[node]
        if 0 <= row < trees.shape.rows[node]:
            return Row(node, row)
    length = sum(trees.shape.rows[node] for node in trees.paths[sequence]) + 1
    targets = f"tokens 1 to {length - 1} of the sequence are targets of rows; token 0 is given"
    raise InputError("no such token", values=f"--sequence {sequence} --token {token}",
                     rule=targets if length > 1 else "the sequence has no rows: no token is a target",
                     remedy="choose a token inside the sequence, or another sequence")


def locate(plan: Plan, row: Row) -> list[Place]:
    """The places of a row, one a prompt copy; `runtime.layout.locate` says the same of tensors."""
    places = []
    for p in plan.passes:
        for rank, spans in zip(p.block, p.placement):
            before = 0
            for span in spans:
                if span.node == row.node and span.lo <= row.row < span.hi:
                    places.append(Place(p.id, rank, before + row.row - span.lo))
                before += span.hi - span.lo
    return places


def _natural(text: str) -> int:
    if not re.fullmatch("[0-9]{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)
