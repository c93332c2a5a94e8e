"""A plan: everything that is decided for one optimizer step, frozen, without tensors or process groups.

A plan is a small graph of passes and the order in which they are played. Passes of one *job* work on one
block of ranks and together hold the trees (or the parts of a tree) that the job took; a spine that two jobs
share is held by both, a prompt copy each. All ranks play the same list of events and skip those of other
blocks, so there is one global order and no cyclic wait.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron_augtree.config import MODES, AugTreeError, InputError
from megatron_augtree.planning.compiler import PRIMITIVES, compile_pass
from megatron_augtree.planning.placement import Placement, Span, count
from megatron_augtree.planning.plan_rules import check_events, check_job, check_pass, require
from megatron_augtree.planning.schedule import Program
from megatron_augtree.planning.tree import ForestShape
from megatron_augtree.planning.verify import check

KINDS = ("fused", "prefill", "chunk", "replay")


@dataclass(frozen=True)
class Pass:
    """One forward, and later one backward, of the model over a block's rows.

    Attributes:
        id: position in `Plan.passes`.
        job: the job it belongs to.
        kind: one of `KINDS`.
        block: pool ranks, in block order.
        placement: [block rank] -> spans.
        reads: passes of the job whose keys and values this one uses.
        primitive, pieces: how queries meet keys held elsewhere.
        keep: received keys, values and queries are kept for the backward.
        node_ranks: ranks of a node, where a gather crosses to another node once and is handed on inside it
            (``gather_kv`` only); 0: everyone fetches from the owner.
        prefetch: prompt keys and values of the next layer travel under this one's work (replays only).
        keep_layers, keep_attention: of the model's layers the last `keep_layers` keep everything for the
            backward and, of the others, the first `keep_attention` keep what attention gave; the rest run
            again in full. `keep_layers` -1: as Megatron's own flags say.
        offload: what the pass keeps rests in host memory until its backward.
    """

    id: int
    job: int
    kind: str
    block: tuple[int, ...]
    placement: Placement
    reads: tuple[int, ...] = ()
    primitive: str = "gather_kv"
    pieces: int = 1
    keep: bool = True
    node_ranks: int = 0
    prefetch: bool = False
    keep_layers: int = -1
    keep_attention: int = 0
    offload: bool = False

    @cached_property
    def nodes(self) -> frozenset[int]:
        return frozenset([span[0] for spans in self.placement for span in spans])


class Event(NamedTuple):
    """`action` is ``forward`` or ``backward``."""

    action: str
    pass_id: int


@dataclass(frozen=True)
class Plan:
    """All passes of one step and their order.

    Attributes:
        world: ranks of the pool.
        mode: the ``--context-parallel-mode`` that made it.
        shape: the forest it was made for.
        passes, events: what is played.
        note: why this plan, in a line.
        seconds, peak_bytes: predicted step time, ns precision, and largest memory of a rank above the model.
        pricing: digest of the constants it was priced with; part of the plan's digest.
    """

    world: int
    mode: str
    shape: ForestShape
    passes: tuple[Pass, ...]
    events: tuple[Event, ...]
    note: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    pricing: str = ""
    _programs: dict = field(default_factory=dict, compare=False, repr=False)

    def program(self, pass_id: int) -> Program:
        """The pass's forward program, compiled once."""
        if pass_id not in self._programs:
            p = self.passes[pass_id]
            states = [(read, self.passes[read].placement) for read in p.reads]
            self._programs[pass_id] = compile_pass(
                self.shape,
                p.placement,
                states=states,
                primitive=p.primitive,
                pieces=p.pieces,
                nodes=[rank // p.node_ranks for rank in p.block] if p.node_ranks else None,
            )
        return self._programs[pass_id]

    @cached_property
    def jobs(self) -> tuple[tuple[int, ...], ...]:
        """[job] -> its passes."""
        jobs: dict[int, list[int]] = {}
        for p in self.passes:
            jobs.setdefault(p.job, []).append(p.id)
        return tuple(tuple(jobs[job]) for job in sorted(jobs))

    @cached_property
    def job_of_node(self) -> dict[int, int]:
        """The job that answers for the sequences that end in a node: the first that holds it."""
        found: dict[int, int] = {}
        for job, passes in enumerate(self.jobs):
            for node in sorted({n for p in passes for n in self.passes[p].nodes}):
                found.setdefault(node, job)
        return found

    @property
    def provides(self) -> frozenset[int]:
        """Passes whose keys and values are kept for later passes."""
        return frozenset(read for p in self.passes for read in p.reads)

    def rows_of_rank(self, rank: int) -> int:
        """Rows that a pool rank computes, prompt copies included."""
        return sum(count(p.placement[p.block.index(rank)]) for p in self.passes if rank in p.block)

    @property
    def computed_rows(self) -> int:
        """Rows that all ranks compute, prompt copies included."""
        return sum(count(spans) for p in self.passes for spans in p.placement)

    def digest(self) -> str:
        """A hash of everything that the ranks must agree on."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict:
        passes = [
            {**asdict(p), "placement": [[list(s) for s in spans] for spans in p.placement]}
            for p in self.passes
        ]
        return {
            "world": self.world,
            "mode": self.mode,
            "shape": asdict(self.shape),
            "passes": passes,
            "events": [list(e) for e in self.events],
            "note": self.note,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
            "pricing": self.pricing,
        }

    @staticmethod
    def from_json(data: dict) -> Plan:
        """Read a plan back.

        Raises:
            AugTreeError: a field is missing or malformed.
        """
        try:
            shape = ForestShape(**{k: tuple(v) for k, v in data["shape"].items()})
            passes = tuple(
                Pass(
                    **{
                        **p,
                        "block": tuple(p["block"]),
                        "reads": tuple(p["reads"]),
                        "placement": tuple(tuple(Span(*s) for s in spans) for spans in p["placement"]),
                    }
                )
                for p in data["passes"]
            )
            rest = {k: data[k] for k in ("world", "mode", "note", "seconds", "peak_bytes", "pricing")}
            plan = Plan(shape=shape, passes=passes, events=tuple(Event(*e) for e in data["events"]), **rest)
            _check_types(plan)
            return plan
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise AugTreeError(
                "cannot read a plan",
                values=f"{type(error).__name__}: {error}",
                rule="a plan is the JSON that Plan.to_json() writes",
                remedy="write the plan again with this version",
            ) from error

    def check_fits(self, shape: ForestShape, world: int) -> None:
        """Assert that the plan was made for a step and a pool.

        Raises:
            InputError: another forest, or another number of ranks.
        """
        if self.shape != shape or self.world != world:
            raise InputError(
                "a plan does not fit the step",
                values=f"plan: {counted(self.shape.total_rows, 'row')} on {counted(self.world, 'rank')}; "
                f"step: {counted(shape.total_rows, 'row')} on {counted(world, 'rank')}",
                rule="a plan is played with the groups and on the pool that it was made for",
                remedy="plan again, or load the plan that belongs to these groups",
            )

    def check(self, *, pairs: bool = False, budget_bytes: int = 0) -> None:
        """Assert that the plan computes every row and every pair and can be played.

        Args:
            pairs: also compile every pass and check its program.
            budget_bytes: limit of the predicted peak; 0 is no limit.

        Raises:
            AugTreeError: the first broken rule.
        """
        require(self.mode in MODES, f"the mode is one of {', '.join(MODES)}", self.mode)
        for p in self.passes:
            require(
                p.kind in KINDS and p.primitive in PRIMITIVES,
                "a pass has a known kind and primitive",
                lambda p=p: f"pass {p.id}: {p.kind}, {p.primitive}",
            )
            check_pass(self, p)
        for job, passes in enumerate(self.jobs):
            check_job(self, job, [self.passes[p] for p in passes])
        missing = [n for n, ends in enumerate(self.shape.ends) if ends and n not in self.job_of_node]
        require(not missing, "every sequence's last node is in a job", f"nodes {missing[:8]} are in none")
        check_events(self)
        require(
            not budget_bytes or self.peak_bytes <= budget_bytes,
            "the predicted peak is within the budget",
            f"{self.peak_bytes} of {budget_bytes} bytes",
        )
        if pairs:
            for p in self.passes:
                check(self.program(p.id), sum(self.shape.area(*s) for spans in p.placement for s in spans))

    def __str__(self) -> str:
        return table(self)


def with_note(plan: Plan, note: str, seconds: float, peak_bytes: int, pricing: str) -> Plan:
    """The same plan with what its price said."""
    return replace(plan, note=note, seconds=seconds, peak_bytes=peak_bytes, pricing=pricing)


def table(plan: Plan) -> str:
    """The plan as text: a line a pass."""
    rows = [("pass", "kind", "ranks", "rows a rank", "moves", "reads", "keep")]
    for p in plan.passes:
        moves = p.primitive if p.primitive != "gather_kv" else f"gather_kv in {p.pieces}"
        held = " ".join(str(count(spans)) for spans in p.placement)
        block = f"{p.block[0]}-{p.block[-1]}" if len(p.block) > 1 else str(p.block[0])
        rows.append(
            (
                str(p.id),
                p.kind,
                block,
                held,
                "nothing" if len(p.block) == 1 else moves,
                ",".join(map(str, p.reads)) or "-",
                "yes" if p.keep else "no",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    total = plan.shape.total_rows
    head = (
        f"{plan.mode}: {counted(total, 'row')} in {counted(len(plan.shape.roots), 'tree')} on "
        f"{counted(plan.world, 'rank')}, {counted(len(plan.passes), 'pass', 'passes')}"
        + (f"; {plan.note}" if plan.note else "")
    )
    return "\n".join([head, *lines])


def counted(number: int, word: str, plural: str = "") -> str:
    """A number of things: ``1 tree``, ``2 trees``."""
    return f"{number} {word if number == 1 else plural or word + 's'}"


def _check_types(plan: Plan) -> None:
    """A file may hold anything; comparing it would fail somewhere, or not at all."""
    passes = plan.passes
    texts = [plan.mode, plan.note, plan.pricing, *(e.action for e in plan.events)]
    numbers = [plan.world, plan.peak_bytes, *(e.pass_id for e in plan.events)]
    numbers += [n for values in asdict(plan.shape).values() for n in values]
    for p in passes:
        texts += [p.kind, p.primitive]
        numbers += [p.id, p.job, p.pieces, p.node_ranks, p.keep_layers, p.keep_attention, *p.block, *p.reads]
        numbers += [n for spans in p.placement for span in spans for n in span]
    flags = [flag for p in passes for flag in (p.keep, p.prefetch, p.offload)]
    fields = ((str, texts), (int, numbers), (bool, flags), (float, [plan.seconds]))
    wrong = [value for kind, values in fields for value in values if type(value) is not kind]
    if wrong:
        raise TypeError(f"{wrong[0]!r} is of the wrong type")
