"""``augtree plan``: the plan of a step, as a table, a picture, a trace and a file."""

from __future__ import annotations

import argparse
import json

from megatron_augtree.config import InputError
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.timeline import idle_share, timeline
from megatron_augtree.runtime.trace import planned_events, write_events
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.choose import Chosen, choose
from megatron_augtree.tools.cli.files import written
from megatron_augtree.tools.cli.output import Answer, Table, gib, ratio, seconds, several

HELP = "lengths or a group file -> the plan"
EXAMPLES = """\
  augtree plan --demo
  augtree plan --prompt 32768 --responses 512,480x3,1024 --ranks 8
  augtree plan --preset longreward --num-groups 64 --ranks 64 --out plan.json --png plan.png
  augtree plan --groups groups.jsonl.gz --range 0:8 --model llama-3.1-8b --trace planned.json"""
#: Passes shown; a plan of many ranks has hundreds.
_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    options.add_step(parser)
    options.add_machine(parser)
    options.add_choice(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--out", metavar="FILE", help="the plan as JSON, for --augtree-plan")
    group.add_argument("--png", metavar="FILE", help="rows and times of each rank as a picture (matplotlib)")
    group.add_argument("--trace", metavar="FILE", help="the planned timeline as a Chrome trace, for Perfetto")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    chosen = choose(args)
    plan = chosen.plan
    bars = timeline(plan, chosen.prices, lock_step=chosen.config.lock_step)
    data = summary(chosen) | {"idle_share": idle_share(bars, plan.world), "passes": _passes(plan)}
    notes = []
    if args.out:
        with written(args.out, "--out") as path:
            path.write_text(plan_text(plan))
        notes.append(f"plan written to {args.out}: run it with --augtree-plan {args.out}")
    if args.trace:
        with written(args.trace, "--trace") as path:
            write_events(path, planned_events(bars))
        notes.append(f"planned timeline written to {args.trace}: open it in ui.perfetto.dev")
    if args.png:
        _picture(chosen, args.png)
        notes.append(f"picture written to {args.png}")
    return Answer(data, [_head(data), *(_table(data) if plan.passes else []), *notes])


def summary(chosen: Chosen) -> dict:
    """A plan in numbers."""
    plan, step = chosen.plan, chosen.step
    return {
        "mode": plan.mode,
        "note": plan.note,
        "groups": step.groups,
        "sequences": len(step.names),
        "trees": len(plan.shape.roots),
        "rows": chosen.rows,
        "unshared_rows": step.unshared_rows,
        "rows_saved_share": 1 - ratio(chosen.rows, step.unshared_rows),
        "ranks": plan.world,
        "degrees": sorted({len(p.block) for p in plan.passes}),
        "predicted_seconds": plan.seconds,
        "peak_bytes": plan.peak_bytes,
        "plan_seconds": chosen.plan_seconds,
        "cluster": chosen.config.cluster,
        "pricing": plan.pricing,
        "digest": plan.digest(),
    }


def plan_text(plan: Plan) -> str:
    """The file that ``--augtree-plan`` reads."""
    return json.dumps(plan.to_json())


def _passes(plan: Plan) -> list[dict]:
    passes = []
    for p in plan.passes:
        rows = [sum(span.hi - span.lo for span in spans) for spans in p.placement]
        passes.append({
            "id": p.id, "kind": p.kind, "block": list(p.block), "rows": rows, "nodes": len(p.nodes),
            "primitive": p.primitive, "pieces": p.pieces, "node_ranks": p.node_ranks, "reads": list(p.reads),
            "keep": p.keep, "prefetch": p.prefetch, "keep_layers": p.keep_layers,
            "keep_attention": p.keep_attention, "offload": p.offload,
        })  # fmt: skip
    return passes


def _head(data: dict) -> str:
    saved, degrees = data["rows_saved_share"], ", ".join(map(str, data["degrees"]))
    lines = [
        f"{several(data['groups'], 'group')}, {several(data['sequences'], 'response')} on "
        f"{several(data['ranks'], 'rank')} ({data['cluster']}): {several(data['rows'], 'row')} computed "
        f"where the un-shared run computes {data['unshared_rows']:,} ({saved:.1%} saved)",
        f"{data['mode']}: {data['note']}" + (f"; blocks of {degrees}" if degrees else ""),
        f"predicted {seconds(data['predicted_seconds'])} a step, peak {gib(data['peak_bytes'])} a rank above "
        f"the model, {data['idle_share']:.1%} idle; planned in {seconds(data['plan_seconds'])}",
    ]
    return "\n".join(lines)


def _table(data: dict) -> list[str | Table]:
    rows = []
    for p in data["passes"][:_SHOWN]:
        block = p["block"]
        rows.append((
            str(p["id"]), p["kind"], f"{block[0]}-{block[-1]}" if len(block) > 1 else str(block[0]),
            f"{sum(p['rows']):,}", f"{max(p['rows']):,}", _moves(p), ",".join(map(str, p["reads"])) or "-",
            _keeps(p),
        ))  # fmt: skip
    columns = ("pass", "kind", "ranks", "rows", "most on a rank", "moves", "reads", "keeps")
    parts: list[str | Table] = [Table(columns, rows, right=frozenset(("pass", "rows", "most on a rank")))]
    if len(data["passes"]) > _SHOWN:
        parts.append(f"... and {several(len(data['passes']) - _SHOWN, 'more pass')}; --json has all")
    return parts


def _moves(p: dict) -> str:
    if len(p["block"]) == 1:
        return "nothing"
    text = f"gather_kv in {p['pieces']}" if p["primitive"] == "gather_kv" else p["primitive"]
    text += " by node" if p["node_ranks"] else ""
    return text + (" ahead" if p["prefetch"] else "")


def _keeps(p: dict) -> str:
    """What stays from forward to backward, in words."""
    parts = [] if p["keep_layers"] < 0 else [f"{several(p['keep_layers'], 'layer')} whole"]
    parts += [f"{p['keep_attention']} attention"] if p["keep_attention"] else []
    parts += [] if p["keep"] or len(p["block"]) == 1 else ["nothing received"]
    parts += ["on the host"] if p["offload"] else []
    return ", ".join(parts) or "all"


def _picture(chosen: Chosen, path: str) -> None:
    try:
        from megatron_augtree.tools.plot import plot_plan
        with written(path, "--png") as target:
            plot_plan(chosen.plan, chosen.model, chosen.prices.cluster, str(target),
                      lock_step=chosen.config.lock_step)
    except ModuleNotFoundError as error:
        raise InputError("a picture needs matplotlib", values=f"--png {path}: no module {error.name}",
                         rule="matplotlib draws it; nothing else here needs it",
                         remedy="pip install matplotlib, or use --trace") from error
    except ValueError as error:
        # The ending names the format, and matplotlib's message those that it has.
        raise InputError("a picture cannot be written", values=f"--png {path}: {error}",
                         rule="the file's ending is a format that matplotlib writes",
                         remedy="let the name end in .png") from error
