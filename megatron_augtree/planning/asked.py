"""What is asked of a step's plan: what `--augtree-force` fixes, which blocks there may be, what is tried."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.offers import EVERY_RANK, Options
from megatron_augtree.planning.plan import counted
from megatron_augtree.planning.recipe import Recipe
from megatron_augtree.planning.tree import ForestShape

#: What a forced choice asks of a step.
_ROOM_FOR_KEYS = (
    "a block has ranks for the primitive, a tree ranks that copies divide and leaves for copies and waves, "
    "its spine rows for chunks"
)


class Asked:
    """What is asked of one step's plan.

    Args:
        config: settings.
        shape: the step's forest.
        model: sizes, recompute and pipeline stages.
        world: ranks of the pool.

    Attributes:
        forced: what is forced, see `AugTreeConfig.forced`.
        limit: the most ranks that a block may have.
    """

    def __init__(self, config: AugTreeConfig, shape: ForestShape, model: ModelShape, world: int) -> None:
        self.config, self.shape, self.model, self.world = config, shape, model, world
        self.forced = config.forced()
        self.limit = min(config.degree or world, world)

    @property
    def forces_shape(self) -> bool:
        """Whether it is forced what passes a job has."""
        return bool({"phase", "waves", "chunks", "primitive"} & self.forced.keys())

    def no_room(self) -> InfeasiblePlanError:
        """The error where no job can be as it is forced."""
        return self._refusal(_ROOM_FOR_KEYS)

    def options(self, limit: int = 0) -> Options:
        """What is tried: everything, or what is forced; on blocks of at most `limit` ranks, or of those that
        there may be."""
        forced, free = self.forced, Options()
        waits = self._forces_waves()
        primitive, pieces = forced.get("primitive"), free.pieces
        if primitive == "move_kv":
            pieces = (EVERY_RANK,)
        elif primitive in ("gather_kv", "local"):
            pieces = tuple(k for k in pieces if k != EVERY_RANK)
        pieces = (forced["pieces"],) if "pieces" in forced else pieces
        phased = {"fused": 0, "phased": 2}.get(forced.get("phase"), 2 if waits else 1)
        pipelined = self.model.stages > 1
        whole = -2
        if self._recompute_is_free():
            whole = forced.get("keep_layers", 0 if "keep_attention" in forced else -1)
        copies = forced.get("copies", 1 if {"waves", "chunks"} & forced.keys() else 0)
        # The degree of all copies together, or of every block.
        only = 0 if "copies" in forced else forced.get("degree", 0)
        least = max(2 * (primitive in ("gather_kv", "move_kv", "move_q")), forced.get("pieces", 0) + 1)
        return Options(
            least=max(least, only),
            limit=only or limit or self.limit,
            lane_degree=forced.get("lane_degree", 0),
            pieces=pieces,
            fused=phased != 2,
            phased=phased,
            chunks=(forced["chunks"],) if "chunks" in forced else free.chunks,
            # A pipeline wants slots; memory is content with fewer.
            waves=(forced["waves"],) if "waves" in forced else free.waves + (16, 32, 64) * pipelined,
            gather=primitive != "move_q",
            move_q=primitive in (None, "move_q"),
            offload=self.model.can_offload,
            copies=copies,
            whole=whole,
            attention=forced.get("keep_attention", 0),
        )

    def _recompute_is_free(self) -> bool:
        """Whether the planner chooses recompute: it has a budget, and is not told to follow the flags."""
        forced = {"keep_layers", "keep_attention"} & self.forced.keys()
        told = self.config.recompute == "auto" and self.config.memory_budget_gib > 0
        return bool(forced) or (told and self.model.can_recompute)

    def check(self) -> None:
        """Assert that a step has room for what is forced.

        Raises:
            InfeasiblePlanError: it has not.
        """
        forced, limit = self.forced, self.limit
        copies, lane, phase = forced.get("copies", 1), forced.get("lane_degree", 1), forced.get("phase")
        degree = forced.get("degree", 0)
        ranks = degree // copies if degree else min(limit, self.world // copies)
        powers = [1 << i for i in range(self.world.bit_length())]
        divisors = [w for w in range(1, limit + 1) if self.world % w == 0]
        widths = [degree] if degree else [*powers, *divisors, limit]
        waiting = self._forces_waves()
        rules = (
            (
                degree > self.world or ranks > limit,
                "degree is at most the pool, degree / copies at most --context-parallel-size (the pool if "
                "not given)",
            ),
            (
                not any(width % copies == 0 and width // copies <= limit for width in widths),
                "copies divides degree: each copy gets degree / copies ranks",
            ),
            (lane > ranks or ranks % lane, "lane_degree divides degree / copies"),
            (
                "pieces" in forced and forced.get("primitive", "gather_kv") != "gather_kv",
                "pieces belong to primitive=gather_kv",
            ),
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
                forced.get("keep_layers", 0) + forced.get("keep_attention", 0) > self.model.layers,
                "keep_layers + keep_attention is at most the number of layers",
            ),
        )
        for broken, rule in rules:
            if broken:
                raise self._refusal(rule)

    def _forces_waves(self) -> bool:
        """Whether something is forced that only a phased plan has."""
        return bool({"waves", "chunks"} & self.forced.keys()) or self.forced.get("primitive") == "move_q"

    def obeys(self, recipes: Sequence[Recipe]) -> bool:
        """Whether some job shows every forced key; one rank moves nothing, few leaves fill no waves."""
        jobs: dict[int, list[Recipe]] = {}
        for recipe in recipes:
            jobs.setdefault(recipe.job, []).append(recipe)
        replays = {sum(r.kind == "replay" for r in job) for job in jobs.values()}
        holders = {
            root: sum(any(root in (*r.inner, *r.leaves) for r in job) for job in jobs.values())
            for root in self.shape.roots
        }
        shown = {
            "degree": {r.width * self.forced.get("copies", 1) for r in recipes},
            "copies": set(holders.values()),
            "primitive": {r.primitive if r.width > 1 else "local" for r in recipes},
            "phase": {"phased" if waves else "fused" for waves in replays},
            "waves": replays,
            "chunks": {sum(r.kind in ("prefill", "chunk") for r in job) for job in jobs.values()},
        }
        return all(value in shown.get(key, (value,)) for key, value in self.forced.items())

    def _refusal(self, rule: str) -> InfeasiblePlanError:
        leaves = sum(not children for children in self.shape.children)
        return InfeasiblePlanError(
            "a forced plan cannot be made",
            values=f"--augtree-force {self.config.force!r}, {self.world} ranks, "
            f"{counted(len(self.shape.roots), 'tree')}, {counted(leaves, 'leaf', 'leaves')}, "
            f"{counted(self.shape.total_rows, 'row')}",
            rule=rule,
            remedy="change or drop a key",
        )
