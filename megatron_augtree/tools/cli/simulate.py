"""``augtree simulate``: every mode's plan of a step, played in time, side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_augtree.config import InfeasiblePlanError, InputError
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.search import budget_of
from megatron_augtree.planning.simulate import Simulated, SimulatedBar, compute_bound, simulate
from megatron_augtree.runtime.trace import planned_events, write_events
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.choose import Chosen, choose_for
from megatron_augtree.tools.cli.files import written
from megatron_augtree.tools.cli.output import Answer, Table, gib, ratio, seconds, several
from megatron_augtree.tools.cli.progress import working

HELP = "every mode's plan played in time: waiting, traffic, memory, distance to the bound"
EXAMPLES = """\
  augtree simulate --demo
  augtree simulate --preset docqa-rl --num-groups 16 --ranks 16 --modes ring,dcp-fused,augtree
  augtree simulate --prompt 32768 --responses 512x8 --ranks 8 --stages 4 --recompute full
  augtree simulate --demo --mode dcp-fused --gantt dcp.png --trace dcp.json"""


@dataclass(frozen=True)
class Played:
    """A mode's plan, simulated."""

    chosen: Chosen
    found: Simulated

    @property
    def plan(self) -> Plan:
        """What was played."""
        return self.chosen.plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    options.add_step(parser)
    options.add_machine(parser)
    options.add_choice(parser)
    group = parser.add_argument_group("simulation")
    group.add_argument("--modes", type=options.modes, default="all", metavar="MODE,...",
                       help="modes beside --mode, or all (the default)")
    group.add_argument("--stages", type=options.positive, default=1, metavar="N",
                       help="pipeline stages, 1F1B; --ranks are those of one stage (default 1)")
    group.add_argument("--cards", type=options.positive, metavar="N",
                       help="network cards of a node, shared evenly by its ranks (default one a rank)")
    group.add_argument("--gantt", metavar="FILE",
                       help="what each rank does when under --mode, as a picture (matplotlib)")
    group.add_argument("--trace", metavar="FILE", help="the same as a Chrome trace, for Perfetto")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    played, left_out = play(args)
    shown = played[args.mode]
    model = shown.chosen.model
    budget = budget_of(shown.chosen.config, shown.chosen.prices.cluster)
    bound = compute_bound(shown.chosen.step.merged.shape, shown.chosen.prices, args.ranks)
    lines = [line_of(mode, x, bound, budget) for mode, x in played.items()]
    lines.sort(key=lambda line: (not line["fits"], line["simulated_seconds"]))
    data = {
        "cluster": args.cluster, "pricing": shown.chosen.prices.cluster.digest(), "ranks": args.ranks,
        "stages": model.stages, "groups": shown.chosen.step.groups, "bound_seconds": bound,
        "budget_bytes": budget, "modes": lines, "left_out": left_out,
    }  # fmt: skip
    notes = [f"{mode}: {why}" for mode, why in left_out.items()]
    if args.trace:
        with written(args.trace, "--trace") as path:
            write_events(path, simulated_events(shown.found.spans))
        notes.append(f"simulated timeline written to {args.trace}: open it in ui.perfetto.dev")
    if args.gantt:
        _picture(shown, args.gantt)
        notes.append(f"picture written to {args.gantt}")
    return Answer(data, [_head(data), _table(lines), *notes])


def play(args: argparse.Namespace) -> tuple[dict[str, Played], dict[str, str]]:
    """(mode -> its plan, played; mode -> why it has none).

    Raises:
        AugTreeError: flags that say nothing sensible, or no plan of ``--mode``.
    """
    config = options.config_of(args)
    if config.lock_step:
        raise InputError("lock-step is not simulated", values="--lock-step",
                         rule="a pass begins where the ranks of its block are free",
                         remedy="leave it out, or see `augtree plan --lock-step`")
    step, model = options.step_of(args), replace(options.model_of(args), stages=args.stages)
    if args.stages > model.layers:
        raise InputError("more pipeline stages than layers", values=f"--stages {args.stages}",
                         rule=f"a stage has at least a layer, and the model has {model.layers}",
                         remedy="choose fewer stages")
    played, left_out = {}, {}
    for mode in dict.fromkeys((args.mode, *args.modes)):
        here = config if mode == args.mode else replace(config, mode=mode, force="")
        try:
            chosen = choose_for(step, model, args.ranks, here)
        except InfeasiblePlanError as error:
            if mode == args.mode:
                raise
            left_out[mode] = f"{error.what}; {error.rule}"
            continue
        with working(f"simulating {mode}"):
            played[mode] = Played(chosen, simulate(chosen.plan, chosen.prices, cards=args.cards or 0))
    return played, left_out


def line_of(mode: str, x: Played, bound: float, budget: int) -> dict:
    """A mode in numbers; shares are of all ranks' time, in a pipeline of their busiest stages'."""
    found, whole = x.found, x.plan.world * x.found.makespan
    peak = max(found.peak_bytes, default=0)
    return {
        "mode": mode, "plan": f"{x.plan.mode}: {x.plan.note}", "simulated_seconds": found.makespan,
        "priced_seconds": x.plan.seconds, "over_price": ratio(found.makespan, x.plan.seconds),
        "over_bound": ratio(found.makespan, bound), "busy_share": ratio(sum(found.busy), whole),
        "exposed_share": sum(found.exposed) / whole if whole else 0.0,
        "idle_share": sum(found.idle) / whole if whole else 0.0, "peak_bytes": peak, "fits": peak <= budget,
    }  # fmt: skip


def simulated_events(spans: Sequence[SimulatedBar]) -> list[dict]:
    """A simulated timeline in the schema of other traces: a process a rank, a row a pipeline stage."""
    events, named = [], set()
    for stage in sorted({span.stage for span in spans}):
        for event in planned_events([span for span in spans if span.stage == stage]):
            if event["ph"] == "M":
                if (event["pid"], event["name"]) in named:
                    continue
                named.add((event["pid"], event["name"]))
                about = event["args"].get("name")
                about = {"name": about.replace("planned", "simulated")} if about else event["args"]
                event = {**event, "args": about}
            events.append({**event, "tid": stage})
    return events


def _head(data: dict) -> str:
    pipeline = f", {data['stages']} pipeline stages" if data["stages"] > 1 else ""
    return (
        f"{several(data['groups'], 'group')} on {several(data['ranks'], 'rank')}{pipeline} "
        f"({data['cluster']}), simulated, not measured; bound {seconds(data['bound_seconds'])}: all rows of "
        "the shared forest once, spread evenly, without launches and traffic"
    )


def _table(lines: Sequence[dict]) -> Table:
    least = min((x["simulated_seconds"] for x in lines if x["fits"]), default=0.0)
    rows = [
        (x["mode"], seconds(x["simulated_seconds"]), f"{ratio(x['simulated_seconds'], least):.3f}",
         seconds(x["priced_seconds"]), f"{x['over_bound']:.2f}", f"{x['busy_share']:.1%}",
         f"{x['exposed_share']:.1%}", f"{x['idle_share']:.1%}", gib(x["peak_bytes"]),
         "yes" if x["fits"] else "no", x["plan"])
        for x in lines
    ]  # fmt: skip
    columns = ("mode", "simulated", "of the best", "priced", "over bound", "busy", "exposed", "idle", "peak",
               "fits", "plan")  # fmt: skip
    return Table(columns, rows, "exposed is a part of idle", frozenset(columns[1:9]))


def _picture(x: Played, path: str) -> None:
    try:
        from megatron_augtree.tools.plot import plot_simulated
        with written(path, "--gantt") as target:
            plot_simulated(x.plan, x.found, str(target))
    except ModuleNotFoundError as error:
        raise InputError("a picture needs matplotlib", values=f"--gantt {path}: no module {error.name}",
                         rule="matplotlib draws it; nothing else here needs it",
                         remedy="pip install matplotlib, or use --trace") from error
