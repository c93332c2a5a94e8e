"""``augtree estimate``: what sharing saves, and the memory of a pass, from lengths alone."""

from __future__ import annotations

import argparse

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.cluster import Cluster, cluster_of
from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.demand import Pair
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.search import budget_of
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.output import Answer, Table, gib, ratio, several
from megatron_augtree.tools.cli.progress import working
from megatron_augtree.tools.lengths import Step

HELP = "memory and shared rows of your lengths: is it worth it"
EXAMPLES = """\
  augtree estimate --prompt 32768 --responses 512x8
  augtree estimate --groups groups.jsonl.gz --model llama-3.1-8b --tp 2 --ranks 16
  augtree estimate --preset dapo-math --num-groups 32 --memory-budget-gib 27"""
#: Below it, sharing saves less than what plans differ by.
_WORTH = 1.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    options.add_step(parser)
    options.add_machine(parser)
    parser.add_argument("--min-shared-rows", type=options.positive, default=16, metavar="N",
                        help="groups of a file share a prompt only where it has so many rows (default 16)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    step, model, cluster = options.step_of(args), options.model_of(args), cluster_of(args.cluster)
    config = AugTreeConfig(memory_budget_gib=args.memory_budget_gib)
    budget = budget_of(config, cluster)
    data = savings(step, model)
    data["budget_bytes"] = budget
    shape = step.merged.shape
    answer: list[str | Table] = [_told(data), _savings_table(data)]
    if shape.rows:
        tree = _heaviest(shape)
        data["largest_tree_rows"] = tree.total_rows
        with working("pricing the memory of a pass"):
            data["memory"] = memory(tree, model, cluster, args.ranks)
        data["smallest_degree"] = {
            kept: next((line["degree"] for line in data["memory"] if line[kept] <= budget), None)
            for kept in _KEPT
        }
        answer += [_memory_table(data), _fits(data)]
    return Answer(data, answer)


def savings(step: Step, model: ModelShape) -> dict:
    """Rows, pairs and operations with and without sharing.

    The ratio of rows is G (P + R) / (P + G R) for a group of G equal responses: what linear layers can gain.
    """
    shape = step.merged.shape
    rows, pairs = shape.total_rows, sum(shape.area(node) for node in range(len(shape.rows)))
    flops, unshared = (
        model.layers * (r * model.linear_flops + p * model.pair_flops) + s * model.vocab_flops
        for r, p, s in ((rows, pairs, sum(shape.scored)),
                        (step.unshared_rows, step.unshared_pairs, sum(step.scored)))
    )  # fmt: skip
    return {
        "groups": step.groups,
        "sequences": len(step.names),
        "rows": rows,
        "unshared_rows": step.unshared_rows,
        "pairs": pairs,
        "unshared_pairs": step.unshared_pairs,
        "forward_flops": flops,
        "unshared_forward_flops": unshared,
        "linear_ratio": ratio(step.unshared_rows, rows),
        "attention_ratio": ratio(step.unshared_pairs, pairs),
        "compute_ratio": ratio(unshared, flops),
    }


#: What layers keep for the backward -> its recompute pair, given the number of layers.
_KEPT = {
    "everything": lambda layers: Pair(layers, 0),
    "attention": lambda layers: Pair(0, layers),
    "inputs": lambda layers: Pair(0, 0),
}


def memory(shape: ForestShape, model: ModelShape, cluster: Cluster, ranks: int) -> list[dict]:
    """Peak bytes of a rank above the model, where a tree is one fused pass of every row cut over all ranks.

    Returns:
        a line for every degree: powers of two, and all ranks.
    """
    inner = tuple(n for n in range(len(shape.rows)) if shape.children[n])
    leaves = tuple(n for n in range(len(shape.rows)) if not shape.children[n])
    prices, lines = Prices(model, cluster), []
    for degree in sorted({1 << i for i in range(ranks.bit_length())} | {ranks}):
        recipe = Recipe(0, "fused", 0, degree, inner, leaves, lane_degree=degree)
        plan = plan_of([recipe], [Event("forward", 0), Event("backward", 0)], mode="augtree", shape=shape,
                       world=degree, pairs_per_row=1)
        price = PassPrice(prices, PassLoads(shape, plan.passes[0], [], cluster.node_ranks), provides=False)
        peaks = {kept: cluster.base_bytes + price.peak(pair(model.layers)) for kept, pair in _KEPT.items()}
        rows = max(plan.rows_of_rank(rank) for rank in range(degree))
        lines.append({"degree": degree, "rows": rows, **peaks})
    return lines


def _heaviest(shape: ForestShape) -> ForestShape:
    """The tree with the most rows, alone."""
    trees = [shape.subtree(root) for root in shape.roots]
    nodes = max(trees, key=lambda tree: sum(shape.rows[n] for n in tree))
    first = nodes[0]
    parents = tuple(shape.parents[n] - first if n != first else -1 for n in nodes)
    return ForestShape(parents, *(tuple(field[n] for n in nodes)
                                  for field in (shape.rows, shape.scored, shape.ends)))  # fmt: skip


def _told(data: dict) -> str:
    worth = data["compute_ratio"]
    text = f"sharing saves {1 - 1 / worth:.0%} of the operations: at most {worth:.2f} times as fast"
    if worth < _WORTH:
        text += "; little: what is left to gain is balance over ranks"
    elif data["attention_ratio"] < data["linear_ratio"] / 2:
        text += "; attention within the responses limits it, which sharing cannot save"
    return text


def _savings_table(data: dict) -> Table:
    rows = [
        ("rows (linear layers)", data["rows"], data["unshared_rows"], data["linear_ratio"]),
        ("pairs (attention)", data["pairs"], data["unshared_pairs"], data["attention_ratio"]),
        ("operations, forward", data["forward_flops"], data["unshared_forward_flops"], data["compute_ratio"]),
    ]
    cells = [(what, f"{a:.3g}" if a > 10**9 else f"{a:,}", f"{b:.3g}" if b > 10**9 else f"{b:,}", f"{c:.2f}")
             for what, a, b, c in rows]  # fmt: skip
    title = f"{several(data['groups'], 'group')}, {several(data['sequences'], 'response')}"
    columns = ("", "shared", "un-shared", "ratio")
    return Table(columns, cells, title, frozenset(columns[1:]))


def _memory_table(data: dict) -> Table:
    cells = [
        (str(line["degree"]), f"{line['rows']:,}",
         *(gib(line[kept]) + (" fits" if line[kept] <= data["budget_bytes"] else "     ") for kept in _KEPT))
        for line in data["memory"]
    ]  # fmt: skip
    columns = ("degree", "rows a rank", "all kept", "attention kept", "all recomputed")
    title = (
        f"peak of a rank above the model, the largest tree ({data['largest_tree_rows']:,} rows) as one pass; "
        f"budget {gib(data['budget_bytes'])}"
    )
    return Table(columns, cells, title, frozenset(columns))


def _fits(data: dict) -> str:
    smallest = data["smallest_degree"]
    if smallest["inputs"] is None:
        return "it fits in one pass on none of these, even with full recompute: it needs chunks and waves"
    told = f"with full recompute it fits on {several(smallest['inputs'], 'rank')}"
    if smallest["everything"] is None:
        return f"{told}; without recompute on none of these"
    return f"{told}, without recompute on {several(smallest['everything'], 'rank')}"
