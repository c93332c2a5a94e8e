"""Is the plan that is priced lowest the fastest? Measured: two ranks, a core each, over three links.

    python scripts/bench_measured.py --json measured.json [--calibration machine.json] [--quick]

A step of a 2-layer, 128-wide model in fp32, on real groups, by five modes: `ring`, the `ring-reuse` variant
with the lowest price, `gather-reuse`, `dynamic`, `augtree`. Each plays the plan that its launcher would;
modes that agree on a plan play it once. Links: the machine's own, and throttled to 35 and 5 MB/s
(`runtime/throttle.py`), so that operations a byte are those of an accelerator's fast links and of its
network card. Figures are seconds of a step's forwards and backwards, which is what a price covers; the whole
step is in the file.

1. *Calibrate*: `tools/calibrate` measures this machine, pinned as the ranks will be, before anything is
   planned. A throttled link is the same machine with the link's rate, whose messages travel while tiles are
   computed, since nothing but time holds them back. All three files are frozen; their digests are printed.
2. *Measure*: all modes in turn over all links and workloads, round after round, the first mode of a round
   another one each time, one round to warm up. A step whose rank waited for its core for over 3 % of it (the
   kernel counts this) is played again, twice at most; the least disturbed counts, however long it took.
3. *Compare*: median and quartiles beside the price; mean absolute error of prices; regret, which is the
   median of `augtree` over that of the best mode; Kendall's tau over pairs of modes that differ beyond noise
   (the 80 % interval of their paired ratio excludes 1, and they are 2 % apart). A null test prices the same
   plans with every constant doubled or halved at random: where that is as good, nothing was shown.

The exit status is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from measured_ranks import DISTURBED, DRAWS, MODEL, Workload
from planner_cases import Bars

from megatron_augtree.planning.cluster import Cluster, document, load, preset
from megatron_augtree.tools.measure import commit, interval, machine, torchrun, write_json

RANKS = 2
#: Groups for which `ring` takes at most about 3 s over the machine's own link. Of a key-value group 5 of 8
#: responses; gsm8k takes 8 groups, since one lasts 40 ms. Tiny prompts, and one response, have (next to)
#: nothing to share.
WORKLOADS = {
    "kv_retrieval_75": Workload("kv_retrieval_75", (0, 1), 5),
    "tau_airline": Workload("tau_airline", (1, 2)),
    "gsm8k_solutions": Workload("gsm8k_solutions", (0, 8)),
    "one response": Workload("tau_airline", (2, 3), 1),
}
#: Link -> bytes a second; 0: the machine's own.
LINKS = {"plain": 0, "35 MB/s": 35_000_000, "5 MB/s": 5_000_000}
#: Bars: mean absolute error of prices, regret, Kendall's tau.
ERROR, REGRET, TAU = 0.15, 1.05, 0.8
#: Times closer than this are tied, whatever their spread.
TIED = 0.02
#: Seconds of the calibration.
CALIBRATION = 180


def main() -> None:
    """Calibrates, measures, compares, and fails where a bar is missed."""
    args, bars, began = parse(), Bars(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        links = frozen(args, Path(folder))
        report = {
            "kind": "measured", "machine": machine(), "commit": commit(), "model": MODEL, "ranks": RANKS,
            "repeats": args.repeats, "tries": args.tries, "load_before": os.getloadavg(),
            "calibration": {link: asdict(cluster) | {"digest": cluster.digest()}
                            for link, (_, cluster, _) in links.items()},
            "measured_by_calibration": links["plain"][2],
        }  # fmt: skip
        cases = played(args, links, Path(folder))
    for case in cases:
        print(table(case), flush=True)
    report |= {"load_after": os.getloadavg(), "seconds": round(time.time() - began), "cases": cases}
    report["summary"] = summary(cases, bars)
    report["missed"] = bars.missed
    print(told(report["summary"]))
    if args.json:
        write_json(args.json, report)
    if args.markdown:
        Path(args.markdown).write_text(markdown(cases))
    for line in bars.missed:
        print(f"MISSED  {line}")
    sys.exit(bool(bars.missed))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data-dir", default=os.environ.get("AUGTREE_DATA", str(default)),
                        help="folder of the group files; default $AUGTREE_DATA, else ../shared/data")
    parser.add_argument("--workload", action="append", choices=WORKLOADS,
                        help="may be given several times; default all")
    parser.add_argument("--repeats", type=int, default=7, help="of every plan; the median counts")
    parser.add_argument("--tries", type=int, default=3,
                        help="a step whose core is taken away is played so often at most; default 3")
    parser.add_argument("--calibration", help="a file of an earlier run on this machine; default: calibrate")
    parser.add_argument("--keep-calibration", help="write what was calibrated to this file")
    parser.add_argument("--quick", action="store_true",
                        help="one small group, plain and 5 MB/s, the cpu preset for a calibration: seconds")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--markdown", help="the same as tables for the documentation, to this file")
    args = parser.parse_args()
    args.repeats = min(args.repeats, 3) if args.quick else args.repeats
    if args.repeats < 2 or args.tries < 1:
        parser.error("--repeats is at least 2, since quartiles need them; --tries at least 1")
    return args


def frozen(args: argparse.Namespace, folder: Path) -> dict[str, tuple[str, Cluster, dict]]:
    """Link -> (file, machine, what the calibration says of itself), before anything is planned or played."""
    measured: dict = {}
    if args.quick:
        plain = preset("cpu")
    else:
        path = args.calibration or args.keep_calibration or str(folder / "calibrated.json")
        if not args.calibration:
            ranks("--calibrate", path, "--seconds", str(CALIBRATION))
        plain, measured = load(path), json.loads(Path(path).read_text())["measured"]
        measured.pop("curves")
    found = {}
    for link, rate in LINKS.items():
        slow = {"link_bytes_s": rate, "nic_bytes_s": rate, "overlap": True} if rate else {}
        cluster = replace(plain, name=f"{plain.name}, {link}", **slow)
        path = str(folder / f"{len(found)}.json")
        write_json(path, document(cluster, {}))
        found[link] = path, cluster, measured
    return {link: found[link] for link in ("plain", "5 MB/s")} if args.quick else found


def ranks(*words: str) -> None:
    """Runs measured_ranks.py on the ranks."""
    torchrun(RANKS, str(Path(__file__).with_name("measured_ranks.py")), *words, show=sys.stderr.isatty())


def played(args: argparse.Namespace, links: dict, folder: Path) -> list[dict]:
    """What the ranks found, by workload and link."""
    asked = {name: WORKLOADS[name] for name in args.workload or WORKLOADS}
    workloads = {"quick": Workload("", (0, 1))} if args.quick else asked
    job = {
        "workloads": {name: asdict(w) for name, w in workloads.items()}, "data": args.data_dir,
        "links": {link: (LINKS[link], path) for link, (path, _, _) in links.items()},
        "repeats": args.repeats, "tries": 1 if args.quick else args.tries, "out": str(folder / "found.json"),
    }  # fmt: skip
    write_json(str(folder / "job.json"), job)
    ranks("--job", str(folder / "job.json"))
    return json.loads(Path(job["out"]).read_text())


# Figures.


def median(row: dict) -> float:
    """Of a plan's repeats, seconds of its passes."""
    return statistics.median(row["passes"])


def chosen(case: dict) -> dict:
    """The plan of `augtree`."""
    return next(row for row in case["plans"] if "augtree" in row["modes"])


def ratio(row: dict, other: dict) -> tuple[float, float, float]:
    """Median of the paired ratios of two plans, and their 80 % interval."""
    paired = [a / b for a, b in zip(row["passes"], other["passes"])]
    return statistics.median(paired), *interval(paired)


def compared(case: dict, predicted: Sequence[float]) -> list[bool | None]:
    """For each pair of modes whose times differ: whether prices order them so; None for equal prices."""
    found: list[bool | None] = []
    priced = [(row, seconds) for row, seconds in zip(case["plans"], predicted) for _ in row["modes"]]
    for (a, first), (b, second) in itertools.combinations(priced, 2):
        middle, low, high = ratio(a, b)
        if not low <= 1 <= high and not 1 / (1 + TIED) < middle < 1 + TIED:
            found.append(None if first == second else (first < second) == (middle < 1))
    return found


def tau(pairs: Sequence[bool | None]) -> float | None:
    """Kendall's tau over pairs that are not tied when measured; None where all are."""
    return (pairs.count(True) - pairs.count(False)) / len(pairs) if pairs else None


def errors(cases: Sequence[dict], draw: int | None = None) -> list[float]:
    """Predicted over measured, less 1, of every plan; by the right constants or by a draw of wrong ones."""
    return [(row["predicted"] if draw is None else row["wrong"][draw]) / median(row) - 1
            for case in cases for row in case["plans"]]  # fmt: skip


def error(cases: Sequence[dict], draw: int | None = None) -> float:
    """Mean absolute error of prices."""
    return statistics.fmean(map(abs, errors(cases, draw)))


def taus(cases: Sequence[dict], draw: int | None = None) -> dict[str, float | None]:
    """Link -> Kendall's tau over pairs of modes of the same workload."""
    pairs: dict[str, list[bool | None]] = {case["link"]: [] for case in cases}
    for case in cases:
        priced = [row["predicted"] if draw is None else row["wrong"][draw] for row in case["plans"]]
        pairs[case["link"]] += compared(case, priced)
    return {link: tau(found) for link, found in pairs.items()}


def null_test(cases: Sequence[dict]) -> dict:
    """The same plans priced with wrong constants."""
    wrong = [error(cases, draw) for draw in range(DRAWS)]
    orders = [taus(cases, draw) for draw in range(DRAWS)]
    links = [link for link, found in taus(cases).items() if found is not None]
    return {
        "draws": DRAWS,
        "error_median": statistics.median(wrong),
        "error_passes": sum(e <= ERROR for e in wrong) / DRAWS,
        "tau_mean": {link: statistics.fmean(order[link] for order in orders) for link in links},
        "tau_passes": {link: sum(order[link] >= TAU for order in orders) / DRAWS for link in links},
    }


def summary(cases: Sequence[dict], bars: Bars) -> dict:
    """Figures over all cases against their bars."""
    orders, null = taus(cases), null_test(cases)
    regrets = {}
    for case in cases:
        best = min(case["plans"], key=median)
        where, ours = f"{case['workload']}, {case['link']}", chosen(case)
        regrets[where] = {"regret": median(ours) / median(best), "best": best["modes"],
                          "paired": ratio(ours, best)}  # fmt: skip
        bars.most(f"regret, {where} (best: {best['modes'][0]})", regrets[where]["regret"], REGRET)
    found = {
        "plans": len(errors(cases)),
        "error_mean": error(cases),
        "error_median": statistics.median(map(abs, errors(cases))),
        "error_largest": max(errors(cases), key=abs),
        "error_by_link": {link: error([c for c in cases if c["link"] == link]) for link in orders},
        "tau": orders,
        "regret": regrets,
        "regret_largest": max(x["regret"] for x in regrets.values()),
        "disturbed_steps": sum(w > DISTURBED for c in cases for row in c["plans"] for w in row["waited"]),
        "null": null,
    }
    bars.most("mean absolute error of prices", found["error_mean"], ERROR)
    for link, value in orders.items():
        if LINKS[link] and value is not None:
            bars.least(f"Kendall's tau, {link}", value, TAU)
    bars.holds("null test: wrong constants have a larger error", null["error_median"] > found["error_mean"])
    lower = [null["tau_mean"][link] <= value for link, value in orders.items() if value is not None]
    bars.holds("null test: wrong constants order modes no better", all(lower))
    return found


def table(case: dict) -> str:
    """A workload over a link, as text."""
    ours, best = chosen(case), min(case["plans"], key=median)
    lines = [f"\n{case['workload']}, {case['link']} (MEASURED; calibration {case['digest']}): "
             f"{case['unshared_rows']} rows un-shared, {ours['rows']} under augtree; best {best['modes'][0]}"]
    lines.append(f"{'modes':44}{'median s':>9}{'quartiles':>16}{'priced':>9}{'error':>8}{'x augtree':>11}"
                 f"{'waited':>8}  plan")  # fmt: skip
    for row in case["plans"]:
        low, _, high = statistics.quantiles(row["passes"], n=4, method="inclusive")
        lines.append(
            f"{', '.join(row['modes']):44}{median(row):9.3f}{f'{low:.3f} - {high:.3f}':>16}"
            f"{row['predicted']:9.3f}{row['predicted'] / median(row) - 1:8.1%}{ratio(row, ours)[0]:11.3f}"
            f"{max(row['waited']):8.1%}  {row['plays']}: {row['note']}"
        )
    return "\n".join(lines)


def markdown(cases: Sequence[dict]) -> str:
    """All cases as one table, a line a plan."""
    lines = ["| step | link | modes | plays | median s (quartiles) | priced s | error | x augtree |"]
    lines.append("|---" * 8 + "|")
    for case in cases:
        for row in case["plans"]:
            low, _, high = statistics.quantiles(row["passes"], n=4, method="inclusive")
            middle, priced, times = median(row), row["predicted"], ratio(row, chosen(case))[0]
            lines.append(
                f"| {case['workload']} | {case['link']} | {', '.join(row['modes'])} | {row['note']} "
                f"| {middle:.3f} ({low:.3f}-{high:.3f}) | {priced:.3f} | {priced / middle - 1:+.1%} "
                f"| {times:.2f} |"
            )
    return "\n".join(lines) + "\n"


def told(found: dict) -> str:
    """The summary as text."""
    null = found["null"]
    lines = [
        f"\nMEASURED  {found['plans']} plans; error of prices: mean {found['error_mean']:.1%}, median "
        f"{found['error_median']:.1%}, largest {found['error_largest']:+.1%}",
        f"null test, {null['draws']} draws: error median {null['error_median']:.1%}, "
        f"{null['error_passes']:.0%} of draws pass",
    ]
    for link, value in found["tau"].items():
        error_here = f"{link:8} error {found['error_by_link'][link]:.1%}"
        if value is None:
            lines.append(f"{error_here}, tau: all tied")
        else:
            lines.append(f"{error_here}, tau {value:.2f}; null tau mean {null['tau_mean'][link]:.2f}, "
                         f"{null['tau_passes'][link]:.0%} of draws pass")  # fmt: skip
    for where, x in found["regret"].items():
        middle, low, high = x["paired"]
        lines.append(f"regret {x['regret']:.3f} (paired {middle:.3f}, {low:.3f} - {high:.3f})  {where}, "
                     f"best {x['best'][0]}")  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
