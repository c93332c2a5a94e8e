"""Runs of examples/grpo/team.py on real ranks; ``test_grpo_team.py`` looks at what they write.

    torchrun --nproc-per-node N tests/mcore/grpo_team_cases.py OUT_FOLDER

On 4 ranks with tensor-parallel size 2 and sequence parallelism.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from examples.grpo import steps as stepping
from examples.grpo import team, team_flags
from examples.grpo.sources import usable
from examples.grpo.task import Retrieval
from megatron_augtree.mcore import build, launch
from megatron_augtree.mcore.weights import reduced_gradients
from scripts import unshared

SIZE = ["--prompt-tokens", "60", "--groups", "3", "--samples", "6", "--response-tokens", "5"]
AUGTREE = ["--context-parallel-mode", "augtree"]
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--recompute-granularity",
                   "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
#: Everything of the loss: both masks, temperature, KL, supervised samples.
RICH = ["--drop-overlong", "--temperature", "0.8", "--kl-coef", "0.04", "--sft", "2", "--dtype", "float64",
        "--steps", "3"]
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--steps", "3"]


class Unrewarded(Retrieval):
    """No response is better than another."""

    def reward(self, question, response) -> float:
        return 0.5


@dataclass
class Cases:
    """All runs of a world."""

    out: Path
    flags: list[str]

    def training(self, name: str, *flags: str, task: type[Retrieval] = Retrieval) -> team.Training:
        """A training that writes into a folder of that name."""
        args, pretrained = team_flags.parse([*SIZE, *self.flags, *flags, "--out", str(self.out / name)])
        launch.start(args)
        if dist.get_rank() == 0:
            os.makedirs(args.out, exist_ok=True)
        _, groups = team.prepare(args, pretrained)
        return team.Training(args, pretrained, task(args.prompt_tokens, args.response_tokens), groups)

    def run(self) -> dict[str, float]:
        """Every case; figures are in the folders, and what else is found is returned."""
        self.training("augtree", *AUGTREE, *RICH, "--shadow-every", "4").run()
        self.training("stock", *RICH).run()
        self.training("whole", *AUGTREE, *SHARDED).run()
        saved = ["--save", str(self.out / "checkpoints")]
        self.training("cut", *AUGTREE, *SHARDED, *saved, "--steps", "2").run()
        self.training("cut", *AUGTREE, *SHARDED, *saved).run()
        return {"moved": self.nothing_to_learn(), "gradient": self.supervised_gradient()}

    def nothing_to_learn(self) -> float:
        """How far weights move on rollouts whose groups are all filtered out, after a step that had some."""
        training = self.training("nothing", *AUGTREE, "--steps", "2", "--weight-decay", "0.1")
        training.step(0)
        before = [p.detach().clone() for p in training.policy.model.parameters()]
        training.source = self.training("unused", *AUGTREE, task=Unrewarded).source
        found = training.step(1)
        assert found["updates"] == [] and found["kept_groups"] == 0, found
        assert "nothing to learn from" in team.line(found, 2)
        after = training.policy.model.parameters()
        return max(float((a.detach() - b).abs().max()) for a, b in zip(after, before))

    def supervised_gradient(self) -> float:
        """The gradient with supervised samples against the un-shared computation's; without TP only."""
        if self.flags:
            return 0.0
        training = self.training("gradient", *AUGTREE, *RICH, "--groups", "4", "--samples", "10")
        loss, source = training.loss, training.source
        groups = [usable(g, loss.advantage) for g in source.of_step(0).values()]
        groups = [group for group in groups if group is not None]
        work = training.steps.prepare(stepping.make_mini_batch(groups, loss.temperature))
        draw, lengths = torch.Generator().manual_seed(3), [len(r.tokens) for r in work.responses]
        apart = [[0.6 * torch.randn(n, generator=draw, dtype=torch.float64) for n in lengths]
                 for _ in range(2)]
        now = training.steps.logprobs(work)
        work.old, work.ref = ([a + b for a, b in zip(now, noise)] for noise in apart)
        gold = source.gold("here", 3)
        training.policy.forget_gradients()
        told = training.steps.gradients(work, stepping.supervised_jobs(gold, 0.7))
        found = reduced_gradients(training.policy.ddp)
        assert told["clip_fraction_low"] > 0 and told["clip_fraction_high"] > 0, told
        wanted = _unshared_gradient(training, groups, gold, work.old, work.ref)
        floor = 1e-3 * max(float(g.abs().max()) for g in wanted.values())
        return max(float((found[n] - g).abs().max()) / max(float(g.abs().max()), floor)
                   for n, g in wanted.items())


def _unshared_gradient(training, groups, gold, old, ref) -> dict[str, torch.Tensor]:
    """By megatron-core's dense attention and the formulas written out; summed over ranks."""
    args, loss = training.args, training.loss
    model = build.build_model(args, augtree=False, seed=args.seed)
    pairs = [(group, response) for group in groups for response in group.responses]
    sequences = _sum(len(pairs))
    for (group, response), before, reference in zip(pairs, old, ref):
        sample = unshared.response_mask(group.prompt, response.tokens)
        (logprobs,) = unshared.unshared_logprobs(model, [sample], temperature=loss.temperature)
        ratio, apart = (logprobs - before).exp(), logprobs - reference
        policy = torch.maximum(-ratio * response.advantage, -ratio.clamp(0.8, 1.2) * response.advantage)
        (policy + loss.kl_coef * ((-apart).exp() - 1 + apart)).mean().div(sequences).backward()
    tokens = _sum(sum(len(group.responses[0].tokens) for group in gold))
    for group in gold:
        sample = unshared.response_mask(group.prompt, group.responses[0].tokens)
        (logprobs,) = unshared.unshared_logprobs(model, [sample])
        (-0.7 * logprobs.sum() / tokens).backward()
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(found[name])
    return found


def _sum(count: int) -> int:
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def main() -> None:
    """Writes ``found.json`` on rank 0."""
    out = Path(sys.argv[1])
    flags = TENSOR_PARALLEL if launch.env_world() == 4 else []
    found = Cases(out, flags).run()
    everyones: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, found)
    if dist.get_rank() == 0:
        assert parallel_state.get_tensor_model_parallel_world_size() == (2 if flags else 1)
        worst = {name: max(f[name] for f in everyones) for name in found}
        (out / "found.json").write_text(json.dumps(worst))
    dist.barrier()
    build.destroy()


if __name__ == "__main__":
    main()
