"""What tensor parallelism and overlap must keep, on four real processes.

    torchrun --nproc-per-node 4 tests/distributed/parallel_worker.py OUT_FOLDER

Each case sets up Megatron's groups anew: TP 1 x 4 ranks of a pool, TP 2 x 2, TP 4 x 1.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.config import AugTreeConfig, InputError
from megatron_augtree.mcore import build
from megatron_augtree.mcore.ddp import gather_parameters_now
from megatron_augtree.mcore.layer_spec import prepare_model
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.packed_seq import AugTreePackedSeqParams
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.shards import gather_whole, vocabulary_shard
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, wrap_model
from megatron_augtree.rl.losses import LossConfig
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.layout import PassLayout
from megatron_augtree.runtime.logprob import row_values
from megatron_augtree.runtime.transport import DistTransport, LocalTransport
from tests.distributed.matrix import LLAMA
from tests.distributed.running import PATIENCE, run
from tests.numerics import fixtures as f

CASES = ("vocabulary", "entropy", "other_groups_on_a_peer", "value_head", "clip_norm", "overlap")
TP = "--tensor-model-parallel-size {} {}"


class ParallelWorker:
    """One rank."""

    def groups(self, size: int) -> None:
        """Megatron's process groups with tensor parallelism of `size`."""
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        self.tp = size
        self.pool = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def model(self, sequence_parallel: bool = False, dtype: str = "float64"):
        flags = TP.format(self.tp, "--sequence-parallel" * sequence_parallel)
        return f.build_model(f.parse(f"{LLAMA} {flags}", dtype), augtree=True)

    def schedule(self, **settings) -> AugTreeSchedule:
        return AugTreeSchedule(AugTreeConfig(), transport=DistTransport(self.pool), **settings)

    def play(self, ddp, batch, loss_fn=None, schedule=None, **settings) -> AugTreeSchedule:
        schedule = schedule or self.schedule(**settings)
        ddp.zero_grad_buffer()
        step = functools.partial(forward_step, loss_fn=loss_fn or Objective(batch, "nll"))
        schedule(forward_step_func=step, data_iterator=iter([batch]), model=ddp, collect=True)
        return schedule

    def batch(self, groups, **choice):
        return f.batch_of(groups, f.augtree(**choice), dist.get_world_size(self.pool))

    # Cases.

    def vocabulary(self) -> dict:
        """Log-probs, entropies and the logits' gradient of slices are those of the whole, to rounding."""
        found = {}
        for size in (2, 4):
            self.groups(size)
            shard = vocabulary_shard()
            draw = torch.Generator().manual_seed(size)
            logits = 5 * torch.randn((7, 16), generator=draw, dtype=torch.float64)
            logits[2, 3] = 800.0
            logits[3, :8] = -torch.inf
            targets = torch.tensor([0, 15, 3, 9, 7, 8, 12])
            weights = torch.randn((7, 2), generator=draw, dtype=torch.float64)
            temperature = torch.linspace(0.5, 2.0, 7)
            whole = logits.clamp(min=-1e5).requires_grad_()  # finite, for the oracle's sake
            part = logits.chunk(size, -1)[shard.rank].clone().requires_grad_()
            logs = torch.log_softmax(whole / temperature.double().unsqueeze(-1), -1)
            entropy = -(logs.exp() * logs).sum(-1)
            want = torch.stack([logs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy], -1)
            got = row_values(part, targets, temperature=temperature, entropy=True, shard=shard)
            alone = row_values(part.detach(), targets, temperature=temperature, shard=shard)
            (want * weights).sum().backward()
            (got * weights).sum().backward()
            gradient = whole.grad.chunk(size, -1)[shard.rank]
            found |= {f"values {size}": f.err({"": got}, {"": want}),
                      f"log-probs alone {size}": f.err({"": alone[:, 0]}, {"": want[:, 0]}),
                      f"gradient {size}": float((part.grad - gradient).abs().max())}
        return {"errors": found}

    def entropy(self) -> dict:
        """Case 39: policy loss with entropy coefficient 0 and 0.01: TP 2 and TP 4 give TP 1's gradients."""
        found = {}
        for coefficient in (0.0, 0.01):
            outcomes = {}
            for size, rows_cut in ((1, False), (2, False), (2, True), (4, True)):
                self.groups(size)
                ddp = wrap_model(self.model(rows_cut))
                groups = self.everywhere(lambda: f.with_policy(self.stock(), f.several()))
                batch = self.batch(groups)
                loss = LossConfig.preset("grpo", entropy_coef=coefficient, kl_coef=0.0)
                schedule = self.play(ddp, batch, Objective(batch, "grpo", loss), entropy=True,
                                     temperature=0.7)
                grads = {name: gather_whole(p.main_grad, p) for name, p in ddp.module.named_parameters()}
                outcomes[size, rows_cut] = grads, schedule.last
            want, last = outcomes.pop((1, False))
            for layout, (grads, other) in outcomes.items():
                found |= {f"{layout} {coefficient}": f.err(grads, want),
                          f"{layout} {coefficient} values": f.err({"": other.values}, {"": last.values})}
            found[f"loss {coefficient}"] = max(abs(o.loss - last.loss) for _, o in outcomes.values())
            assert coefficient == 0 or f.err(want, self.before) > 1e-3  # the entropy term is in
            self.before = want
        return {"errors": found}

    def stock(self) -> torch.nn.Module:
        """A stock model with the oracle's weights in this process alone: only where TP is 1."""
        return f.build_model(f.parse(LLAMA), augtree=False)

    def everywhere(self, compute):
        """What rank 0 computed once, with TP 1, on every rank."""
        if not hasattr(self, "_made"):
            assert self.tp == 1
            box = [compute() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(box, src=0)
            self._made = box[0]
        return self._made

    def other_groups_on_a_peer(self) -> dict:
        """Tensor-parallel peers with different groups: the same error everywhere, before any exchange."""
        self.groups(2)
        ddp = wrap_model(self.model())
        odd = parallel_state.get_tensor_model_parallel_rank() == 1
        try:
            self.play(ddp, self.batch(f.several() if odd else f.ragged()))
        except InputError as error:
            assert error.what == "ranks hold different groups"
            assert "[1, 3] differ from rank 0" in error.values, error.values
            return {"message": str(error)}
        raise AssertionError("not refused")

    def value_head(self) -> dict:
        """A replicated output layer under sequence parallelism: values and gradients as with TP 1."""
        outcomes = []
        for size, rows_cut in ((1, False), (2, False), (2, True)):
            self.groups(size)
            model = self.model(rows_cut)
            prepare_model(model).restore()
            model.output_layer = _ValueHead(model.config)
            prepare_model(model)
            ddp = wrap_model(model)
            ddp.zero_grad_buffer()
            ids, packed = _chain()
            out = ddp(ids, None, None, packed_seq_params=packed)
            (out[0, :, 0] * torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).sum().backward()
            model.config.finalize_model_grads_func([ddp], None)
            grads = {name: gather_whole(p.main_grad, p) for name, p in ddp.module.named_parameters()}
            # All pool ranks did the same: their sum is as many times the gradient.
            ranks = dist.get_world_size(self.pool)
            outcomes.append(({name: g / ranks for name, g in grads.items()}, out.detach()))
        (want, values), *others = outcomes
        assert float(want["output_layer.weight"].abs().max()) > 0
        return {"errors": {f"{i} {what}": error for i, (grads, out) in enumerate(others) for what, error in
                           (("gradients", f.err(grads, want)), ("values", f.err({"": out}, {"": values})))}}

    def clip_norm(self) -> dict:
        """Case 48: Megatron's clipping norm in fp32 with TP 2 (and SP) is that of TP 1."""
        norms = []
        for size, rows_cut in ((1, False), (2, False), (2, True)):
            self.groups(size)
            ddp, optimizer = self.trainer(self.model(rows_cut, "float32"), False, clip=1e-3)
            self.play(ddp, self.batch(f.several()))
            norms.append(float(optimizer.step()[1]))
        return {"errors": {"norm": 0.0}, "norms": norms} if max(norms) / min(norms) - 1 < 1e-5 else \
            {"errors": {"norm": max(norms) / min(norms) - 1}}

    def trainer(self, model, sharded: bool, clip: float = 0.0, **wrapping):
        parser = argparse.ArgumentParser()
        add_optimizer_arguments(parser)
        args = parser.parse_args(["--optimizer", "adam", "--lr", "0.01", "--clip-grad", str(clip)],
                                 namespace=f.parse(dtype="float32"))
        args.use_distributed_optimizer = sharded
        ddp = wrap_model(model, distributed_optimizer=sharded, **wrapping)
        return ddp, make_optimizer(args, ddp)

    def overlap(self) -> dict:
        """Case 11: steps of 2, 1, 3, 2 groups, idle ranks, phased plans; with overlap the same bits.

        Without overlap Megatron reduces everything as one bucket, and where buckets end decides in which
        order four ranks are added: the same bits are asked for with one bucket, rounding with several.
        """
        self.groups(1)
        grad = {"overlap_grad_reduce": True}
        both = {**grad, "overlap_param_gather": True}
        several = {"bucket_size": 9000}
        for sharded, ways in ((False, (grad,)), (True, (grad, both))):
            plain = self.train_unevenly(sharded)
            for way in ways:
                _same_bits(self.train_unevenly(sharded, **way), plain)
            cut = [self.train_unevenly(sharded, **way, **several) for way in ways]
            for other in cut:
                _same_bits(other, cut[0])
                error = f.err(other, plain)
                assert error < 1e-5, error
        return {}

    def train_unevenly(self, sharded: bool, **how) -> dict[str, torch.Tensor]:
        """Parameters after steps with different numbers of groups and passes; replicas have the same bits."""
        pool, idle, schedule = f.several(), 0, self.schedule()
        ddp, optimizer = self.trainer(self.model(dtype="float32"), sharded, **how)
        steps = [(pool[:2], {"degree": 1}), (pool[3:], {"degree": 1}),
                 (pool[:3], {"phase": "phased", "waves": 2, "chunks": 2}), (pool[1:3], {}),
                 (pool[2:3], {"degree": 2})]
        for step, (groups, choice) in enumerate(steps):
            batch = self.batch(groups, **choice)
            idle += not any(dist.get_rank() in p.block for p in batch.plan.passes)
            # A schedule of its own compares weights: also those that are still to be gathered.
            self.play(ddp, batch, schedule=schedule if step != 3 else None)
            optimizer.step()
            optimizer.zero_grad()
        gather_parameters_now(ddp)
        found = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (idle, found))
        assert any(number for number, _ in everyone), "no rank was idle"
        for _, replica in everyone:
            _same_bits(replica, found)
        return found


def _same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class _ValueHead(torch.nn.Linear):
    """As RL frameworks replace the output layer for a critic."""

    def __init__(self, config) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self.sequence_parallel = config.sequence_parallel
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, config.hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, input_, weight=None, runtime_gather_output=None):
        values = super().forward(input_)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def _chain():
    """(ids, pack) of five rows of one sequence, three of them scored; the head's values are kept."""
    batch = f.batch_of([f.group((5, 9, 2), (61, 7, 33))], f.augtree(), 1)
    cpu = torch.device("cpu")
    engine = Engine(batch.plan, batch.forest, None, LocalTransport(1), get_kernel("reference", cpu))
    (only,) = batch.plan.passes
    rows = PassLayout(only, batch.forest).local([0], cpu)
    return rows.inputs.unsqueeze(0), AugTreePackedSeqParams(
        positions=rows.positions, context=engine.context(only, {}), scored=rows.scored,
        score=lambda values, _: values)


def main() -> None:
    torch.set_num_threads(1)
    build.initialize(f.parse(LLAMA), timeout_s=PATIENCE)
    worker = ParallelWorker()
    run(enumerate(getattr(worker, name) for name in CASES), Path(sys.argv[1]))
    build.destroy()


if __name__ == "__main__":
    main()
