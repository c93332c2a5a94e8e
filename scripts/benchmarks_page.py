"""Writes the tables and figures of docs/benchmarks.md and README.md from the files in benchmarks/.

    python scripts/benchmarks_page.py            rewrites the pages
    python scripts/benchmarks_page.py --check    exits 1, and names what differs, where a page is stale

The text of the pages is written by hand. Between `<!-- table NAME -->` and `<!-- end -->` is a table, below
a line that says its kind and its file; words may follow the name (`paper_ratios first serial`). Between
`<!-- value SCRIPT PATH FORMAT -->` and `<!-- end -->`, within a line, stands one figure of the newest file of
a script: PATH is keys and places with dots between them (spaces are allowed), or begins with `derived`;
FORMAT is `2f` for two decimals, `1%` for a share, `d` for as it is. What no file has is "not run yet".
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import benchmarks_measured
import benchmarks_priced
import benchmarks_simulated
from benchmarks_files import KINDS, at, grid, newest, not_run, percent

from megatron_augtree.config import InputError

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "benchmarks.md", ROOT / "README.md"]
FAMILIES = (benchmarks_simulated, benchmarks_priced, benchmarks_measured)
TABLES = {name: table for family in FAMILIES for name, table in family.TABLES.items()}
DERIVED = {**benchmarks_simulated.DERIVED, **benchmarks_measured.DERIVED}

_END = "<!-- end -->"
_TABLE = re.compile(r"<!-- table (?P<name>[^\n]+?) -->\n(?P<old>.*?)" + _END, re.DOTALL)
#: What others write (`tests/support.py`).
_OTHERS = re.compile(r"<!-- [^\n]*written by [^\n]* -->")
_VALUE = re.compile(r"<!-- value (?P<name>[^\n]+?) -->(?P<old>[^\n]*?)" + _END)


def runs(folder: Path) -> list[str]:
    """Which runs the page shows: of every script the newest file."""
    lines = []
    for script, kind in KINDS.items():
        found = newest(folder, script)
        cells = ["not run yet", "", "", ""]
        if found is not None:
            digests = ", ".join(f"{name} `{digest}`" for name, digest in found.digests.items())
            cells = [f"`{found.name}`", ", ".join(found.commits), "; ".join(found.machines), digests]
        lines.append([f"`{script}`", kind, *cells])
    return list(grid(["script", "figures are", "file", "commit", "machine", "constants"], lines))


def table(name: str, folder: Path) -> str:
    """The lines of a table.

    Args:
        name: with the words behind it.
        folder: of the figures.

    Raises:
        InputError: there is no such table.
    """
    key, *words = name.split()
    if key == "runs":
        return "\n".join(runs(folder))
    if key not in TABLES:
        raise InputError(
            "the page asks for a table that nobody makes",
            values=f"<!-- table {name} -->",
            rule=f"tables are runs, {', '.join(sorted(TABLES))}",
            remedy="name one of them, or add it to scripts/benchmarks_*.py",
        )
    script, part, make, kind = TABLES[key]
    found = newest(folder, script, part)
    if found is None:
        return not_run(script)
    return "\n".join([found.caption(kind), "", *make(found.data, *words)])


def value(name: str, folder: Path) -> str:
    """One figure.

    Args:
        name: script, path, format.
        folder: of the figures.

    Raises:
        InputError: there is no such script.
    """
    script, _, rest = name.partition(" ")
    path, _, shape = rest.rpartition(" ")
    first, _, inside = path.partition(".")
    found = newest(folder, script) if first == "derived" else newest(folder, script, path)
    data = {} if found is None else found.data
    if first == "derived" and found is not None:
        data, path = DERIVED.get(script, lambda _: {})(data), inside
    figure = at(data, path)
    if figure is not None:
        return shown(figure, shape)
    if script in KINDS:
        return "(not run yet)"
    raise InputError(
        "the page asks for a figure of a script that has none",
        values=f"<!-- value {name} -->",
        rule=f"scripts are {', '.join(KINDS)}",
        remedy="correct the name, or add the script to scripts/benchmarks_files.py",
    )


def shown(figure: float | str, shape: str) -> str:
    """A figure in its format."""
    if shape == "d":
        return f"{figure:,}" if isinstance(figure, int) else str(figure)
    return percent(figure, int(shape[:-1])) if shape.endswith("%") else f"{figure:.{shape}}"


def rewritten(page: str, folder: Path) -> str:
    """The page with tables and figures as the files have them.

    Raises:
        InputError: a marker without its end, or a name that means nothing.
    """

    def put(make: Callable[[str, Path], str], line: str) -> Callable[[re.Match], str]:
        def of(match: re.Match) -> str:
            if "<!--" in match["old"]:
                raise unended(match[0].splitlines()[0])
            return line.format(match["name"], make(match["name"], folder))

        return of

    page = _TABLE.sub(put(table, "<!-- table {} -->\n{}\n" + _END), page)
    page = _VALUE.sub(put(value, "<!-- value {} -->{}" + _END), page)
    begun = page.count("<!-- table ") + page.count("<!-- value ")
    ends = page.count(_END) - len(_OTHERS.findall(page))
    if not begun == ends == len(_TABLE.findall(page)) + len(_VALUE.findall(page)):
        raise unended("a marker of the page")
    return page


def unended(what: str) -> InputError:
    """A marker that does not end, or an end that does not begin."""
    return InputError(
        "the page's markers do not match",
        values=what,
        rule=f"every table and every figure stands between its marker and {_END}, a figure within one line",
        remedy="end the marker, or take it away",
    )


def main() -> None:
    """Rewrites the pages, or says where they are stale."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page is stale")
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES)
    parser.add_argument("--figures", type=Path, default=ROOT / "benchmarks", help="folder of the files")
    args = parser.parse_args()
    stale = [str(page) for page in args.page if not current(page, args.figures, write=not args.check)]
    if stale and args.check:
        sys.exit(f"{', '.join(stale)}: stale, run python scripts/benchmarks_page.py")


def current(path: Path, figures: Path, *, write: bool) -> bool:
    """Whether a page is as the figures have it; otherwise it is rewritten, or what differs is printed."""
    old = path.read_text()
    try:
        new = rewritten(old, figures)
    except InputError as error:
        sys.exit(str(error))
    if write:
        path.write_text(new)
    elif new != old:
        both = old.splitlines(), new.splitlines()
        print("\n".join(difflib.unified_diff(*both, "page", "figures", n=0, lineterm="")))
    return new == old


if __name__ == "__main__":
    main()
