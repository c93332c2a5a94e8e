"""Settings and errors that every layer shares. Standard library only."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass


class AugTreeError(Exception):
    """Base of every error that a user can cause.

    An error has four parts, so that it can be acted on without reading code.

    Args:
        what: what is wrong, one clause.
        values: the offending values, with the flag, file or field that holds them.
        rule: the rule that they break.
        remedy: what to change.
    """

    def __init__(self, what: str, *, values: str = "", rule: str = "", remedy: str = "") -> None:
        self.what, self.values, self.rule, self.remedy = what, values, rule, remedy
        parts = [what]
        parts += [
            f"  {name}: {text}"
            for name, text in (("values", values), ("rule", rule), ("remedy", remedy))
            if text
        ]
        super().__init__("\n".join(parts))


class UnsupportedError(AugTreeError):
    """A combination of settings that AugTree does not compute exactly, refused at start-up."""


class InfeasiblePlanError(AugTreeError):
    """A forced plan, or a memory budget, that no plan satisfies."""


class InputError(AugTreeError):
    """Data that cannot be used: a malformed group file, ranks given different data."""


#: ``--context-parallel-mode`` values, in the order the documentation lists them.
MODES = (
    "ring",
    "ring-reuse",
    "ring-reuse-two-pass",
    "ring-reuse-per-response",
    "gather-reuse",
    "dynamic",
    "dynamic-reuse",
    "dcp-phased",
    "dcp-fused",
    "paper",
    "augtree",
)

#: Keys of ``--augtree-force``.
FORCE_KEYS = (
    "degree",
    "lane_degree",
    "copies",
    "primitive",
    "pieces",
    "phase",
    "chunks",
    "waves",
    "keep_layers",
    "keep_attention",
)

#: Those of them that may be 0.
_FORCE_ZERO = ("keep_layers", "keep_attention")

#: Those that are words, and which.
_FORCE_WORDS = {"primitive": ("gather_kv", "move_kv", "move_q", "local"), "phase": ("fused", "phased")}

#: Passes of a prompt, and of its leaves: each pays its launches in every layer, and planning them takes long.
MOST_PASSES = 256

#: ``--augtree-recompute`` values.
RECOMPUTE = ("auto", "flags")


#: What planning without the C++ core (`planning/native.py`) says once.
NO_CORE = (
    "planning runs without its C++ core: the same plans, but up to hundreds of times as long; pip install "
    "pybind11, then install megatron-augtree again where there is a C++ compiler"
)


def did_you_mean(name: str, known: Sequence[str], listed: str = "--help") -> str:
    """The rule of an error about an unknown name: all known ones where they are few, else the nearest.

    Args:
        name: what was given.
        known: what there is.
        listed: what lists all of them.
    """
    if len(known) <= 4:
        return f"it is one of {', '.join(known)}"
    begun = [word for word in known if name and word.startswith(name)]
    close = begun[:3] or difflib.get_close_matches(name, known, n=3)
    nearest = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{nearest}{listed} lists all {len(known)}"


@dataclass(frozen=True)
class AugTreeConfig:
    """What a user may choose; ``mcore/arguments.py`` makes the flags from these fields.

    Attributes:
        mode: one of ``MODES``: augtree, or a peer (``planning/baselines``).
        degree: ranks of a block; under ``augtree`` their upper limit, under the baselines their number
            (dynamic, dynamic-reuse: of the longest sequence or group); 0 means all ranks of the pool
            (dynamic, dynamic-reuse: whatever is cheapest).
        force: ``key=value,...``: degree, lane_degree, copies, pieces, chunks, waves, keep_layers,
            keep_attention (numbers), primitive (gather_kv, move_kv, move_q, local), phase (fused, phased);
            chunks and waves are at most 256; empty leaves everything to the planner.
        plan_path: a plan in JSON to run instead of planning; empty leaves it to the planner.
        memory_budget_gib: upper limit of predicted peak memory above the built model, GiB a rank;
            0 means the memory of the cluster preset.
        recompute: ``auto``: with a memory budget the planner chooses for every pass how many layers keep
            everything and how many keep what attention gave; without one, and under ``flags``, Megatron's
            --recompute-* flags and `keep_attention` say so.
        min_shared_rows: groups share a spine only where it has at least this many rows.
        keep_attention: of the layers that --recompute-granularity runs again in the backward, how many, from
            the first, keep what attention gave, so that neither it nor its traffic is repeated; -1 means all.
        kernel: attention kernel: ``auto`` (the fastest that runs here), ``reference``, ``cpu_flash``,
            ``cuda_flash`` or ``te_fused``.
        cluster: machine that prices plans: cpu, a100, h100, h200, b200 or paper (``planning/cluster.py``), or
            the path of a file that ``calibrate`` wrote, which ends in .json or holds a path separator.
        logit_chunk_mib: logits kept at once by the output layer, MiB.
        trace_dir: folder for the last step's Chrome trace (JSON, for Perfetto), planned beside measured, a
            file a rank; empty writes none.
        guard_steps: under ``augtree``, plans of a kind that measure slower than ring in so many steps, at
            least 3, give way to it (``mcore/guard.py``); 0 measures nothing.
        lock_step: only plans in which every rank of the pool plays the same number of passes, each together
            with all others (``planning/lock_step.py``): what experts and pipelines ask for.
    """

    mode: str = "augtree"
    degree: int = 0
    force: str = ""
    plan_path: str = ""
    memory_budget_gib: float = 0.0
    recompute: str = "auto"
    min_shared_rows: int = 16
    keep_attention: int = 0
    kernel: str = "auto"
    cluster: str = "cpu"
    logit_chunk_mib: int = 256
    trace_dir: str = ""
    guard_steps: int = 0
    lock_step: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise AugTreeError(
                "unknown context-parallel mode",
                values=f"--context-parallel-mode {self.mode}",
                rule=did_you_mean(self.mode, MODES),
                remedy="correct the spelling, or leave the flag out for stock Megatron",
            )
        if self.recompute not in RECOMPUTE:
            raise AugTreeError(
                "unknown recompute setting",
                values=f"--augtree-recompute {self.recompute}",
                rule=did_you_mean(self.recompute, RECOMPUTE),
                remedy="correct the spelling",
            )
        self._check_ranges()
        if self.guard_steps and (self.guard_steps < 3 or self.mode != "augtree"):
            raise AugTreeError(
                "a guard that cannot judge",
                values=f"--augtree-guard-steps {self.guard_steps}, --context-parallel-mode {self.mode}",
                rule="it compares plans of augtree with ring, in at least 3 steps of each; 0 is no guard",
                remedy="correct the number, or leave the flag out",
            )

    def _check_ranges(self) -> None:
        rules = (
            (self.degree >= 0, f"--context-parallel-size {self.degree}", "at least 1, or 0 for all ranks"),
            (
                # Written so that NaN fails too.
                0 <= self.memory_budget_gib < float("inf"),
                f"--augtree-memory-budget-gib {self.memory_budget_gib}",
                "finite and above 0, or 0 for the memory of the machine",
            ),
            (self.min_shared_rows >= 1, f"--augtree-min-shared-rows {self.min_shared_rows}", "at least 1"),
            (self.logit_chunk_mib >= 1, f"--augtree-logit-chunk-mib {self.logit_chunk_mib}", "at least 1"),
            (
                self.keep_attention >= -1,
                f"--augtree-keep-attention {self.keep_attention}",
                "at least 0, or -1 for all layers",
            ),
        )
        for good, value, rule in rules:
            if not good:
                raise AugTreeError(
                    "a setting is out of range", values=value, rule=f"it is {rule}", remedy="correct the flag"
                )

    def forced(self) -> dict[str, int | str]:
        """``force`` as a dictionary; numbers are integers.

        Raises:
            AugTreeError: an unknown key, a repeated key, or a value of the wrong kind.
        """
        return parse_force(self.force)

    def check_forced(self) -> None:
        """Assert that what is forced can be read, and is augtree's: what command lines check.

        Raises:
            AugTreeError: it cannot, or is a peer's.
        """
        if self.forced() and self.mode != "augtree":
            raise AugTreeError(
                "a forced plan of a peer",
                values=f"--augtree-force {self.force}, --context-parallel-mode {self.mode}",
                rule="only augtree's plans can be forced; a peer has --context-parallel-size",
                remedy="leave --augtree-force out, or use --context-parallel-mode augtree",
            )


def parse_force(text: str) -> dict[str, int | str]:
    """``"degree=2,primitive=gather_kv"`` -> ``{"degree": 2, "primitive": "gather_kv"}``."""
    forced: dict[str, int | str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, sign, value = (part.strip() for part in item.partition("="))
        rule = _broken_rule(key, value, forced) if sign else "forced choices are key=value, split by commas"
        if rule:
            raise AugTreeError(
                "cannot read a forced plan",
                values=f"--augtree-force {text!r}, at {item!r}",
                rule=rule,
                remedy="correct or remove the pair",
            )
        forced[key] = value if key in _FORCE_WORDS else int(value)
    return forced


def _broken_rule(key: str, value: str, forced: dict[str, int | str]) -> str:
    """The rule that a pair of ``force`` breaks; empty where it breaks none."""
    if key not in FORCE_KEYS:
        return f"{key!r} is no key: {did_you_mean(key, FORCE_KEYS)}"
    if key in forced:
        return f"each key is given once, {key} is there twice"
    if key in _FORCE_WORDS:
        words = _FORCE_WORDS[key]
        return "" if value in words else f"{key} is one of {', '.join(words)}"
    least = 0 if key in _FORCE_ZERO else 1
    # Not isdigit, which int does not follow; no pool has ranks, no group leaves of ten digits.
    if not value.isdecimal() or len(value) >= 10 or int(value) < least:
        return f"{key} is an integer of at most nine digits, at least {least}"
    if key in ("chunks", "waves") and int(value) > MOST_PASSES:
        return f"{key} is at most {MOST_PASSES}: every pass pays its launches in each layer"
    return ""
