"""The tables of docs/worth_it.md: bounds by formula, and what the planner predicts for seeded presets.

    python -m tests.worth        writes the tables into docs/worth_it.md

One node of eight H100 (`h100` preset), qwen2.5-7b in bf16, eight groups, full recompute in every mode, so
that modes differ in nothing else. A baseline has its best degree of those that fit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.data.workloads import WORKLOADS, workload
from megatron_augtree.planning.cluster import preset
from megatron_augtree.planning.plan import Plan
from megatron_augtree.tools.cli.choose import Chosen, alternatives, choose_for
from megatron_augtree.tools.cli.estimate import savings
from megatron_augtree.tools.lengths import step_of_lengths
from megatron_augtree.tools.models import model_shape

PAGE = Path(__file__).resolve().parents[1] / "docs" / "worth_it.md"
RANKS = GROUPS = 8
PRESETS = ("narrativeqa", "longreward", "docqa-rl", "rag", "lmsys", "openthoughts", "code-ocr", "dapo-math")
#: Peers that share nothing, and the strongest that do -> degrees that are tried; 0 is their own choice.
UNSHARED = {"ring": (1, 2, 4, 8), "dynamic": (0,)}
SHARING = {"dcp-fused": (1, 2, 4, 8), "dynamic-reuse": (0,)}
#: Prompt over response, responses of a prompt.
RATIOS, COUNTS = ((1, 16), (1, 4), (1, 1), (4, 1), (16, 1), (64, 1)), (4, 8, 16, 64)


def bounds() -> str:
    """Rows un-shared over shared, and pairs, by the page's formulas for equal responses."""
    lines = ["| P : R | " + " | ".join(f"G = {g}" for g in COUNTS) + " |", "|---" * (len(COUNTS) + 1) + "|"]
    for p, r in RATIOS:
        cells = []
        for g in COUNTS:
            rows = g * (p + r) / (p + g * r)
            pairs = g * (p + r) ** 2 / (p * p + 2 * g * p * r + g * r * r)
            cells.append(f"{rows:.2f}, {pairs:.2f}")
        lines.append(f"| {p} : {r} | {' | '.join(cells)} |")
    return "\n".join(lines)


def predicted() -> str:
    """What sharing can gain, and what the planner predicts, for every preset."""
    head = ("preset", "P, R (medians), G", "rows", "operations", "`ring`", "`dynamic`",
            "best that shares", "the plan")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    model = model_shape("qwen2.5-7b", recomputed=True)
    for name in PRESETS:
        made, step = WORKLOADS[name], step_of_lengths(workload(name, GROUPS, 0))
        chosen = choose_for(step, model, RANKS, AugTreeConfig(cluster="h100"))
        worth = savings(step, chosen.model)
        best = [_best(chosen, {mode: UNSHARED[mode]}) for mode in UNSHARED] + [_best(chosen, SHARING)]
        ratios = [worth["linear_ratio"], worth["compute_ratio"], *(b / chosen.plan.seconds for b in best)]
        lengths = f"{made.prompt.p50:,}, {made.response.p50:,}, {made.responses}"
        cells = [f"`{name}`", lengths, *(f"{ratio:.2f}" for ratio in ratios), _told(chosen.plan)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _best(chosen: Chosen, modes: dict[str, Sequence[int]]) -> float:
    """Predicted seconds of the fastest of some baselines, over the degrees that fit into the machine."""
    budget, plans = preset("h100").memory_bytes, []
    for mode, degrees in modes.items():
        for degree in degrees:
            config = replace(chosen.config, degree=degree)
            plans += alternatives(replace(chosen, config=config), [mode]).values()
    return min(plan.seconds for plan in plans if plan.peak_bytes <= budget)


def _told(plan: Plan) -> str:
    widths = sorted({len(p.block) for p in plan.passes}, reverse=True)
    kinds = sorted({"fused" if p.kind == "fused" else "waves" for p in plan.passes})
    return f"{plan.mode}, blocks of {', '.join(map(str, widths))}, {' and '.join(kinds)}"


TABLES = {"bounds": bounds, "predicted": predicted}


def rewritten(page: str, name: str) -> str:
    """A page with one of the tables between its marks."""
    begin, end = f"<!-- {name}: written by python -m tests.worth -->", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    assert len(pattern.findall(page)) == 1, f"the page has no single part from {begin!r} to {end!r}"
    return pattern.sub(lambda _: f"{begin}\n{TABLES[name]()}\n{end}", page)


if __name__ == "__main__":
    text = PAGE.read_text()
    for table in TABLES:
        text = rewritten(text, table)
    PAGE.write_text(text)
