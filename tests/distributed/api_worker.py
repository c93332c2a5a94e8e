"""One process a rank that uses the public API on real gloo processes; a result file a case and rank.

torchrun --nproc-per-node N tests/distributed/api_worker.py OUT_FOLDER
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.mcore import api, build
from megatron_augtree.mcore.update import add_optimizer_arguments, make_optimizer, wrap_model
from megatron_augtree.mcore.weights import reduced_gradients
from scripts.unshared import unshared_logits, unshared_logprobs
from tests.distributed.api_cases import CASES, PLANS
from tests.distributed.api_parts import ApiRank, batch_of, distance, group_of, refused
from tests.distributed.running import bound, run
from tests.numerics import fixtures as f


class ApiWorker(ApiRank):
    """One rank's cases."""

    def tier2(self, plan: str, deal: str, data: str, scaling: str = "plain") -> dict:
        """Loss, gradients and this rank's log-probs against the un-shared run."""
        groups, want = self.lab.data(data)
        handle = self.handle(plan, scaling)
        mine = self.deal(groups, deal)
        found = self.step(handle, groups, mine)
        grads = reduced_gradients(handle.model)
        if scaling == "fp16":
            grads = {name: grad / 1024 for name, grad in grads.items()}
        assert found.metrics["tokens"] == len(want.logprobs), found.metrics
        return {
            "errors": {
                "loss": abs(found.loss - want.loss) / abs(want.loss),
                "gradients": f.err(grads, want.grads),
                "logprobs": distance(found.outputs, groups, mine, want),
            },
            "rows": found.stats["rows"],
        }

    def tier1(self, plan: str, deal: str, data: str) -> dict:
        """The same, in a forward_step under Megatron's own schedule, per-token loss."""
        groups, want = self.lab.data(data)
        handle = self.handle(plan)
        mine = self.deal(groups, deal)
        batch, loss, tokens = batch_of(groups, mine)
        step = api.plan(handle, batch)
        owned = sorted(self.schedule(handle, step, loss, tokens))
        assert owned == [i for i, s in enumerate(step.samples) if s.computed.any()], "every sample once"
        return {"errors": {"gradients": f.err(reduced_gradients(handle.model), want.grads)}}

    def common_samples(self) -> dict:
        """Context-parallel peers give the same samples: the loss counts each once, all get all values."""
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(context_parallel_size=self.world)
        try:
            groups, want = self.lab.data("several")
            everything = self.deal(groups, "all to the last") or list(
                range(sum(len(g.responses) for g in groups))
            )
            batch, loss, tokens = batch_of(groups, everything)
            handle, calls = self.handle("waves"), []
            plan = api.plan(handle, batch, scope="cp")

            def counted(outputs):
                calls.extend(outputs.index.tolist())
                return loss(outputs)

            found = api.forward_backward(handle, batch, plan, counted, normalizer=tokens)
            old = api.forward_logprobs(handle, batch, plan)
            assert torch.equal(old.values["logprobs"], found.outputs.values["logprobs"])
            everyone = [None] * self.world
            dist.all_gather_object(everyone, calls)
            scored = [i for i, s in enumerate(plan.samples) if s.computed.any()]
            assert sorted(sum(everyone, [])) == scored and all(everyone), everyone
            error = {
                "gradients": f.err(reduced_gradients(handle.model), want.grads),
                "loss": abs(found.loss - want.loss),
                "logprobs": distance(found.outputs, groups, everything, want),
            }
            other, _, _ = batch_of(groups, everything[self.rank == 1 :])
            refused(lambda: api.plan(handle, other, scope="cp"), "hold different samples")
            scope = "pool" if self.rank == 1 else "cp"
            refused(lambda: api.plan(self.handle("waves"), batch, scope=scope), "ranks [1] with scope='pool'")
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
        return {"errors": error}

    def accumulation(self) -> dict:
        """Three groups through the API in two calls, the fourth through stock micro-batches between them."""
        groups, want = self.lab.data("several")
        handle = self.handle("planned", "overlap")
        tokens = len(want.logprobs)
        for _ in range(2):  # the second step meets what overlap recorded in the first
            handle.model.zero_grad_buffer()
            parts = [(groups[:1], "in turn", False), (None, "", False), (groups[1:3], "uneven", True)]
            for part, deal, last in parts:
                if part is None:
                    self._stock_group(handle, groups[3], tokens)
                    continue
                batch, loss, _ = batch_of(part, self.deal(part, deal))
                api.forward_backward(
                    handle, batch, api.plan(handle, batch), loss, normalizer=tokens, finalize=last
                )
            found = f.err(reduced_gradients(handle.model), want.grads)
            assert found < 1e-10, found
        return {"errors": {"gradients": found}}

    def _stock_group(self, handle, group, tokens) -> None:
        """Megatron's own schedule on whole sequences; only the last rank has any."""
        answers = list(group.responses) if self.rank == self.world - 1 else []

        def forward_step(iterator, model):
            answer = next(iterator, None)
            ids = torch.tensor([[*group.prompt, *answer.tokens][:-1]]) if answer else torch.tensor([[0]])
            logits = model(ids, torch.arange(ids.shape[1])[None], None)
            return logits, functools.partial(loss_of, answer)

        def loss_of(answer, logits):
            none = torch.tensor(0, dtype=torch.int)
            if answer is None:
                return logits.sum() * 0, none, {}
            chosen = torch.log_softmax(logits[0], -1)[len(group.prompt) - 1 :]
            values = chosen.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            return f.grpo(values[torch.tensor(answer.loss_mask)], answer, tokens), none, {}

        with handle.accumulating():
            forward_backward_no_pipelining(
                forward_step_func=forward_step,
                data_iterator=iter(answers),
                model=handle.model,
                num_microbatches=max(len(answers), 1),
                seq_length=1,
                micro_batch_size=1,
            )

    def tensor_parallel(self, sequence_parallel: bool, plan: str) -> dict:
        """Both tiers and a top-k head on TP 2; tensor-parallel peers give the same samples."""
        groups, want = self.lab.data("several")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        try:
            self.pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
            pool_rank, pool = dist.get_rank(self.pool), dist.get_world_size(self.pool)
            flags = f"{f.MODEL} --tensor-model-parallel-size 2 {'--sequence-parallel' * sequence_parallel}"
            handle = self.handle(plan, args=f.parse(flags))
            mine = list(range(sum(len(g.responses) for g in groups)))[pool_rank::pool]
            batch, loss, tokens = batch_of(groups, mine)
            step = api.plan(handle, batch)
            out = api.forward_backward(handle, batch, step, loss, normalizer=tokens)
            errors = {
                "tier 2": f.err(reduced_gradients(handle.model), want.grads),
                "logprobs": distance(out.outputs, groups, mine, want),
            }
            top = api.forward_logprobs(handle, batch, step, head=api.topk_head(5))
            assert torch.equal(top.values["logprobs"], out.outputs.values["logprobs"])
            errors["topk"] = self._topkdistance(top, groups, mine)
            if "phased" not in PLANS[plan].get("force", ""):
                handle.model.zero_grad_buffer()
                self.schedule(handle, step, loss, tokens)
                errors["tier 1"] = f.err(reduced_gradients(handle.model), want.grads)
            apart = batch_of(groups, mine[: len(mine) - parallel_state.get_tensor_model_parallel_rank()])[0]
            refused(lambda: api.plan(handle, apart), "tensor-parallel ranks hold different samples")
            # Its pool is told, and the pool of its peers.
            wrong = api.Batch([torch.tensor([f.VOCAB])], [torch.tensor([])]) if self.rank == 1 else batch
            refused(lambda: api.plan(handle, wrong), "ranks [1]; of rank 1: a batch does not fit")
            refused(
                lambda: api.forward_backward(handle, wrong, step, loss, normalizer=tokens),
                "ranks [1]; of rank 1: a batch does not fit",
            )
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
            self.pool = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return {"errors": errors}

    def _topkdistance(self, top, groups: list, mine: list[int]) -> float:
        """Of top-k log-probs to those of the stock model without tensor parallelism."""
        pairs = [(g, r) for g in groups for r in g.responses]
        worst = 0.0
        for i, values, ids in zip(mine, top.as_list("topk_logprobs"), top.as_list("topk_ids")):
            group, answer = pairs[i]
            ((logits),) = unshared_logits(self.lab.stock, f.sequences([group_of(group, answer)]))
            want = torch.log_softmax(logits.detach(), -1).topk(5, -1)
            assert torch.equal(ids, want.indices)
            worst = max(worst, float((values - want.values).abs().max()))
        return worst

    def gathered(self) -> dict:
        """Parameters gathered during the next step's first forward, ranks without a row among them."""
        groups, _ = self.lab.data("several")
        bits = []
        for overlap in (False, True):
            parser = argparse.ArgumentParser()
            add_optimizer_arguments(parser)
            # An eps at which Adam amplifies rounding little: buckets change the order of a sum of three.
            args = parser.parse_args(["--adam-eps", "1e-3"], namespace=f.parse(dtype="float32"))
            args.use_distributed_optimizer = True
            ddp = wrap_model(
                f.build_model(args, augtree=False),
                distributed_optimizer=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap,
                bucket_size=9000,
            )
            optimizer = make_optimizer(args, ddp)
            handle = api.prepare_model(ddp, AugTreeConfig(min_shared_rows=4, force="degree=1"))
            found = []
            for part in (groups, groups[2:3], groups[1:]):
                ddp.zero_grad_buffer()
                optimizer.zero_grad()
                batch, loss, tokens = batch_of(part, self.deal(part, "in turn"))
                plan = api.plan(handle, batch)
                found.append(api.forward_logprobs(handle, batch, plan).values["logprobs"])
                api.forward_backward(handle, batch, plan, loss, normalizer=tokens)
                optimizer.step()
            found.append(api.forward_logprobs(handle, batch, plan).values["logprobs"])
            bits.append(found)
        apart = max(float((a - b).abs().max()) for a, b in zip(*bits, strict=True) if len(a))
        assert apart <= (0 if self.world == 2 else 1e-5), apart
        changes = [float((a - b).abs().max()) for a, b in zip(bits[0][2:], bits[0][3:]) if len(a)]
        assert min(changes) > 1e-3, "the last step changed the weights"
        return {}

    def like(self) -> dict:
        """Ratios are exactly 1 and KL exactly 0, with entropy or without; other samples are refused."""
        groups, _ = self.lab.data("inner_losses")
        mine = self.deal(groups, "in turn")
        for plan in ("two copies", "chunks and waves by move_q"):
            handle = self.handle(plan)
            batch, _, tokens = batch_of(groups, mine)
            first = api.plan(handle, batch)
            old = api.forward_logprobs(handle, batch, first).as_list()
            again = api.plan(handle, batch, like=first)
            assert again.plan is first.plan

            def loss(outputs, old=old):
                ratio = (outputs.values["logprobs"] - old[int(outputs.index)]).exp()
                return ratio.sum() - outputs.values["entropy"].sum(), {
                    "max/ratio": ratio.max(),
                    "min/ratio": ratio.min(),
                }

            found = api.forward_backward(handle, batch, again, loss, normalizer=tokens, entropy="grad")
            assert found.metrics == {"max/ratio": 1.0, "min/ratio": 1.0}
        other, _, _ = batch_of(groups, mine[:-1] if self.rank == 1 else mine)
        refused(lambda: api.plan(handle, other, like=first), "batch cannot be used")
        refused(lambda: api.forward_logprobs(handle, other, first), "call cannot be played")
        return {}

    def data(self) -> dict:
        """Per-token data goes to the rows' ranks in row order, and back; in fp64, fp32, bf16 and int64."""
        groups, _ = self.lab.data("several")
        batch, _, _ = batch_of(groups, self.deal(groups, "uneven"))
        handle = self.handle("waves")
        plan = api.plan(handle, batch)
        # Tokens themselves: rows that are shared have the same ones, whoever gives them.
        for dtype, tail in (
            (torch.int64, ()),
            (torch.float32, (2, 3)),
            (torch.bfloat16, (1,)),
            (torch.float64, ()),
        ):
            x = [t.to(dtype).reshape(-1, *[1] * len(tail)).expand(-1, *tail) for t in batch.tokens]
            back = None
            for p in plan.plan.passes:
                taken = plan.take(x, p.id)
                assert taken.dtype == dtype and taken.shape[1:] == tail
                hosts = plan.transport.hosts(p.block)
                rows = plan._rows_here(p.id)
                assert bool(hosts) == (self.rank in p.block) and len(taken) == len(rows)
                want = torch.from_numpy(plan.forest.inputs[rows])
                assert torch.equal(taken.flatten(1)[:, 0].long() if tail else taken.long(), want)
                back = plan.put(taken, p.id, back, fill=-1)
            for got, sample in zip(back, x):
                assert torch.equal(got[:-1], sample[:-1]) and bool((got[-1] == -1).all())
        short = [t[1:] for t in batch.tokens] if self.rank == 0 else batch.tokens
        refused(lambda: plan.take(short, 0), "does not fit the samples")
        return {}

    def group_loss(self) -> dict:
        """A loss that couples a group's samples, also those without a valid token."""
        groups, _ = self.lab.data("several")
        mine = self.deal(groups, "groups")
        batch, _, _ = batch_of(groups, mine)
        handle = self.handle("two copies")
        plan = api.plan(handle, batch)
        sizes = []

        def loss(outputs):
            sizes.append(len(outputs.index))
            means = torch.stack([part.sum() for part in outputs.as_list()])
            return means.softmax(0).square().sum(), {}

        api.forward_backward(handle, batch, plan, loss, normalizer=3.0, loss_scope="group")
        # Groups come when their passes are played, in whatever order.
        assert sorted(sizes) == sorted(len(g.responses) for g in groups[self.rank :: self.world])
        model = f.build_model(self.lab.args, augtree=False)
        total = 0
        for group in groups:
            sums = [v.sum() for v in unshared_logprobs(model, f.sequences([group]))]
            total = total + torch.stack(sums).softmax(0).square().sum()
        (total / 3).backward()
        found = f.err(reduced_gradients(handle.model), f.gradients(model))
        apart, _, _ = batch_of(groups, self.deal(groups, "in turn"))
        plan = api.plan(handle, apart)
        refused(
            lambda: api.forward_backward(handle, apart, plan, loss, normalizer=1, loss_scope="group"),
            "given by different ranks",
        )
        phased = self.handle("waves")
        plan = api.plan(phased, batch)
        refused(
            lambda: api.forward_backward(phased, batch, plan, loss, normalizer=1, loss_scope="group"),
            "complete at different times",
        )
        return {"errors": {"gradients": found}}

    def errors(self) -> dict:
        """One rank's mistake is the same error on every rank, and the next call works."""
        groups, _ = self.lab.data("several")
        batch, loss, tokens = batch_of(groups, self.deal(groups, "in turn"))
        handle = self.handle("waves")
        bad = (
            api.Batch([torch.tensor([1, 2, 999])], [torch.tensor([True, True])]) if self.rank == 1 else batch
        )
        messages = [refused(lambda: api.plan(handle, bad), "ranks [1]; of rank 1: a batch does not fit")]
        strange = api.Batch([None], [None]) if self.rank == 1 else batch
        refused(lambda: api.plan(handle, strange), "ranks [1]; of rank 1: RuntimeError")
        refused(lambda: api.plan(handle, batch, max_rows=1 if self.rank else 2), "different arguments")
        plan = api.plan(handle, batch)
        refused(
            lambda: api.forward_backward(handle, batch, plan, loss, normalizer=tokens + self.rank),
            "normalizer",
        )

        def three(outputs):
            return (*loss(outputs), 3) if self.rank == 1 else loss(outputs)

        def raising(outputs):
            raise ZeroDivisionError("in the trainer's code")

        messages.append(
            refused(lambda: api.forward_backward(handle, batch, plan, three, normalizer=tokens), "3 values")
        )
        messages.append(
            refused(
                lambda: api.forward_backward(
                    handle, batch, plan, raising if self.rank == 0 else loss, normalizer=tokens
                ),
                "ZeroDivisionError",
            )
        )
        messages.append(refused(lambda: api.plan(handle, batch, max_rows=1), "more rows than allowed"))
        handle.model.zero_grad_buffer()
        assert api.forward_backward(handle, batch, plan, loss, normalizer=tokens).loss
        return {"message": "\n".join(messages)}

    def strangers(self) -> dict:
        """What one rank alone calls, or gives to a call, is an error on every rank; the next call works."""
        groups, _ = self.lab.data("several")
        batch, loss, tokens = batch_of(groups, self.deal(groups, "in turn"))
        handle = self.handle("two copies")
        plan, other = api.plan(handle, batch), self.rank == 1

        def step(given=plan, loss_fn=loss, **how):
            return api.forward_backward(handle, batch, given, loss_fn, **{"normalizer": tokens, **how})

        def breaks(logits, rows):
            if other and len(logits):
                raise ZeroDivisionError("in the trainer's head")
            return {"logprobs": logits[:, 0]}

        def named(outputs):
            return loss(outputs)[0], {1: 2.0} if other else {}

        taken = [t.double() for t in batch.tokens]
        texts = [
            refused(lambda: step(normalizer=None if other else tokens), "ranks [1]; of rank 1: TypeError"),
            refused(lambda: step(plan.plan if other else plan), "ranks [1]; of rank 1: an argument is not"),
            refused(lambda: step(loss_fn=None if other else loss), "ranks [1]; of rank 1: the loss function"),
            refused(lambda: step(loss_fn=named), "ranks [1]; on rank 1: AugTreeError: a loss function's met"),
            refused(lambda: step(head=breaks), "ranks [1]; on rank 1: ZeroDivisionError"),
            refused(
                lambda: api.plan(handle, batch, scope="all" if other else "pool"), "of rank 1: an argument"
            ),
            refused(
                lambda: api.plan(handle, batch, like=plan.plan if other else plan), "of rank 1: an argument"
            ),
        ]
        refused(lambda: step() if other else api.plan(handle, batch), "'forward_backward'")
        refused(lambda: step() if other else api.forward_logprobs(handle, batch, plan), "different calls")
        refused(lambda: plan.take(taken, 0) if other else step(), "take")
        refused(lambda: plan.take(taken, 0) if other else api.plan(handle, batch), "take")
        handle.model.zero_grad_buffer()
        assert step().loss
        return {"message": "\n".join(texts)}

    def nobody(self) -> dict:
        """Zero gradients, not NaN and not None."""
        handle = self.handle()
        masked = api.Batch([torch.tensor([1, 2, 3, 4])] * 2, [torch.tensor([False] * 3)] * 2)
        scored = api.Batch(masked.tokens, masked.loss_mask, score_mask=[torch.tensor([True] * 3)] * 2)
        for batch in (api.Batch.empty(), masked, scored):
            plan = api.plan(handle, batch)
            found = api.forward_backward(
                handle, batch, plan, lambda o: (o.values["logprobs"].sum(), {}), normalizer=0
            )
            grads = reduced_gradients(handle.model).values()
            assert found.loss == 0 and all(bool((g == 0).all()) for g in grads)
            outputs = api.forward_logprobs(handle, batch, plan)
            assert len(outputs.index) == len(batch.tokens)
            assert len(outputs.values["logprobs"]) == (6 if batch is scored else 0)
        return {}

    def shadow(self) -> dict:
        """Every second step is compared; gradients have the bits that they have without."""
        groups, want = self.lab.data("merged")
        mine = self.deal(groups, "in turn")
        runs = []
        for every in (0, 2):
            handle = self.handle("two copies", "overlap", shadow_every=every)
            bits = []
            for _ in range(3):
                handle.model.zero_grad_buffer()
                batch, loss, tokens = batch_of(groups, mine)
                # What an earlier call left is neither compared nor lost.
                api.forward_backward(
                    handle, batch, api.plan(handle, batch), loss, normalizer=tokens, finalize=False
                )
                out = self.step(handle, groups, mine)
                bits.append({name: g.clone() for name, g in reduced_gradients(handle.model).items()})
            runs.append(bits)
        assert all(torch.equal(a[name], b[name]) for a, b in zip(*runs) for name in a)
        report = handle.report()
        assert len(report["shadow"]) == 2 and "shadow/logprobs" in out.stats, report
        return {
            "errors": {
                **{f"{i} {k}": v for i, s in enumerate(report["shadow"]) for k, v in s.items()},
                "gradients": f.err({n: g / 2 for n, g in runs[1][2].items()}, want.grads),
            }
        }

    def fallback(self) -> dict:
        """Counted, with the reason; the same gradients, in both tiers."""
        groups, want = self.lab.data("several")
        mine = self.deal(groups, "uneven")
        try:
            self.handle(stock=True)
            raise AssertionError("not refused")
        except AugTreeError as error:
            assert "attention-dropout" in str(error)
        handle = self.handle(stock=True, fallback=True)
        out = self.step(handle, groups, mine)
        errors = {
            "tier 2": f.err(reduced_gradients(handle.model), want.grads),
            "logprobs": distance(out.outputs, groups, mine, want),
        }
        handle.model.zero_grad_buffer()
        batch, loss, tokens = batch_of(groups, mine)
        step = api.plan(handle, batch)

        self.schedule(handle, step, loss, tokens)
        errors["tier 1"] = f.err(reduced_gradients(handle.model), want.grads)
        ((reason, count),) = handle.report()["fallback"].items()
        assert "attention-dropout" in reason and count == 2 and out.stats["fallback"] == reason
        refused(
            lambda: api.forward_backward(handle, batch, step, loss, normalizer=1, loss_scope="group"),
            "given by different ranks",
        )
        whole, _, _ = batch_of(groups, self.deal(groups, "groups"))
        sizes = []

        def by_group(outputs):
            sizes.append(len(outputs.index))
            return outputs.values["logprobs"].sum(), {}

        step = api.plan(handle, whole)
        api.forward_backward(handle, whole, step, by_group, normalizer=1, loss_scope="group")
        # Groups come when their passes are played, in whatever order.
        assert sorted(sizes) == sorted(len(g.responses) for g in groups[self.rank :: self.world])
        return {"errors": errors}

    def conformance(self, trainer: str) -> dict:
        """A trainer of ours that works as a framework does: the same gradients with and without AugTree."""
        from tests.mcore.conformance.run import compare

        return {"errors": compare(trainer, self.lab)}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    worker = ApiWorker()
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    cases = [
        (i, case)
        for i, case in enumerate(CASES[worker.world])
        if not only or case["do"] in only.split(",") or only in case["name"]
    ]

    run(((i, bound(worker, case)) for i, case in cases), folder)
    build.destroy()


if __name__ == "__main__":
    main()
