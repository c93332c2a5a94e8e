"""Tables of docs/benchmarks.md that are priced and simulated: the paper's set-up, pools, ablations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks_files import RATIO_HEAD, Table, grid, listed, ratio_cells
from paper_table import MODES, PRINTED_NAMES, REGIMES, SETS, ratio_of
from pool_table import values_of
from table_cases import COLUMNS, TIE, Ratios, seconds


def bars(data: dict) -> Iterator[str]:
    """Bars that are missed in a list, those that are met in a line: priced and simulated."""
    found: dict[tuple[str, str], dict[str, dict]] = {}
    if "bars" not in data:
        yield "The run was cut short, and its bars were not judged."
        return
    for bar in data["bars"]:
        where, what = bar["what"].split(": ", 1)
        *rest, column = where.split(", ")
        found.setdefault((f"{', '.join(rest)}: {what}" if rest else what, bar["bar"]), {})[column] = bar
    good, bad = [], []
    for (name, asked), of in found.items():
        seen = [f"{of[c]['value']:.4g}" if c in of else "-" for c in COLUMNS]
        by = [column for column in of if not of[column]["met"]]
        line = f"{name} {' / '.join(seen)} ({asked})"
        (bad if by else good).append(f"{line}: **missed** {' and '.join(by)}" if by else line)
    yield f"Bars met, priced / simulated: {'; '.join(good) or 'none'}."
    yield from listed(bad, "No bar is missed.")


# The paper's set-up.

_POINTS = "simulated; columns \"printed\" are measurements of the paper's authors"
_OTHERS = {mode: f"`{mode}`" for mode in MODES} | {"single": "best single pass"}


def paper_rows(data: dict, lengths: str, regime: str) -> list[dict]:
    """The points of a set of lengths under a regime."""
    return [row for row in data["rows"] if (row["lengths"], row["regime"]) == (lengths, regime)]


def paper_ratios(data: dict, regime: str) -> Iterator[str]:
    """How many times as long as ours others take, and what it would be were ours at the bound."""
    tables, lines = [paper_rows(data, lengths, regime) for lengths in SETS], []
    for other, name in _OTHERS.items():
        line = [name]
        for rows in tables:
            priced, simulated = ([ratio_of(row, other, column) for row in rows] for column in COLUMNS)
            line += [f"{statistics.mean(priced):.2f}", *ratio_cells(simulated)]
            line.append(f"{over_bound(rows, other):.2f}")
        lines.append(line)
    last = ["ours over the bound"]
    for rows in tables:
        priced, simulated = ([ratio_of(row, "bound", column) for row in rows] for column in COLUMNS)
        last += [f"{statistics.mean(priced):.2f}", *ratio_cells(simulated)[:2], "", ""]
    names = ("priced mean", *RATIO_HEAD, "at the bound")
    return grid([regime, *(f"{lengths}: {name}" for lengths in SETS for name in names)], [*lines, last])


def over_bound(rows: Sequence[dict], other: str, column: str = "priced") -> float:
    """The mean that another's ratio would have, did ours take no longer than the bound."""
    return statistics.mean(ratio_of(row, other, column) * ratio_of(row, "bound", column) for row in rows)


def paper_points(data: dict, lengths: str) -> Iterator[str]:
    """Simulated seconds of every point beside the paper's own."""
    tables = [paper_rows(data, lengths, regime) for regime in REGIMES]
    lines = []
    for rows in zip(*tables):
        line = [rows[0]["name"], f"{rows[0]['prompt']:,} + 8 x {rows[0]['response']:,}"]
        for row in rows:
            best, its = min(row["modes"].items(), key=lambda x: x[1]["simulated"])
            mark = "*" if row["launch_bound"] else ""
            line += [f"{seconds(row['ours']['simulated'])}{mark}", f"{seconds(its['simulated'])} `{best}`",
                     seconds(row["bound"])]  # fmt: skip
        lines.append([*line, *(f"{printed:g}" for printed in rows[0]["printed"])])
    each = [f"{regime}: {name}" for regime in REGIMES for name in ("ours", "best peer", "bound")]
    printed = [f"printed: {name}" for name in PRINTED_NAMES]
    yield from grid([f"{lengths} lengths", "tokens", *each, *printed], lines)
    yield from listed(paper_slower(data), "On no point, of either set, is a peer faster beyond a tie.")
    yield ""
    yield from bars(data)


#: Bars that are missed, as (peer, sets of lengths).
_MISSED = (("dcp-phased", SETS), ("paper", SETS[:1]))


def paper_missed(data: dict) -> Iterator[str]:
    """Point by point: how many times as long as ours a peer takes whose mean misses its bar, how many times
    as long as the bound ours does, and seconds that the peer spends more on launches, padding, the rest."""
    lines = []
    for rows in zip(*(paper_rows(data, lengths, "serial") for lengths in SETS)):
        line = [rows[0]["name"]]
        for peer, sets in _MISSED:
            for row in rows[: len(sets)]:
                its, mine = row["modes"][peer], row["parts"]
                more = {part: its["parts"][part] - mine[part] for part in mine}
                launches, padding = more.pop("launches"), more.pop("padding")
                spent = (f"{round(part, 2) + 0:.2f}" for part in (launches, padding, sum(more.values())))
                line += [f"{ratio_of(row, peer, 'priced'):.3f}", f"{ratio_of(row, 'bound', 'priced'):.2f}",
                         ", ".join(spent)]  # fmt: skip
        lines.append(line)
    names = ("over ours", "ours over the bound", "launches, padding, rest")
    each = (f"`{peer}`, {lengths}" for peer, sets in _MISSED for lengths in sets)
    yield from grid(["priced", *(f"{head}: {name}" for head in each for name in names)], lines)


def paper_slower(data: dict) -> Iterator[str]:
    """Points on which a peer is faster, beyond a tie."""
    for row in data["rows"]:
        for mode in MODES:
            for column in COLUMNS:
                ratio = ratio_of(row, mode, column)
                where = f"{row['lengths']}, {row['regime']}, {row['name']}"
                if ratio < 1 - TIE:
                    yield f"{where}: {slower(f'`{mode}`', column, ratio, row['ours'], row['modes'][mode])}"


def slower(name: str, column: str, ratio: float, ours: dict, its: dict) -> str:
    """How much faster a peer is, and what the simulation adds to either price."""
    played = [f"{x['simulated'] / x['priced']:.3f}" if x["simulated"] else "-" for x in (ours, its)]
    return f"{name} takes {ratio:.3f} of our time, {column}; simulated over priced {' and '.join(played)}"


def paper_derived(data: dict) -> dict[str, Any]:
    """Lengths -> regime -> column -> other -> its ratios, for figures inside the text."""
    return {
        lengths: {
            regime: {
                column: {
                    other: {**Ratios.of([ratio_of(row, other, column) for row in rows])._asdict(),
                            "at_bound": over_bound(rows, other, column)}
                    for other in (*_OTHERS, "bound")
                }
                for column in COLUMNS
            }
            for regime in REGIMES if (rows := paper_rows(data, lengths, regime))
        }
        for lengths in SETS
    }  # fmt: skip


# Pools.

#: Peers that the bars are about.
_BARRED = ("dcp at its best degree", "dcp at 8, groups in turn")
#: Those that texts mention.
_POOL_PEERS = (*_BARRED, "ring at its best degree", "two-pass ring")


def pools_of(data: dict) -> dict[str, list[dict]]:
    """Pool -> its batches."""
    pools: dict[str, list[dict]] = {}
    for row in data["rows"]:
        pools.setdefault(f"{row['ranks']} x {row['groups']}", []).append(row)
    return pools


def job_bound(rows: Sequence[dict], column: str) -> list[float]:
    """[batch] ours over what no schedule of one job a tree is below."""
    return [row["ours"][column] / row["moldable"] for row in rows]


def pool_ratios(data: dict) -> Iterator[str]:
    """Every pool beside the peers of the bars and both bounds, every layer recomputed."""
    lines = []
    for pool, rows in pools_of(data).items():
        even = [f"{statistics.mean(values_of(rows, 'bound', column)):.2f}" for column in COLUMNS]
        jobs = [f"{statistics.mean(job_bound(rows, column)):.2f}" for column in COLUMNS]
        for other in _BARRED:
            cells = [x for column in COLUMNS for x in ratio_cells(values_of(rows, other, column))]
            lines.append([pool, other, *cells, f"{pool_at_bound(rows, other, 'bound'):.2f}",
                          " / ".join(even), " / ".join(jobs)])  # fmt: skip
    each = [f"{column}: {name}" for column in COLUMNS for name in RATIO_HEAD]
    more = ("at the bound", "ours over the bound", "over the job bound")
    yield from grid(["ranks x groups", "peer", *each, *more], lines)
    yield from listed(pool_slower(data), "On no batch is a peer that fits faster beyond a tie.")
    yield ""
    yield from bars(data)


def pool_at_bound(rows: Sequence[dict], other: str, bound: str, column: str = "priced") -> float:
    """The mean that another's ratio would have, did ours take no longer than a bound."""
    found = [(row["peers"][other][column], row[bound]) for row in rows]
    return statistics.mean(its / least for its, least in found if its is not None)


def pool_means(data: dict) -> Iterator[str]:
    """Mean times of every peer over ours, priced, under either way of recompute."""
    lines, names = [], list(data["rows"][0]["peers"])
    for pool, rows in pools_of(data).items():
        means = [[f"{statistics.mean(values_of(rows, x, 'priced', ours)):.2f}" for x in (*names, "bound")]
                 for ours in ("ours", "ours_auto")]  # fmt: skip
        lines.append([pool, *map(" / ".join, zip(*means))])
    return grid(["ranks x groups", *names, "ours over the bound"], lines)


def pool_slower(data: dict) -> Iterator[str]:
    """Batches on which a peer that fits is faster, beyond a tie."""
    for row in data["rows"]:
        seen = set()  # the best degree is often 8: one plan under two names
        for name, its in row["peers"].items():
            for column in COLUMNS if its["fits"] else ():
                ratio = values_of([row], name, column)
                if ratio and ratio[0] < 1 - TIE and (its["note"], column) not in seen:
                    seen.add((its["note"], column))
                    where = f"{row['ranks']} x {row['groups']}, {row['preset']}, seed {row['seed']}"
                    yield f"{where}: {slower(name, column, ratio[0], row['ours'], its)}"


def pool_derived(data: dict) -> dict[str, Any]:
    """Pool -> column -> other -> its mean, and what it would be were ours at either bound."""
    return {
        pool: {
            column: {
                other: {
                    "mean": statistics.mean(values_of(rows, other, column)),
                    "at_bound": pool_at_bound(rows, other, "bound", column),
                    "at_job_bound": pool_at_bound(rows, other, "moldable", column),
                }
                for other in _POOL_PEERS if other in rows[0]["peers"] and values_of(rows, other, column)
            }
            | {"bound": {"mean": statistics.mean(values_of(rows, "bound", column))},
               "job bound": {"mean": statistics.mean(job_bound(rows, column))}}
            for column in COLUMNS
        }
        for pool, rows in pools_of(data).items()
    }  # fmt: skip


# Ablations.


def both(plan: dict | None, ours: dict) -> str:
    """A plan's times over ours, priced / simulated; "-" where there is no such plan."""
    return "-" if plan is None else " / ".join(f"{plan[c] / ours[c]:.2f}" for c in COLUMNS)


def families(data: dict) -> Iterator[str]:
    """Forced families over the automatic choice; phased over fused where recompute is chosen."""
    rows = data["tables"]["families"]
    phases = {row["name"]: row["plans"] for row in data["tables"]["phases"]}
    lines = []
    for row in rows:
        ours, auto = row["automatic"], [phases[row["name"]][f"{x}, auto"] for x in ("phased", "fused")]
        cells = [both(ours, bound_of(row)), *(both(plan, ours) for plan in row["forced"].values())]
        chosen = "-" if None in auto else both(*auto)
        lines.append([row["name"], seconds(ours["simulated"]), *cells, chosen, ours["note"]])
    head = ("tree", "automatic, s", "over the bound", *rows[0]["forced"],
            "recompute chosen: phased over one pass", "automatic plan")  # fmt: skip
    return grid(head, lines)


def bound_of(row: dict) -> dict[str, float]:
    """A row's bound as both its times."""
    return dict.fromkeys(COLUMNS, row["bound"])


def together(data: dict) -> Iterator[str]:
    """A batch planned together beside its trees one at a time, and groups of more responses beside peers."""
    batches, groups = data["tables"]["joint"], data["tables"]["group size"]
    peers, lines = [mode for mode in groups[0]["plans"] if mode != "augtree"], []
    for row in batches:
        ours = row["together"]
        lines.append([row["name"], seconds(ours["simulated"]), both(ours, bound_of(row)),
                      both(row["alone"], ours), *["-"] * len(peers)])  # fmt: skip
    for row in groups:
        ours = row["plans"]["augtree"]
        lines.append([row["name"], seconds(ours["simulated"]), both(ours, bound_of(row)), "-",
                      *(both(row["plans"][mode], ours) for mode in peers)])  # fmt: skip
    head = ("batch", "ours, s", "over the bound", "one tree at a time", *(f"`{mode}`" for mode in peers))
    yield from grid(head, lines)
    yield ""
    yield from bars(data)


TABLES = {
    "paper_ratios": Table("paper_table", "rows", paper_ratios),
    "paper_points": Table("paper_table", "rows", paper_points, _POINTS),
    "paper_missed": Table("paper_table", "rows", paper_missed, "priced"),
    "pool_ratios": Table("pool_table", "rows", pool_ratios),
    "pool_means": Table("pool_table", "rows", pool_means, "priced"),
    "families": Table("ablations", "tables", families),
    "together": Table("ablations", "tables", together),
}
DERIVED = {"paper_table": paper_derived, "pool_table": pool_derived}
