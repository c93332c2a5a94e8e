"""Says whether a copy of Megatron-LM calls AugTree's hooks, edit by edit; with ``--apply`` puts them in.

    python patches/check.py PATH_TO_MEGATRON_LM [--apply]

For each edit of the copy's release (``patches/<release>/edits.json``) one line:

    there          its lines are in the file
    missing        they are not, and the line that they belong next to is there exactly once
    does not fit   they are not, and that line is missing too, or there several times

An edit is an insertion next to one line, so other changes to the files do not matter. The exit code is 0
where every edit is there, else 1; with ``--apply``, nothing is written unless every missing edit fits.
Standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
THERE, MISSING, MISFIT = "there", "missing", "does not fit"


@dataclass(frozen=True)
class Edit:
    """One insertion.

    Attributes:
        name: short.
        file: path inside Megatron-LM.
        where: ``before`` or ``after`` the anchor.
        anchor: the line that it belongs next to, whole.
        lines: what is inserted.
        why: what it is for.
    """

    name: str
    file: str
    where: str
    anchor: str
    lines: tuple[str, ...]
    why: str

    def state(self, text: list[str]) -> str:
        """`THERE`, `MISSING` or `MISFIT` in the lines of its file."""
        wanted = [line.strip() for line in self.lines]
        found = [line.strip() for line in text]
        if any(found[at : at + len(wanted)] == wanted for at in range(len(found))):
            return THERE
        return MISSING if text.count(self.anchor) == 1 else MISFIT

    def put_in(self, text: list[str]) -> list[str]:
        """The lines of its file with the edit, which is missing."""
        at = text.index(self.anchor) + (self.where == "after")
        return [*text[:at], *self.lines, *text[at:]]


def release_of(folder: Path) -> str:
    """Major and minor of a copy of Megatron-LM; empty where it is none."""
    info = folder / "megatron" / "core" / "package_info.py"
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    numbers = dict(re.findall(r"^(MAJOR|MINOR)\s*=\s*(\d+)", text, re.MULTILINE))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}" if len(numbers) == 2 else ""


def edits_for(release: str) -> list[Edit]:
    """The edits of a release; none where there are none for it."""
    for path in sorted(HERE.glob("*/edits.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["release"] == release:
            return [Edit(**{**edit, "lines": tuple(edit["lines"])}) for edit in table["edits"]]
    return []


def read(folder: Path, edit: Edit) -> list[str]:
    """Lines of an edit's file; none where it does not exist."""
    path = folder / edit.file
    return path.read_text(encoding="utf-8").split("\n") if path.is_file() else []


def states(folder: Path, edits: list[Edit]) -> list[str]:
    """The state of every edit."""
    return [edit.state(read(folder, edit)) for edit in edits]


def apply(folder: Path, edits: list[Edit]) -> None:
    """Puts in what is missing; one file after the other, each written once."""
    texts: dict[str, list[str]] = {}
    for edit in edits:
        text = texts.get(edit.file) or read(folder, edit)
        texts[edit.file] = edit.put_in(text) if edit.state(text) == MISSING else text
    for file, text in texts.items():
        (folder / file).write_text("\n".join(text), encoding="utf-8")


def main(words: list[str] | None = None) -> int:
    """Prints the state of every edit; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a copy of Megatron-LM")
    parser.add_argument("--apply", action="store_true", help="put in what is missing")
    args = parser.parse_args(words)
    release = release_of(args.folder)
    edits = edits_for(release)
    if not edits:
        known = ", ".join(sorted(path.parent.name for path in HERE.glob("*/edits.json")))
        print(f"{args.folder}: {'release ' + release if release else 'no copy of Megatron-LM'}; "
              f"there are edits for {known}", file=sys.stderr)
        return 1
    found = states(args.folder, edits)
    if args.apply and MISFIT not in found:
        apply(args.folder, edits)
        found = states(args.folder, edits)
    for edit, state in zip(edits, found):
        print(f"{state:12} {edit.name:10} {edit.file}: {edit.why}")
        if state == MISFIT:
            print(f"{'':12} {edit.where} the line {edit.anchor.strip()!r}, put: " + " | ".join(edit.lines))
    return 0 if set(found) == {THERE} else 1


if __name__ == "__main__":
    sys.exit(main())
