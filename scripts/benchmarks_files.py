"""What the makers of the tables in docs/benchmarks.md share: files of figures, and Markdown.

A file of figures is `benchmarks/DATE-SCRIPT.json`, as SCRIPT writes it with `--json`. Of several the newest
counts that has the part that a table is made of: some scripts can be asked for a part of their figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from table_cases import Ratios

#: Script -> what its figures are.
KINDS = {
    "paper_table": "priced and simulated",
    "pool_table": "priced and simulated",
    "ablations": "priced and simulated",
    "simulate_regret": "simulated",
    "never_slower": "priced",
    "planner_quality": "priced",
    "bench_planner": "measured",
    "bench_measured": "measured",
    "bench_update": "measured",
    "bench_memory": "measured",
    "bench_peers": "measured",
    "bench_emulated": "emulated",
}


class Report(NamedTuple):
    """A file of figures.

    Attributes:
        script: that wrote it.
        name: of the file.
        data: its figures.
    """

    script: str
    name: str
    data: dict[str, Any]

    @property
    def commits(self) -> list[str]:
        """Of all its runs."""
        parts = [self.data, *runs_of(self.data), *self.data.get("workloads", {}).values()]
        return list(dict.fromkeys(part["commit"] for part in parts if "commit" in part))

    @property
    def machines(self) -> list[str]:
        """Of all its runs."""
        parts = [self.data, *runs_of(self.data)]
        return list(dict.fromkeys(part["machine"] for part in parts if "machine" in part))

    @property
    def digests(self) -> dict[str, str]:
        """Cluster -> digest of the constants that prices are made of."""
        data = self.data
        found = {**data.get("clusters", {}), **data.get("cluster_digests", {})}
        for name, value in data.get("calibration", {}).items():
            found[name] = value["digest"] if isinstance(value, dict) else value
        if "cluster_digest" in data:
            found[data.get("cluster", "cpu")] = data["cluster_digest"]
        for run in runs_of(data):
            found |= {case["cluster"]: case["digest"] for case in run["cases"] if "cluster" in case}
        return found

    def caption(self, kind: str = "") -> str:
        """The line above a table: what kind of figures these are (default: its script's), and where from."""
        kind = kind or KINDS[self.script]
        where = f"`{self.name}`, commit {', '.join(self.commits) or 'not noted'}"
        return f"*{kind[0].upper()}{kind[1:]}: {where}.*"


class Table(NamedTuple):
    """How a table is made.

    Attributes:
        script: whose figures it shows.
        part: path of what it needs of them; "" is all.
        make: figures and the words behind its name -> its lines.
        kind: of its figures, where that is not its script's.
    """

    script: str
    part: str
    make: Callable[..., Iterable[str]]
    kind: str = ""


def runs_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of bench_emulated, of which a file may hold several; of others those that have cases."""
    return data.get("runs", [data] if "cases" in data else [])


@cache
def read(path: Path) -> dict[str, Any]:
    """A file's figures."""
    return json.loads(path.read_text())


def newest(folder: Path, script: str, part: str = "") -> Report | None:
    """The newest file of a script that has a part, or None."""
    for path in sorted(folder.glob(f"*-{script}.json"), reverse=True):
        data = read(path)
        if not part or at(data, part) is not None:
            return Report(script, path.name, data)
    return None


def at(data: Any, path: str) -> Any:
    """What is at a path of keys and places with dots between them, or None."""
    for key in path.split("."):
        if isinstance(data, list):
            data = data[int(key)] if key.isdigit() and int(key) < len(data) else None
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return data


def not_run(script: str) -> str:
    """In place of a table."""
    return f"Not run yet: `python scripts/{script}.py --json benchmarks/DATE-{script}.json`."


# Markdown.


def grid(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """A table's lines."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def listed(lines: Iterable[str], none: str) -> Iterator[str]:
    """A list below a table, or a line that there is nothing in it; of many only the first."""
    found = list(lines)
    yield ""
    yield from [f"- {line}" for line in found[:MOST]] or [none]
    if len(found) > MOST:
        yield f"- and {len(found) - MOST} more"


def missed(lines: Sequence[str]) -> Iterator[str]:
    """The bars that a run missed, as it said, in a line."""
    yield ""
    yield f"**Missed**: {'; '.join(lines)}." if lines else "All bars are met."


def percent(value: float, digits: int = 1) -> str:
    """A share."""
    return f"{100 * value:.{digits}f} %"


#: So many lines of a list are shown.
MOST = 5
#: What `ratio_cells` shows.
RATIO_HEAD = ("mean, median", "range", "ties, ours slower")


def ratio_cells(values: Sequence[float]) -> list[str]:
    """Ratios to ours; none where nothing was simulated."""
    if not values:
        return ["-"] * len(RATIO_HEAD)
    r = Ratios.of(values)
    return [f"{r.mean:.2f}, {r.median:.2f}", f"{r.least:.2f} to {r.most:.2f}",
            f"{r.ties}, {r.slower} of {r.cases}"]  # fmt: skip
