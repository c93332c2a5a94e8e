"""Tables of docs/benchmarks.md that are measured or emulated: modes over links, updates, memory, peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks_files import Table, grid, listed, missed, percent, runs_of
from table_cases import seconds

# Modes over links.

#: Column -> the modes that it stands for: of `ring-reuse` the variant with the lowest price is played.
_PLAYED = {
    "ring": ("ring",),
    "ring-reuse": ("ring-reuse", "ring-reuse-two-pass", "ring-reuse-per-response"),
    "gather-reuse": ("gather-reuse",),
    "dynamic": ("dynamic",),
    "augtree": ("augtree",),
}


def modes(data: dict) -> Iterator[str]:
    """Median seconds, and what was priced, of each mode on each step over each link."""
    lines = []
    for case in data["cases"]:
        line = [case["link"], case["workload"]]
        for names in _PLAYED.values():
            rows = [row for row in case["plans"] if set(names) & set(row["modes"])]
            line.append(played(rows[0]) if rows else "-")
        regret = data["summary"]["regret"][f"{case['workload']}, {case['link']}"]
        _, low, high = regret["paired"]
        named = "`augtree`" if "augtree" in regret["best"] else f"`{regret['best'][0]}`"
        ours = next(row for row in case["plans"] if "augtree" in row["modes"])
        rows = f"{case['unshared_rows'] / ours['rows']:.2f}"
        where = f"regret, {case['workload']}, {case['link']} "
        bad = any(line.startswith(where) for line in data["missed"])
        shown = f"**{regret['regret']:.3f}**" if bad else f"{regret['regret']:.3f}"
        lines.append([*line, rows, named, shown, f"{low:.2f} to {high:.2f}"])
    head = [*(f"`{mode}`" for mode in _PLAYED), "rows un-shared over ours"]
    yield from grid(["link", "step", *head, "fastest", "regret", "80 % interval, paired"], lines)
    yield ""
    yield from measured_bars(data)


def played(row: dict) -> str:
    """Median seconds of a plan, and in brackets its price."""
    return f"{seconds(statistics.median(row['passes']))} ({seconds(row['predicted'])})"


def measured_bars(data: dict) -> Iterator[str]:
    """Errors, orders and regrets by link, and the null test."""
    found, links = data["summary"], list(data["summary"]["tau"])
    null = found["null"]
    worst = {link: max(x["regret"] for where, x in found["regret"].items() if where.endswith(f", {link}"))
             for link in links}  # fmt: skip
    errors = f"{percent(found['error_mean'])}, {percent(found['error_median'])}, " \
             f"{percent(found['error_largest'])}"  # fmt: skip
    draws = f"{percent(null['error_median'])}; {percent(null['error_passes'], 0)} of draws pass"
    lines = [
        ["error of prices: mean, median, largest", "mean at most 15 %",
         *(percent(found["error_by_link"][link]) for link in links), errors],
        ["Kendall's tau", "at least 0.8, throttled", *(order(found["tau"][link]) for link in links), ""],
        ["largest regret", "at most 1.05", *(f"{worst[link]:.3f}" for link in links),
         f"{found['regret_largest']:.3f}"],
        [f"null test: error, median of {null['draws']} draws", "above ours", *[""] * len(links), draws],
        ["null test: tau, mean; draws that pass", "not above ours",
         *(null_order(null, link) for link in links), ""],
    ]  # fmt: skip
    yield from grid(["", "bar", *links, f"all, {found['plans']} plans"], lines)
    yield from missed(data["missed"])


def order(tau: float | None) -> str:
    """Kendall's tau."""
    return "all tied" if tau is None else f"{tau:.2f}"


def null_order(null: dict, link: str) -> str:
    """What wrong constants make of the order over a link."""
    if link not in null["tau_mean"]:
        return "all tied"
    return f"{null['tau_mean'][link]:.2f}; {percent(null['tau_passes'][link], 0)}"


# Updates.


def updates(data: dict) -> Iterator[str]:
    """Times of every mode over augtree's, and peaks, by workload."""
    work = data["workloads"]
    names = list(dict.fromkeys(mode for found in work.values() for mode in found["seconds"]))
    lines = [["ratio of rows, shared", *(f"{found['bound']:.2f}" for found in work.values())]]
    for mode in names:
        cells = []
        for found in work.values():
            ratio = found["ratios"][f"{mode} / augtree"]
            low, high = ratio["interval"]
            gib = max(found["peaks"][mode]["peak_bytes"]) / 2**30
            cells.append(f"{seconds(statistics.median(found['seconds'][mode]))} s, {ratio['median']:.2f} "
                         f"({low:.2f} to {high:.2f}), {gib:.2f} GiB")  # fmt: skip
        lines.append([f"`{mode}`", *cells])
    yield from grid(["median, times augtree's (80 % interval), peak", *work], lines)
    claims = [(f"{name}, {claim}", good) for name, x in work.items() for claim, good in x["claims"].items()]
    yield from missed([claim for claim, good in claims if not good])


# Memory.


def settings(data: dict) -> Iterator[str]:
    """Peaks of every setting, and the longest prompt that fits."""
    lines = [
        [name, f"{row['peak_mib']:.0f}", f"{row['predicted_mib']:.0f}",
         f"{row['longest_prompt']:,}" if "longest_prompt" in row else "not searched"]
        for name, row in data["settings"].items()
    ]  # fmt: skip
    head = ("setting", "measured peak, MiB", "predicted", f"longest prompt in {data['budget_mib']} MiB")
    return grid(head, lines)


def budgets(data: dict) -> Iterator[str]:
    """Peaks under a budget."""
    lines = []
    for name, row in data["budgets"].items():
        peak = f"{row['peak_mib']:.0f}"
        if row["peak_mib"] > row["budget_mib"]:
            peak = f"**{peak}, beyond**"
        lines.append([name, peak, f"{row['predicted_mib']:.0f}", row["plan"]])
    return grid(["groups, budget", "measured peak, MiB", "predicted", "plan"], lines)


# Emulated.


def emulated(data: dict) -> Iterator[str]:
    """Errors, orders and regrets by ranks and cluster."""
    grouped: dict[tuple[int, str], list[dict]] = {}
    for run in runs_of(data):
        for case in run["cases"]:
            grouped.setdefault((case["ranks"], case["cluster"]), []).append(case)
    lines = []
    for (ranks, cluster), cases in grouped.items():
        plans = [plan for case in cases for plan in case["plans"]]
        taus = [case["tau"] for case in cases if case["tau"] is not None]
        lines.append([
            ranks, cluster, len(cases), len(plans),
            percent(statistics.mean(abs(plan["error"]) for plan in plans)),
            percent(max((plan["error"] for plan in plans), key=abs)),
            f"{statistics.mean(taus):.2f}, {min(taus):.2f}" if taus else "all tied",
            f"{max(case['regret'] for case in cases):.3f}", percent(max(plan["lag"] for plan in plans)),
        ])  # fmt: skip
    head = ("ranks", "cluster", "trees", "plans", "mean error", "largest", "tau: mean, least",
            "largest regret", "largest lag")  # fmt: skip
    yield from grid(head, lines)
    yield from missed([line for run in runs_of(data) for line in run["missed"]])
    yield from listed(map(emulated_null, runs_of(data)), "")
    yield from listed(emulated_far(data), f"No price is off by more than {percent(_FAR, 0)}.")


#: Errors beyond this are listed.
_FAR = 0.1


def emulated_far(data: dict) -> list[str]:
    """Plans whose price is far off, the farthest first."""
    found = [(plan, f"{case['ranks']} ranks, {case['cluster']}, {case['case']}")
             for run in runs_of(data) for case in run["cases"] for plan in case["plans"]
             if abs(plan["error"]) > _FAR]  # fmt: skip
    return [f"{where}, `{', '.join(plan['modes'])}` ({plan['note']}): price off by {percent(plan['error'])}, "
            f"lag {percent(plan['lag'])}"
            for plan, where in sorted(found, key=lambda x: -abs(x[0]["error"]))]  # fmt: skip


def emulated_null(run: dict) -> str:
    """A run's bars beside those of wrong constants."""
    found, null = run["summary"], run["summary"]["null"]
    ranks = ", ".join(map(str, sorted({case["ranks"] for case in run["cases"]})))
    return (f"{ranks} ranks: error {percent(found['mean_error'])}, tau {order(found['tau_mean'])}; the null "
            f"test's {percent(null['median_error'], 0)} and {null['median_tau']:.2f}, and "
            f"{percent(null['pass_error'], 0)} and {percent(null['pass_tau'], 0)} of its draws pass")


def emulated_derived(data: dict) -> dict[str, Any]:
    """Over all runs, for figures inside the text."""
    cases = [case for run in runs_of(data) for case in run["cases"]]
    errors = [plan["error"] for case in cases for plan in case["plans"]]
    return {
        "plans": len(errors), "cases": len(cases), "error_mean": statistics.mean(map(abs, errors)),
        "far": sum(abs(error) > _FAR for error in errors),
        "regret": max(case["regret"] for case in cases),
    }  # fmt: skip


# Peers on one device.


def peers(data: dict) -> Iterator[str]:
    """Seconds of a forward and backward, and errors in fp64."""
    names = list(dict.fromkeys(name for case in data["cases"] for name in case["peers"]))
    lines = []
    for case in data["cases"]:
        cells = [peer(case["peers"].get(name), case["peers"].get("augtree")) for name in names]
        bound = case["unshared_rows"] / case["rows"]
        lines.append([case["case"], f"{case['unshared_rows']:,}, {case['rows']:,} ({bound:.2f})", *cells])
    return grid(["tree, tokens", "rows, un-shared, shared (ratio)", *names], lines)


def peer(figures: dict | None, ours: dict | None) -> str:
    """One peer on one tree."""
    if figures is None:
        return "-"
    ratio = f", {figures['median_s'] / ours['median_s']:.2f}" if ours else ""
    low, high = figures["iqr_s"]
    return (f"{seconds(figures['median_s'])} s{ratio} ({seconds(low)} to {seconds(high)}); "
            f"{figures['error_fp64']:.0e}")  # fmt: skip


# The planner's own time.


def latency(data: dict) -> Iterator[str]:
    """From lengths to a plan."""
    lines = []
    for name, row in data["sections"]["latency"].items():
        bar, took = row.get("bar_ms"), f"{row['decision_ms']:.2f}"
        if bar is not None and row["decision_ms"] > bar:
            took = f"**{took}, {row['decision_ms'] / bar:.1f} times its bar**"
        lines.append([name, "-" if bar is None else f"{bar:g}", took, f"{row['plan_ms']:.1f}"])
    yield from grid(["step", "bar, ms", "decision, ms", "whole plan, ms"], lines)
    parts = data["sections"].get("compile", {})
    yield ""
    yield "Preparing one pass: " + (", ".join(f"{x} {took['ms']:.0f} ms" for x, took in parts.items()) or "-")
    yield from missed(data["missed"])


TABLES = {
    "modes": Table("bench_measured", "cases", modes),
    "updates": Table("bench_update", "workloads", updates),
    "settings": Table("bench_memory", "settings", settings),
    "budgets": Table("bench_memory", "budgets", budgets),
    "emulated": Table("bench_emulated", "", emulated),
    "peers": Table("bench_peers", "cases", peers),
    "latency": Table("bench_planner", "sections.latency", latency),
}
DERIVED = {"bench_emulated": emulated_derived}
