"""Tables of docs/benchmarks.md of the planner's choices on many batches: regret, never slower, quality."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks_files import Table, grid, listed, missed, percent

# Regret in simulation.

#: Modes whose simulated seconds are nearer to their prices, in the mean, stand in one line.
_NEAR = 0.005


def regret(data: dict) -> Iterator[str]:
    """How regrets lie, the worst batches, and simulated over priced seconds of every mode's plans."""
    found = data["regret"]
    skipped = ", ".join(f"{count} {why}" for why, count in data["skipped"].items()) or "none"
    mean, middle, most = (percent(found[name], 2) for name in ("mean", "median", "worst"))
    yield (f"{data['batches']} batches (skipped: {skipped}): regret mean {mean} (bar 1 %), median {middle}, "
           f"worst {most} (bar 5 %); a peer is faster on {data['not_the_best']}, by more than 1 % on "
           f"{data['not_the_best_by_1_percent']}.")  # fmt: skip
    yield from missed(data["missed"])
    yield from listed(map(worst, data["worst"]), "No regret is above 2 %.")
    modes: dict[str, dict[str, dict]] = {}
    for kind, line in data["simulated_over_priced"].items():
        mode, pipeline = kind.split(", ")
        modes.setdefault(mode, {})[pipeline] = line
    kinds = ("one stage", "1F1B")
    far = [mode for mode, x in modes.items()
           if mode == "augtree" or max(abs(line["mean"] - 1) for line in x.values()) > _NEAR]  # fmt: skip
    lines = [[f"`{mode}`", *(spread(modes[mode].get(kind)) for kind in kinds)] for mode in far]
    lines.append([f"{len(modes) - len(far)} others", *[f"within {percent(_NEAR)} in the mean"] * len(kinds)])
    yield ""
    head = [f"simulated over priced, {kind}: mean, median, range" for kind in kinds]
    yield from grid(["plans of", *head], lines)


def worst(row: dict) -> str:
    """A batch with much regret, and what the simulation adds to either price."""
    mine, other = row["chosen"], row["best"]
    over = [f"{x['simulated'] / x['priced']:.3f}" for x in (mine, other)]
    order = "also by its price" if other["priced"] <= mine["priced"] else "not by its price"
    return (f"seed {row['seed']}, {row['world']} ranks of {row['cluster']}, {row['model']}, {row['stages']} "
            f"stages: {percent(row['regret'], 2)}; `{other['mode']}` is faster, {order}; simulated over "
            f"priced {' and '.join(over)}")  # fmt: skip


def spread(line: dict[str, float] | None) -> str:
    """How some ratios lie."""
    if line is None:
        return "-"
    return f"{line['mean']:.3f}, {line['median']:.3f}, {line['least']:.2f} to {line['worst']:.2f}"


# Never slower.


def never_slower(data: dict) -> Iterator[str]:
    """The chosen plan's time over that of each mode's fastest."""
    table, lines = data["modes"], []
    for mode in [name for name in table if not name.endswith(", beside")]:
        own, beside = table[mode], table.get(f"{mode}, beside")
        cells = ["-"] * 2
        if beside is not None:
            cells = [f"{beside['faster']} of {beside['batches']:,}", f"{beside['worst']:.4f}"]
        lines.append([f"`{mode}`", f"{own['batches']:,}", f"{own['ties']:,}", own["faster"],
                      f"{own['mean']:.2f}", f"{own['worst']:.4f}", *cells])  # fmt: skip
    head = ("mode", "batches", "ties", "peer faster", "mean", "worst (at most 1)", "beside: faster on",
            "worst")  # fmt: skip
    return grid(head, lines)


# Quality.


def quality(data: dict) -> Iterator[str]:
    """Chosen plans beside bounds, uniform degrees and peers; ranks that idle."""
    sections = data["sections"]
    idle = sections.get("idle", {})
    lines = []
    for name, row in sections["quality"]["presets"].items():
        least = [f"{row['over_bound']:.3f}", bold(row["uniform_ratio"]), row["uniform_degree"],
                 bold(row["peer_ratio"]), row["peer"]]  # fmt: skip
        lines.append([name, *least, *idle_cells(idle.get(name))])
    lines += [[name, *["-"] * 5, *idle_cells(row)] for name, row in idle.items()
              if name not in sections["quality"]["presets"]]  # fmt: skip
    head = ("step", "over the bound", "best uniform degree over ours", "which", "best peer over ours",
            "which", "27 GiB: over the bound", "most idle rank, mean")  # fmt: skip
    yield from grid(head, lines)
    yield from missed(data["missed"])


def bold(ratio: float) -> str:
    """A ratio that has to be at least 1."""
    return f"**{ratio:.4f}**" if ratio < 1 else f"{ratio:.4f}"


def idle_cells(row: dict | None) -> list[str]:
    """A plan under the usual memory over its bound, and its idle ranks."""
    if row is None:
        return ["-"] * 2
    return [f"{row['over_bound']:.3f}", f"{percent(row['worst'])}, {percent(row['mean'])}"]


def tight(data: dict) -> Iterator[str]:
    """What little memory costs."""
    lines = []
    for name, row in data["sections"]["memory"].items():
        found = row["budgets"]
        ample, least = next(iter(found.values())), found[f"{row['least_gib']:g}"]
        tight = found.get("10")
        cells = [f"{x['seconds'] / ample['seconds']:.3f}" if x else "-" for x in (tight, least)]
        seen = ", ".join(dict.fromkeys(x["shape"] for x in found.values()))
        lines.append([name, f"{row['least_gib']:g}", *cells, f"{row['full_over_plan']:.3f}", seen])
    head = ("tree", "least GiB", "10 GiB over ample (at most 1.25)", "least over ample",
            "full recompute over the plan at 27 GiB (at least 1.1)", "plans as memory shrinks")  # fmt: skip
    return grid(head, lines)


def fixed(data: dict) -> Iterator[str]:
    """A line a budget: the costliest of parts that are fixed, and of speeds that are wrong."""
    for gib, found in data["sections"]["regret"].items():
        forced, wrong = found["forced"], found["wrong"]
        key, speed = (max(x, key=lambda name: x[name]["mean"]) for x in (forced, wrong))
        fused, phased = (f"{forced[f'phase={phase}']['mean']:.2f}" for phase in ("fused", "phased"))
        yield (f"- {gib} GiB: of {len(forced)} parts that are fixed, `{key}` costs most, "
               f"{forced[key]['mean']:.2f} times the automatic choice in the mean and "
               f"{forced[key]['worst']:.2f} at worst (all fused {fused}, all phased {phased}); of "
               f"{len(wrong)} speeds wrong by 2x, `{speed}`: {percent(wrong[speed]['mean'], 2)} (bar 2 %), "
               f"{percent(wrong[speed]['worst'])} at worst.")  # fmt: skip


TABLES = {
    "regret": Table("simulate_regret", "regret", regret),
    "never_slower": Table("never_slower", "modes", never_slower),
    "quality": Table("planner_quality", "sections.quality", quality),
    "tight": Table("planner_quality", "sections.memory", tight),
    "fixed": Table("planner_quality", "sections.regret", fixed),
}
