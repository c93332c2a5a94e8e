"""Plays one world's part of the parity matrix on real processes; a result file a case and rank.

    torchrun --nproc-per-node N tests/distributed/matrix_worker.py ORACLES OUT_FOLDER

ORACLES holds, for every model and data set, groups and the un-shared outcome: made in a process of its own,
where there is no tensor parallelism.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore import build
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.shards import gather_whole
from megatron_augtree.mcore.update import TorchOptimizer, wrap_model
from megatron_augtree.mcore.weights import reduced_gradients
from megatron_augtree.runtime.transport import DistTransport
from tests.distributed.matrix import FROZEN, MODELS, PLANS, RECOMPUTE, cases
from tests.distributed.running import PATIENCE, run
from tests.numerics import fixtures as f


class MatrixWorker:
    """One rank."""

    def __init__(self, oracles: Path) -> None:
        self.oracles = torch.load(oracles, weights_only=False)
        self.tp = 0

    def play(self, case: dict) -> dict:
        """Errors of one case against the un-shared run; two steps of the same batch give the same bits."""
        self._parallel(2 if "TP 2" in case["layout"] else 1)
        groups, want, start = self.oracles[case["model"], case["data"]]
        ddp = self._model(case)
        names = {name for name, p in ddp.module.named_parameters() if p.requires_grad}
        pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
        batch = f.batch_of(groups, _program(PLANS[case["plan"]]), dist.get_world_size(pool))
        config = AugTreeConfig(mode=batch.plan.mode, keep_attention=RECOMPUTE[case["recompute"]][1])
        schedule = AugTreeSchedule(config, transport=DistTransport(pool))
        whole = {name: gather_whole(p, p) for name, p in ddp.module.named_parameters()}
        assert all(torch.equal(whole[name], start[name]) for name in start), "other weights than the oracle's"
        outcomes = [self._step(ddp, schedule, batch) for _ in range(2)]
        first, second = outcomes
        assert all(torch.equal(first.grads[name], second.grads[name]) for name in names), "another step 2"
        wanted = f.Outcome(want.loss, want.logprobs, {name: want.grads[name] for name in names})
        found = f.errors(first, wanted, {name: start[name] for name in names})
        found["norm"] = self._clipped_step(ddp, case, wanted, start)
        return {"errors": found, "rows": batch.plan.rows_of_rank(dist.get_rank(pool))}

    def _parallel(self, size: int) -> None:
        if self.tp != size:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
            self.tp = size

    def _model(self, case: dict):
        flags = f"{MODELS[case['model']]} {RECOMPUTE[case['recompute']][0]} " \
                f"--tensor-model-parallel-size {self.tp} {'--sequence-parallel' * ('SP' in case['layout'])}"
        model = f.build_model(f.parse(flags), augtree=True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not FROZEN[case["frozen"]](name))
        # Buckets of a few layers' parameters, so that several are under way.
        return wrap_model(model, distributed_optimizer=case["sharded"], overlap_grad_reduce=case["overlap"],
                          bucket_size=9000)

    def _step(self, ddp, schedule: AugTreeSchedule, batch) -> f.Outcome:
        ddp.zero_grad_buffer()
        (metrics,) = schedule(
            forward_step_func=functools.partial(forward_step, loss_fn=Objective(batch, "grpo")),
            data_iterator=iter([batch]), model=ddp, collect=True)
        return f.Outcome(metrics["loss"], schedule.last.values[:, 0].clone(), reduced_gradients(ddp))

    def _clipped_step(self, ddp, case: dict, want: f.Outcome, start: dict) -> float:
        """Error of the norm, and of parameters after a clipped SGD step."""
        if case["sharded"]:  # torch's optimizers want whole gradients
            return 0.0
        trained = [p for p in ddp.parameters() if p.requires_grad]
        norm = math.sqrt(sum(float(g.square().sum()) for g in want.grads.values()))
        optimizer = TorchOptimizer(torch.optim.SGD(trained, lr=0.5), clip_grad=0.3 * norm)
        _, found, _ = optimizer.step()
        expected = {name: start[name] - 0.5 * 0.3 * norm / (norm + 1e-6) * grad
                    for name, grad in want.grads.items()}
        after = {name: gather_whole(p, p) for name, p in ddp.module.named_parameters() if p.requires_grad}
        return max(abs(found - norm) / norm, f.err(after, expected))


def _program(fields: dict) -> f.Program:
    fields = dict(fields)
    return f.Program(fields.pop("mode", "augtree"), tuple(fields.items()))


def main() -> None:
    torch.set_num_threads(1)
    oracles, folder = map(Path, sys.argv[1:3])
    build.initialize(f.parse(MODELS["llama"]), timeout_s=PATIENCE)
    worker, world = MatrixWorker(oracles), dist.get_world_size()
    mine = [case for case in cases() if case["world"] == world]
    # One layout after the other: groups are made anew but once.
    ordered = sorted(enumerate(mine), key=lambda item: item[1]["layout"])
    run(((index, functools.partial(worker.play, case)) for index, case in ordered), folder)
    build.destroy()


if __name__ == "__main__":
    main()
