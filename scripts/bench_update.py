"""How fast is a GRPO update on two CPU ranks: every mode, paired, on three real workloads.

    python scripts/bench_update.py --json bench.json [--workload kv] [--pairs 9]

One launch a workload runs all modes in turn, round after round, so that drift of the machine hits all alike;
a ratio is the median over rounds of (mode's step / augtree's step), with an 80 % interval from resampling the
rounds. Peak memory is taken from a fresh process for each mode, by scripts/replay.py. The last row runs
augtree under a budget of 1.1 x ring's measured peak, and is compared with the baselines that stay within it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from megatron_augtree.tools.measure import commit, interval, machine, torchrun, write_json

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 1024 --vocab-size 4096 "
    "--untie-embeddings-and-output-weights --dtype float32 --optimizer sgd --lr 1e-4"
).split()
RANKS = 2
BASELINES = ("ring", "ring-reuse", "ring-reuse-per-response", "gather-reuse")
#: Name -> (file, groups).
WORKLOADS = {
    "kv": ("kv_retrieval_75.jsonl.gz", "0:1"),
    "tau": ("tau_airline.jsonl.gz", "0:2"),
    "gsm8k": ("gsm8k_solutions.jsonl.gz", "0:8"),
}
BUDGETED = "augtree (budget)"


def main() -> None:
    """Runs the workloads and prints a table each."""
    args = parse()
    if args.worker:
        worker(args)
        return
    report = {"machine": machine(), "commit": commit(), "model": MODEL, "ranks": RANKS, "workloads": {}}
    failed = []
    for name in args.workload or WORKLOADS:
        found = measure(name, args)
        report["workloads"][name] = found
        print(table(name, found), flush=True)
        failed += [f"{name}: {claim}" for claim, good in found["claims"].items() if not good]
        if args.json:
            write_json(args.json, report)
    for claim in failed:
        print(f"NOT SHOWN  {claim}")
    sys.exit(bool(failed))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument(
        "--data-dir",
        default=os.environ.get("AUGTREE_DATA", str(default)),
        help="folder of the group files; default $AUGTREE_DATA, else ../shared/data from the root",
    )
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, help="may be given several times; default all"
    )
    parser.add_argument("--pairs", type=int, default=9, help="rounds; at least 9 for a figure worth quoting")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--budget-gib", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, args: argparse.Namespace) -> dict:
    """Peaks from fresh processes, then paired times in one launch."""
    peaks = {}
    for mode in (*BASELINES, "augtree"):
        print(f"{name}: peak memory of {mode}", file=sys.stderr, flush=True)
        peaks[mode] = peak(name, mode, args)
    budget = 1.1 * max(peaks["ring"]["peak_bytes"]) / 2**30
    peaks[BUDGETED] = peak(name, "augtree", args, "--augtree-memory-budget-gib", f"{budget:.4f}")
    print(f"{name}: {args.pairs} rounds of {len(BASELINES) + 2} runs", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        torchrun(
            RANKS,
            __file__,
            "--worker",
            str(out),
            "--workload",
            name,
            "--pairs",
            str(args.pairs),
            "--data-dir",
            args.data_dir,
            "--budget-gib",
            f"{budget:.4f}",
        )
        found = json.loads(out.read_text())
    return summary(name, found, peaks, budget)


def peak(name: str, mode: str, args: argparse.Namespace, *more: str) -> dict:
    """Peak resident memory above the built model, a rank, from a fresh process."""
    from safetensors import safe_open

    file, groups = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as folder:
        dump = str(Path(folder) / "dump.safetensors")
        torchrun(
            RANKS,
            str(Path(__file__).with_name("replay.py")),
            "--data",
            str(Path(args.data_dir) / file),
            "--groups",
            groups,
            "--context-parallel-mode",
            mode,
            *MODEL,
            "--dump",
            dump,
            *more,
        )
        with safe_open(dump, "pt") as opened:
            metadata = {key: json.loads(text) for key, text in opened.metadata().items()}
    return {"peak_bytes": metadata["peak_bytes"], "predicted_bytes": metadata["plan"]["json"]["peak_bytes"]}


def worker(args: argparse.Namespace) -> None:
    """One rank: all modes in turn, round after round."""
    import torch.distributed as dist

    from megatron_augtree.config import AugTreeConfig
    from megatron_augtree.data.groups import parse_range
    from megatron_augtree.mcore import build
    from megatron_augtree.mcore.sampler import plan_step
    from megatron_augtree.mcore.schedule import AugTreeSchedule
    from megatron_augtree.mcore.update import pool_size
    from megatron_augtree.tools.updates import Updates

    updates = Updates(MODEL)
    file, groups = WORKLOADS[args.workload[0]]
    data = updates.groups(Path(args.data_dir) / file, *parse_range(groups))
    runs = {}
    for mode in (*BASELINES, "augtree", BUDGETED):
        budget = args.budget_gib if mode == BUDGETED else 0.0
        config = AugTreeConfig(mode=mode.split()[0], memory_budget_gib=budget)
        runs[mode] = AugTreeSchedule(config), plan_step(data, updates.shape, pool_size(), config)
    times = {mode: [] for mode in runs}
    for turn in range(args.pairs + 1):
        for mode, run in runs.items():
            found = updates.play(*run)
            if turn:  # the first round warms up
                times[mode].append(found.step)
    if dist.get_rank() == 0:
        batch, ring = runs["augtree"][1], runs["ring"][1]
        write_json(
            args.worker,
            {
                "seconds": times,
                "plans": {mode: str(b.plan) for mode, (_, b) in runs.items()},
                "predicted": {mode: b.plan.seconds for mode, (_, b) in runs.items()},
                "bound": ring.forest.shape.total_rows / batch.forest.shape.total_rows,
            },
        )
    dist.barrier()
    build.destroy()


def summary(name: str, found: dict, peaks: dict, budget: float) -> dict:
    """Ratios with intervals, and whether the claims hold."""
    seconds = found["seconds"]
    ratios = {}
    for mode in seconds:
        for ours in ("augtree", BUDGETED):
            paired = [theirs / our for theirs, our in zip(seconds[mode], seconds[ours])]
            ratios[f"{mode} / {ours}"] = {"median": statistics.median(paired), "interval": interval(paired)}
    fits = [mode for mode in BASELINES if max(peaks[mode]["peak_bytes"]) <= budget * 2**30]
    rivals = {
        "augtree": (BASELINES, "the fastest baseline"),
        BUDGETED: (fits, "the fastest baseline within its budget"),
    }
    claims = {}
    for ours, (modes, what) in rivals.items():
        fastest = min(modes, key=lambda mode: statistics.median(seconds[mode]))
        slower = [our / theirs for theirs, our in zip(seconds[fastest], seconds[ours])]
        low, high = interval(slower)
        tie = " (a tie)" if low <= 1 <= high else ""
        claims[
            f"{ours} not slower than {fastest}, {what}: {statistics.median(slower):.3f} of its time, "
            f"80 % interval to {high:.3f}, at most 1.05{tie}"
        ] = high <= 1.05
    if name == "kv":
        gain = ratios["ring / augtree"]["median"]
        claims[f"at least 6.1 x faster than ring: {gain:.2f} x"] = gain >= 6.1
    used = max(peaks[BUDGETED]["peak_bytes"]) / 2**30
    claims[f"within a budget of 1.1 x ring's peak: {used:.3f} of {budget:.3f} GiB"] = used <= budget
    return {
        **found,
        "peaks": peaks,
        "budget_gib": budget,
        "ratios": ratios,
        "claims": claims,
    }


def table(name: str, found: dict) -> str:
    """The figures of a workload as text."""
    lines = [
        f"\n{name}: linear-work bound against ring {found['bound']:.2f}",
        f"{'mode':26}{'median s':>10}{'x augtree':>11}{'80 % interval':>18}{'peak GiB':>10}",
    ]
    for mode, times in found["seconds"].items():
        ratio = found["ratios"][f"{mode} / augtree"]
        low, high = ratio["interval"]
        top = max(found["peaks"][mode]["peak_bytes"]) / 2**30
        lines.append(
            f"{mode:26}{statistics.median(times):10.3f}{ratio['median']:11.3f}"
            f"{f'{low:.3f} - {high:.3f}':>18}{top:10.3f}"
        )
    lines += [f"{'shown' if good else 'NOT SHOWN':10} {claim}" for claim, good in found["claims"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
