"""AugTree inside Megatron-LM's training loop: hooks that its source, or patches of it, call.

``megatron.training`` builds model, DDP, optimizer and learning-rate schedule, logs, evaluates and saves, all
as in a stock run. Under a ``--context-parallel-mode`` six things are different, each a hook or two:

- `add_arguments`: AugTree's flags are known;
- `begin` and `checked`: they are checked, around Megatron's own validation, before a process group exists;
- `model_arguments`: the model is built as for one context-parallel rank;
- `bound`: `prepare_model` binds the model that was built;
- `datasets`: the data are groups, and an iterator yields a planned `StepBatch` a step;
- `schedule`: `AugTreeSchedule` plays it, with the loss of ``--objective``.

**Parallel sizes.** A plan cuts the pool as it likes, so for Megatron the whole pool is one context-parallel
group, and there is one data-parallel rank: a step takes ``--global-batch-size`` groups, any number, which
Megatron counts as consumed samples. ``--context-parallel-size`` is the limit of a block (its degree, under
the baselines); left out, it is the pool. The model is told of one context-parallel rank: stock attention
refuses more, and rows of a pack are exchanged by AugTree alone.

**Loss.** As everywhere in AugTree it is normalised by the step's own denominators. Megatron is told to scale
nothing (``--calculate-per-token-loss``, and no tokens), so numbers equal those of `examples/pretrain_gpt.py`.

`megatron_lm/patches.py` has the patches that call the hooks; those who vendor Megatron-LM call them from its
source (`patches/README.md`). What is called twice, by hand and by a patch, does its work once. Without a mode
every hook does nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func as stock_schedule

from megatron_augtree.config import AugTreeConfig, UnsupportedError
from megatron_augtree.data.groups import Group
from megatron_augtree.mcore import objective
from megatron_augtree.mcore.arguments import add_augtree_arguments, augtree_config, check_supported
from megatron_augtree.mcore.ddp import config_of
from megatron_augtree.mcore.launch import agree
from megatron_augtree.mcore.layer_spec import prepare_model
from megatron_augtree.mcore.megatron_lm.flags import (
    add_data_arguments,
    check_loop,
    check_stray,
    fitted,
    read_splits,
)
from megatron_augtree.mcore.patches import refuse_mindspeed
from megatron_augtree.mcore.report import StepFigures, figures_of, slow_planning
from megatron_augtree.mcore.sampler import GroupSampler, StepBatch, model_shape, step_loader
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.planning.plan import counted
from megatron_augtree.rl.losses import LossConfig


class _Unset(int):
    """Megatron's default of a flag, which a user who writes the same number does not give."""


@dataclass
class Run:
    """A run under a mode.

    Attributes:
        args: Megatron's.
        config: the mode.
        loss: the policy loss, for ``--objective grpo``.
        splits: the groups of training, validation and test.
        world: ranks of this run.
        schedule: plays steps; made at the first one.
    """

    args: argparse.Namespace
    config: AugTreeConfig
    loss: LossConfig
    splits: dict[str, tuple[Group, ...]]
    world: int
    schedule: AugTreeSchedule | None = None
    model: list[torch.nn.Module] = field(default_factory=list)

    @functools.cached_property
    def longest(self) -> int:
        """Tokens of the longest response of the training data."""
        return objective.longest_response(self.splits["train"])

    def describe(self) -> str:
        """What runs, in a line; and in another why plans take long."""
        args = self.args
        counts = ", ".join(f"{len(groups)} {name}" for name, groups in self.splits.items())
        told = (
            f"--context-parallel-mode {self.config.mode}; "
            f"{counted(args.context_parallel_size, 'rank')} a pool, at most "
            f"{self.config.degree or args.context_parallel_size} a block; {args.objective}; "
            f"groups: {counts}; {args.global_batch_size} a step"
        )
        return "\n".join(f"AugTree: {line}" for line in [told, *slow_planning()])


_run: Run | None = None
_ours: tuple[str, ...] = ()


def current() -> Run | None:
    """The run of this process; None is stock Megatron."""
    return _run


# --- arguments -------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds AugTree's flags to a parser, which may have Megatron's; a second call changes nothing."""
    global _ours
    known = {action.dest for action in parser._actions}
    if "context_parallel_mode" in known:
        return parser
    theirs = "context_parallel_size" in known
    add_augtree_arguments(parser)
    objective.add_loss_arguments(parser)
    add_data_arguments(parser)
    if theirs:
        parser.set_defaults(context_parallel_size=_Unset(1))
        _ours = tuple(sorted({action.dest for action in parser._actions} - known)) + ("loss_without_preset",)
    return parser


def begin(args: argparse.Namespace) -> None:
    """Before Megatron validates its arguments: checks ours and reads the data; without a mode, forgets them.

    Raises:
        AugTreeError: the first thing that is wrong.
    """
    global _run
    if not hasattr(args, "context_parallel_mode") or (_run is not None and _run.args is args):
        return  # by hand and by a patch: the other one was here
    _run = None
    given = not isinstance(args.context_parallel_size, _Unset)
    limit, args.context_parallel_size = int(args.context_parallel_size), 1
    if args.context_parallel_mode is None:
        args.context_parallel_size = limit
        augtree_config(args)
        check_stray(args)
        for name in _ours:  # what is printed and saved is the stock run's
            delattr(args, name)
        return
    refuse_mindspeed()
    degree = limit if given else 0
    config = augtree_config(argparse.Namespace(**{**vars(args), "context_parallel_size": degree}))
    loss = objective.loss_config(args)
    check_supported(args)
    check_loop(args)
    splits = read_splits(args)
    for groups in splits.values():
        objective.check_groups(groups, args.objective, loss)
    world, parts = args.world_size, args.tensor_model_parallel_size
    if world % parts:
        raise UnsupportedError(
            "the ranks cannot hold whole models",
            values=f"{world} ranks, --tensor-model-parallel-size {parts}",
            rule="the ranks are a multiple of the tensor-parallel size",
            remedy="start another number of ranks, or change the size",
        )
    args.calculate_per_token_loss = True
    args.dataloader_type = "external"
    # Megatron's validation sees one data-parallel rank, which is what its loop counts with: `checked`.
    args.world_size = parts
    _run = Run(args, config, loss, splits, world)


def checked(args: argparse.Namespace) -> None:
    """After Megatron has validated its arguments, which sets some: the pool is one context-parallel group.

    Raises:
        UnsupportedError: a setting that AugTree does not compute exactly.
    """
    if _run is None or _run.args is not args:
        return
    check_supported(args)
    check_loop(args)
    args.world_size = _run.world
    args.context_parallel_size = args.world_size // args.tensor_model_parallel_size
    if args.rank == 0:
        print(_run.describe(), flush=True)


# --- model, data, schedule -------------------------------------------------------------------------------


def model_arguments(kwargs: dict[str, Any]) -> None:
    """Changes what a model's configuration is made of: see the module's docstring, parallel sizes."""
    if _run is not None:
        kwargs["context_parallel_size"] = 1


def bound(model: list[torch.nn.Module]) -> None:
    """Binds the model that Megatron built, wrapped and loaded.

    Raises:
        UnsupportedError: the model has something that AugTree does not compute exactly.
    """
    if _run is None:
        return
    for chunk in model:
        prepare_model(chunk, logit_chunk_mib=_run.config.logit_chunk_mib)
    _run.model = model


def datasets(samples: tuple[int, int | None, int]) -> tuple[Iterator[StepBatch] | None, ...]:
    """Iterators over the steps of training, validation and test; None for a split without groups.

    Args:
        samples: groups that Megatron wants of each, from its own count of iterations.

    Raises:
        SystemExit: code 2 on every rank, where the vocabulary or the first plan does not fit.
    """
    args = _run.args
    consumed = {"train": args.consumed_train_samples, "valid": args.consumed_valid_samples, "test": 0}
    found = []
    for (name, groups), wanted in zip(_run.splits.items(), samples, strict=True):
        found.append(_steps(groups, wanted, consumed[name], name == "train") if groups else None)
    return tuple(found)


def _steps(groups: tuple[Group, ...], wanted: int, consumed: int, training: bool) -> Iterator[StepBatch]:
    args = _run.args
    left = wanted - consumed if training else wanted
    batch = args.global_batch_size
    if not training:
        batch = getattr(args, "eval_global_batch_size", batch)  # from megatron-core 0.19 on
    sampler = GroupSampler(
        len(groups),
        batch,
        consumed=consumed,
        steps=max(0, -(-left // batch)),
        shuffle=args.shuffle and training,
        seed=args.seed,
    )
    workers = args.num_workers if training else 0
    world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    shape = model_shape(config_of(_run.model[0]), args.padded_vocab_size)

    def first() -> tuple[Iterator[StepBatch], StepBatch | None]:
        loader = step_loader(
            fitted(groups, args), sampler, shape, world, _run.config, workers=workers
        )
        steps = iter(loader)
        return steps, next(steps, None)

    steps, batch = agree(first)
    return steps if batch is None else itertools.chain([batch], steps)


def tell(iteration: int) -> None:
    """What the step computed and how long it took, beside Megatron's own line and in its TensorBoard.

    Args:
        iteration: the step's, counted from 1.
    """
    args, schedule = _run.args, _run.schedule
    figures = StepFigures(**figures_of(schedule, schedule.seconds))
    if args.rank == 0 and iteration % args.log_interval == 0:
        cells = [f"AugTree: iteration {iteration}/{args.train_iters}", *figures.cells()]
        print(" | ".join(cells), flush=True)
    writer = get_tensorboard_writer()
    if writer is not None and iteration % args.tensorboard_log_interval == 0:
        for name, value in figures.plan_scalars().items():
            writer.add_scalar(name, value, iteration)


def get_tensorboard_writer() -> Any:
    """Megatron's own, on the rank that has it; the script's `megatron.training` is loaded by now."""
    return sys.modules["megatron.training.global_vars"].get_tensorboard_writer()


def schedule(*args: Any, **kwargs: Any) -> Callable:
    """What ``get_forward_backward_func`` returns under a mode; otherwise, what it returns anyway."""
    return stock_schedule(*args, **kwargs) if _run is None else play


def play(
    *, data_iterator: Iterator[StepBatch], model: Any, forward_only: bool = False, **megatron: Any
) -> list[dict[str, torch.Tensor]]:
    """Plays one step, as one micro-batch, with the loss of ``--objective``.

    Args:
        data_iterator: yields a `StepBatch`; the same on every rank.
        model: a list of one chunk.
        forward_only: no backward.
        megatron: what else a schedule is given, the script's forward step included: it is not called.

    Returns:
        a list of one dictionary: loss and metrics, fp32 scalars on the model's device.
    """
    run, args = _run, _run.args
    if run.schedule is None:
        values = {"temperature": run.loss.temperature, "entropy": run.loss.entropy_coef > 0}
        run.schedule = AugTreeSchedule(run.config, **values)
    batch = next(data_iterator)
    constant = objective.loss_constant(args, batch.groups, run.longest)
    loss_fn = objective.Objective(batch, args.objective, run.loss, constant)
    (metrics,) = run.schedule(
        forward_step_func=functools.partial(forward_step, loss_fn=loss_fn),
        data_iterator=iter([batch]),
        model=model,
        forward_only=forward_only,
    )
    if not forward_only:
        tell(args.curr_iteration + 1)
        if args.curr_iteration + 1 == args.train_iters:
            run.schedule.write_trace()
    device = next(run.model[0].parameters()).device
    return [{name: torch.tensor(float(value), device=device) for name, value in metrics.items()}]
