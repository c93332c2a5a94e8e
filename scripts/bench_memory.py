"""What an update needs in memory, and how long a prompt fits: recompute, kept attention, waves, against ring.

    python scripts/bench_memory.py --json memory.json [--only settings,budgets] [--budget-mib 256]

Every figure is the peak of resident memory above the built model, the larger of two CPU ranks, each from a
fresh process (scripts/replay.py).

settings  the two groups of tau_airline that bench_update.py times; then, for every setting, the longest
          prompt with four responses of 128 tokens that stays within the budget.
budgets   augtree with `--augtree-memory-budget-gib`, recompute left to the planner: the largest measured peak
          of `--repeats` runs beside the budget. The script fails where it is beyond.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from megatron_augtree.data.groups import Group, read_groups, write_groups
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.tools.measure import commit, machine, torchrun, write_json

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 1024 --vocab-size 4096 "
    "--untie-embeddings-and-output-weights --dtype float32 --optimizer sgd --lr 1e-4"
).split()
RANKS = 2
FULL = "--recompute-granularity full --recompute-method {} --recompute-num-layers {}"
WAVES = " --augtree-force phase=phased,waves=2,chunks=2"
AUGTREE = "--context-parallel-mode augtree "
#: Setting -> flags.
SETTINGS = {
    "ring": "--context-parallel-mode ring",
    "ring, full": "--context-parallel-mode ring " + FULL.format("uniform", 1),
    "augtree": AUGTREE,
    "augtree, selective": AUGTREE + "--recompute-granularity selective",
    "augtree, mixed 1 / 2 / 1": AUGTREE + FULL.format("block", 3) + " --augtree-keep-attention 2",
    "augtree, full, attention kept": AUGTREE + FULL.format("uniform", 1) + " --augtree-keep-attention -1",
    "augtree, full": AUGTREE + FULL.format("uniform", 1),
    "augtree, waves": AUGTREE + WAVES,
    "augtree, waves, full": AUGTREE + FULL.format("uniform", 1) + WAVES,
}
STEP = 1024  # tokens; the longest prompt is found to this
#: Groups of a file -> budgets in MiB: enough to keep everything, then less and less.
BUDGETS = {("tau_airline", 2): (2048, 1024, 640), ("kv_retrieval_75", 1): (1024, 400, 300)}


def main() -> None:
    """Measures and prints tables."""
    args = parse()
    figures = {"machine": machine(), "commit": commit(), "cluster_digest": cluster_of("cpu").digest(),
               "model": MODEL, "ranks": RANKS, "budget_mib": args.budget_mib}
    beyond: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if "settings" in args.only:
            for name, row in settings(args, folder):
                figures.setdefault("settings", {})[name] = row
                save(args, figures)
        if "budgets" in args.only:
            for name, row in budgets(args, folder):
                figures.setdefault("budgets", {})[name] = row
                save(args, figures)
                if row["peak_mib"] > row["budget_mib"]:
                    beyond.append(f"{name}: {row['peak_mib']:.0f} MiB")
    for line in beyond:
        print(f"BEYOND ITS BUDGET  {line}")
    sys.exit(bool(beyond))


def save(args: argparse.Namespace, figures: dict) -> None:
    """Writes what is known so far, where a file was asked for."""
    if args.json:
        write_json(args.json, figures)


def settings(args: argparse.Namespace, folder: str) -> Iterator[tuple[str, dict]]:
    """(name, figures) of every setting."""
    groups = list(read_groups(args.data_dir / "tau_airline.jsonl.gz", 0, 2))
    print(f"{'setting':32}{'tau_airline MiB':>17}{'predicted':>11}{f'prompt in {args.budget_mib} MiB':>20}")
    for name, flags in tqdm(SETTINGS.items(), unit="setting", disable=None, file=sys.stderr):
        peak, predicted, _ = measure(groups, flags, folder)
        longest = longest_prompt(groups[0], flags, args, folder)
        print(f"{name:32}{peak:17.0f}{predicted:11.0f}{longest:20}", flush=True)
        yield name, {"flags": flags, "peak_mib": peak, "predicted_mib": predicted, "longest_prompt": longest}


def budgets(args: argparse.Namespace, folder: str) -> Iterator[tuple[str, dict]]:
    """(name, figures) of every workload and budget."""
    cases = [(*workload, budget) for workload, some in BUDGETS.items() for budget in some]
    print(f"{'groups':26}{'budget MiB':>11}{'predicted':>11}{'measured':>10}  plan")
    for file, count, budget in tqdm(cases, unit="budget", disable=None, file=sys.stderr):
        groups = list(read_groups(args.data_dir / f"{file}.jsonl.gz", 0, count))
        flags = f"{AUGTREE}--augtree-memory-budget-gib {budget / 1024}"
        runs = [measure(groups, flags, folder) for _ in range(args.repeats)]
        peaks, (_, predicted, note) = [peak for peak, *_ in runs], runs[0]
        print(f"{f'{count} of {file}':26}{budget:11}{predicted:11.0f}{max(peaks):10.0f}  {note}", flush=True)
        yield f"{count} of {file}, {budget} MiB", {"budget_mib": budget, "peak_mib": max(peaks),
                                                   "peaks_mib": peaks, "predicted_mib": predicted,
                                                   "plan": note}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("AUGTREE_DATA", default),
                        help="folder of the group files; default $AUGTREE_DATA, else ../shared/data")
    parser.add_argument("--only", default="settings,budgets", help="sections; default all")
    parser.add_argument("--budget-mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each budget; the largest peak counts")
    parser.add_argument("--max-prompt", type=int, default=16384, help="where the search for a prompt ends")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    args.only, args.data_dir = args.only.split(","), Path(args.data_dir)
    if not set(args.only) <= {"settings", "budgets"}:
        parser.error(f"--only {','.join(args.only)}: sections are settings and budgets")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: there is at least one")
    return args


def measure(groups: list[Group], flags: str, folder: str) -> tuple[float, float, str]:
    """(measured, predicted) peak of an update, MiB, and its plan in a line."""
    from safetensors import safe_open

    data, dump = str(Path(folder) / "groups.jsonl.gz"), str(Path(folder) / "dump.safetensors")
    write_groups(data, groups)
    replay = str(Path(__file__).with_name("replay.py"))
    torchrun(RANKS, replay, "--data", data, *MODEL, *flags.split(), "--dump", dump)
    with safe_open(dump, "pt") as opened:
        found = {key: json.loads(text) for key, text in opened.metadata().items()}
    plan = found["plan"]["json"]
    return max(found["peak_bytes"]) / 2**20, plan["peak_bytes"] / 2**20, plan["note"]


def longest_prompt(group: Group, flags: str, args: argparse.Namespace, folder: str) -> int:
    """Tokens of the longest prompt that stays within the budget; a multiple of `STEP`."""
    fits, breaks = 0, args.max_prompt // STEP + 1
    step = 1
    while breaks - fits > 1:
        # Doubled until it breaks, then halved: what does not fit is slow.
        tried = min(fits + step, breaks - 1) if breaks > args.max_prompt // STEP else (fits + breaks) // 2
        if measure([_of_length(group, tried * STEP)], flags, folder)[0] <= args.budget_mib:
            fits, step = tried, 2 * step
        else:
            breaks = tried
    return fits * STEP


def _of_length(group: Group, tokens: int) -> Group:
    """The group with its prompt repeated to a length, and the beginnings of its responses."""
    prompt = (group.prompt * (tokens // len(group.prompt) + 1))[:tokens]
    short = [replace(r, tokens=r.tokens[:128], loss_mask=r.loss_mask[:128]) for r in group.responses]
    return replace(group, prompt=prompt, responses=tuple(short))


if __name__ == "__main__":
    main()
