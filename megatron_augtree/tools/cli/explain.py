"""``augtree explain``: the candidates, their scores, and why the winner won."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import Considered
from megatron_augtree.planning.search import budget_of
from megatron_augtree.planning.timeline import Bar, timeline
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.choose import Chosen, alternatives, choose
from megatron_augtree.tools.cli.output import Answer, Table, gib, ratio, seconds, several
from megatron_augtree.tools.cli.plan import summary

HELP = "candidates, scores, why the winner won"
EXAMPLES = """\
  augtree explain --demo
  augtree explain --prompt 8192 --responses 512x8 --ranks 8 --top 30
  augtree explain --groups groups.jsonl.gz --memory-budget-gib 20"""
#: Plain, one packed ring, Megatron's dynamic degrees with reuse, and balanced blocks in one pass.
_AGAINST = "ring,ring-reuse,dynamic-reuse,dcp-fused"
#: Words in names of augtree's candidates -> what they stand for.
_WORDS = {
    "one tree": "the tree on its best block",
    "joint": "each tree on a block of its own width",
    "degree": "all trees on blocks of so many ranks",
    "in turn": "groups dealt as data parallelism deals them",
    "shared passes": "trees of a block in fewer passes",
    "searched": "which ones by local search",
    "one pass a block": "all trees of a block in one pass",
    "logits once": "waves so small that no logits are made again",
    "shorter slots": "more waves for the longest passes",
    "lock-step": "equal blocks, each with as many rounds",
    "copies": "prompts that are computed on several blocks",
}
#: A link so fast that nothing is waited for, bytes a second.
_FREE = 1 << 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    options.add_step(parser)
    options.add_machine(parser)
    options.add_choice(parser)
    parser.add_argument("--top", type=options.positive, default=12, metavar="N",
                        help="candidates shown (default 12); --json has all")
    parser.add_argument("--against", type=options.modes, default=_AGAINST, metavar="MODE,...",
                        help=f"modes whose time is taken apart beside it, or all (default {_AGAINST})")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    chosen = choose(args)
    best = max(1, round(chosen.plan.seconds * 1e9))
    candidates = [
        {"name": c.name, "seconds": c.time_ns / 1e9, "score": c.time_ns / best, "peak_bytes": c.peak_bytes,
         "fits": c.fits}
        for c in chosen.considered
    ]  # fmt: skip
    others = [mode for mode in args.against if mode != chosen.config.mode]
    plans = {"the plan": chosen.plan, **alternatives(chosen, others)}
    ask = {"prices": chosen.prices, "lock_step": chosen.config.lock_step}
    parts = {name: parts_of(plan, **ask) for name, plan in plans.items() if plan.passes}
    data = summary(chosen) | {"candidates": candidates, "seconds_by_part": parts}
    budget = budget_of(chosen.config, chosen.prices.cluster)
    over = {name: plan.peak_bytes for name, plan in plans.items() if plan.peak_bytes > budget}
    data["why"] = why(chosen, parts, over)
    if not parts:
        return Answer(data, [data["why"]])
    shown = _shown(candidates, args.top)
    tables = [_candidates(shown, len(candidates)), *_glossary(shown), _parts_table(parts)]
    return Answer(data, [data["why"], *tables])


def parts_of(plan: Plan, prices: Prices, lock_step: bool = False) -> dict[str, float]:
    """What a plan's predicted seconds are spent on; the parts add up to them.

    Each part is what the step would save if it were free, one after the other: traffic that nothing hides,
    launches, recompute, then waiting for ranks with more to do; computing is the rest.
    """
    at = partial(timeline, lock_step=lock_step)
    machine, layers = prices.cluster, prices.model.layers
    no_wires = replace(machine, link_bytes_s=_FREE, nic_bytes_s=_FREE, message_ns=0, stage_ns=0)
    no_launches = replace(no_wires, tile_ns=0, layer_ns=0, pass_ns=0)
    whole = replace(plan, passes=tuple(replace(p, keep_layers=layers, keep_attention=0) for p in plan.passes))
    steps = {
        "traffic": at(plan, replace(prices, cluster=no_wires)),
        "launches": at(plan, replace(prices, cluster=no_launches)),
        "recompute": at(whole, replace(prices, cluster=no_launches)),
    }
    left = _busiest(at(plan, prices), plan.world)
    parts = {"total": left}
    for name, bars in steps.items():
        less = _busiest(bars, plan.world)
        parts[name], left = left - less, less
    computing = sum(bar.work for bar in steps["recompute"]) / plan.world
    return {**parts, "waiting": left - computing, "computing": computing}


def _busiest(bars: list[Bar], world: int) -> float:
    """Seconds of the rank with most to do: what the planner minimises."""
    busy = [0.0] * world
    for bar in bars:
        busy[bar.rank] += bar.duration
    return max(busy)


def why(chosen: Chosen, parts: dict[str, dict[str, float]], over: dict[str, int]) -> str:
    """The reason, in sentences.

    Args:
        chosen: the plan.
        parts: name of a plan -> its `parts_of`.
        over: names of those that do not fit -> their peak, bytes.
    """
    if not parts:
        return "nothing to compute"
    mine, alike = parts["the plan"], {}
    for name, theirs in parts.items():
        if name != "the plan":
            needs = f", over the budget with {gib(over[name])}" if name in over else ""
            alike.setdefault((*theirs.values(), needs), []).append(name)
    differences = [
        f"against {', '.join(names)}{needs}: {_difference(mine, parts[names[0]])}"
        for (*_, needs), names in alike.items()
    ]
    return "\n".join([_against_candidates(chosen), *differences])


def _against_candidates(chosen: Chosen) -> str:
    fitting = [c for c in chosen.considered if c.fits]
    faster = [c for c in chosen.considered if not c.fits and c.time_ns < chosen.plan.seconds * 1e9]
    name, plan = fitting[0].name, f"{chosen.plan.mode}: {chosen.plan.note}"
    told = f"{several(len(chosen.considered), 'candidate')}, {len(fitting)} within the memory budget; " \
        f"the fastest is {name}"
    second = _runner_up(fitting)
    if second is not None:
        ahead = ratio(second.time_ns, fitting[0].time_ns) - 1
        lead = f"{ahead:.1%} ahead of" if ahead >= 0.001 else "level with"
        told += f", {lead} {second.name}"
    if faster:
        told += f"; {several(len(faster), 'faster one')} would need more memory, " \
            f"the fastest {gib(min(faster, key=lambda c: c.time_ns).peak_bytes)}"
    return told if name == plan else f"{told}\nthe plan is {plan}"


def _runner_up(fitting: list[Considered]) -> Considered | None:
    """The best candidate that is not the winner under another name."""
    return next((c for c in fitting[1:] if c.name != fitting[0].name), None)


def _difference(mine: dict[str, float], theirs: dict[str, float]) -> str:
    """What another plan pays more for, largest first."""
    gap = theirs["total"] - mine["total"]
    if abs(gap) <= 1e-9:
        return "a tie"
    more = {name: theirs[name] - mine[name] for name in mine if name != "total"}
    costs = [(n, d) for n, d in sorted(more.items(), key=lambda item: -item[1]) if d > 0.01 * abs(gap)]
    gains = [(n, -d) for n, d in sorted(more.items(), key=lambda item: item[1]) if -d > 0.01 * abs(gap)]
    told = f"{ratio(theirs['total'], mine['total']):.2f} x the time, {seconds(abs(gap))} " \
        f"{'more' if gap > 0 else 'less'}"
    if costs:
        told += ": more " + ", ".join(f"{name} {seconds(d)}" for name, d in costs)
    if gains:
        told += "; less " + ", ".join(f"{name} {seconds(d)}" for name, d in gains)
    return told


def _shown(candidates: list[dict], top: int) -> list[dict]:
    # Some differ in what the name does not say, such as what is kept: the fastest stands for them.
    named = {c["name"]: c for c in reversed(candidates)}
    return [c for c in candidates if named[c["name"]] is c][:top]


def _candidates(shown: list[dict], count: int) -> Table:
    rows = [(str(number), c["name"], seconds(c["seconds"]), f"{c['score']:.3f}", gib(c["peak_bytes"]),
             "yes" if c["fits"] else "no") for number, c in enumerate(shown, start=1)]  # fmt: skip
    columns = ("", "candidate", "predicted", "of the winner", "peak", "fits")
    title = f"{len(shown)} of {several(count, 'candidate')}"
    return Table(columns, rows, title, frozenset(("", "predicted", "of the winner", "peak")))


def _glossary(shown: list[dict]) -> list[str]:
    """What the words in the names shown stand for; peers are named by their modes."""
    names = " ".join(c["name"] for c in shown if c["name"].startswith("augtree: "))
    told = [f"{word} - {meaning}" for word, meaning in _WORDS.items() if word in names]
    return [f"augtree's candidates: {'; '.join(told)}"] if told else []


def _parts_table(parts: dict[str, dict[str, float]]) -> Table:
    names = ("total", "computing", "waiting", "traffic", "launches", "recompute")
    rows = [(name, *(seconds(theirs[part]) for part in names)) for name, theirs in parts.items()]
    return Table(("", *names), rows, "where a step's time goes", frozenset(names))
