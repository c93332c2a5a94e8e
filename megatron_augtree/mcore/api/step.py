"""A plan for some samples, and their per-token data in the order of its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.mcore.agreement import said_by_all
from megatron_augtree.mcore.api.batch import Sample
from megatron_augtree.mcore.api.handle import Handle
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.tree import Forest
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.layout import rows_of
from megatron_augtree.runtime.routing import Routing, route
from megatron_augtree.runtime.transport import Transport


@dataclass
class StepPlan:
    """A plan for some samples; made by `plan`, played any number of times.

    Attributes:
        handle: the model it is played on.
        scope: ``"pool"`` or ``"cp"``.
        samples: this rank's, in the caller's order.
        numbers: [own sample] its number in the forest.
        owners: [sequence] rank of the scope that its loss is evaluated on.
        groups: [sequence] number of its group.
        plan, forest: what is computed; None where the model falls back to stock.
        heat: temperature of every row ([rows] float64), or the one of all.
        fingerprint: hash of this rank's samples.
        stats: see `plan`.
        stock_micro_batches: where the model falls back to stock, micro-batches of the rank with most samples.
        engines: what plays the plan, made when first played.
    """

    handle: Handle
    scope: str
    samples: list[Sample]
    numbers: range
    owners: Sequence[int]
    groups: Sequence[int]
    plan: Plan | None
    forest: Forest | None
    heat: np.ndarray | float
    fingerprint: str
    stats: dict[str, float | str] = field(default_factory=dict)
    stock_micro_batches: int = 0
    engines: dict[str, Engine] = field(default_factory=dict, repr=False)

    @property
    def transport(self) -> Transport:
        return self.handle.transport(self.scope)

    @cached_property
    def routing(self) -> Routing:
        """Windows and exchanges of the whole plan."""
        return route(self.plan, self.forest, self.owners)

    @cached_property
    def micro_routing(self) -> Routing:
        """Exchanges of micro-batches."""
        return route(self.plan, self.forest, self.owners, by_pass=True)

    def take(self, x: Sequence[Tensor], pass_id: int, fill: float = 0) -> Tensor:
        """Per-token data in the order of a pass's rows on this rank; collective.

        Args:
            x: of every own sample [T_i, ...]; row t takes entry t. Where samples share a row, it takes the
                entry of the first one.
            pass_id: the same on every rank.
            fill: for rows of nobody's (there are none in a plan of these samples).

        Returns:
            [T_local, ...]; no rows on a rank outside the pass's block. fp64 and int64 keep every bit; other
            types travel as these.

        Raises:
            InputError: tensors that do not fit the samples, or differ in type or shape over ranks.
        """
        wide, dtype, tail = self._gather_tokens(x, fill)
        rows = self._rows_here(pass_id)
        return wide[torch.from_numpy(rows)].to(dtype).reshape(len(rows), *tail).to(self.handle.device)

    def put(self, y: Tensor, pass_id: int, into: list[Tensor] | None = None, fill: float = 0) -> list[Tensor]:
        """The inverse of `take`: data of a pass's rows to every own sample's tokens; collective.

        Args:
            y: [T_local, ...] in row order; on ranks outside the block of any first size 0.
            pass_id: the same on every rank.
            into: what `put` gave for other passes: tokens that this pass does not hold keep it.
            fill: for tokens that no pass held so far; a sample's last token has no row.

        Returns:
            of every own sample [T_i, ...].
        """
        rows = self._rows_here(pass_id)
        if len(y) != len(rows):
            raise InputError(
                "data does not fit a pass",
                values=f"{len(y)} rows, pass {pass_id} has {len(rows)} here",
                rule="one entry a row",
                remedy="give what take gave the shape of",
            )
        kind = torch.float64 if y.is_floating_point() else torch.int64
        total = self.forest.shape.total_rows
        flat = y.detach().cpu().to(kind).reshape(len(y), int(np.prod(y.shape[1:])))
        dense = torch.zeros((total, flat.shape[1] + 1), dtype=kind)
        dense[torch.from_numpy(rows)] = torch.cat([flat, flat.new_ones((len(flat), 1))], dim=1)
        dense = self.transport.total(dense).cpu()
        found = []
        for i, sample in enumerate(self.samples):
            row = torch.from_numpy(self._rows_of_sample(i))
            shape = (len(sample.tokens), *y.shape[1:])
            tokens = into[i].clone() if into is not None else y.new_full(shape, fill)
            held = row[dense[row, -1] > 0]
            at = torch.nonzero(dense[row, -1] > 0).flatten()
            tokens[at.to(y.device)] = dense[held, :-1].to(y.dtype).reshape(-1, *y.shape[1:]).to(y.device)
            found.append(tokens)
        return found

    def _rows_here(self, pass_id: int) -> np.ndarray:
        p = self.plan.passes[pass_id]
        spans = [p.placement[r] for r in self.transport.hosts(p.block)]
        parts = [rows_of(self.forest.shape, s) for s in spans]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _rows_of_sample(self, i: int) -> np.ndarray:
        """[T - 1] the forest's row behind every row of an own sample."""
        shape = self.forest.shape
        parts = [
            np.arange(shape.offsets[n], shape.offsets[n + 1]) for n in self.forest.paths[self.numbers[i]]
        ]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _gather_tokens(self, x: Sequence[Tensor], fill: float) -> tuple[Tensor, torch.dtype, tuple[int, ...]]:
        """[rows, w] of the whole forest, and type and shape of an entry."""
        mine = ""
        if len(x) != len(self.samples) or any(len(a) != len(s.tokens) for a, s in zip(x, self.samples)):
            mine = (
                f"error: {[len(a) for a in x][:8]} entries for samples of "
                f"{[len(s.tokens) for s in self.samples][:8]} tokens"
            )
        elif len(x):
            mine = f"{str(x[0].dtype).removeprefix('torch.')} {','.join(map(str, x[0].shape[1:]))}"
        # In the words of other calls: a rank that makes one of them instead is told.
        said = {"call": {"call": "take"}, "error": "", "data": mine}
        _, texts = said_by_all(self.transport, json.dumps(said))
        votes = [json.loads(text) for text in texts]
        calls = {vote["call"]["call"] for vote in votes}
        kinds = {vote["data"] for vote in votes if vote.get("data")}
        if len(calls) > 1:
            kinds = {f"error: ranks call {', '.join(sorted(calls))}"}
        if len(kinds) != 1 or next(iter(kinds)).startswith("error"):
            raise InputError(
                "per-token data does not fit the samples",
                values="; ".join(sorted(kinds)) or "none",
                rule="of every sample [T, ...], of one type and shape on all ranks",
                remedy="give one tensor a sample, in the order of the batch",
            )
        name, _, text = next(iter(kinds)).partition(" ")
        dtype, tail = getattr(torch, name), tuple(int(n) for n in text.split(",") if n)
        kind = torch.float64 if dtype.is_floating_point else torch.int64
        total, world, rank = self.forest.shape.total_rows, self.transport.world, self._rank
        first = torch.full((total,), world, dtype=torch.int64)
        dense = torch.zeros((total, int(np.prod(tail))), dtype=kind)
        for i in reversed(range(len(x))):
            row = torch.from_numpy(self._rows_of_sample(i))
            dense[row] = x[i][: len(row)].detach().cpu().to(kind).reshape(len(row), dense.shape[1])
            first[row] = rank
        # The first rank that has a row gives its entry; for scope="cp" all have all of them.
        chosen = self.transport.total(first, "min").cpu()
        dense[chosen != rank] = 0
        dense = self.transport.total(dense).cpu()
        dense[chosen == world] = fill
        return dense, dtype, tail

    @property
    def _rank(self) -> int:
        return self.transport.rank
