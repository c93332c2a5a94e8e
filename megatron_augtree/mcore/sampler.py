"""From groups to steps: a batch sampler with the planner hooked in.

The sampler yields the numbers of the groups of one step. The loader's collate function (in a data worker, or
in the main process) turns them into a `StepBatch`: trees, and a plan from their lengths. Planning is pure:
every rank plans for itself, and the main process compares digests before the first forward.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.data import DataLoader

from megatron_augtree.config import AugTreeConfig, AugTreeError, InfeasiblePlanError, InputError
from megatron_augtree.data.groups import Group, fingerprint
from megatron_augtree.planning.choose import WITHIN, choose, merging
from megatron_augtree.planning.cluster import cluster_of
from megatron_augtree.planning.cost import Prices
from megatron_augtree.planning.lock_step import check_in_step
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import configured, make_plan
from megatron_augtree.planning.timeline import Bar, idle_share, timeline
from megatron_augtree.planning.tree import Forest, TokenSequence, from_sequences, sequence_of

#: Plain context parallelism on what nobody shares: what plans are measured against.
STOCK = "ring"


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step: its groups, their trees and the plan. Sequences are numbered group by group.

    Attributes:
        groups: the groups, the same on every rank.
        forest, plan: what is computed, and how.
        fingerprint: hash of the groups; ranks compare it.
        plan_seconds: seconds that trees and plan took, in the process that made them.
        idle: share of the ranks' time in which they wait, by the plan's prices.
        bars: the planned timeline, where a trace is asked for.
        stock: the same step by ring, where a guard measures against it and ring can be played.
    """

    groups: tuple[Group, ...]
    forest: Forest
    plan: Plan
    fingerprint: str
    plan_seconds: float = 0.0
    idle: float = 0.0
    bars: tuple[Bar, ...] = ()
    stock: StepBatch | None = None

    @property
    def logical_rows(self) -> int:
        """Loss-bearing logical rows of the step."""
        return sum(len(rows) for rows in self.forest.logical)

    @property
    def unshared_rows(self) -> int:
        """Rows that a run without sharing computes."""
        return sum(max(len(g.prompt) + len(r.tokens) - 1, 0) for g in self.groups for r in g.responses)


def model_shape(config: TransformerConfig, vocab_size: int) -> ModelShape:
    """Sizes of a megatron-core model, as the planner wants them: of one tensor-parallel rank's slice."""
    parts = config.tensor_model_parallel_size
    item = torch.empty((), dtype=config.params_dtype).element_size()
    return ModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        ffn=config.ffn_hidden_size // parts,
        vocab=vocab_size // parts,
        q_heads=config.num_attention_heads // parts,
        # Fewer groups than ranks: ranks of one group hold a copy of its keys and values.
        kv_heads=max((config.num_query_groups or config.num_attention_heads) // parts, 1),
        k_dim=config.kv_channels,
        v_dim=config.kv_channels,
        gated=config.gated_linear_unit,
        item_bytes=item,
        accum_bytes=max(item, 4),
        row_parts=parts if config.sequence_parallel else 1,
        recomputed=_recomputed(config),
        can_offload=not config.gradient_accumulation_fusion,
    )


def _recomputed(config: TransformerConfig) -> int:
    """Layers that keep their input only; selective recompute keeps nearly all of a layer."""
    if config.recompute_granularity != "full":
        return 0
    whole = config.recompute_method == "uniform"
    return config.num_layers if whole else min(config.recompute_num_layers, config.num_layers)


def sequences_of(groups: Sequence[Group]) -> tuple[list[TokenSequence], list[int]]:
    """Every response with its prompt as one sequence, and the group number of each."""
    sequences, numbers = [], []
    for number, group in enumerate(groups):
        for r in group.responses:
            sequences.append(sequence_of(group.prompt, r.tokens, r.loss_mask, group.prompt_salt, r.salt))
            numbers.append(number)
    return sequences, numbers


def plan_step(groups: Sequence[Group], model: ModelShape, world: int, config: AugTreeConfig) -> StepBatch:
    """Trees and plan of one step, in any mode.

    Args:
        groups: the step's groups.
        model: sizes of the model.
        world: ranks of the pool.
        config: the mode and its limits.

    Raises:
        InfeasiblePlanError: a forced plan or a memory budget that nothing satisfies.
        AugTreeError: a plan file that cannot be read or does not fit.
    """
    started = time.perf_counter()
    sequences, numbers = sequences_of(groups)
    if config.plan_path:
        plan = _read_plan(config.plan_path)
        forest = _forest_of(plan, sequences, numbers, config)
        plan.check_fits(forest.shape, world)  # first: the other checks take its shape for granted
        plan.check(pairs=True)
        if config.lock_step:
            check_in_step(plan)
    else:
        forest, plan = choose_plan(sequences, numbers, model, world, config)
    prices = Prices(configured(model, config), cluster_of(config.cluster))

    def made(forest: Forest, plan: Plan) -> StepBatch:
        seconds = time.perf_counter() - started
        bars = tuple(timeline(plan, prices, lock_step=config.lock_step))
        idle, kept = idle_share(bars, world), bars if config.trace_dir else ()
        return StepBatch(tuple(groups), forest, plan, fingerprint(groups), seconds, idle, kept)

    step = made(forest, plan)
    if config.guard_steps and plan.mode != STOCK:
        stock = _stock(sequences, numbers, model, world, config)
        if stock is not None:
            return replace(step, stock=made(*stock))
    return step


def choose_plan(
    sequences: Sequence[TokenSequence],
    numbers: Sequence[int],
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
) -> tuple[Forest, Plan]:
    """Trees and plan of some sequences: the mode's, or under ``augtree`` a peer's that shares nothing, where
    that is cheaper.

    Args:
        sequences: of the step.
        numbers: [sequence] group number.
        model, world, config: as for `plan_step`.

    Raises:
        InfeasiblePlanError: a forced plan or a memory budget that nothing satisfies.
    """
    found = choose(lambda mode: _forest(mode, sequences, numbers, config), model, world, config)
    return found.trees, found.plan


def _forest(
    mode: str, sequences: Sequence[TokenSequence], numbers: Sequence[int], config: AugTreeConfig
) -> Forest:
    """The trees that a mode computes: merged over groups, within groups, or not at all."""
    return from_sequences(sequences, groups=numbers, **merging(mode, config.min_shared_rows))


def _forest_of(
    plan: Plan, sequences: Sequence[TokenSequence], numbers: Sequence[int], config: AugTreeConfig
) -> Forest:
    """The trees of a plan from a file: groups may have been joined when it was made, or not."""
    joined = _forest(plan.mode, sequences, numbers, config)
    if joined.joined and joined.shape != plan.shape:
        apart = _forest(WITHIN, sequences, numbers, config)
        return apart if apart.shape == plan.shape else joined
    return joined


def _stock(sequences: Sequence[TokenSequence], numbers: Sequence[int], model: ModelShape, world: int,
           config: AugTreeConfig) -> tuple[Forest, Plan] | None:
    """What the guard measures against, as it would run by itself; None where it cannot be played here."""
    model, forest = configured(model, config), _forest(STOCK, sequences, numbers, config)
    ask = {"tree_groups": forest.tree_groups, "mode": STOCK, "own": True}
    with suppress(InfeasiblePlanError):
        return forest, make_plan(forest.shape, model, world, config, **ask)
    return None


def _read_plan(path: str) -> Plan:
    try:
        with open(path, encoding="utf-8") as file:
            return Plan.from_json(json.load(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            "cannot read a plan file",
            values=f"--augtree-plan {path}: {error}",
            rule="the file holds the JSON of one plan",
            remedy="write it again",
        ) from error


class GroupSampler:
    """Yields the group numbers of one step after the other, epoch after epoch.

    A step may take the end of one epoch and the beginning of the next. Where a step begins depends on
    `consumed` alone, so a run that resumes takes the groups that an uninterrupted one would have taken.

    Args:
        groups: how many groups there are.
        batch: groups of a step.
        consumed: groups used before (from a checkpoint); the next step starts there.
        steps: how many steps to yield.
        shuffle: every epoch in an order of its own, which follows from `seed` and the epoch's number;
            otherwise in file order.
        seed: see `shuffle`.
    """

    def __init__(
        self,
        groups: int,
        batch: int,
        *,
        consumed: int = 0,
        steps: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if groups < 1 or batch < 1:
            raise InputError(
                "nothing to train on",
                values=f"{groups} groups, --global-batch-size {batch}",
                rule="a step takes at least one group",
                remedy="give a file with groups",
            )
        self.groups, self.batch, self.consumed, self.steps = groups, batch, consumed, steps
        self.shuffle, self.seed = shuffle, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        order, epoch = list(range(self.groups)), -1
        for step in range(self.steps):
            chosen = []
            for place in range(self.consumed + step * self.batch, self.consumed + (step + 1) * self.batch):
                if place // self.groups != epoch:
                    epoch = place // self.groups
                    order = self.order(epoch)
                chosen.append(order[place % self.groups])
            yield chosen

    def order(self, epoch: int) -> list[int]:
        """The group numbers of an epoch, in the order they are taken."""
        order = list(range(self.groups))
        if self.shuffle:
            # Seeded by text, which the standard library hashes alike on every machine.
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


@dataclass(frozen=True)
class _Collate:
    """Picklable: a worker process plans with it."""

    model: ModelShape
    world: int
    config: AugTreeConfig

    def __call__(self, groups: list[Group]) -> StepBatch | AugTreeError:
        try:
            return plan_step(groups, self.model, self.world, self.config)
        except AugTreeError as error:
            return error  # raised by the loader: the message of a worker's exception is a traceback


def _end_with_parent(_: int) -> None:
    """In a worker: a thread that ends it once the rank is gone, killed for instance.

    torch's own watch ends the loop, but then waits until the last step is written into a pipe that nobody
    reads: a step beyond the pipe's 64 KiB would leave the process there for ever.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class _StepLoader(DataLoader):
    """Yields `StepBatch`es, and raises what their making raised."""

    def __iter__(self) -> Iterator[StepBatch]:
        for batch in super().__iter__():
            if isinstance(batch, AugTreeError):
                raise batch
            yield batch


def step_loader(
    groups: Sequence[Group],
    sampler: GroupSampler,
    model: ModelShape,
    world: int,
    config: AugTreeConfig,
    *,
    workers: int = 0,
) -> DataLoader:
    """A loader of `StepBatch`es; with workers, steps are planned while the device runs earlier ones."""
    # A generator of its own: otherwise every new iterator would draw from the random state of the training.
    return _StepLoader(
        list(groups),
        batch_sampler=sampler,
        collate_fn=_Collate(model, world, config),
        num_workers=workers,
        worker_init_fn=_end_with_parent,
        generator=torch.Generator(),
    )
