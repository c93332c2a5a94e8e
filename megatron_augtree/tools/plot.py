"""Pictures: what each rank of a plan holds and does when, and a reward curve.

Times are the planner's own prices: the picture shows what the plan was chosen for, not a measurement. A pass
starts when every rank of its block is free, and its block's ranks end it together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_augtree.planning.cluster import Cluster
from megatron_augtree.planning.cost import NS, PassLoads, Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"fused": "#4878a8", "prefill": "#7a5c9e", "chunk": "#9b7fbf", "replay": "#d98a3d"}
_SPINE, _LEAF = "#355c7d", "#f2a65a"
#: Bars narrower than this share of the axis carry no text.
_READABLE = 0.05


@dataclass(frozen=True)
class Bar:
    """What one rank does for a while.

    Attributes:
        rank: of the pool.
        pass_id: the pass.
        action: ``forward`` or ``backward``.
        start, duration: seconds.
        rows: rows of the pass on this rank.
    """

    rank: int
    pass_id: int
    action: str
    start: float
    duration: float
    rows: int


def timeline(plan: Plan, model: ModelShape, cluster: Cluster) -> list[Bar]:
    """The plan's events at their priced times, in the order of the plan.

    Args:
        plan: what is played.
        model: sizes of the model, as the planner had them.
        cluster: the machine that the plan was priced for.

    Returns:
        One bar an event and rank of its block.
    """
    prices = Prices(model, cluster)
    loads = [PassLoads(plan.shape, p, [plan.passes[read].placement for read in p.reads], cluster.node_ranks)
             for p in plan.passes]
    times = [prices.pass_ns(load) for load in loads]
    free = [0] * plan.world
    bars = []
    for action, pass_id in plan.events:
        block, duration = plan.passes[pass_id].block, times[pass_id][action == "backward"]
        start = max(free[rank] for rank in block)
        for index, rank in enumerate(block):
            rows = loads[pass_id].ranks[index].rows
            bars.append(Bar(rank, pass_id, action, start / NS, duration / NS, rows))
            free[rank] = start + duration
    return bars


def plot_plan(plan: Plan, model: ModelShape, cluster: Cluster, path: str) -> None:
    """Draws which rank holds which rows (above) and which rank does what when (below).

    Args:
        plan: the plan.
        model: sizes of the model.
        cluster: the machine that the plan was priced for.
        path: the PNG.
    """
    figure = _figure(11.0, 3.2 + 0.8 * plan.world)
    rows, time = figure.subplots(2, 1)
    _draw_rows(rows, plan)
    _draw_time(time, plan, timeline(plan, model, cluster))
    for axes in (rows, time):
        axes.set_yticks(range(plan.world), [f"rank {rank}" for rank in range(plan.world)])
        axes.set_ylim(plan.world - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    total, unshared = plan.shape.total_rows, _unshared_rows(plan)
    figure.suptitle(f"{plan.mode}: {total:,} rows computed where un-shared sequences have {unshared:,}")
    _save(figure, path)


def plot_curve(values: Sequence[float], path: str, *, title: str, levels: Mapping[str, float] | None = None,
               window: int = 10, label: str = "step",
               over: Mapping[str, Sequence[float]] | None = None) -> None:
    """Draws a value a step, its moving average, labelled levels, and other runs' values over it.

    Args:
        values: one value a step.
        path: the PNG.
        title: above the picture.
        levels: label -> height of a dashed line.
        window: steps of the moving average.
        label: what the values are called.
        over: label -> values of another run, dotted, a value a step.
    """
    figure = _figure(8.0, 4.5)
    axes = figure.subplots()
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color="#b8c4d0", linewidth=1, label=label)
    means = [sum(values[max(0, i - window):i]) / min(i, window) for i in steps]
    axes.plot(steps, means, color=_SPINE, linewidth=2, label=f"mean of the last {window} steps")
    for label, others in (over or {}).items():
        axes.plot(range(1, len(others) + 1), others, color=_COLOURS["replay"], linestyle=":", linewidth=1.6,
                  label=label)
    for label, height in (levels or {}).items():
        axes.axhline(height, color=_LEAF, linestyle="--", linewidth=1.2, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    _save(figure, path)


def _unshared_rows(plan: Plan) -> int:
    shape = plan.shape
    return sum(ends * (shape.rows[node] + sum(shape.rows[a] for a in shape.ancestors[node]))
               for node, ends in enumerate(shape.ends))


def _draw_rows(axes: Axes, plan: Plan) -> None:
    shape, longest = plan.shape, max((plan.rows_of_rank(rank) for rank in range(plan.world)), default=0)
    tree_of = {node: root for root in shape.roots for node in range(len(shape.rows))
               if node == root or root in shape.ancestors[node]}
    names = {root: f"tree {number}" for number, root in enumerate(shape.roots)}
    for rank in range(plan.world):
        at = 0
        for p in plan.passes:
            for span in p.placement[p.block.index(rank)] if rank in p.block else ():
                width, leaf = span.hi - span.lo, not shape.children[span.node]
                axes.barh(rank, width, left=at, height=0.6, color=_LEAF if leaf else _SPINE,
                          edgecolor="white", linewidth=0.4)
                if not leaf and width >= _READABLE * longest:
                    axes.text(at + width / 2, rank, names[tree_of[span.node]], color="white", fontsize=8,
                              ha="center", va="center")
                at += width
    _legend(axes, {"prompt rows": _SPINE, "response rows": _LEAF})
    axes.set_xlabel("rows held, pass after pass")


def _draw_time(axes: Axes, plan: Plan, bars: Sequence[Bar]) -> None:
    end = max((bar.start + bar.duration for bar in bars), default=0.0)
    for bar in bars:
        kind = plan.passes[bar.pass_id].kind
        backward = bar.action == "backward"
        axes.barh(bar.rank, bar.duration * 1e3, left=bar.start * 1e3, height=0.6, color=_COLOURS[kind],
                  alpha=0.6 if backward else 1.0, hatch="//" if backward else None, edgecolor="white")
        if bar.duration >= _READABLE * end:
            axes.text((bar.start + bar.duration / 2) * 1e3, bar.rank, f"pass {bar.pass_id}\n{bar.rows} rows",
                      fontsize=8, ha="center", va="center",
                      bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})
    kinds = dict.fromkeys(plan.passes[bar.pass_id].kind for bar in bars)
    _legend(axes, {f"{kind} (hatched: backward)": _COLOURS[kind] for kind in kinds})
    axes.set_xlabel("ms, as priced")


def _legend(axes: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    axes.legend(handles=patches, frameon=False, ncols=len(colours) or 1, loc="lower right",
                bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _figure(width: float, height: float) -> Figure:
    # Without pyplot: no display is looked for, and no global state is left.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: str) -> None:
    figure.savefig(path, dpi=130)
