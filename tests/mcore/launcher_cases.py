"""Groups, flags and runs that the launcher's tests share; also what its real ranks run (see ``main``)."""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import importlib.util
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from megatron_augtree.data.groups import Group, Response, write_groups
from megatron_augtree.mcore import checkpoint, launch, objective
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.transport import DistTransport, Transport

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 64 --vocab-size 64 --untie-embeddings-and-output-weights --augtree-min-shared-rows 4 "
)
#: Flags of AugTree are refused without a mode.
STOCK_MODEL = MODEL.replace("--augtree-min-shared-rows 4 ", "")


def load_example() -> ModuleType:
    """The launcher as a module; data workers and pickling find it by name."""
    name = "augtree_pretrain_gpt"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


example = load_example()


def make_groups(count: int = 5) -> list[Group]:
    """Groups of four responses with everything that a policy loss may need."""
    rng = random.Random(3)
    groups = []
    for number in range(count):
        prompt = tuple(rng.randrange(64) for _ in range(rng.randrange(9, 17)))
        responses = []
        for index, length in enumerate((1, 5, 3, 0 if number == 2 else 4)):
            logprobs = tuple(-4.2 + 0.6 * rng.random() for _ in range(length))
            tokens = tuple(rng.randrange(64) for _ in range(length))
            responses.append(
                Response(
                    tokens,
                    (True,) * length,
                    reward=float(index % 2),
                    old_logprobs=logprobs,
                    ref_logprobs=tuple(x - 0.1 for x in logprobs),
                )
            )
        groups.append(Group(f"g{number}", prompt, tuple(responses)))
    return groups


def write_data(folder: Path) -> Path:
    """A group file, gzip."""
    path = folder / "groups.jsonl.gz"
    write_groups(path, make_groups())
    return path


def prepared(data: Path | str, flags: str, world: int = 1):
    """A checked training; ``--context-parallel-mode`` among the flags or stock Megatron."""
    shape = MODEL if "--context-parallel-mode" in flags else STOCK_MODEL
    words = f"{shape} --num-workers 0 --data-path {data} {flags}".split()
    return example.prepare(example.parser().parse_args(words), world)


def train(data: Path | str, flags: str, transport: Transport | None = None, world: int | None = None):
    """Records and trainer of a run."""
    world = transport.world if transport is not None else (world or dist.get_world_size())
    ready = prepared(data, flags, world)
    return example.train(ready, transport)


def state_of(trainer) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's tensors (this rank's shard), by name."""
    found = {f"model/{name}": p.detach().clone() for name, p in trainer.ddp.module.named_parameters()}
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        inner = getattr(part, "optimizer", None) or part.inner
        for group in inner.param_groups:
            for number, parameter in enumerate(group["params"]):
                found[f"main/{number}"] = parameter.detach().clone()
        for number, values in inner.state_dict()["state"].items():
            found |= {
                f"state/{number}/{name}": value.clone()
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
    return found


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits differ, or that only one has."""
    return [
        name
        for name in sorted(a.keys() | b.keys())
        if name not in a
        or name not in b
        or a[name].dtype != b[name].dtype
        or not torch.equal(a[name], b[name])
    ]


def numbers(records) -> list[dict]:
    """What a run reports but times, of every step."""
    return [{"loss": r.loss, "grad_norm": r.grad_norm, "metrics": r.metrics} for r in records]


def start(data: str, flags: str = "") -> None:
    """Process group and Megatron of a real rank."""
    first = example.parser().parse_args(f"{STOCK_MODEL} --data-path {data} --train-iters 1 {flags}".split())
    launch.start(first)


def die(data: str) -> None:
    """Two steps; in the second one's loss, rank 1 is killed."""
    start(data)
    steps, policy_loss = [], objective.policy_loss

    def step(self, batch):
        steps.append(batch)
        return trained(self, batch)

    def deadly(*arguments):
        if len(steps) == 2 and dist.get_rank() == 1:
            os.write(2, f"dies at {time.monotonic()}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return policy_loss(*arguments)

    trained, example.Trainer.step, objective.policy_loss = example.Trainer.step, step, deadly
    train(data, "--context-parallel-mode augtree --objective grpo --global-batch-size 2 --train-iters 2")


def guard(data: str, result: str, tensor_parallel: str) -> None:
    """Ten guarded steps of one kind, in which rank 1 is slow wherever the plan is not ring's."""
    parallel = f"--tensor-model-parallel-size {tensor_parallel}"
    start(data, parallel)
    play, modes = Engine.play, []

    def slow(self, *arguments, **keywords):
        modes.append(self.plan.mode)
        result = play(self, *arguments, **keywords)
        time.sleep(1.5 * (dist.get_rank() == 1 and self.plan.mode != "ring"))
        return result

    Engine.play = slow
    flags = f"--context-parallel-mode augtree --augtree-guard-steps 3 {parallel}"
    flags += f" --augtree-force degree={dist.get_world_size() // int(tensor_parallel)}"
    records, _ = train(data, f"{flags} --global-batch-size 2 --train-iters 10")
    found = {
        "modes": everyones(modes),
        "fallback": everyones([record.fallback_steps for record in records]),
        "lines": everyones([record.line(10) for record in records]),
    }
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))


def refused_save(trainer) -> int:
    """The code with which this rank ends where rank 0 cannot write a file of a checkpoint."""

    def full(*arguments):
        raise OSError("no room, on purpose")

    if dist.get_rank() == 0:
        checkpoint.save_file = full
    try:
        trainer.save()
    except SystemExit as end:
        return end.code
    return 0


def everyones(value) -> list:
    """[rank] value."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    """What each of the real ranks runs: argv is the data, a scratch folder, and the result's path."""
    if sys.argv[1] == "die":
        return die(sys.argv[2])
    if sys.argv[1] == "guard":
        return guard(*sys.argv[2:])
    data, folder, result = sys.argv[1:4]
    start(data)
    found: dict[str, object] = {}
    grpo = "--train-iters 2 --global-batch-size 2 --objective grpo --optimizer sgd --lr 0.1 --dtype float64 "
    for mode in ("", "--context-parallel-mode ring", "--context-parallel-mode augtree"):
        records, trainer = train(data, f"{grpo} {mode} --save {folder}/real{mode[-4:].strip()}")
        found[mode[24:] or "stock"] = numbers(records)
        found["parameters " + (mode[24:] or "stock")] = {
            name: float(value.norm()) for name, value in state_of(trainer).items()
        }
    # Each rank saves, and gets back, its own shard.
    adam = (
        "--context-parallel-mode augtree --global-batch-size 1 --use-distributed-optimizer --num-workers 1 "
    )
    _, whole = train(data, f"{adam} --train-iters 3")
    _, half = train(data, f"{adam} --train-iters 1 --save {folder}/shards")
    _, rest = train(data, f"{adam} --train-iters 3 --load {folder}/shards")
    found["shards"] = everyones(
        [differing(state_of(whole), state_of(rest)), len(differing(state_of(half), state_of(rest)))]
    )
    mine = torch.tensor([dist.get_rank() + 1.0])
    total = DistTransport().total(mine)
    found["total"] = everyones([float(mine), float(total)])
    found["save refused"] = everyones(refused_save(half))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    launch.run(main)
