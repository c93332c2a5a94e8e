"""From lengths to a plan: candidates, feasible ones, the cheapest.

Planning is pure and deterministic: integers only, ties go to the earlier candidate, so the same lengths give
the same plan, on every rank and machine. The search is in `jobs.py` (one tree on one block) and `pool.py`
(the batch over the pool); the peers' plans (`baselines/`) are candidates too, so that none is ever cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_augtree.config import AugTreeConfig, AugTreeError, InfeasiblePlanError
from megatron_augtree.planning.baselines import FREE, Costs, baseline_plan, variants
from megatron_augtree.planning.baselines.hybrid import widths
from megatron_augtree.planning.candidates import copies_of
from megatron_augtree.planning.cluster import GIB, Cluster, cluster_of
from megatron_augtree.planning.cost import NS, Prices
from megatron_augtree.planning.fast import FastJobs, make_jobs
from megatron_augtree.planning.jobs import EVERY_RANK, Jobs, Options
from megatron_augtree.planning.loads import PassLoads
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Event, Plan, with_note
from megatron_augtree.planning.pool import Arrangement, Pool
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.rivals import Rivals
from megatron_augtree.planning.tree import ForestShape

_ROOM_FOR_KEYS = "a block has ranks for the primitive, leaves for copies and waves, spine rows for chunks"


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
    the slowest rank's, and under a pipeline (1F1B) filling and draining it adds (stages - 1) longest passes.
    Memory follows the events: what passes keep from forward to backward, plus one layer's work.
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
    slot = max((sum(pair) for pair in times), default=0)
    base = prices.cluster.base_bytes if plan.passes else 0
    time = max(busy, default=0) + (prices.model.stages - 1) * slot
    return Priced(plan, time, base + max(peak, default=0))


def price_recipes(
    jobs: Jobs, recipes: Sequence[Recipe], events: Sequence[Event], world: int
) -> tuple[int, int]:
    """(ns, bytes) of some recipes, as `price` says of their plan."""
    if isinstance(jobs, FastJobs):
        time_ns, peak_bytes = jobs.price(recipes, events, world)
        return time_ns, peak_bytes + (jobs.prices.cluster.base_bytes if recipes else 0)
    rules = {"mode": "augtree", "shape": jobs.shape, "world": world, "pairs_per_row": jobs.unit}
    priced = price(plan_of(recipes, events, **rules), jobs.prices)
    return priced.time_ns, priced.peak_bytes


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
    cluster = cluster_of(config.cluster)
    prices = Prices(model, cluster)
    search = _Search(shape, prices, world, config, tree_groups)
    if (mode or config.mode) == "augtree":
        best = search.run()
    else:
        best = search.baseline(mode or config.mode)
        if config.mode == "augtree" and best.peak_bytes > search.budget:
            raise search.over_budget(best.plan.note, best.peak_bytes)
    plan = with_note(best.plan, best.plan.note, best.time_ns / NS, best.peak_bytes, cluster.digest())
    plan.check(budget_bytes=search.budget if config.mode == "augtree" else 0)
    considered = sorted(search.considered, key=lambda c: (not c.fits, c.time_ns))
    return plan, considered


def configured(model: ModelShape, config: AugTreeConfig) -> ModelShape:
    """The model as the settings run it: layers that keep attention, rows whose logits are made at once."""
    kept = model.recomputed if config.keep_attention < 0 else min(model.recomputed, config.keep_attention)
    logits = (config.logit_chunk_mib << 20) // (model.vocab * max(4, model.item_bytes))
    return replace(model, attention_kept=kept, logit_rows=max(1, logits))


def unshared_least(shape: ForestShape, model: ModelShape, world: int, config: AugTreeConfig) -> float:
    """Seconds that a mode which shares nothing takes at the least: sequences spread evenly, a pass each.

    Args:
        shape: the shared forest of the step.
        model, world, config: as for `make_plan`.
    """
    prices = Prices(model, cluster_of(config.cluster))
    lengths = [(ends, shape.starts[n] + shape.rows[n]) for n, ends in enumerate(shape.ends) if ends]
    count = len(lengths)
    alone = ForestShape((-1,) * count, tuple(rows for _, rows in lengths), (0,) * count, (1,) * count)
    jobs = Jobs(alone, prices, 1, 0, Options())
    return sum(ends * jobs.floor((n,), 1) for n, (ends, _) in enumerate(lengths)) / world / NS


def reordered(plan: Plan, events: Sequence[Event], model: ModelShape, config: AugTreeConfig) -> Plan | None:
    """The plan with its events in another order, or None where that does not fit in memory."""
    cluster = cluster_of(config.cluster)
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
    def __init__(
        self,
        shape: ForestShape,
        prices: Prices,
        world: int,
        config: AugTreeConfig,
        tree_groups: Sequence[int],
    ) -> None:
        self.shape, self.prices, self.world, self.config = shape, prices, world, config
        self.tree_groups = tree_groups
        self.forced = config.forced()
        self.budget = _budget(config, prices.cluster)
        self.unit = pairs_per_row(prices.model, prices.cluster)
        self.considered: list[Considered] = []
        self.leaves = [n for n in range(len(shape.rows)) if not shape.children[n]]

    # The search.

    def run(self) -> Priced:
        """The cheapest plan that fits; errors and arguments as for `make_plan`."""
        if not self.shape.rows:
            return Priced(Plan(self.world, "augtree", self.shape, (), (), "nothing to compute"), 0, 0)
        self._check_forced()
        best = self._best_arrangement()
        found = None if best is None else self._play(best)
        if self.forced and found is not None and not self._obeys(found.plan):
            raise self._refusal(_ROOM_FOR_KEYS)
        if not self.forced:
            found = self._with_rivals(found)
        if found is None:
            raise self._nothing_fits()
        return found

    def baseline(self, mode: str) -> Priced:
        """A baseline's plan; as a candidate of ``augtree`` its cheapest on blocks within the limit."""
        costs = self.costs()
        if self.config.mode != "augtree":
            made = baseline_plan(
                mode, self.shape, self.tree_groups, self.world, self.config.degree, costs
            )
            return price(made, self.prices)
        degrees = [d for d in range(1, self._limit() + 1) if self.world % d == 0]
        if mode in FREE:
            degrees = [d for d in widths(self.world) if d <= self._limit()]
        best = None
        for recipes, events, note in variants(mode, self.shape, self.tree_groups, self.world, costs, degrees):
            if max((r.width for r in recipes), default=0) <= self._limit():
                time_ns, peak_bytes = costs.price(self.shape, recipes, events)
                self._consider(f"{mode}: {note}", time_ns, peak_bytes)
                key = (peak_bytes > self.budget, time_ns)
                if best is None or key < best[0]:
                    best = key, recipes, events, note, peak_bytes
        _, recipes, events, note, peak_bytes = best
        rules = {"shape": self.shape, "world": self.world, "pairs_per_row": self.unit}
        return Priced(plan_of(recipes, events, mode=mode, note=note, **rules), best[0][1], peak_bytes)

    def _with_rivals(self, found: Priced | None) -> Priced | None:
        """The plan, or that of a peer which is cheaper."""
        rivals = Rivals(self._pool, self._limit(), self.config.degree > 0, self.costs())
        for rival in rivals.faster_than(None if found is None else found.time_ns):
            self._consider(f"{rival.mode}: {rival.note}", rival.time_ns, rival.peak_bytes)
            better = found is None or rival.time_ns < found.time_ns
            if rival.peak_bytes <= self.budget and better:
                rules = {"shape": self.shape, "world": self.world, "pairs_per_row": self.unit}
                plan = plan_of(rival.recipes, rival.events, mode=rival.mode, note=rival.note, **rules)
                found = Priced(plan, rival.time_ns, rival.peak_bytes)
        return found

    def _best_arrangement(self) -> Arrangement | None:
        best = None
        for pool in self._pools():
            self._pool = pool
            for arrangement in pool.arrangements():
                peak = arrangement.peak_bytes + self.prices.cluster.base_bytes
                self._consider(f"augtree: {arrangement.name}", arrangement.time_ns, peak)
                if best is None or arrangement.time_ns < best.time_ns:
                    best = arrangement
        return best

    def _pools(self) -> Iterator[Pool]:
        """Under a pipeline the longest pass counts too: not at all, fully, or shared by a block's trees."""
        trees_a_rank = max(1, len(self.shape.roots) // self.world)
        weights = sorted({0, 16, max(1, 16 // trees_a_rank)}) if self.prices.model.stages > 1 else [0]
        for weight in weights:
            yield Pool(
                self._jobs(weight), self.world, self._limit(), self.forced.get("degree", 0), self.tree_groups
            )

    def _jobs(self, slot_weight: int = 0) -> Jobs:
        room, options = self.budget - self.prices.cluster.base_bytes, self.options()
        return make_jobs(self.shape, self.prices, self.unit, room, options, slot_weight, world=self.world)

    def _play(self, arrangement: Arrangement) -> Priced:
        recipes, events = arrangement.recipes(self.shape, self.unit)
        choices = list(dict.fromkeys(str(x.job.offer.choice) for x in arrangement.placed))
        note = f"{choices[0]}" + (f" and {len(choices) - 1} more kinds of block" if len(choices) > 1 else "")
        rules = {"shape": self.shape, "world": self.world, "pairs_per_row": self.unit}
        plan = plan_of(recipes, events, mode="augtree", note=note, **rules)
        return Priced(plan, *price_recipes(self._jobs(), recipes, events, self.world))

    def _consider(self, name: str, time_ns: int, peak_bytes: int) -> None:
        self.considered.append(Considered(name, time_ns, peak_bytes, peak_bytes <= self.budget))

    def costs(self) -> Costs:
        """What baselines choose by: the price of their plans."""

        known: dict[ForestShape, Jobs] = {}

        def of(shape: ForestShape, recipes: Sequence[Recipe], events: Sequence[Event]) -> tuple[int, int]:
            if shape not in known:
                known[shape] = make_jobs(shape, self.prices, self.unit, 0, Options(), world=self.world)
            return price_recipes(known[shape], recipes, events, self.world)

        return Costs(self.unit, of, self.budget, self.prices.model, self.prices.cluster)

    # What is forced.

    def options(self) -> Options:
        """What is tried: everything, or what is forced."""
        forced, free = self.forced, Options()
        waits = self._forces_waves()
        primitive, pieces = forced.get("primitive"), free.pieces
        if primitive == "move_kv":
            pieces = (EVERY_RANK,)
        elif primitive in ("gather_kv", "local"):
            pieces = tuple(k for k in pieces if k != EVERY_RANK)
        pieces = (forced["pieces"],) if "pieces" in forced else pieces
        phased = {"fused": 0, "phased": 2}.get(forced.get("phase"), 2 if waits else 1)
        pipelined = self.prices.model.stages > 1
        whole = -2 if not self._recompute_is_free() else forced.get("keep_layers", -1)
        copies = forced.get("copies", 1 if {"degree", "waves", "chunks"} & forced.keys() else 0)
        return Options(
            least=max(2 * (primitive in ("gather_kv", "move_kv", "move_q")), forced.get("pieces", 0) + 1),
            lane_degree=forced.get("lane_degree", 0),
            pieces=pieces,
            fused=phased != 2,
            phased=phased,
            chunks=(forced["chunks"],) if "chunks" in forced else free.chunks,
            # A pipeline wants slots; memory is content with fewer.
            waves=(forced["waves"],) if "waves" in forced else free.waves + (16, 32, 64) * pipelined,
            gather=primitive != "move_q",
            move_q=primitive in (None, "move_q"),
            offload=self.prices.model.can_offload,
            copies=copies,
            whole=whole,
            attention=forced.get("keep_attention", 0),
        )

    def _recompute_is_free(self) -> bool:
        """Whether the planner chooses recompute: it has a budget, and is not told to follow the flags."""
        forced = {"keep_layers", "keep_attention"} & self.forced.keys()
        told = self.config.recompute == "auto" and self.config.memory_budget_gib > 0
        return bool(forced) or (told and self.prices.model.can_recompute)

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
            (
                forced.get("keep_layers", 0) + forced.get("keep_attention", 0) > self.prices.model.layers,
                "keep_layers + keep_attention is at most the number of layers",
            ),
        )
        for broken, rule in rules:
            if broken:
                raise self._refusal(rule)

    def _forces_waves(self) -> bool:
        """Whether something is forced that only a phased plan has."""
        return bool({"waves", "chunks"} & self.forced.keys()) or self.forced.get("primitive") == "move_q"

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

    # Refusals.

    def _refusal(self, rule: str) -> InfeasiblePlanError:
        return InfeasiblePlanError(
            "a forced plan cannot be made",
            values=f"--augtree-force {self.config.force!r}, {self.world} ranks, "
            f"{len(self.shape.roots)} trees, {len(self.leaves)} leaves, {self.shape.total_rows} rows",
            rule=rule,
            remedy="change or drop a key",
        )

    def _nothing_fits(self) -> AugTreeError:
        """The error of the tree that fits nowhere: what it needs here, and how many ranks would do."""
        jobs, copies = self._jobs(), self.forced.get("copies", 1)
        pool = Pool(jobs, self.world, self._limit(), self.forced.get("degree", 0), self.tree_groups)
        for tree, root in enumerate(self.shape.roots):
            widths = {*pool.widths(), self.forced.get("degree", self._limit())}
            if any(pool.settled(tree, width) for width in widths):
                continue
            for width in sorted(w for w in widths if w % copies == 0):
                for part in copies_of(self.shape, pool.trees[tree], copies, self.unit):
                    jobs.best(part, width // copies)
            if jobs.leanest is not None:
                base = self.prices.cluster.base_bytes
                return self.over_budget(str(jobs.leanest.choice), jobs.leanest.peak + base, root, jobs)
        return self._refusal(_ROOM_FOR_KEYS)

    def over_budget(
        self, lean: str, needs: int, root: int | None = None, jobs: Jobs | None = None
    ) -> InfeasiblePlanError:
        """The error where even the plan that needs least memory needs too much."""
        rows = self.shape.rows
        nodes = range(len(rows)) if root is None else self.shape.subtree(root)
        node = max(nodes, key=lambda n: self.shape.starts[n] + rows[n])
        longest = self.shape.starts[node] + rows[node]
        tree = "" if root is None else f"tree {self.shape.roots.index(root)} of {len(self.shape.roots)} "
        tree += "" if root is None else f"({sum(rows[n] for n in nodes)} rows); "
        ranks = self._ranks_that_fit(jobs, nodes) if jobs is not None and not self.forced else 0
        return InfeasiblePlanError(
            "no plan fits the memory budget",
            values=f"--augtree-memory-budget-gib {self.budget / GIB:.3g}; {tree}the leanest plan "
            f"({lean}) needs {needs / GIB:.3f} GiB; "
            f"the longest sequence has {longest} rows (ends in node {node})",
            rule="every rank's predicted peak above the model stays within the budget",
            remedy=f"raise the budget to {needs / GIB:.3f} GiB, "
            + (f"use blocks of {ranks} ranks, " if ranks else "add ranks, ")
            + "or shorten the longest sequence",
        )

    def _ranks_that_fit(self, jobs: Jobs, nodes: Sequence[int]) -> int:
        """The narrowest wider block on which a tree fits, up to eight times the limit; 0 is none."""
        width = 1 << self._limit().bit_length()
        while width <= 8 * self._limit():
            if jobs.with_copies(nodes, width) is not None:
                return width
            width *= 2
        return 0
