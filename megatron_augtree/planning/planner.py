"""Chooses a plan just before the update, from lengths alone: candidates -> feasible -> cheapest.

The search goes from what matters most to what matters least: blocks, prompt copies and lanes first (imbalance
costs more than traffic), then primitive and pieces, then phases and waves, which also take over where memory
is short. The baselines' plans are candidates, so the predicted time is never worse than theirs. Ties go to
the earlier candidate: same lengths, same plan, on every rank and machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.baselines import baseline_plan
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.cluster import GIB, Cluster, preset
from megatron_augtree.planning.cost import NS, PassLoads, Prices
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Event, Plan, with_note
from megatron_augtree.planning.tree import ForestShape

#: Baselines that are candidates too: those whose forest the planner has.
_CANDIDATE_BASELINES = ("gather-reuse", "ring-reuse", "ring-reuse-per-response")


@dataclass(frozen=True)
class Priced:
    """A plan with its predicted time (ns) and largest memory of a rank (bytes)."""

    plan: Plan
    time_ns: int
    peak_bytes: int


@dataclass(frozen=True)
class Considered:
    """A candidate that the planner looked at.

    Attributes:
        name: what it is, in a line.
        time_ns, peak_bytes: its price.
        fits: whether its memory is within the budget.
    """

    name: str
    time_ns: int
    peak_bytes: int
    fits: bool


def price(plan: Plan, prices: Prices) -> Priced:
    """Predicted time and memory of a plan.

    A rank's time is the sum of its passes (a block waits for its slowest rank in every layer); the plan's is
    the slowest rank's. Memory follows the events: what passes keep from forward to backward, plus one layer's
    work.
    """
    loads = [
        PassLoads(plan.shape, p, [plan.passes[r].placement for r in p.reads], prices.cluster.node_ranks)
        for p in plan.passes
    ]
    times = [prices.pass_ns(load) for load in loads]
    provides = plan.provides
    kept = [prices.pass_bytes(load, provides=p.id in provides) for load, p in zip(loads, plan.passes)]
    work = [prices.work_bytes(load) for load in loads]
    busy, alive, peak = [0] * plan.world, [0] * plan.world, [0] * plan.world
    for action, pass_id in plan.events:
        p, backward = plan.passes[pass_id], action == "backward"
        for index, rank in enumerate(p.block):
            busy[rank] += times[pass_id][backward]
            alive[rank] += 0 if backward else kept[pass_id][index]
            peak[rank] = max(peak[rank], alive[rank] + work[pass_id][index])
            alive[rank] -= kept[pass_id][index] if backward else 0
    base = prices.cluster.base_bytes if plan.passes else 0
    return Priced(plan, max(busy, default=0), base + max(peak, default=0))


def make_plan(
    shape: ForestShape,
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
    *,
    tree_groups: Sequence[int],
    mode: str | None = None,
) -> Plan:
    """The plan of a mode: under ``augtree`` the cheapest that fits, otherwise the baseline's, priced.

    Args:
        shape: the forest of the step, shared as the mode shares.
        model: sizes of the model.
        world: ranks of the pool.
        config: limits and forced choices.
        tree_groups: [tree] number of the (first) group behind each root.
        mode: another mode than `config.mode`: a baseline as a candidate of ``augtree``, under its limits.

    Raises:
        InfeasiblePlanError: a forced choice, or under ``augtree`` the memory budget, that nothing satisfies.
    """
    return explain(shape, model, world, config, tree_groups=tree_groups, mode=mode)[0]


def explain(
    shape: ForestShape,
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
    *,
    tree_groups: Sequence[int],
    mode: str | None = None,
) -> tuple[Plan, list[Considered]]:
    """`make_plan`, with all candidates that were looked at, cheapest first; those over the budget last."""
    cluster = preset(config.cluster)
    prices = Prices(model, cluster)
    search = _Search(shape, prices, world, config)
    if (mode or config.mode) == "augtree":
        best = search.run(tree_groups)
    else:
        best = price(baseline_plan(mode or config.mode, shape, tree_groups, world, config.degree), prices)
        if config.mode == "augtree" and best.peak_bytes > search.budget:
            raise search.over_budget(best)
    plan = with_note(best.plan, best.plan.note, best.time_ns / NS, best.peak_bytes, cluster.digest())
    plan.check(budget_bytes=search.budget if config.mode == "augtree" else 0)
    considered = sorted(search.considered, key=lambda c: (not c.fits, c.time_ns))
    return plan, considered


def reordered(plan: Plan, events: Sequence[Event], model: ModelShape, config: AugTreeConfig) -> Plan | None:
    """The plan with its events in another order, or None where that does not fit in memory."""
    cluster = preset(config.cluster)
    made = replace(plan, events=tuple(events), _programs=plan._programs)
    peak = price(made, Prices(model, cluster)).peak_bytes
    return replace(made, peak_bytes=peak) if peak <= _budget(config, cluster) else None


def _budget(config: AugTreeConfig, cluster: Cluster) -> int:
    """Bytes that a rank's predicted peak may have."""
    if not config.memory_budget_gib:
        return cluster.memory_bytes
    # No budget of a fraction of a byte is "no limit", and none of a float's size overflows.
    return max(1, int(min(config.memory_budget_gib, float(GIB)) * GIB))


def pairs_per_row(model: ModelShape, cluster: Cluster) -> int:
    """What a row's linear and element-wise layers cost, in attention pairs of this machine."""
    row_ns = model.linear_flops * NS // cluster.gemm_flops + 2 * model.saved_bytes * NS // cluster.row_bytes_s
    # One division: a pair takes an accelerator a small part of a nanosecond.
    return max(1, row_ns * cluster.attention_flops // (model.pair_flops * NS))


class _Search:
    def __init__(self, shape: ForestShape, prices: Prices, world: int, config: AugTreeConfig) -> None:
        self.shape, self.prices, self.world, self.config = shape, prices, world, config
        self.forced = config.forced()
        self.budget = _budget(config, prices.cluster)
        self.unit = pairs_per_row(prices.model, prices.cluster)
        self.best: Priced | None = None
        self.leanest: Priced | None = None
        self.considered: list[Considered] = []
        self.leaves = [n for n in range(len(shape.rows)) if not shape.children[n]]

    def run(self, tree_groups: Sequence[int]) -> Priced:
        """The cheapest plan that fits; errors and arguments as for `make_plan`."""
        if not self.shape.rows:
            return Priced(Plan(self.world, "augtree", self.shape, (), (), "nothing to compute"), 0, 0)
        self._check_forced()
        fused: list[tuple[Priced, Choice]] = []
        for choice in self._blocks_and_lanes():
            priced = self._try(choice)
            if priced is not None:
                fused.append((priced, choice))
        ranked = sorted(fused, key=lambda pair: pair[0].time_ns)[:3]
        if any(priced.peak_bytes > self.budget for priced, _ in ranked):
            ranked += sorted(fused, key=lambda pair: pair[0].peak_bytes)[:3]
        for _, choice in ranked:
            for refined in self._refinements(choice):
                self._try(refined)
        if not self.forced and self.world % self._limit() == 0:
            for mode in _CANDIDATE_BASELINES:
                plan = baseline_plan(mode, self.shape, tree_groups, self.world, self._limit())
                self._consider(price(plan, self.prices))
        if not fused:
            raise self._refusal(
                "a block has ranks for the primitive, leaves for copies and waves, spine rows for chunks"
            )
        if self.best is None:
            raise self.over_budget(self.leanest)
        return self.best

    def _check_forced(self) -> None:
        forced, limit = self.forced, self._limit()
        degree, copies = forced.get("degree", limit), forced.get("copies", 1)
        lane = forced.get("lane_degree", 1)
        phase, ranks = forced.get("phase"), degree // copies
        waiting = self._forces_waves()
        rules = (
            (degree > limit, "degree is at most --context-parallel-size (the pool if not given)"),
            (degree % copies, "copies divides degree: each copy gets degree / copies ranks"),
            (lane > ranks or ranks % lane, "lane_degree divides degree / copies"),
            (waiting and phase == "fused", "waves, chunks and move_q belong to phase=phased"),
            (
                (waiting or phase == "phased") and not any(self.shape.children),
                "a phased plan needs a shared prompt: a node with leaves below it",
            ),
            (
                forced.get("primitive") == "local" and ranks > 1,
                "primitive=local needs blocks of one rank (degree = copies)",
            ),
        )
        for broken, rule in rules:
            if broken:
                raise self._refusal(rule)

    def _forces_waves(self) -> bool:
        """Whether something is forced that only a phased plan has."""
        return bool({"waves", "chunks"} & self.forced.keys()) or self.forced.get("primitive") == "move_q"

    def _refusal(self, rule: str) -> InfeasiblePlanError:
        return InfeasiblePlanError(
            "a forced plan cannot be made",
            values=f"--augtree-force {self.config.force!r}, {self.world} ranks, "
            f"{len(self.shape.roots)} trees, {len(self.leaves)} leaves, {self.shape.total_rows} rows",
            rule=rule,
            remedy="change or drop a key",
        )

    def _obeys(self, plan: Plan) -> bool:
        """Whether some job shows every forced key; one rank moves nothing, few leaves fill no waves."""
        jobs = [[plan.passes[p] for p in job] for job in plan.jobs]
        replays = {sum(p.kind == "replay" for p in job) for job in jobs}
        shown = {
            "degree": {len(p.block) * self.forced.get("copies", 1) for p in plan.passes},
            "copies": {sum(any(root in p.nodes for p in job) for job in jobs) for root in self.shape.roots},
            "primitive": {p.primitive for p in plan.passes},
            "phase": {"phased" if waves else "fused" for waves in replays},
            "waves": replays,
            "chunks": {sum(p.kind in ("prefill", "chunk") for p in job) for job in jobs},
        }
        return all(value in shown.get(key, (value,)) for key, value in self.forced.items())

    def _limit(self) -> int:
        return min(self.config.degree or self.world, self.world)

    def _blocks_and_lanes(self) -> Iterator[Choice]:
        """Fused candidates over degrees, copies, lanes and whether trees share a pass."""
        forced, limit = self.forced, self._limit()
        powers = {1 << i for i in range(limit.bit_length())}
        degrees = sorted({d for d in range(1, limit + 1) if d in powers or self.world % d == 0} | {limit})
        if "degree" in forced:
            degrees = [forced["degree"] // forced.get("copies", 1)]
        degrees = [d for d in degrees if d % forced.get("lane_degree", 1) == 0]
        phased = forced.get("phase") == "phased" or self._forces_waves()
        base = Choice(
            degree=1,
            phase="phased" if phased else "fused",
            chunks=forced.get("chunks", 1),
            waves=forced.get("waves", 1),
            primitive=forced.get("primitive", "gather_kv"),
        )
        for degree in degrees:
            copies = [c for c in (1, 2, 4, 8) if c == 1 or c * degree <= self.world and len(self.leaves) > 1]
            for copy in [forced["copies"]] if "copies" in forced else copies:
                for lane, wide in self._lanes(degree):
                    for together in (True, False) if len(self.shape.roots) > 1 else (True,):
                        yield replace(
                            base, degree=degree, copies=copy, lane_degree=lane, wide=wide, together=together
                        )

    def _lanes(self, degree: int) -> Iterable[tuple[int, int]]:
        if "lane_degree" in self.forced:
            return [(self.forced["lane_degree"], 0)]
        if degree == 1:
            return [(1, 0)]
        lanes = [(1, 0), (degree, 0)]
        lanes += [(1, wide) for wide in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if wide < len(self.leaves)]
        return lanes + [(lane, 0) for lane in (2, 4) if lane < degree and degree % lane == 0]

    def _refinements(self, choice: Choice) -> Iterator[Choice]:
        """Primitive and pieces, phases and waves, and giving up what was received, of a good candidate."""
        forced = self.forced
        variants = [choice]
        if choice.phase == "fused" and forced.get("phase") != "fused" and any(self.shape.children):
            variants += self._phased(choice)
        if choice.degree > 2 and "primitive" not in forced:
            variants += [replace(choice, pieces=k) for k in (2, 4) if k < choice.degree]
            variants.append(replace(choice, primitive="move_kv"))
        for variant in variants:
            yield variant
            yield replace(variant, keep=False)

    def _phased(self, choice: Choice) -> Iterator[Choice]:
        """A fused candidate's phased relatives: all trees, or only the large ones of trees in turn."""
        forced = self.forced
        chunk_counts = [forced["chunks"]] if "chunks" in forced else (1, 2)
        wave_counts = [forced["waves"]] if "waves" in forced else (1, 2, 4, 8, 16)
        primitives = [forced["primitive"]] if "primitive" in forced else ("gather_kv", "move_q")
        sizes = sorted(sum(self.shape.rows[n] for n in self.shape.subtree(root)) for root in self.shape.roots)
        smalls = {0} if choice.together else {0, sizes[len(sizes) // 2], sizes[-2]}
        for waves in (w for w in wave_counts if w <= max(1, len(self.leaves))):
            for chunks in chunk_counts:
                for primitive in primitives if choice.degree > 1 else ("gather_kv",):
                    for small in sorted(smalls):
                        yield replace(
                            choice,
                            phase="phased",
                            chunks=chunks,
                            waves=waves,
                            primitive=primitive,
                            small=small,
                        )

    def _try(self, choice: Choice) -> Priced | None:
        """The price of a choice, or None where it is not what was forced."""
        plan = build(choice, self.shape, self.world, self.unit)
        if not self._obeys(plan):
            return None
        priced = price(plan, self.prices)
        self._consider(priced)
        return priced

    def _consider(self, priced: Priced) -> None:
        fits = priced.peak_bytes <= self.budget
        name = f"{priced.plan.mode}: {priced.plan.note}"
        self.considered.append(Considered(name, priced.time_ns, priced.peak_bytes, fits))
        if self.leanest is None or priced.peak_bytes < self.leanest.peak_bytes:
            self.leanest = priced
        if priced.peak_bytes <= self.budget and (self.best is None or priced.time_ns < self.best.time_ns):
            self.best = priced

    def over_budget(self, lean: Priced) -> InfeasiblePlanError:
        """The error where even the plan that needs least memory needs too much."""
        rows = self.shape.rows
        node = max(range(len(rows)), key=lambda n: self.shape.starts[n] + rows[n])
        longest = self.shape.starts[node] + rows[node]
        return InfeasiblePlanError(
            "no plan fits the memory budget",
            values=f"--augtree-memory-budget-gib {self.budget / GIB:.3g}; the leanest plan "
            f"({lean.plan.note}) needs {lean.peak_bytes / GIB:.3f} GiB; "
            f"the longest sequence has {longest} rows (ends in node {node})",
            rule="every rank's predicted peak above the model stays within the budget",
            remedy="raise the budget, add ranks, or shorten the longest sequence",
        )
