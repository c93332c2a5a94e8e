"""Trains a GPT on groups of responses, launched as Megatron's own `pretrain_gpt.py` is.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --data-path groups.jsonl.gz \
        --context-parallel-mode augtree --num-layers 4 --hidden-size 256 --num-attention-heads 4 \
        --vocab-size 4096 --train-iters 100 --global-batch-size 4 --objective grpo --loss-preset dapo \
        --save checkpoints --save-interval 20 --load checkpoints --tensorboard-dir runs

A group file is JSON lines (`megatron_augtree/data/groups.py` has the fields), plain or gzip, of token ids or,
with `--tokenizer-type ByteTokenizer`, of text. Flags have Megatron's names where Megatron has the thing; a
step takes `--global-batch-size` groups. Without `--context-parallel-mode` the run is stock Megatron: dense
attention, one sequence a micro-batch, nothing shared. The first line of output says which it is.

The step is the same in every mode: a data worker makes trees and plan while earlier steps run, a schedule
plays them through the model, Megatron's DDP adds the gradients up, and an optimizer steps.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError, UnsupportedError
from megatron_augtree.data import groups as group_files
from megatron_augtree.data.groups import Group
from megatron_augtree.data.tokenizer import TOKENIZERS
from megatron_augtree.mcore import launch, objective
from megatron_augtree.mcore.arguments import (
    add_augtree_arguments,
    add_model_arguments,
    augtree_config,
    check_supported,
)
from megatron_augtree.mcore.build import (
    build_config,
    build_model,
    check_recompute,
    tensor_parallel_size,
)
from megatron_augtree.mcore.checkpoint import (
    FORMATS,
    Checkpoint,
    Made,
    Progress,
    check_format,
    latest,
    made_for,
    save,
)
from megatron_augtree.mcore.launch import RankParser, agree, env_world
from megatron_augtree.mcore.report import Report, StepRecord, figures_of, slow_planning
from megatron_augtree.mcore.sampler import GroupSampler, StepBatch, model_shape, step_loader
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.stock import StockSchedule
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, wrap_as_asked
from megatron_augtree.mcore.weights import check_folder
from megatron_augtree.planning.plan import counted
from megatron_augtree.rl.losses import LossConfig
from megatron_augtree.runtime.transport import Transport

STOCK = (
    "no --context-parallel-mode: stock Megatron, dense attention, one sequence a micro-batch, nothing shared"
)


def parser() -> RankParser:
    """All flags."""
    parser = RankParser(description=__doc__.partition("\n")[0])
    add_model_arguments(parser)
    add_augtree_arguments(parser)
    add_optimizer_arguments(parser)
    objective.add_loss_arguments(parser)
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path", nargs="+", required=True, metavar="FILE", help="group files, read in turn"
    )
    group.add_argument("--groups", default=":", metavar="A:B", help="of all files together, groups A to B-1")
    group.add_argument("--tokenizer-type", choices=tuple(TOKENIZERS), default="NullTokenizer")
    group.add_argument(
        "--fold-token-ids",
        action="store_true",
        help="take ids %% --vocab-size: tries a small model on the file of a large one",
    )
    group.add_argument(
        "--max-prompt-tokens", type=int, default=None, help="keep the first tokens of every prompt"
    )
    group.add_argument("--max-response-tokens", type=int, default=None, help="the same for responses")
    group.add_argument("--shuffle", action="store_true", help="every epoch in an order that --seed decides")
    group.add_argument(
        "--num-workers", type=int, default=1, help="processes that plan ahead; 0 plans in between"
    )
    group = parser.add_argument_group("training")
    group.add_argument("--train-iters", type=int, required=True, help="iterations, loaded ones included")
    group.add_argument("--global-batch-size", type=int, default=1, help="groups of a step")
    group.add_argument("--seed", type=int, default=1234, help="of weights, random states and --shuffle")
    launch.add_timeout_argument(group)
    group = parser.add_argument_group("checkpoints and logs")
    group.add_argument(
        "--save", default="", metavar="DIR", help="write checkpoints; also one after the last step"
    )
    group.add_argument(
        "--save-interval", type=int, default=0, help="iterations from one checkpoint to the next"
    )
    group.add_argument(
        "--ckpt-format",
        choices=FORMATS,
        default=FORMATS[0],
        help="of checkpoints that are written: torch_dist is Megatron's, for any number of ranks",
    )
    group.add_argument("--load", default="", metavar="DIR", help="resume the newest checkpoint")
    group.add_argument(
        "--finetune",
        action="store_true",
        help="load the weights only: iteration, optimizer and random states start anew",
    )
    group.add_argument("--tensorboard-dir", default="", metavar="DIR")
    group.add_argument("--log-interval", type=int, default=1, help="iterations from one line to the next")
    return parser


@dataclass(frozen=True)
class Training:
    """A training that was checked: all that a user can get wrong, but the plans of its steps, is behind it.

    Attributes:
        args: the flags.
        config: the mode; None is stock Megatron.
        loss: the policy loss, for ``--objective grpo``.
        groups: all groups.
        world: ranks of the pool.
        made: what checkpoints are compared by.
        data: identifies the groups and their order.
        checkpoint: what is loaded, or None.
    """

    args: argparse.Namespace
    config: AugTreeConfig | None
    loss: LossConfig
    groups: tuple[Group, ...]
    world: int
    made: Made
    data: str
    checkpoint: Checkpoint | None

    @property
    def progress(self) -> Progress:
        """Where the run starts: after the checkpoint's step; with other data, at their first group."""
        if self.checkpoint is None or self.args.finetune:
            return Progress(0, 0, self.data)
        saved = self.checkpoint.progress
        return Progress(saved.iteration, saved.consumed_groups if saved.data == self.data else 0, self.data)

    def describe(self) -> str:
        """What runs, in a few lines."""
        args, begun = self.args, self.progress
        what = f"--context-parallel-mode {self.config.mode}" if self.config is not None else STOCK
        lines = [
            f"{what}; {counted(self.world, 'rank')}, {args.dtype}, {args.optimizer}, {args.objective}; "
            f"{counted(len(self.groups), 'group')}, {args.global_batch_size} a step"
        ]
        if self.checkpoint is not None:
            lines.append(
                f"{self.checkpoint.folder}: "
                + ("weights only" if args.finetune else f"resuming after iteration {begun.iteration}")
            )
            if not args.finetune and self.checkpoint.progress.data != self.data:
                lines.append(
                    "the data or their order are not those of the checkpoint: starting at the first group"
                )
        elif args.load:
            lines.append(f"{args.load}: no checkpoint yet, starting from iteration 0")
        if self.config is not None:
            lines += slow_planning()
        if begun.iteration >= args.train_iters:
            lines.append(f"nothing to do: --train-iters {args.train_iters} are done")
        return "\n".join(lines)


def prepare(args: argparse.Namespace, world: int | None = None) -> Training:
    """Reads and checks everything that can be without an exchange between ranks; rank 0 makes the folders.

    Args:
        args: of `parser`.
        world: all ranks; None is torchrun's.

    Raises:
        AugTreeError: the first thing that is wrong.
    """
    check_supported(args)
    check_recompute(args)
    config, loss = augtree_config(args), objective.loss_config(args)
    check_flags(args, config)
    groups = tuple(load_groups(args))
    objective.check_groups(groups, args.objective, loss)
    world = (world or env_world()) // tensor_parallel_size(args, world or env_world())
    check_format(args)
    made = made_for(args, world)
    data = group_files.fingerprint(groups) + (f"/shuffled {args.seed}" if args.shuffle else "")
    checkpoint = latest(args.load) if args.load else None
    if checkpoint is not None:
        checkpoint.require(made, weights_only=args.finetune)
    elif args.load and (args.load != args.save or args.finetune):
        raise InputError(
            "there is no checkpoint to load",
            values=f"--load {args.load}",
            rule="a checkpoint was saved there; it may only be missing where --save is the same folder, "
            "at the first start of a run that resumes itself",
            remedy="correct the path",
        )
    if launch.env_rank() == 0:
        check_folder(args.save, "--save")
        check_folder(args.tensorboard_dir, "--tensorboard-dir")
        check_folder(args.augtree_trace_dir, "--augtree-trace-dir")
    return Training(args, config, loss, groups, world, made, data, checkpoint)


def check_flags(args: argparse.Namespace, config: AugTreeConfig | None) -> None:
    """Refuses values out of range, and flags that would do nothing.

    Raises:
        AugTreeError: the first one.
    """
    low = {
        "--train-iters": 1,
        "--global-batch-size": 1,
        "--log-interval": 1,
        "--save-interval": 0,
        "--num-workers": 0,
        "--context-parallel-size": 0,
    }
    for flag, least in low.items():
        value = getattr(args, flag.lstrip("-").replace("-", "_"))
        if value < least:
            raise AugTreeError(
                "a flag is out of range",
                values=f"{flag} {value}",
                rule=f"at least {least}",
                remedy="correct the flag",
            )
    if config is None and args.context_parallel_size > 1:
        raise UnsupportedError(
            "stock Megatron has no context parallelism here",
            values=f"--context-parallel-size {args.context_parallel_size} without --context-parallel-mode",
            rule="megatron-core's local attention keeps a sequence on one rank",
            remedy="choose a mode, for instance --context-parallel-mode ring, or leave the size out",
        )
    if (args.save_interval and not args.save) or (args.finetune and not args.load):
        raise AugTreeError(
            "a flag without the one that it belongs to",
            values="--save-interval without --save"
            if args.save_interval and not args.save
            else "--finetune without --load",
            rule="alone it does nothing",
            remedy="give both",
        )


def load_groups(args: argparse.Namespace) -> list[Group]:
    """The groups that the flags name.

    Raises:
        InputError: a file, range or limit that cannot be used, or ids beyond the vocabulary.
    """
    read = functools.partial(group_files.read_groups, tokenizer=TOKENIZERS[args.tokenizer_type]())
    first, end = group_files.parse_range(args.groups)
    groups = [group for path in args.data_path for group in read(path)]
    if max(first + 1, end or 0) > len(groups):
        raise InputError(
            "the files have too few groups",
            values=f"--groups {args.groups}, {len(groups)} groups",
            rule="the range lies within the files",
            remedy="correct the range",
        )
    groups = group_files.truncate(groups[first:end], args.max_prompt_tokens, args.max_response_tokens)
    if args.fold_token_ids:
        return group_files.fold(groups, args.vocab_size)
    group_files.check_vocabulary(groups, args.vocab_size)
    return groups


class Trainer:
    """Model, optimizer and schedule of a training, and the step.

    Args:
        training: what to run.
        transport: the pool; None is Megatron's data-parallel group with context parallelism.
    """

    def __init__(self, training: Training, transport: Transport | None = None) -> None:
        self.training, args = training, training.args
        random.seed(args.seed)
        np.random.seed(args.seed % 2**32)
        torch.manual_seed(args.seed)
        chunk = {} if training.config is None else {"logit_chunk_mib": training.config.logit_chunk_mib}
        model = build_model(args, augtree=training.config is not None, seed=args.seed, **chunk)
        if training.checkpoint is not None:
            agree(lambda: training.checkpoint.load_model(model))
        self.ddp: DistributedDataParallel = wrap_as_asked(args, model)
        self.optimizer = make_optimizer(args, self.ddp)
        values = {"temperature": training.loss.temperature, "entropy": training.loss.entropy_coef > 0}
        if training.config is None:
            self.schedule = StockSchedule(transport, **values)
        else:
            self.schedule = AugTreeSchedule(training.config, transport=transport, **values)
        if training.checkpoint is not None and not args.finetune:
            agree(lambda: training.checkpoint.load_training(self.ddp.module, self.optimizer))
        self.progress = training.progress
        self.longest = objective.longest_response(training.groups)

    def batches(self) -> Iterator[StepBatch]:
        """The steps that are left, planned ahead."""
        training, args = self.training, self.training.args
        groups = training.groups
        sampler = GroupSampler(
            len(groups),
            args.global_batch_size,
            consumed=self.progress.consumed_groups,
            steps=args.train_iters - self.progress.iteration,
            shuffle=args.shuffle,
            seed=args.seed,
        )
        # The stock run plays no plan. Replicas of one rank are what it is, and what ranks compare.
        config = training.config or AugTreeConfig(mode="ring", degree=1)
        shape = model_shape(build_config(args), args.vocab_size)
        return iter(step_loader(groups, sampler, shape, training.world, config, workers=args.num_workers))

    def step(self, batch: StepBatch) -> StepRecord:
        """One update."""
        training, args = self.training, self.training.args
        started = time.perf_counter()
        constant = objective.loss_constant(args, batch.groups, self.longest)
        loss_fn = objective.Objective(batch, args.objective, training.loss, constant)
        # Both: Megatron's optimizer leaves param.grad an alias of DDP's buffer.
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        (metrics,) = self.schedule(
            forward_step_func=functools.partial(forward_step, loss_fn=loss_fn),
            data_iterator=iter([batch]),
            model=self.ddp,
        )
        _, norm, _ = self.optimizer.step()
        old = self.progress
        self.progress = Progress(old.iteration + 1, old.consumed_groups + len(batch.groups), old.data)
        seconds = time.perf_counter() - started
        if isinstance(self.schedule, AugTreeSchedule):
            figures = figures_of(self.schedule, seconds)
        else:
            rows = batch.unshared_rows
            figures = {"groups": len(batch.groups), "rows": rows, "unshared_rows": rows, "note": "dense",
                       "measured_seconds": seconds}
        return StepRecord(
            iteration=self.progress.iteration,
            loss=metrics["loss"],
            grad_norm=float(norm),
            metrics=metrics,
            **figures,
        )

    def save(self) -> str:
        """Writes a checkpoint; every rank calls it."""
        training, args = self.training, self.training.args
        if args.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)  # which the next forward would have done
        return save(
            args.save, training.made, self.progress, self.ddp.module, self.optimizer, args.ckpt_format
        )


def train(training: Training, transport: Transport | None = None) -> tuple[list[StepRecord], Trainer]:
    """Runs a training to its last iteration; the process group exists.

    Args:
        training: of `prepare`.
        transport: see `Trainer`.

    Returns:
        A record a step, and the trainer as it stands at the end.
    """
    args, records = training.args, []
    report = Report(
        training.progress.iteration,
        args.train_iters,
        interval=args.log_interval,
        speaks=dist.get_rank() == 0,
        tensorboard_dir=args.tensorboard_dir,
    )
    report.say(training.describe())
    trainer = Trainer(training, transport)
    batches = trainer.batches()
    batch = agree(lambda: next(batches, None))
    while batch is not None:
        records.append(trainer.step(batch))
        report.step(records[-1])
        done = trainer.progress.iteration
        if args.save and (
            done == args.train_iters or (args.save_interval and done % args.save_interval == 0)
        ):
            report.say(f"saved {trainer.save()}")
        batch = next(batches, None)
    if records and isinstance(trainer.schedule, AugTreeSchedule):
        trainer.schedule.write_trace()
    report.close()
    return records, trainer


def main() -> None:
    """Parses, checks on every rank, and trains."""
    args = agree(lambda: parser().parse_args())
    training = agree(lambda: prepare(args))
    launch.start(args)
    train(training)


if __name__ == "__main__":
    launch.run(main)
