"""The search for a plan: candidates, feasible ones, the cheapest; and why nothing fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_augtree.config import AugTreeConfig, AugTreeError, InfeasiblePlanError
from megatron_augtree.planning.asked import Asked
from megatron_augtree.planning.baselines import Costs, baseline_recipes, degrees_of, variants
from megatron_augtree.planning.candidates import copies_of
from megatron_augtree.planning.cluster import GIB, Cluster
from megatron_augtree.planning.cost import Prices, pairs_per_row
from megatron_augtree.planning.fast import make_jobs
from megatron_augtree.planning.finalists import played
from megatron_augtree.planning.jobs import Jobs
from megatron_augtree.planning.lock_step import in_step, out_of_step
from megatron_augtree.planning.offers import Options
from megatron_augtree.planning.one_degree import by_degree, is_few
from megatron_augtree.planning.plan import Event, counted
from megatron_augtree.planning.pool import Arrangement, Pool
from megatron_augtree.planning.price import price_recipes
from megatron_augtree.planning.recipe import Decision, Recipe
from megatron_augtree.planning.rivals import Rivals
from megatron_augtree.planning.rounds import LockStep
from megatron_augtree.planning.slots import FINALISTS, promising, with_shorter_slots
from megatron_augtree.planning.tree import ForestShape


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


def budget_of(config: AugTreeConfig, cluster: Cluster) -> int:
    """Bytes that a rank's predicted peak may have."""
    if not config.memory_budget_gib:
        return cluster.memory_bytes
    # No budget of a fraction of a byte is "no limit", and none of a float's size overflows.
    return max(1, int(min(config.memory_budget_gib, float(GIB)) * GIB))


class Search:
    """The search for the plan of one step under some settings; arguments as for `planner.make_plan`.

    Attributes:
        budget: bytes that a rank's predicted peak may have.
        considered: candidates so far.
    """

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
        self.asked = Asked(config, shape, prices.model, world)
        self.forced, self._limit = self.asked.forced, self.asked.limit
        self.budget = budget_of(config, prices.cluster)
        self.unit = pairs_per_row(prices.model, prices.cluster)
        self.considered: list[Considered] = []
        self._pool: Pool | None = None
        self._by_degree = is_few(shape, world, prices.model.stages) and not (self.forced or config.lock_step)

    # The search.

    def run(self) -> Decision:
        """The cheapest plan that fits; errors as for `planner.make_plan`."""
        if not self.shape.rows:
            return Decision("augtree", [], [], "nothing to compute", 0, 0)
        if self.forced:
            self.asked.check()
        best = self._best_arrangement()
        found = None if best is None else self._decision(best)
        if self.forced and found is not None and not self.asked.obeys(found.recipes):
            raise self.asked.no_room()
        # Few peers keep step; they are no candidates then.
        if not self.forced and not self.config.lock_step:
            found = self._with_rivals(found)
        if found is None:
            raise self._nothing_fits()
        return found

    def baseline(self, mode: str, own: bool = False) -> Decision:
        """A baseline's plan; as a candidate of ``augtree`` its cheapest within the limit, unless it is
        to be its own choice."""
        costs, limit = self.costs(), self._limit
        if own or self.config.mode != "augtree":
            made = baseline_recipes(
                mode, self.shape, self.tree_groups, self.world, self.config.degree, costs
            )
            found = [Decision(mode, *made, *costs.price(self.shape, made[0], made[1]))]
            return self._in_step(mode, found)[0]
        degrees = [d for d in degrees_of(mode, self.world) if d <= limit]
        found = []
        for made in variants(mode, self.shape, self.tree_groups, self.world, costs, degrees):
            if max((r.width for r in made[0]), default=0) <= limit:
                found.append(Decision(mode, *made, *costs.price(self.shape, made[0], made[1])))
        found = self._in_step(mode, found)
        for x in found:
            self._consider(x)
        return min(found, key=lambda x: (x.peak_bytes > self.budget, x.time_ns))

    def _in_step(self, mode: str, found: list[Decision]) -> list[Decision]:
        """Those of a mode's plans that keep step, where that is asked for."""
        if not self.config.lock_step:
            return found
        kept = [in_step(x, self.shape, self.prices, self.world) for x in found]
        if not any(kept):
            raise out_of_step(f"--context-parallel-mode {mode}, {self.world} ranks")
        return [x for x in kept if x is not None]

    def _with_rivals(self, found: Decision | None) -> Decision | None:
        """The plan, or that of a peer which is cheaper."""
        rivals = Rivals(self._pool, self._limit, self.config.degree > 0, self.costs())
        for rival in rivals.faster_than(None if found is None else found.time_ns):
            self._consider(rival)
            better = found is None or rival.time_ns < found.time_ns
            if rival.peak_bytes <= self.budget and better:
                found = rival
        return found

    def _best_arrangement(self) -> Arrangement | None:
        found: list[Arrangement] = []
        pools = list(self._pools())
        # The first counts a job by its time alone, which is what bounds peers.
        self._pool = pools[0]
        for pool in pools:
            found += self._arrangements(pool)
        if self.prices.model.stages > 1 and not self.config.lock_step:
            ways = [pool.jobs for pool in pools]
            found += [x for y in promising(found) if (x := with_shorter_slots(y, ways, self.world))]
            found = played(promising(found, FINALISTS), self._priced, self._in_waves, ways[0].room)
        if self._by_degree:
            for x in by_degree(pools[0], self._pool_of, found):
                found.append(self._where_it_lies(x))
        for x in found:
            peak = x.peak_bytes + self.prices.cluster.base_bytes
            self._consider(Decision("augtree", [], [], x.name, x.time_ns, peak))
        return min(found, key=lambda x: x.time_ns, default=None)

    def _arrangements(self, pool: Pool) -> Iterator[Arrangement]:
        if not self.config.lock_step:
            # A pipeline's finalists are priced later.
            where = self._where_it_lies if pool.stages == 1 else lambda x: x
            yield from map(where, pool.arrangements())
            return
        lock_step = LockStep(pool)
        yield from lock_step.arrangements()
        pool.jobs.leanest = lock_step.leanest

    def _where_it_lies(self, x: Arrangement) -> Arrangement:
        """The arrangement priced on its own ranks: jobs are counted as if blocks began with a node, which
        aligned blocks of powers of two do, or lie in one."""
        nodes = self.prices.cluster.node_ranks
        blocks = [(p.start, p.width) for p in x.placed]
        if all(w & (w - 1) == 0 and start % w == 0 for start, w in [*blocks, (0, nodes)]):
            return x
        return self._priced(x)

    def _priced(self, x: Arrangement) -> Arrangement:
        """The arrangement at the price of its plan."""
        recipes, events = x.recipes(self.shape, self.unit)
        time_ns, peak_bytes = price_recipes(self._pool.jobs, recipes, events, self.world)
        return replace(x, time_ns=time_ns, peak_bytes=peak_bytes - self.prices.cluster.base_bytes)

    def _in_waves(self, waves: int) -> Jobs | None:
        """Prices of jobs in so many waves, fused ones for 0; None where that is forced."""
        if self.asked.forces_shape:
            return None
        shape = {"waves": (waves,), "fused": False, "phased": 2} if waves else {"fused": True, "phased": 0}
        return self._jobs_of(self.asked.options()._replace(**shape))

    def _pools(self) -> Iterator[Pool]:
        """Under a pipeline the longest pass counts too: not at all, fully, or shared by a block's trees."""
        trees_a_rank = max(1, len(self.shape.roots) // self.world)
        weights = sorted({0, 16, max(1, 16 // trees_a_rank)}) if self.prices.model.stages > 1 else [0]
        for weight in weights:
            yield self._pool_of(self.forced.get("degree", 0), self._jobs(weight), not self._by_degree)

    def _pool_of(self, degree: int, jobs: Jobs | None = None, dealt: bool = True) -> Pool:
        jobs = self._jobs(only=degree) if jobs is None else jobs
        return Pool(jobs, self.world, self._limit, degree, self.tree_groups, dealt)

    def _jobs(self, slot_weight: int = 0, limit: int = 0, only: int = 0) -> Jobs:
        options = self.asked.options(limit)
        options = options._replace(least=only, limit=only) if only else options
        return self._jobs_of(options, slot_weight, max(limit, self.world))

    def _jobs_of(self, options: Options, slot_weight: int = 0, world: int = 0) -> Jobs:
        room, world = self.budget - self.prices.cluster.base_bytes, world or self.world
        return make_jobs(self.shape, self.prices, self.unit, room, options, slot_weight, world=world)

    def _decision(self, arrangement: Arrangement) -> Decision:
        recipes, events = arrangement.recipes(self.shape, self.unit)
        choices = list(dict.fromkeys(map(str, dict.fromkeys(x.job.offer.choice for x in arrangement.placed))))
        others = f" and {counted(len(choices) - 1, 'more kind', 'more kinds')} of block"
        note = choices[0] + (others if len(choices) > 1 else "")
        peak = arrangement.peak_bytes + self.prices.cluster.base_bytes
        return Decision("augtree", recipes, events, note, arrangement.time_ns, peak)

    def _consider(self, x: Decision) -> None:
        fits = x.peak_bytes <= self.budget
        self.considered.append(Considered(f"{x.mode}: {x.note}", x.time_ns, x.peak_bytes, fits))

    def costs(self) -> Costs:
        """What baselines choose by: the price of their plans."""
        # Prices of recipes need no room and no options; every peer plans this forest.
        jobs = self._pool.jobs if self._pool is not None else self._jobs()

        def of(_: ForestShape, recipes: Sequence[Recipe], events: Sequence[Event]) -> tuple[int, int]:
            return price_recipes(jobs, recipes, events, self.world)

        return Costs(self.unit, of, self.budget, self.prices.model, self.prices.cluster)

    # Refusals.

    def _nothing_fits(self) -> AugTreeError:
        """The error of the tree that fits nowhere: what it needs here, and how many ranks would do."""
        if self.config.lock_step and self._pool.jobs.leanest is not None:
            lean = self._pool.jobs.leanest
            return self.over_budget(str(lean.choice), lean.peak + self.prices.cluster.base_bytes)
        jobs, limit = self._jobs(), self._limit
        degree, copies = self.forced.get("degree", 0), self.forced.get("copies", 0)
        pool = self._pool_of(degree, jobs)
        for tree, root in enumerate(self.shape.roots):
            widths = {*pool.widths(), degree or limit}
            if any(pool.settled(tree, width) for width in widths):
                continue
            for width in sorted(widths):
                # On more ranks than a block may have, as few parts as that takes.
                parts = copies or max(1, width // (degree or 1 << (limit.bit_length() - 1)))
                if width % parts == 0 and width // parts <= limit:
                    for part in copies_of(self.shape, pool.trees[tree], parts, self.unit):
                        jobs.best(part, width // parts)
            if jobs.leanest is not None:
                base = self.prices.cluster.base_bytes
                return self.over_budget(str(jobs.leanest.choice), jobs.leanest.peak + base, root, jobs)
        return self.asked.no_room()

    def over_budget(
        self, lean: str, needs: int, root: int | None = None, jobs: Jobs | None = None
    ) -> InfeasiblePlanError:
        """The error where even the plan that needs least memory needs too much."""
        rows = self.shape.rows
        nodes = range(len(rows)) if root is None else self.shape.subtree(root)
        node = max(nodes, key=lambda n: self.shape.starts[n] + rows[n])
        longest = self.shape.starts[node] + rows[node]
        tree = "" if root is None else f"tree {self.shape.roots.index(root)} of {len(self.shape.roots)} "
        tree += "" if root is None else f"({counted(sum(rows[n] for n in nodes), 'row')}); "
        flag, size = self.config.memory_budget_gib, f"{self.budget / GIB:.4g}"
        given = f"--augtree-memory-budget-gib {size}" if flag else f"the machine's memory, {size} GiB"
        ranks = self._ranks_that_fit(jobs, nodes) if jobs is not None and not self.forced else 0
        return InfeasiblePlanError(
            "no plan fits the memory budget",
            values=f"{given}; {tree}the leanest plan ({lean}) needs {needs / GIB:.3f} GiB; "
            f"the longest sequence has {counted(longest, 'row')} (ends in node {node})",
            rule="every rank's predicted peak above the model stays within the budget",
            remedy=f"raise the budget to {needs / GIB:.3f} GiB, "
            + (f"use blocks of {ranks} ranks, " if ranks else "add ranks, ")
            + "or shorten the longest sequence",
        )

    def _ranks_that_fit(self, jobs: Jobs, nodes: Sequence[int]) -> int:
        """The narrowest wider block on which a tree fits, up to eight times the limit; 0 is none."""
        width, most = 1 << self._limit.bit_length(), 8 * self._limit
        jobs = self._jobs(limit=most)
        while width <= most:
            if jobs.with_copies(nodes, width) is not None:
                return width
            width *= 2
        return 0
