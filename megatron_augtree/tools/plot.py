"""Pictures: what each rank of a plan holds and does when, and a reward curve.

Times are the planner's own prices (`planning/timeline.py`): the picture shows what the plan was chosen for,
not a measurement. So is what was simulated (`planning/simulate.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_augtree.planning.cluster import Cluster
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.simulate import Simulated
from megatron_augtree.planning.timeline import Bar, idle_share, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"fused": "#4878a8", "prefill": "#7a5c9e", "chunk": "#9b7fbf", "replay": "#d98a3d"}
_SPINE, _LEAF, _WAITING = "#355c7d", "#f2a65a", "#d9d9d9"
#: Bars narrower than this share of the axis carry no text.
_READABLE = 0.05
#: Inches of a picture, however many ranks.
_TALLEST = 40.0
#: Ranks with a label of their own.
_LABELS = 64


def plot_plan(
    plan: Plan, model: ModelShape, cluster: Cluster, path: str, *, lock_step: bool = False
) -> None:
    """Draws which rank holds which rows (above) and which rank does what when (below).

    Args:
        plan: the plan.
        model: sizes of the model.
        cluster: the machine that the plan was priced for.
        path: the PNG.
        lock_step: see `planning.timeline.timeline`.
    """
    figure = _figure(11.0, min(3.2 + 0.8 * plan.world, _TALLEST))
    rows, time = figure.subplots(2, 1)
    bars = timeline(plan, Prices(model, cluster), lock_step=lock_step)
    _draw_rows(rows, plan)
    _draw_time(time, plan, bars, plan.world, "as priced")
    labelled = range(0, plan.world, -(-plan.world // _LABELS))
    for axes in (rows, time):
        axes.set_yticks(labelled, [f"rank {rank}" for rank in labelled])
        axes.set_ylim(plan.world - 0.5, -0.5)
        axes.spines[["top", "right"]].set_visible(False)
    total, unshared = plan.shape.total_rows, _unshared_rows(plan)
    figure.suptitle(f"{plan.mode}: {total:,} rows where un-shared sequences have {unshared:,}; "
                    f"{plan.seconds * 1e3:,.1f} ms, {idle_share(bars, plan.world):.1%} idle, as priced")
    _save(figure, path)


def plot_simulated(plan: Plan, found: Simulated, path: str) -> None:
    """Draws what each rank does when in a simulation, a line a rank and pipeline stage.

    Args:
        plan: the plan.
        found: what `planning.simulate.simulate` says of it.
        path: the PNG.
    """
    stages = 1 + max((span.stage for span in found.spans), default=0)
    lines = plan.world * stages
    figure = _figure(11.0, min(2.0 + 0.4 * lines, _TALLEST))
    axes = figure.subplots()
    bars = [Bar(span.rank * stages + span.stage, *span[1:8]) for span in found.spans]
    _draw_time(axes, plan, bars, lines, "simulated")
    labelled = range(0, lines, -(-lines // _LABELS))
    names = [f"rank {n // stages}" + (f", stage {n % stages}" if stages > 1 else "") for n in labelled]
    axes.set_yticks(labelled, names)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{plan.mode}: {found.makespan * 1e3:,.1f} ms simulated, {plan.seconds * 1e3:,.1f} ms "
                    f"priced, bound {found.bound * 1e3:,.1f} ms")
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
    trees = {node: f"tree {n}" for n, root in enumerate(shape.roots) for node in shape.subtree(root)}
    for rank in range(plan.world):
        at, pieces, colours = 0, [], []
        for p in plan.passes:
            for span in p.placement[p.block.index(rank)] if rank in p.block else ():
                width, leaf = span.hi - span.lo, not shape.children[span.node]
                pieces.append((at, width))
                colours.append(_LEAF if leaf else _SPINE)
                if not leaf and width >= _READABLE * longest and plan.world <= _LABELS:
                    axes.text(at + width / 2, rank, trees[span.node], color="white", fontsize=8, ha="center",
                              va="center")
                at += width
        _bars(axes, rank, pieces, facecolors=colours)
    _legend(axes, {"prompt rows": _SPINE, "response rows": _LEAF})
    axes.set_xlim(0, longest or 1)
    axes.set_xlabel("rows held, pass after pass")


def _draw_time(axes: Axes, plan: Plan, bars: Sequence[Bar], lines: int, how: str) -> None:
    end = max((bar.start + bar.duration for bar in bars), default=0.0)
    of_rank: dict[int, list[Bar]] = {rank: [] for rank in range(lines)}
    for bar in bars:
        of_rank[bar.rank].append(bar)
    for rank, mine in of_rank.items():
        _bars(axes, rank, [(bar.start * 1e3, bar.duration * 1e3) for bar in mine], facecolors=_WAITING)
        for action, alpha, hatch in (("forward", 1.0, None), ("backward", 0.6, "//")):
            shown = [bar for bar in mine if bar.action == action]
            colours = [_COLOURS[plan.passes[bar.pass_id].kind] for bar in shown]
            _bars(axes, rank, [(bar.start * 1e3, bar.work * 1e3) for bar in shown], facecolors=colours,
                  alpha=alpha, hatch=hatch)
    for bar in bars if lines <= _LABELS else ():
        if bar.duration >= _READABLE * end:
            axes.text((bar.start + bar.duration / 2) * 1e3, bar.rank, f"pass {bar.pass_id}\n{bar.rows} rows",
                      fontsize=8, ha="center", va="center",
                      bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})
    kinds = dict.fromkeys(plan.passes[bar.pass_id].kind for bar in bars)
    _legend(axes, {f"{kind} (hatched: backward)": _COLOURS[kind] for kind in kinds}
            | {"waiting for the block": _WAITING})
    axes.set_xlim(0, end * 1e3 or 1)
    axes.set_xlabel(f"ms, {how}")


def _bars(axes: Axes, rank: int, pieces: Sequence[tuple[float, float]], **how) -> None:
    """One object for all bars of a rank: thousands of objects would take minutes."""
    axes.broken_barh(pieces, (rank - 0.3, 0.6), edgecolor="white", linewidth=0.4, **how)


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
