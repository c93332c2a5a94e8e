"""One long-lived process a rank: runs a list of cases on real gloo processes, a result file a case and rank.

    torchrun --nproc-per-node N tests/distributed/worker.py OUT_FOLDER

After every case the ranks agree through these files, not through the process group: where one failed and
others may be waiting for it, the rest is reported as not run instead of hanging. Cases that fail in the same
way on every rank (a comparison, a refusal) are followed by the next one.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError
from megatron_augtree.data.groups import fold, read_groups, truncate
from megatron_augtree.mcore import build
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.sampler import StepBatch, model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, wrap_model
from megatron_augtree.mcore.weights import reduced_gradients
from megatron_augtree.planning.schedule import promise, reverse
from megatron_augtree.runtime.transport import DistTransport, LocalTransport
from tests.distributed.cases import CASES, REAL
from tests.distributed.device import NoStreams
from tests.distributed.running import PATIENCE, bound, run
from tests.numerics import fixtures as f


class Worker:
    """One rank, with the models that all cases share."""

    def __init__(self) -> None:
        build.initialize(f.parse(), timeout_s=PATIENCE)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.lab = f.Lab()
        self.ddp = wrap_model(f.build_model(self.lab.args, augtree=True))
        self.model = model_shape(self.ddp.module.config, f.VOCAB)

    # What cases are made of.

    def everywhere(self, value):
        """Rank 0's object on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def on_rank_0(self, compute):
        """What rank 0 computed, on every rank; an error of rank 0 is raised everywhere."""
        found = None
        if self.rank == 0:
            try:
                found = "value", compute()
            except Exception:
                found = "error", traceback.format_exc()
        kind, value = self.everywhere(found)
        if kind == "error":
            raise AssertionError(value)
        return value

    def batch(self, groups: list, program: dict) -> StepBatch:
        """A step by the planner's way, or by a choice."""
        if "choice" in program:
            return f.batch_of(groups, f.augtree(**program["choice"]), self.world)
        batch = plan_step(groups, self.model, self.world, AugTreeConfig(min_shared_rows=4, **program))
        batch.plan.check(pairs=True)
        return batch

    def play(self, batch: StepBatch, kind: str, *, ddp=None, delay=None, streams=None, loss_fn=None, **how):
        """(outcome with reduced gradients, metrics, transport) of one step on real processes."""
        ddp = ddp or self.ddp
        transport = DistTransport(self.pool, delay, streams)
        schedule = AugTreeSchedule(AugTreeConfig(mode=batch.plan.mode), transport=transport)
        ddp.zero_grad_buffer()
        (metrics,) = schedule(
            forward_step_func=functools.partial(forward_step, loss_fn=loss_fn or Objective(batch, kind)),
            data_iterator=iter([batch]), model=ddp, collect=True, **how)
        grads = {name: p.main_grad.detach().clone() for name, p in ddp.module.named_parameters()}
        return f.Outcome(metrics["loss"], schedule.last.values[:, 0].clone(), grads), metrics, transport

    def check_traffic(self, batch: StepBatch, transport: DistTransport) -> int:
        """Bytes and messages of this rank are those promised; returns the bytes."""
        sizes, messages, plan = {}, 0, batch.plan
        for p in plan.passes:
            if self.rank not in p.block:
                continue
            layers = self.model.layers
            again = max(layers - p.keep_layers - p.keep_attention, 0) if p.keep_layers >= 0 else 0
            sent = [(made, layers) for made in f.sent_forward(plan, p)]
            sent += [(plan.program(p.id), again), (reverse(plan.program(p.id), keep=p.keep), layers)]
            for made, times in sent:
                promised = promise(made, p.block.index(self.rank), self.model)
                messages += times * promised.messages
                for name, size in promised.bytes.items():
                    sizes[name] = sizes.get(name, 0) + times * size
        traffic = transport.traffic[self.rank]
        assert (dict(traffic.bytes), traffic.messages) == (sizes, messages)
        return sum(sizes.values())

    # Cases.

    def parity(self, program: dict, data: str, kind: str) -> dict:
        """Loss, log-probs, gradients and steps against the un-shared run; metrics against one process."""
        groups, want = self.on_rank_0(lambda: self.lab.data(data, kind))
        batch = self.batch(groups, program)
        got, metrics, transport = self.play(batch, kind)
        sent = self.check_traffic(batch, transport)
        found = f.errors(got, want, self.lab.start)
        if self.rank == 0:
            alone = f.batch_of(groups, f.augtree(), 1)
            schedule = AugTreeSchedule(AugTreeConfig(), transport=LocalTransport(1))
            f.play(self.lab.tree, alone, kind, schedule=schedule)
            assert metrics.keys() == {"loss", *schedule.last.metrics}
            found["metrics"] = max(abs(metrics[name] - value) / max(1, abs(value))
                                   for name, value in schedule.last.metrics.items())
        return {"errors": found, "bits": _bits(got), "bytes": sent,
                "rows": batch.plan.rows_of_rank(self.rank)}

    def delays(self, program: dict, data: str) -> dict:
        """Random delays before sends change no bit."""
        batch = self.batch(self.on_rank_0(lambda: self.lab.data(data))[0], program)
        plain = self.play(batch, "grpo")[0]
        draw = random.Random(self.rank)
        late = self.play(batch, "grpo", delay=lambda: draw.choice([0, 0, 0.002, 0.02]))[0]
        assert _bits(plain) == _bits(late)
        return {"bits": _bits(late)}

    def prefetched(self, program: dict, data: str) -> dict:
        """Prompt keys a layer ahead, with random delays before sends: the same bits and bytes as without.

        Then a wave's second layer raises on every rank: what was under way is not taken for the next step's.
        """
        batch = self.batch(self.on_rank_0(lambda: self.lab.data(data))[0], program)
        passes = tuple(replace(p, prefetch=False) for p in batch.plan.passes)
        plain, _, alone = self.play(replace(batch, plan=replace(batch.plan, passes=passes)), "grpo")
        draw = random.Random(self.rank)
        got, _, transport = self.play(batch, "grpo", delay=lambda: draw.choice([0, 0, 0.002, 0.02]))
        assert _bits(plain) == _bits(got)
        assert [t.bytes for t in transport.traffic] == [t.bytes for t in alone.traffic]
        sent = self.check_traffic(batch, transport)
        layer = self.ddp.module.decoder.layers[1]

        def fail(module, args, kwargs):
            if kwargs["packed_seq_params"].context.prefetch is not None:
                raise LookupError

        hook = layer.register_forward_pre_hook(fail, with_kwargs=True)
        try:
            self.play(batch, "grpo", delay=lambda: draw.choice([0, 0.002]))
        except LookupError:
            pass
        else:
            raise AssertionError("no layer failed")
        finally:
            hook.remove()
        assert _bits(self.play(batch, "grpo")[0]) == _bits(plain)
        return {"bits": _bits(got), "bytes": sent}

    def streamed(self, program: dict, data: str) -> dict:
        """The way of a device with streams, with its message buffers used again and again: the same bits."""
        batch = self.batch(self.on_rank_0(lambda: self.lab.data(data))[0], program)
        plain, _, alone = self.play(batch, "grpo")
        got, _, transport = self.play(batch, "grpo", streams=NoStreams())
        assert _bits(plain) == _bits(got)
        assert transport.traffic == alone.traffic
        return {"bits": _bits(got), "bytes": self.check_traffic(batch, transport)}

    def other_data(self) -> dict:
        """Ranks with different groups: the same error everywhere, before anything is exchanged."""
        groups = f.several() if self.rank == 1 else f.ragged()
        return self.refused(f.batch_of(groups, f.augtree(), self.world), "ranks hold different groups")

    def other_plan(self) -> dict:
        """Ranks with different plans for the same groups."""
        return self.refused(f.batch_of(f.ragged(), f.augtree(keep=self.rank != 1), self.world),
                            "ranks hold different plans")

    def other_weights(self) -> dict:
        """Ranks whose models differ in a single bit of one parameter."""
        model = f.build_model(self.lab.args, augtree=True)
        if self.rank == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1).view(torch.int64)[-1] ^= 1
        return self.refused(f.batch_of(f.ragged(), f.augtree(), self.world), "ranks hold different weights",
                            ddp=wrap_model(model))

    def other_flags(self) -> dict:
        """Ranks started with different command lines; where files lie may differ."""
        own = argparse.Namespace(seed=1, objective="nll", lr=0.1, load=f"folder-{self.rank}", steps=None)
        build.compare_flags(own)
        told = set()
        for flag, value in {"seed": 2, "objective": "grpo", "lr": 0.2, "steps": 3}.items():
            other = argparse.Namespace(**{**vars(own), **({flag: value} if self.rank == 1 else {})})
            try:
                build.compare_flags(other)
            except InputError as error:
                assert "ranks [1]" in error.values and error.values.endswith(f"--{flag}"), error
                told.add(str(error))
        assert len(told) == 4
        return {"message": sorted(told)[0]}

    def refused(self, batch: StepBatch, what: str, **how) -> dict:
        try:
            self.play(batch, "nll", **how)
        except InputError as error:
            assert error.what == what and "ranks [1]" in error.values, error
            return {"message": str(error)}
        raise AssertionError("not refused")

    def broken_loss(self) -> dict:
        """A loss function in Megatron's three-value form: a clear error everywhere."""
        groups = self.on_rank_0(lambda: self.lab.data("ragged"))[0]
        batch = self.batch(groups, {"choice": {}})

        def three(values):
            return values.values.sum(), torch.tensor(3), {}

        try:
            self.play(batch, "nll", loss_fn=three)
        except AugTreeError as error:
            assert "3 values" in error.values
            return {"message": str(error)}
        raise AssertionError("not refused")

    def skipped_rank(self) -> dict:
        """The mutation must be seen: the last rank's gradients are lost before the reduction."""
        groups, want = self.on_rank_0(lambda: self.lab.data("ragged"))
        config = self.ddp.module.config
        finalize = config.finalize_model_grads_func

        def forgetful(models, tokens):
            if self.rank == self.world - 1:
                for buffer in self.ddp.buffers:
                    buffer.grad_data.zero_()
            finalize(models, tokens)

        batch = self.batch(groups, {"choice": {"lane_degree": 8}})
        assert batch.plan.rows_of_rank(self.world - 1) > 0
        try:
            config.finalize_model_grads_func = forgetful
            got = self.play(batch, "grpo")[0]
        finally:
            config.finalize_model_grads_func = finalize
        assert f.err(got.grads, want.grads) > 1e-3
        return {"bits": _bits(got)}

    def adam(self, sharded: bool) -> dict:
        """Megatron's fp32 Adam (and distributed optimizer) equals torch's, fed with the same gradients."""
        groups = self.on_rank_0(lambda: self.lab.data("several"))[0]
        args, ddp, optimizer = self.trainer("float32", sharded)
        start = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
        batch = f.batch_of(groups, f.augtree(), self.world)
        self.play(batch, "grpo", ddp=ddp)
        grads = reduced_gradients(ddp)
        assert all(float(grad.abs().max()) > 0 for grad in grads.values())
        parameters = {name: torch.nn.Parameter(value) for name, value in start.items()}
        for name, parameter in parameters.items():
            parameter.grad = grads[name]
        torch.optim.Adam(parameters.values(), lr=args.lr, eps=args.adam_eps).step()
        optimizer.step()
        found = f.err(dict(ddp.module.named_parameters()), parameters)
        assert found < 1e-6, found
        return {"bits": _hash(dict(ddp.module.named_parameters())), "difference": found}

    def trainer(self, dtype: str, sharded: bool, eps: float = 1e-8):
        """(arguments, DDP, Megatron's optimizer) of a fresh model."""
        parser = argparse.ArgumentParser()
        add_optimizer_arguments(parser)
        args = parser.parse_args(["--optimizer", "adam", "--lr", "0.01", "--adam-eps", str(eps)],
                                 namespace=f.parse(dtype=dtype))
        args.use_distributed_optimizer = sharded
        ddp = wrap_model(f.build_model(args, augtree=True), distributed_optimizer=sharded)
        return args, ddp, make_optimizer(args, ddp)

    def steps(self) -> dict:
        """Steps of unequal numbers of groups, ranks without a group among them: replicas stay bit-identical.

        Both optimizers follow a run in one process: at Adam's eps of 1e-3 its amplification of rounding is
        small.
        """
        pool = self.on_rank_0(lambda: self.lab.data("several"))[0]
        runs = []
        for sharded in (False, True):
            _, ddp, optimizer = self.trainer("float32", sharded, eps=1e-3)
            bits = []
            for groups in (pool[:2], pool[3:], pool[:3], pool[1:3], pool[2:3]):
                self.play(f.batch_of(groups, f.augtree(degree=1), self.world), "nll", ddp=ddp)
                optimizer.step()
                optimizer.zero_grad()
                bits.append(_hash(dict(ddp.module.named_parameters())))
            runs.append((ddp.module, bits))
        found = {"sharded": f.err(dict(runs[1][0].named_parameters()), dict(runs[0][0].named_parameters()))}
        alone = f.build_model(f.parse(dtype="float32"), augtree=True)
        adam = torch.optim.Adam(alone.parameters(), lr=0.01, eps=1e-3)
        for groups in (pool[:2], pool[3:], pool[:3], pool[1:3], pool[2:3]):
            f.play(alone, f.batch_of(groups, f.augtree(), 1), "nll")
            adam.step()
        found["one process"] = f.err(dict(runs[0][0].named_parameters()), dict(alone.named_parameters()))
        assert max(found.values()) < 1e-4, found
        return {"bits": json.dumps([bits for _, bits in runs]), "errors": {}}

    def real(self, file: str, kind: str) -> dict:
        """The two longest groups of a real file, cut so that the dense oracle fits."""
        def prepare():
            groups = f.with_policy(self.lab.stock, fold(truncate(longest(file), 600, 90), f.VOCAB), seed=1)
            return groups, f.oracle(self.lab.stock, groups, kind)

        groups, want = self.on_rank_0(prepare)
        found = {}
        for program in ({"mode": "augtree"}, {"mode": "ring-reuse"}):
            got = self.play(self.batch(groups, program), kind)[0]
            found |= {f"{program['mode']} {name}": value
                      for name, value in f.errors(got, want, self.lab.start).items()}
        return {"errors": found, "bits": _bits(got)}

    def long(self, file: str) -> dict:
        """Untruncated, forward only, fp32: log-probs of AugTree and of ring within 1e-4."""
        groups = fold(longest(file), f.VOCAB)
        model = f.build_model(f.parse(dtype="float32"), augtree=True)
        values = {}
        for mode in ("augtree", "ring"):
            batch = self.batch(groups, {"mode": mode})
            got = self.play(batch, "nll", ddp=_Bare(model), forward_only=True)[0]
            values[mode] = got.logprobs
        difference = float((values["augtree"] - values["ring"]).abs().max())
        assert len(values["ring"]) and difference < 1e-4, difference
        return {"bits": _hash(values), "difference": difference}


class _Bare(torch.nn.Module):
    """A model without DDP, for forward passes: no gradients to keep."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.config = module, module.config
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros(1)

    def zero_grad_buffer(self) -> None:
        """Nothing to do."""

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def longest(file: str, count: int = 2) -> list:
    """The groups of a real file with most tokens."""
    groups = read_groups(REAL / f"{file}.jsonl.gz")
    return sorted(groups, key=lambda g: -sum(len(g.prompt) + len(r.tokens) for r in g.responses))[:count]


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _bits(outcome: f.Outcome) -> str:
    return _hash({**outcome.grads, "/logprobs": outcome.logprobs, "/loss": torch.tensor([outcome.loss])})


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    worker = Worker()
    run(((i, bound(worker, case)) for i, case in enumerate(CASES[worker.world])), folder)
    build.destroy()


if __name__ == "__main__":
    main()
