"""Checkpoints of a launcher: the next step after loading has the bits of an uninterrupted run's.

    DIR/latest_checkpointed_iteration.txt   the iteration to load; written last
    DIR/iter_0000004/model.safetensors      weights under megatron-core's own names
                     optimizer.pt           or optimizer_<rank>.pt, a shard a rank (distributed optimizer)
                     random.pt              random states
                     checkpoint.json        what it was made for, and the size of every file; written last

A checkpoint is written in a folder that no reader looks at and put in place by one rename. A save that is
killed leaves the older checkpoint to load; a file that was cut short later is noticed by its size.

Nothing depends on the number of ranks or on the mode, with one exception: a shard of the distributed
optimizer belongs to a rank, so such a checkpoint is loaded by as many ranks as saved it. Ranks of a pool draw
the same random numbers (what would differ between them, dropout, is refused), so one random state is kept.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.mcore.build import build_config
from megatron_augtree.mcore.launch import agree

FORMAT = 1
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "checkpoint.json"
MODEL_FILE, RANDOM_FILE, OPTIMIZER_FILE = "model.safetensors", "random.pt", "optimizer.pt"


@dataclass(frozen=True)
class Made:
    """What a checkpoint was made for; one that differs does not load.

    Attributes:
        model: flag -> value, everything that decides what the weights mean.
        optimizer: flag -> value, everything that decides what its state means.
        shards: ranks that hold a part of the optimizer each; 1 where every rank holds it whole.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    shards: int


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
        if not weights_only and self.made.shards != made.shards:
            raise InputError(
                "a checkpoint was made on another number of ranks",
                values=f"{self.folder}: {self.made.shards} ranks there, {made.shards} here",
                rule="every rank holds its own shard of the distributed optimizer",
                remedy="use as many ranks, or start from the weights alone with --finetune",
            )

    def load_model(self, model: torch.nn.Module) -> None:
        """Put the weights into a model (before DDP and optimizer are made of it).

        Raises:
            InputError: the file does not hold exactly the model's tensors.
        """
        weights = _reading(os.path.join(self.folder, MODEL_FILE), load_file)
        own = _tensors(model)
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

    def load_training(self, optimizer: Any) -> None:
        """Put optimizer and random states back; the learning rate and the like stay as the flags say."""
        shards = _shards_of(optimizer)
        name = _optimizer_file(_rank()) if shards else OPTIMIZER_FILE
        state = _reading(os.path.join(self.folder, name), _torch_load)
        for part, saved in zip(shards or [optimizer], state, strict=True):
            _load_optimizer(part, saved, sharded=bool(shards))
        _set_random_state(_reading(os.path.join(self.folder, RANDOM_FILE), _torch_load))


def save(folder: str, made: Made, progress: Progress, model: torch.nn.Module, optimizer: Any) -> str:
    """Write a checkpoint; called by every rank, returns when it is complete.

    Args:
        folder: of all checkpoints of the run; shared by the ranks. Made if it does not exist.
        made, progress: what is to be known when it is loaded.
        model: the model inside DDP.
        optimizer: Megatron's, or `update.TorchOptimizer`.

    Returns:
        The checkpoint's folder.

    Raises:
        SystemExit: code 2, on every rank, where any could not write; the older checkpoint is left.
    """
    final = os.path.join(folder, f"iter_{progress.iteration:07d}")
    partial = os.path.join(folder, f".iter_{progress.iteration:07d}.partial")
    shards, rank = _shards_of(optimizer), _rank()

    def begin() -> None:
        if rank == 0:
            for leftover in (partial, f"{partial}.old"):  # of a save that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            os.makedirs(partial)

    def write_optimizer() -> None:
        if shards:
            _torch_save([_shard_state(part) for part in shards], os.path.join(partial, _optimizer_file(rank)))
        elif rank == 0:
            _torch_save([optimizer.state_dict()], os.path.join(partial, OPTIMIZER_FILE))

    def complete() -> None:
        if rank == 0:
            save_file(_tensors(model), os.path.join(partial, MODEL_FILE))
            _torch_save(_random_state(), os.path.join(partial, RANDOM_FILE))
            _publish(folder, partial, final, made, progress)

    try:
        for part in (begin, write_optimizer, complete):
            agree(functools.partial(_writing, folder, part))  # which also waits for every rank's part
    except SystemExit:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk has better uses for it
        raise
    return final


def _writing(folder: str, part: Callable[[], None]) -> None:
    try:
        part()
    except (OSError, SafetensorError) as error:
        raise InputError(
            "a checkpoint cannot be written",
            values=f"--save {folder}: {error}",
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
        return Checkpoint(found, Made(**manifest["made"]), Progress(**manifest["progress"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(found, str(error)) from error


def _publish(folder: str, partial: str, final: str, made: Made, progress: Progress) -> None:
    """Complete the partial folder, put it in place and say that it is the newest."""
    sizes = {name: os.path.getsize(os.path.join(partial, name)) for name in sorted(os.listdir(partial))}
    manifest = {"format": FORMAT, "made": asdict(made), "progress": asdict(progress), "bytes": sizes}
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
    except Exception as error:  # torch, pickle and safetensors each raise their own
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


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's tensors, each in memory of its own (DDP keeps them in one buffer)."""
    return {
        name: value.detach().clone().contiguous()
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }


def _shards_of(optimizer: Any) -> list[Any]:
    """The parts of Megatron's distributed optimizer; empty for an optimizer that every rank holds whole."""
    parts = getattr(optimizer, "chained_optimizers", [])
    return [part for part in parts if hasattr(part, "shard_fp32_groups")]


def _shard_state(part: Any) -> dict[str, Any]:
    """This rank's shard: torch's state, and the fp32 parameters that it steps."""
    return {"inner": part.optimizer.state_dict(), "parameters": [p.detach().clone() for p in _stepped(part)]}


def _stepped(part: Any) -> list[Tensor]:
    return [p for group in part.optimizer.param_groups for p in group["params"]]


def _load_optimizer(part: Any, saved: dict[str, Any], *, sharded: bool) -> None:
    groups = part.optimizer.param_groups if hasattr(part, "optimizer") else part.inner.param_groups
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "step")} for group in groups
    ]
    if sharded:
        part.optimizer.load_state_dict(saved["inner"])
        with torch.no_grad():
            for parameter, value in zip(_stepped(part), saved["parameters"], strict=True):
                parameter.copy_(value)
    else:
        part.load_state_dict(saved)
    groups = part.optimizer.param_groups if hasattr(part, "optimizer") else part.inner.param_groups
    for group, setting in zip(groups, settings, strict=True):
        group.update(setting)


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
        "python": [version, list(numbers), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
