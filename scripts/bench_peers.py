"""Peers that share a prompt on one CPU: seconds of a forward and backward, and how exact the gradients are.

    python scripts/bench_peers.py --json peers.json [--quick]

One process, one thread, one small decoder (2 layers, hidden 128; `scripts/small_gpt.py`), the same rows and
the same loss (the negative log-likelihood of all response tokens). What differs is how rows attend:

    stock          every response alone behind its own copy of the prompt; torch's causal attention
    augtree        the tree's rows once, through the executor on a pool of one rank
    prefixgrouper  the tree's rows once, PrefixGrouper around torch's attention (PyPI `prefix_grouper`, MIT)
    dense-mask     the tree's rows once, torch's attention with the tree's mask in full (up to 4,096 rows)

Times are MEASURED: repeats are interleaved; plans, masks and indices are made before. A gradient's error is
its largest difference to that of the un-shared run in float64 with attention written out, over its largest
entry; the worst parameter counts.
PrefixGrouper shares within a micro-batch on one device; context parallelism, deeper trees and waves, which it
does not have, play no part here.

The exit status is 1 where augtree's gradients are off by more than 1e-10.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from planner_cases import Bars
from small_gpt import Attend, Group, SmallGPT, dense, draw_group, flash
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.config import AugTreeConfig, UnsupportedError
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.tree import Forest
from megatron_augtree.runtime.engine import Engine, SequenceValues
from megatron_augtree.runtime.layout import LocalRows
from megatron_augtree.runtime.transport import LocalTransport
from megatron_augtree.runtime.tree_attention import PassContext, tree_attention
from megatron_augtree.tools.measure import commit, machine, write_json

#: Layers, hidden, heads, KV heads, vocabulary.
SIZES = (2, 128, 4, 2, 512)
#: Name -> prompt tokens, responses, tokens of the longest, all equally long. In the last one sharing gains
#: next to nothing.
CASES = {
    "prompt 2048, 8 x 128": (2048, 8, 128, True),
    "prompt 1024, 8 ragged to 384": (1024, 8, 384, False),
    "prompt 32, 8 x 384": (32, 8, 384, True),
}
QUICK = {"quick": (96, 3, 40, False)}
#: Rows above which the mask in full is left out.
MASKED_ROWS = 4096
#: Largest error of augtree's gradients in float64.
EXACT = 1e-10


class Step:
    """A group's forward and backward; gradients are left in the parameters.

    Args:
        model: of any floating type.
        group: prompt and responses.
        forest: its tree.
    """

    def __init__(self, model: SmallGPT, group: Group, forest: Forest) -> None:
        self.model, self.group, self.forest = model, group, forest
        self.tokens = group.tokens

    def __call__(self) -> None:
        raise NotImplementedError

    def backward(self, logprobs: Tensor) -> None:
        """Of the mean over all response tokens."""
        (-logprobs.sum() / self.tokens).backward()


class Stock(Step):
    """Every response alone behind its prompt.

    Args:
        plain: attention as one writes it down, instead of torch's.
    """

    def __init__(self, model: SmallGPT, group: Group, forest: Forest, plain: bool = False) -> None:
        super().__init__(model, group, forest)
        self.sequences = [torch.tensor([*group.prompt, *r]) for r in group.responses]
        scale = model.width**-0.5
        self.attend: Attend = lambda q, k, v, layer: flash(q, k, v, 1)
        if plain:
            self.attend = lambda q, k, v, layer: dense(q, k, v, True, scale)[0]

    def __call__(self) -> None:
        for ids, response in zip(self.sequences, self.group.responses):
            hidden = self.model(ids[:-1], torch.arange(len(ids) - 1), self.attend)
            self.backward(self.model.logprobs(hidden[-len(response) :], ids[-len(response) :]))


class AugTree(Step):
    """The planner's plan on a pool of one rank, by the engine."""

    def __init__(self, model: SmallGPT, group: Group, forest: Forest) -> None:
        super().__init__(model, group, forest)
        layers, hidden, heads, kv_heads, vocab = SIZES
        width, ffn = hidden // heads, model.layers[0]["down"].in_features
        shape = ModelShape(layers, hidden, ffn, vocab, heads, kv_heads, width, width, gated=True)
        plan = make_plan(forest.shape, shape, 1, AugTreeConfig(), tree_groups=forest.tree_groups)
        self.engine = Engine(plan, forest, self.values, LocalTransport(1), get_kernel("auto", "cpu"))

    def values(self, local: LocalRows, context: PassContext) -> Tensor:
        """[n, 1] log-probs of a pass's scored rows."""
        scale = self.model.width**-0.5

        def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
            return tree_attention(q, k, v, context, layer, scale)

        hidden = self.model(local.inputs, local.positions, attend)
        return self.model.logprobs(hidden[local.scored], local.targets).unsqueeze(-1)

    def loss(self, whole: SequenceValues) -> tuple[Tensor, dict]:
        """The share of some sequences."""
        return -whole.values.sum() / self.tokens, {}

    def __call__(self) -> None:
        self.engine.play(self.loss)


class Rows(Step):
    """The tree's rows in one pack: the prompt's, then each response's; a subclass says how they attend."""

    def __init__(self, model: SmallGPT, group: Group, forest: Forest) -> None:
        super().__init__(model, group, forest)
        scored = forest.scored.nonzero()[0]
        self.inputs, self.positions = torch.tensor(forest.inputs), torch.tensor(forest.positions)
        self.scored, self.targets = torch.tensor(scored), torch.tensor(forest.targets[scored])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """[T, Hq, D]."""
        raise NotImplementedError

    def __call__(self) -> None:
        hidden = self.model(self.inputs, self.positions, self.attend)
        self.backward(self.model.logprobs(hidden[self.scored], self.targets))


class DenseMask(Rows):
    """torch's attention under the whole mask: a row sees its node's earlier rows and its ancestors."""

    def __init__(self, model: SmallGPT, group: Group, forest: Forest) -> None:
        super().__init__(model, group, forest)
        shape = forest.shape
        node = torch.repeat_interleave(torch.arange(len(shape.rows)), torch.tensor(shape.rows))
        above = torch.tensor([[b in shape.ancestors[a] for b in range(len(shape.rows))]
                              for a in range(len(shape.rows))])  # fmt: skip
        order = torch.arange(len(node))
        own = (node[:, None] == node[None]) & (order[:, None] >= order[None])
        self.mask = own | above[node][:, node]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = functional.scaled_dot_product_attention(*parts, attn_mask=self.mask, enable_gqa=True)
        return out[0].transpose(0, 1)


class Grouped(Rows):
    """PrefixGrouper: its cutting and joining of q, k, v around torch's attention."""

    def __init__(self, model: SmallGPT, group: Group, forest: Forest) -> None:
        super().__init__(model, group, forest)
        prefix, *suffixes = forest.shape.rows
        self.grouper = prefix_grouper().PrefixGrouper([[prefix, *suffixes]])
        longest = max(suffixes)
        # Shorter responses are padded at their ends, which no query that counts sees.
        self.mask = torch.ones(longest, prefix + longest, dtype=torch.bool).tril(prefix)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return self.grouper.forward(self._attention, *parts)[0]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        """[B, T, H, D]: the prompt is causal; responses follow it."""
        mask = None if q.shape[2] == k.shape[2] else self.mask
        made = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return made.transpose(1, 2)


def prefix_grouper():
    """The package.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    try:
        return importlib.import_module("prefix_grouper")
    except ImportError as error:
        raise UnsupportedError(
            "PrefixGrouper is not here",
            values=f"import prefix_grouper: {error}",
            rule="this script compares with it; nothing else needs it",
            remedy="pip install prefix_grouper, or name the others with --peers",
        ) from error


PEERS: dict[str, Callable[[SmallGPT, Group, Forest], Step]] = {
    "stock": Stock, "augtree": AugTree, "prefixgrouper": Grouped, "dense-mask": DenseMask,
}  # fmt: skip


def gradients(step: Step) -> list[Tensor]:
    """Of all parameters after one step; they are taken away."""
    step()
    found = [p.grad for p in step.model.parameters()]
    step.model.zero_grad(set_to_none=True)
    return found


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Largest over tensors of max|a - b| / max|b|."""
    return max(float((a.double() - b.double()).abs().max() / b.abs().max()) for a, b in zip(got, want))


def compare(name: str, peers: Sequence[str], repeats: int, bar: tqdm) -> dict:
    """Times and errors of the peers in one case."""
    prompt, responses, longest, equal = {**CASES, **QUICK}[name]
    group = draw_group(prompt, responses, longest, SIZES[-1], equal=equal)
    forest = group.forest
    rows = forest.shape.total_rows
    peers = [peer for peer in peers if peer != "dense-mask" or rows <= MASKED_ROWS]
    exact, single = SmallGPT(*SIZES).double(), SmallGPT(*SIZES)
    want = gradients(Stock(exact, group, forest, plain=True))
    found: dict[str, dict] = {}
    steps = {}
    for peer in peers:
        error64 = error_of(gradients(PEERS[peer](exact, group, forest)), want)
        began = time.perf_counter()
        steps[peer] = PEERS[peer](single, group, forest)
        made = time.perf_counter() - began
        error32 = error_of(gradients(steps[peer]), want)  # warms up, too
        found[peer] = {"error_fp64": error64, "error_fp32": error32, "setup_s": made, "seconds": []}
    for _ in range(repeats):
        for peer, step in steps.items():
            began = time.perf_counter()
            step()
            found[peer]["seconds"].append(time.perf_counter() - began)
            step.model.zero_grad(set_to_none=True)
            bar.update()
    for figures in found.values():
        figures["median_s"] = statistics.median(figures["seconds"])
        cuts = statistics.quantiles(figures["seconds"], method="inclusive")
        figures["iqr_s"] = [cuts[0], cuts[2]]
    unshared = sum(prompt - 1 + len(r) for r in group.responses)
    return {"case": name, "rows": rows, "unshared_rows": unshared, "peers": found}


def table(found: dict) -> str:
    """A case as text."""
    bound = found["unshared_rows"] / found["rows"]
    ours = found["peers"].get("augtree", {}).get("median_s")
    lines = [f"\n{found['case']}: {found['rows']} rows, un-shared {found['unshared_rows']} ({bound:.2f}x)"]
    lines.append(f"{'':16}{'median s':>10}{'IQR s':>18}{'x augtree':>11}{'error fp64':>12}{'fp32':>10}")
    for peer, x in found["peers"].items():
        low, high = x["iqr_s"]
        ratio = f"{x['median_s'] / ours:.2f}" if ours else "-"
        lines.append(f"{peer:16}{x['median_s']:10.4f}{f'{low:.4f} - {high:.4f}':>18}{ratio:>11}"
                     f"{x['error_fp64']:12.1e}{x['error_fp32']:10.1e}")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Compares, prints, and fails where gradients are off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; default all")
    parser.add_argument("--repeats", type=int, default=7, help="timed steps of each, at least 2")
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    peers = args.peers.split(",")
    if set(peers) - set(PEERS) or args.repeats < 2:
        parser.error(f"--peers: of {', '.join(PEERS)}; --repeats: at least 2")
    try:
        _ = "prefixgrouper" in peers and prefix_grouper()
    except UnsupportedError as error:
        sys.exit(str(error))
    torch.set_num_threads(1)
    cases, bars = QUICK if args.quick else CASES, Bars()
    report = {"kind": "measured", "machine": machine(), "commit": commit(), "torch": torch.__version__,
              "model": SIZES, "threads": 1, "repeats": args.repeats, "cases": []}  # fmt: skip
    total = len(cases) * len(peers) * args.repeats
    with tqdm(total=total, unit="step", disable=None, file=sys.stderr) as bar:
        for name in cases:
            found = compare(name, peers, args.repeats, bar)
            report["cases"].append(found)
            print(table(found), flush=True)
            if "augtree" in found["peers"]:
                error = found["peers"]["augtree"]["error_fp64"]
                bars.most(f"{name}: error of augtree's gradients", error, EXACT)
            report["missed"] = bars.missed
            if args.json:
                write_json(args.json, report)
    for line in bars.missed:
        print(f"MISSED  {line}")
    sys.exit(bool(bars.missed))


if __name__ == "__main__":
    main()
