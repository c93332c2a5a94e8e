"""Checkpoints of a launcher: the next step after loading has the bits of an uninterrupted run's.

    DIR/latest_checkpointed_iteration.txt   the iteration to load; written last
    DIR/iter_0000004/model.safetensors      weights under megatron-core's own names
                     optimizer.pt           or optimizer_<rank>.pt, a shard a rank (distributed optimizer)
                     random.pt              random states
                     checkpoint.json        what it was made for, and the size of every file; written last

With `--ckpt-format torch_dist`, megatron-core's own format stands in the folder instead of the first three
(`mcore/dist_checkpoint.py`); it is the one that tensor-parallel ranks and other numbers of ranks can use.

A checkpoint is written in a folder that no reader looks at and put in place by one rename. A save that is
killed leaves the older checkpoint to load; a file that was cut short later is noticed by its size.

Nothing depends on the number of ranks or on the mode, with one exception: in `safetensors` a shard of the
distributed optimizer belongs to a rank, so such a checkpoint is loaded by as many ranks as saved it. Ranks of
a pool draw the same random numbers (what would differ between them, dropout, is refused), so one random state
is kept.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_augtree.config import InputError, UnsupportedError
from megatron_augtree.mcore import dist_checkpoint
from megatron_augtree.mcore.build import build_config
from megatron_augtree.mcore.launch import agree
from megatron_augtree.mcore.training_state import (
    load_optimizer,
    random_state,
    set_random_state,
    shard_state,
    shards_of,
    tensors_of,
)

FORMAT = 1
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "checkpoint.json"
#: ``--ckpt-format``.
SAFETENSORS, TORCH_DIST = FORMATS = ("safetensors", "torch_dist")
MODEL_FILE, RANDOM_FILE, OPTIMIZER_FILE = "model.safetensors", "random.pt", "optimizer.pt"


@dataclass(frozen=True)
class Made:
    """What a checkpoint was made for; one that differs does not load.

    Attributes:
        model: flag -> value, everything that decides what the weights mean.
        optimizer: flag -> value, everything that decides what its state means.
        shards: ranks that hold a part of the optimizer each; 1 where every rank holds it whole.
        tensor_parallel: ranks that hold a slice of the weights each.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    shards: int
    tensor_parallel: int = 1


def made_for(args: argparse.Namespace, world: int) -> Made:
    """What a run is made of.

    Args:
        args: of a launcher.
        world: ranks of the pool.
    """
    config = build_config(args)
    flags = (
        "num_layers",
        "hidden_size",
        "vocab_size",
        "normalization",
        "norm_epsilon",
        "rotary_base",
        "rotary_interleaved",
        "softmax_scale",
        "swiglu",
        "disable_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "untie_embeddings_and_output_weights",
        "num_attention_heads",
        "dtype",
    )
    model = {name: getattr(args, name) for name in flags}
    # Defaults that depend on other flags, as the model has them.
    model |= {name: getattr(config, name) for name in ("ffn_hidden_size", "num_query_groups", "kv_channels")}
    optimizer = {"optimizer": args.optimizer, "use_distributed_optimizer": args.use_distributed_optimizer}
    return Made(
        *(
            {f"--{name.replace('_', '-')}": value for name, value in part.items()}
            for part in (model, optimizer)
        ),
        shards=world if args.use_distributed_optimizer else 1,
        tensor_parallel=args.tensor_model_parallel_size,
    )


def check_format(args: argparse.Namespace) -> None:
    """Fail where a run could not be saved in the format that was chosen.

    Raises:
        UnsupportedError: slices of weights in a format of whole ones.
    """
    if args.save and args.ckpt_format == SAFETENSORS and args.tensor_model_parallel_size > 1:
        raise UnsupportedError(
            "the checkpoint format does not hold slices of a model",
            values=f"--ckpt-format {SAFETENSORS}, "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}",
            rule="model.safetensors holds whole tensors, which no rank has",
            remedy=f"use --ckpt-format {TORCH_DIST}",
        )


@dataclass(frozen=True)
class Progress:
    """Where training stands.

    Attributes:
        iteration: steps done.
        consumed_groups: groups used by them, of these data.
        data: identifies the data and their order; `consumed_groups` counts in them.
    """

    iteration: int
    consumed_groups: int
    data: str


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: str
    made: Made
    progress: Progress
    ckpt_format: str = SAFETENSORS

    def require(self, made: Made, *, weights_only: bool = False) -> None:
        """Fail where the checkpoint does not belong to this run.

        Args:
            made: what this run is made of.
            weights_only: the optimizer is not loaded and may be another one.

        Raises:
            InputError: names every setting that differs.
        """
        kinds = [("model", self.made.model, made.model)]
        if not weights_only:
            kinds.append(("optimizer", self.made.optimizer, made.optimizer))
        for kind, theirs, ours in kinds:
            differ = [
                f"{name} {theirs.get(name)} there, {ours.get(name)} here"
                for name in sorted(theirs.keys() | ours.keys())
                if theirs.get(name) != ours.get(name)
            ]
            if differ:
                raise InputError(
                    f"a checkpoint was made for another {kind}",
                    values=f"{self.folder}: {'; '.join(differ)}",
                    rule=f"a run resumes with the {kind} that it was saved with",
                    remedy="restore the flags"
                    + ("" if kind == "model" else ", or start from the weights alone with --finetune"),
                )
        if self.ckpt_format == TORCH_DIST:
            return
        if made.tensor_parallel > 1:
            raise UnsupportedError(
                "a checkpoint holds whole weights",
                values=f"{self.folder}: --ckpt-format {SAFETENSORS}; "
                f"--tensor-model-parallel-size {made.tensor_parallel}",
                rule="tensor-parallel ranks load slices",
                remedy=f"load it on one such rank, and save it with --ckpt-format {TORCH_DIST}",
            )
        if not weights_only and self.made.shards != made.shards:
            raise InputError(
                "a checkpoint was made on another number of ranks",
                values=f"{self.folder}: {self.made.shards} ranks there, {made.shards} here",
                rule="every rank holds its own shard of the distributed optimizer",
                remedy=f"use as many ranks, or save with --ckpt-format {TORCH_DIST}, or start from the "
                "weights alone with --finetune",
            )

    def load_model(self, model: torch.nn.Module) -> None:
        """Put the weights into a model (before DDP and optimizer are made of it).

        Raises:
            InputError: the file does not hold exactly the model's tensors.
        """
        if self.ckpt_format == TORCH_DIST:
            return _reading(self.folder, functools.partial(dist_checkpoint.load_weights, model=model))
        weights = _reading(os.path.join(self.folder, MODEL_FILE), load_file)
        own = tensors_of(model)
        wrong = [
            name
            for name in sorted(own.keys() | weights.keys())
            if name not in own or name not in weights or own[name].shape != weights[name].shape
        ]
        if wrong:
            raise InputError(
                "a checkpoint holds other tensors than the model",
                values=f"{self.folder}: {wrong[:4]}",
                rule="names and shapes are those of the model",
                remedy="restore the model's flags",
            )
        model.load_state_dict(weights, strict=False)  # strict would ask for the extra states, which are empty

    def load_training(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Put optimizer and random states back; the learning rate and the like stay as the flags say.

        Args:
            model: the model inside DDP, with the checkpoint's weights.
            optimizer: made of it.
        """
        if self.ckpt_format == TORCH_DIST:
            read = functools.partial(dist_checkpoint.load_state, model=model, optimizer=optimizer,
                                     tensor_parallel=self.made.tensor_parallel)
            states = _reading(self.folder, read)
            if states is not None:
                set_random_state(states)
            return
        shards = shards_of(optimizer)
        name = _optimizer_file(_rank()) if shards else OPTIMIZER_FILE
        state = _reading(os.path.join(self.folder, name), _torch_load)
        for part, saved in zip(shards or [optimizer], state, strict=True):
            load_optimizer(part, saved, sharded=bool(shards))
        set_random_state(_reading(os.path.join(self.folder, RANDOM_FILE), _torch_load))


def save(folder: str, made: Made, progress: Progress, model: torch.nn.Module, optimizer: Any,
         ckpt_format: str = SAFETENSORS) -> str:
    """Write a checkpoint; called by every rank, returns when it is complete.

    Args:
        folder: of all checkpoints of the run; shared by the ranks. Made if it does not exist.
        made, progress: what is to be known when it is loaded.
        model: the model inside DDP.
        optimizer: Megatron's, or `update.TorchOptimizer`.
        ckpt_format: one of `FORMATS`.

    Returns:
        The checkpoint's folder.

    Raises:
        SystemExit: code 2, on every rank, where any could not write; the older checkpoint is left.
    """
    final = os.path.join(folder, f"iter_{progress.iteration:07d}")
    partial = os.path.join(folder, f".iter_{progress.iteration:07d}.partial")
    shards, rank = shards_of(optimizer), _rank()

    def begin() -> None:
        if rank == 0:
            for leftover in (partial, f"{partial}.old"):  # of a save that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            os.makedirs(partial)

    def write_parts() -> None:
        if ckpt_format == TORCH_DIST:
            dist_checkpoint.save_state(partial, model, optimizer, random_state())
        elif shards:
            _torch_save([shard_state(part) for part in shards], os.path.join(partial, _optimizer_file(rank)))
        elif rank == 0:
            _torch_save([optimizer.state_dict()], os.path.join(partial, OPTIMIZER_FILE))

    def complete() -> None:
        if rank == 0:
            if ckpt_format == SAFETENSORS:
                save_file(tensors_of(model), os.path.join(partial, MODEL_FILE))
                _torch_save(random_state(), os.path.join(partial, RANDOM_FILE))
            _publish(folder, partial, final, made, progress, ckpt_format)

    try:
        for part in (begin, write_parts, complete):
            agree(functools.partial(_writing, folder, part))  # which also waits for every rank's part
    except SystemExit:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk has better uses for it
        raise
    return final


def save_weights(folder: str, made: Made, weights: dict[str, Tensor]) -> str:
    """Write weights that were not trained here as a checkpoint for ``--load`` with ``--finetune``.

    Args:
        folder: as for `save`.
        made: of the launcher's arguments; its part about the optimizer is left out.
        weights: the model's tensors, whole, by its names and in its type.

    Returns:
        The checkpoint's folder; its ``model.safetensors`` is what ``scripts/`` load.

    Raises:
        InputError: the folder cannot be written.
    """
    final, partial = (os.path.join(folder, name) for name in ("iter_0000000", ".iter_0000000.partial"))

    def write() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
        save_file({name: value.contiguous() for name, value in weights.items()},
                  os.path.join(partial, MODEL_FILE))
        _publish(folder, partial, final, Made(made.model, {}, 1), Progress(0, 0, ""), SAFETENSORS)

    _writing(folder, write)
    return final


def _writing(folder: str, part: Callable[[], None]) -> None:
    try:
        part()
    except (OSError, SafetensorError, CheckpointException) as error:
        raise InputError(
            "a checkpoint cannot be written",
            values=f"--save {folder}: {str(error).strip()}",
            rule="--save is a folder that can be made and written, with room for the checkpoint",
            remedy="correct the path, or free some space",
        ) from error


def latest(folder: str) -> Checkpoint | None:
    """The newest complete checkpoint of a folder; None where nothing was ever saved in it.

    Raises:
        InputError: the folder names a checkpoint that is missing or damaged.
    """
    try:
        with open(os.path.join(folder, TRACKER), encoding="ascii") as file:
            iteration = int(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(os.path.join(folder, TRACKER), str(error)) from error
    found = os.path.join(folder, f"iter_{iteration:07d}")
    try:
        with open(os.path.join(found, MANIFEST), encoding="utf-8") as file:
            manifest = json.load(file)
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        for name, size in manifest["bytes"].items():
            actual = os.path.getsize(os.path.join(found, name))
            if actual != size:
                raise ValueError(f"{name} has {actual} bytes, {size} were written")
        return Checkpoint(found, Made(**manifest["made"]), Progress(**manifest["progress"]),
                          manifest.get("ckpt_format", SAFETENSORS))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(found, str(error)) from error


def _publish(folder: str, partial: str, final: str, made: Made, progress: Progress,
             ckpt_format: str) -> None:
    """Complete the partial folder, put it in place and say that it is the newest."""
    sizes = {name: os.path.getsize(os.path.join(partial, name)) for name in sorted(os.listdir(partial))}
    manifest = {"format": FORMAT, "ckpt_format": ckpt_format, "made": asdict(made),
                "progress": asdict(progress), "bytes": sizes}
    _write_text(os.path.join(partial, MANIFEST), json.dumps(manifest, indent=1))
    for name in sizes:
        _sync(os.path.join(partial, name))
    if os.path.isdir(final):  # of an earlier run: a folder cannot be replaced in one rename
        aside = f"{partial}.old"
        os.rename(final, aside)
        os.rename(partial, final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(partial, final)
    _sync(folder)
    tracker = os.path.join(folder, TRACKER)
    _write_text(f"{tracker}.partial", str(progress.iteration))
    os.replace(f"{tracker}.partial", tracker)
    _sync(folder)


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: str) -> None:
    """To the disk: a rename must not get there before the data that it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _damaged(path: str, found: str) -> InputError:
    return InputError(
        "a checkpoint cannot be read",
        values=f"{path}: {found}",
        rule="a checkpoint is complete and as it was written",
        remedy=f"write the iteration of an older checkpoint into {TRACKER}, or remove that file to "
        "start anew",
    )


def _reading(path: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(path)
    except (Exception, CheckpointException) as error:  # torch, pickle and safetensors each raise their own
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _torch_load(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _torch_save(state: Any, path: str) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # what torch makes of a full disk
        raise OSError(str(error).splitlines()[0]) from error


def _rank() -> int:
    return dist.get_rank()


def _optimizer_file(rank: int) -> str:
    return f"optimizer_{rank:05d}.pt"
