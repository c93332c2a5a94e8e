"""Real groups at their full lengths: log-probs of ``augtree`` against those of ``ring``. Forward only.

    torchrun --nproc-per-node 2 scripts/check_real_data.py --data ../shared/data/*.gz [--longest 2]

`check_real_data.sh` runs it over everything; tests import `longest_groups` and `compare`. A small model (2
layers, hidden 64, fp32) is enough for exactness. Its weights are drawn wide, so that the prompt matters to
every response: reversing prompts moves the log-probs by far more than the tolerance, which is checked too.
Memory is bounded: groups are computed in batches of at most `--batch-rows` un-shared rows, or of one group.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from logprobs import Scorer
from megatron.core.models.gpt import GPTModel
from tqdm import tqdm

from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.data.groups import Group, fold, read_groups
from megatron_augtree.mcore.arguments import add_model_arguments
from megatron_augtree.mcore.build import build_model
from megatron_augtree.mcore.launch import RankParser, add_timeout_argument, agree, run, start
from megatron_augtree.mcore.memory import PeakMemory, resident_bytes

MODEL = ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
         "--num-query-groups 2 --ffn-hidden-size 128 --vocab-size 4096 --max-position-embeddings 16384 "
         "--dtype float32 --swiglu --normalization RMSNorm --disable-bias-linear "
         "--untie-embeddings-and-output-weights --init-method-std 0.2").split()
MODES = ("augtree", "ring")
TOLERANCE = 1e-4
#: Where reversed prompts moved the log-probs by less on average, agreement would prove little.
LEAST_EFFECT = 100 * TOLERANCE


@dataclass
class Comparison:
    """What was compared, summed up over batches.

    Attributes:
        groups, tokens: how many groups and loss-bearing tokens.
        worst: largest difference of two log-probs.
        effect: by how much reversed prompts move the log-probs of the last batch, on average.
        peak_bytes: largest resident memory of a rank above the model.
        seconds: mode -> seconds.
    """

    groups: int
    tokens: int
    worst: float
    effect: float
    peak_bytes: int
    seconds: dict[str, float]

    def good(self, peak_bytes: float = float("inf")) -> bool:
        """Whether the log-probs agree and depend on the prompts, within a limit of memory."""
        return self.worst <= TOLERANCE and self.effect >= LEAST_EFFECT and self.peak_bytes <= peak_bytes

    def __str__(self) -> str:
        times = ", ".join(f"{mode} {seconds:.1f} s" for mode, seconds in self.seconds.items())
        return (f"{self.groups} groups, {self.tokens} log-probs: largest difference {self.worst:.1e} "
                f"(reversed prompts move them by {self.effect:.2f}), peak {self.peak_bytes / 2**20:.0f} MiB "
                f"a rank, {times}")


def model_arguments() -> argparse.Namespace:
    """Arguments of the small model, for `build.initialize` and `build_model`."""
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return parser.parse_args(MODEL)


def rows_alone(group: Group) -> int:
    """Rows of a group that a run without sharing computes."""
    return sum(max(len(group.prompt) + len(r.tokens) - 1, 0) for r in group.responses)


def longest_groups(path: str, count: int) -> list[Group]:
    """The `count` groups of a file with the most un-shared rows, longest first."""
    return sorted(read_groups(path), key=rows_alone, reverse=True)[:count]


def batches(groups: Iterable[Group], rows: int) -> Iterator[list[Group]]:
    """Groups in order, in batches of at most `rows` un-shared rows, or of one group."""
    batch: list[Group] = []
    for group in groups:
        if batch and sum(map(rows_alone, batch)) + rows_alone(group) > rows:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def compare(model: GPTModel, groups: Sequence[Group], *, rows: int = 20000, modes: Sequence[str] = MODES,
            base_bytes: int | None = None,
            progress: Callable[[int], None] = lambda count: None) -> Comparison:
    """Log-probs of groups by two modes; every rank of the pool calls it, the result is the same on all.

    Args:
        model: with AugTree's attention, the same on all ranks.
        groups: at least one; ids as in the file, are folded to the model's vocabulary.
        rows: un-shared rows of a batch.
        modes: two ``--context-parallel-mode`` values.
        base_bytes: resident memory of this rank that does not count; default what is resident now.
        progress: called with the number of groups of every batch that is done.
    """
    scorers = {mode: Scorer(model, AugTreeConfig(mode=mode)) for mode in modes}
    seconds = dict.fromkeys(modes, 0.0)
    worst, count = 0.0, 0
    with PeakMemory() as memory:
        for batch in batches(groups, rows):
            values = {}
            for mode, score in scorers.items():
                began = time.perf_counter()
                values[mode] = score(fold(batch, model.vocab_size))
                seconds[mode] += time.perf_counter() - began
            first, second = values.values()
            difference = (first - second).abs()
            worst = max(worst, float(difference.nan_to_num(nan=float("inf")).max())) if len(first) else worst
            count += len(first)
            progress(len(batch))
        turned = [replace(group, prompt=group.prompt[::-1]) for group in fold(batch, model.vocab_size)]
        effect = float((scorers[modes[0]](turned) - first).abs().mean())
    peak = torch.tensor(memory.peak_bytes - (memory.start_bytes if base_bytes is None else base_bytes))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return Comparison(len(groups), count, worst, effect, int(peak), seconds)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The check's own flags, and the small model's."""
    parser = RankParser(prog="check_real_data.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--longest", type=int, default=None, metavar="K",
                        help="only the K longest groups of every file; default all groups")
    parser.add_argument("--batch-rows", type=int, default=20000, help="un-shared rows computed together")
    parser.add_argument("--memory-limit-gib", type=float, default=1.0,
                        help="largest resident memory of a rank above the model")
    add_timeout_argument(parser)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(argv)
    if args.longest is not None and args.longest < 1 or args.batch_rows < 1:
        raise AugTreeError("nothing to check",
                           values=f"--longest {args.longest}, --batch-rows {args.batch_rows}",
                           rule="both are at least 1", remedy="correct the flag")
    return argparse.Namespace(**{**vars(model_arguments()), **vars(args)})


def main(argv: Sequence[str] | None = None) -> None:
    """Checks every file; rank 0 prints a line a file. Exit code 1 where one fails."""
    args = agree(lambda: parse(argv))
    start(args)
    model = build_model(args, augtree=True, seed=args.seed)
    first, good, base_bytes = dist.get_rank() == 0, True, resident_bytes()
    for path in args.data:
        count = sys.maxsize if args.longest is None else args.longest
        groups = agree(lambda path=path, count=count: longest_groups(path, count))
        with tqdm(total=len(groups), unit="group", desc=os.path.basename(path), leave=False,
                  disable=not first or not sys.stderr.isatty()) as bar:
            result = compare(model, groups, rows=args.batch_rows, base_bytes=base_bytes, progress=bar.update)
        passed = result.good(args.memory_limit_gib * 2**30)
        good = good and passed
        if first:
            verdict = "ok  " if passed else "FAIL"
            print(f"{verdict} {dist.get_world_size()} ranks, {os.path.basename(path)}: {result}", flush=True)
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
