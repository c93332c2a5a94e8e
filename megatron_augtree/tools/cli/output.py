"""What a command answers, and how it is shown: tables on a terminal, aligned text elsewhere, or JSON.

rich is used where it is installed and the output is a terminal; nothing depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from megatron_augtree.planning.cluster import GIB


@dataclass(frozen=True)
class Table:
    """A table; columns whose name is in `right` are aligned to the right."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    title: str = ""
    right: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        data: for ``--json``: plain numbers, texts, lists and dictionaries.
        parts: for people: paragraphs and tables, in order.
        code: exit status: 0, or 1 where a check failed.
    """

    data: dict[str, Any]
    parts: Sequence[str | Table] = field(default_factory=list)
    code: int = 0


def show(answer: Answer, stream: TextIO, *, as_json: bool) -> None:
    """Write an answer."""
    if as_json:
        stream.write(json.dumps(answer.data, indent=1) + "\n")
        return
    console = _console(stream)
    for part in answer.parts:
        if console is not None:
            console.print(_rich_table(part) if isinstance(part, Table) else part, markup=False,
                          highlight=False)
        else:
            stream.write((_plain_table(part) if isinstance(part, Table) else part) + "\n")


def _console(stream: TextIO) -> Any:
    """rich's console, or None."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(title=table.title or None, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False,
                     show_header=any(table.columns))
    for column in table.columns:
        made.add_column(column, justify="right" if column in table.right else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made


def _plain_table(table: Table) -> str:
    lines = [*([table.columns] if any(table.columns) else []), *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    text = [table.title] if table.title else []
    for line in lines:
        cells = (
            cell.rjust(width) if column in table.right else cell.ljust(width)
            for cell, width, column in zip(line, widths, table.columns)
        )
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def seconds(value: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def gib(value: int) -> str:
    """Bytes as GiB."""
    return f"{value / GIB:.2f} GiB"


def ratio(a: int | float, b: int | float) -> float:
    """a / b, and 1 where both are nothing."""
    return a / b if b else 1.0


def several(count: int, word: str) -> str:
    """``1 group``, ``2 groups``."""
    return f"{count:,} {word}" + ("" if count == 1 else "es" if word.endswith("s") else "s")
