"""Trainers that save and load by megatron-core's dist_checkpointing, as trainers of others do.

    torchrun --nproc-per-node N tests/mcore/dist_checkpoint_cases.py DATA FOLDER RESULT

A trainer takes two steps and saves; its third step, without any loading, is the reference. Whoever loads must
find the same state (saved again, it is the same to the bit) and take the same third step.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import functools
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.validation import StrictHandling
from safetensors.torch import load_file, save_file

from megatron_augtree.mcore import build, dist_checkpoint, launch
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.shards import gather_whole
from megatron_augtree.mcore.stock import StockSchedule
from megatron_augtree.mcore.training_state import random_state
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, wrap_model
from megatron_augtree.mcore.weights import reduced_gradients
from tests.mcore import launcher_cases
from tests.numerics import fixtures as f

#: How optimizers save: flags, and the distributed optimizer's sharding type.
KINDS = {
    "adam": ("--optimizer adam --adam-eps 1e-3 --lr 0.01", "float32", None),
    "dp_reshardable": ("--optimizer adam --adam-eps 1e-3 --lr 0.01", "float32", "dp_reshardable"),
    "fully_reshardable": ("--optimizer adam --adam-eps 1e-3 --lr 0.01", "float32", "fully_reshardable"),
    "launcher": ("--optimizer sgd --sgd-momentum 0.9 --lr 0.1", "float64", None),  # by our own functions
}


@dataclass(frozen=True)
class Site:
    """Who trains: the mode, and the ranks.

    Attributes:
        world: all ranks.
        augtree: AugTree, or stock Megatron.
        tensor_parallel: ranks that hold a slice each.
    """

    name: str
    world: int
    augtree: bool = True
    tensor_parallel: int = 1


SITES = {site.name: site for site in (
    Site("plain 1", 1, augtree=False),
    Site("augtree 2", 2),
    Site("augtree 4", 4),
    Site("augtree 2 x TP 2", 4, tensor_parallel=2),
)}


def loads(kind: str) -> list[tuple[str, str]]:
    """(who loads, whose checkpoint): each from every world that ran before, and plain from all."""
    names = list(SITES)
    pairs = [(names[0], name) for name in names[1:]]
    pairs += [(site, source) for place, site in enumerate(names[1:], 1) for source in names[:place]
              if SITES[source].world < SITES[site].world or SITES[source].tensor_parallel == 1]
    # This type follows the buckets of a tensor-parallel rank.
    return [pair for pair in pairs if kind != "dp_reshardable"
            or SITES[pair[0]].tensor_parallel == SITES[pair[1]].tensor_parallel]


def folder_of(root: Path, site: str, kind: str) -> Path:
    """Where a site's checkpoint lies; its reference lies beside it."""
    return root / f"{site.replace(' ', '-')}-{kind}"


def copy_of(root: Path, site: str, source: str, kind: str) -> Path:
    """Where a site saves again what it loaded."""
    return root / f"{folder_of(root, source, kind).name}-by-{site.replace(' ', '-')}"


class Trainer:
    """A model and an optimizer; all steps take the same groups."""

    def __init__(self, site: Site, kind: str, seed: int = 3) -> None:
        flags, dtype, self.sharding = KINDS[kind]
        self.site, self.kind, distributed = site, kind, self.sharding is not None
        parser = argparse.ArgumentParser()
        add_optimizer_arguments(parser)
        args = parser.parse_args(flags.split(), namespace=arguments(site, dtype))
        args.use_distributed_optimizer = distributed
        self.model = f.build_model(args, augtree=site.augtree, seed=seed)
        self.ddp = wrap_model(self.model, distributed_optimizer=distributed)
        self.optimizer = make_optimizer(args, self.ddp)
        self.schedule = AugTreeSchedule(f.AugTreeConfig()) if site.augtree else StockSchedule()
        self.batch = f.batch_of(f.several(), f.augtree(), site.world // site.tensor_parallel)

    def step(self) -> dict[str, torch.Tensor]:
        """One step; the loss, reduced gradients and new parameters, whole on every rank."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        (metrics,) = self.schedule(
            forward_step_func=functools.partial(forward_step, loss_fn=Objective(self.batch, "nll")),
            data_iterator=iter([self.batch]), model=self.ddp)
        grads = reduced_gradients(self.ddp)
        self.optimizer.step()
        found = {"loss": torch.tensor(metrics["loss"], dtype=torch.float64)}
        for name, parameter in self.model.named_parameters():
            found[f"grad/{name}"] = grads[name]
            found[f"param/{name}"] = gather_whole(parameter, parameter).clone()
        return found

    def _metadata(self) -> dict:
        made = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
                "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        return made | ({"distrib_optim_sharding_type": self.sharding} if self.sharding else {})

    def _state(self, loading: bool) -> dict:
        weights = self.model.sharded_state_dict(metadata=self._metadata())
        return {"model": weights, "optimizer": self.optimizer.sharded_state_dict(
            weights, is_loading=loading, metadata=self._metadata())}

    def save(self, folder: Path) -> None:
        """To an empty folder."""
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        if self.kind == "launcher":
            dist_checkpoint.save_state(str(folder), self.model, self.optimizer, random_state())
        else:
            dist_checkpoint.write(self._state(False), str(folder))

    def load(self, folder: Path, tensor_parallel: int) -> None:
        """Strictly: neither side may have more."""
        if self.kind == "launcher":
            found = dist_checkpoint.load_state(str(folder), self.model, self.optimizer,
                                               tensor_parallel=tensor_parallel)
            assert (found is not None) == (tensor_parallel == self.site.tensor_parallel)
            return
        loaded = dist_checkpointing.load(self._state(True), str(folder), strict=StrictHandling.RAISE_ALL)
        self.model.load_state_dict(loaded["model"], strict=True)
        with torch.no_grad():  # in fp32 a shard is a view of a parameter
            self.optimizer.load_state_dict(loaded["optimizer"])


def arguments(site: Site, dtype: str = "float32") -> argparse.Namespace:
    """Model arguments of a site."""
    return f.parse(f"{f.MODEL} --tensor-model-parallel-size {site.tensor_parallel}", dtype)


def enter(site: Site) -> None:
    """Process group and parallel state of a site; another site's state is replaced."""
    parallel_state.destroy_model_parallel()
    build.initialize(arguments(site), timeout_s=120)


def save_all(site: Site, root: Path) -> dict[str, list[str]]:
    """Save a checkpoint of each kind, with its reference.

    Returns:
        kind -> tensors of the next step that differ where the same site loads it.
    """
    differing = {}
    for kind in KINDS:
        folder, trainer = folder_of(root, site.name, kind), Trainer(site, kind)
        trainer.step()
        trainer.step()
        trainer.save(folder)
        reference = trainer.step()
        if dist.get_rank() == 0:
            save_file(reference, f"{folder}.safetensors")
        again = Trainer(site, kind, seed=4)
        again.load(folder, site.tensor_parallel)
        differing[kind] = launcher_cases.differing(reference, again.step())
        dist.barrier()
    return differing


def load_from(site: Site, source: Site, kind: str, root: Path) -> dict[str, float]:
    """Load another site's checkpoint, save it again, and take the next step; how far that is from theirs."""
    folder, trainer = folder_of(root, source.name, kind), Trainer(site, kind, seed=4)
    trainer.load(folder, source.tensor_parallel)
    trainer.save(copy_of(root, site.name, source.name, kind))
    got, want = trainer.step(), load_file(f"{folder}.safetensors")
    return {part: f.err(_part(got, part), _part(want, part)) for part in ("loss", "grad/", "param/")}


def _part(found: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if name.startswith(prefix)}


def keys_of(folder: Path) -> set[str]:
    """All keys of a checkpoint but those of random states."""
    return {value.key for value in load_sharded_metadata(str(folder)).values()} - {dist_checkpoint.RANDOM_KEY}


def launcher(data: str, root: Path, site: Site) -> dict[str, object]:
    """The launcher's own flags: resumed here, and from two ranks elsewhere."""
    flags = ("--global-batch-size 2 --lr 0.01 --adam-eps 1e-3 --context-parallel-mode augtree "
             "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
             f"--ckpt-format torch_dist --tensor-model-parallel-size {site.tensor_parallel} ")
    own = root / f"launcher-{site.name.replace(' ', '-')}"
    whole, trainer = launcher_cases.train(data, f"{flags} --train-iters 4")
    launcher_cases.train(data, f"{flags} --train-iters 2 --save {own}")
    rest, resumed = launcher_cases.train(data, f"{flags} --train-iters 4 --load {own}")
    states = [launcher_cases.state_of(t) for t in (trainer, resumed)]
    found = {"differing": launcher_cases.differing(*states), "losses": [r.loss for r in whole],
             "same": launcher_cases.numbers(whole)[2:] == launcher_cases.numbers(rest)}
    if site.name != "augtree 2":
        rest, _ = launcher_cases.train(data, f"{flags} --train-iters 4 --load {root}/launcher-augtree-2")
        found["from 2"] = [r.loss for r in rest]
    return found


def main() -> None:
    """What each of the real ranks runs; a rank that fails says why in a file."""
    try:
        run_cases(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except Exception:
        Path(f"{sys.argv[3]}.{dist.get_rank()}").write_text(traceback.format_exc())
        raise


def run_cases(data: str, root: Path, result: Path) -> None:
    """All cases of this world; rank 0 writes what all ranks found."""
    found: dict[str, dict] = {}
    for site in (site for site in SITES.values() if site.world == int(os.environ["WORLD_SIZE"])):
        enter(site)
        found[site.name] = {"same": save_all(site, root), "launcher": launcher(data, root, site)}
        for kind in KINDS:
            for _, source in (pair for pair in loads(kind) if pair[0] == site.name):
                found[site.name][f"{kind} from {source}"] = load_from(site, SITES[source], kind, root)
    everyone = launcher_cases.everyones(found)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(everyone))


if __name__ == "__main__":
    launch.run(main)
