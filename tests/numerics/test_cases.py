"""Cases that went wrong in other stacks, as whole updates; numbered as in tests/cases.py, which lists all."""

import dataclasses
import functools
import math

import pytest
import torch

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.mcore import schedule as schedule_module
from megatron_augtree.mcore.objective import Objective
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.rl.losses import LossConfig
from megatron_augtree.runtime.layout import rows_of
from megatron_augtree.runtime.transport import LocalTransport
from scripts.unshared import unshared_logits
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

BAR = 1e-10
PHASED = f.augtree(phase="phased", waves=2, chunks=2)
MOVED = f.augtree(phase="phased", waves=2, primitive="move_q")
SAMPLE = [f.BASELINES[0], f.augtree(lane_degree=8), f.augtree(degree=-2, copies=2), PHASED, MOVED]


def advantages(made, *values):
    """The group with these advantages, and without old log-probs: ratio 1."""
    answers = zip(made.responses, values, strict=True)
    return dataclasses.replace(made, responses=tuple(
        dataclasses.replace(answer, advantage=float(value)) for answer, value in answers))


def gradient(logprobs, answer, count):
    """The policy gradient at ratio 1."""
    return -answer.advantage * (logprobs - logprobs.detach()).exp().sum() / count


def same(lab, groups, kind="grpo", oracle=None, worlds=(1, 2, 4, 8), programs=SAMPLE, alive=True):
    """Parity over worlds and programs; returns the oracle. `alive` False: some gradients are truly zero."""
    want = f.oracle(lab.stock, groups, oracle or kind)
    for world in worlds:
        for program in programs:
            got = f.play(lab.tree, f.batch_of(groups, program, world), kind)
            if alive:
                found = f.worst(f.errors(got, want, lab.start))
            else:
                found = max(abs(got.loss - want.loss), f.err(got.grads, want.grads))
            assert found < BAR, (world, str(program), found)
    return want


def test_case_1_first_tokens_and_the_last_prompt_token(lab):
    prompt = (*f.tokens(1, 10), 63)  # its last token occurs nowhere else
    group = advantages(f.group(prompt, (1, 2, 3), (4,), (5, 6), (7, 8, 9, 10)), 1, -1, 2, -2)
    want = same(lab, [group], oracle=gradient)
    got = f.play(lab.tree, f.batch_of([group], f.augtree(), 4))
    name = "embedding.word_embeddings.weight"
    assert float(want.grads[name][63].abs().max()) > 1e-3
    assert f.err({name: got.grads[name][63]}, {name: want.grads[name][63]}) < BAR
    firsts = [0, 3, 4, 6]
    assert f.err({"": got.logprobs[firsts]}, {"": want.logprobs[firsts]}) < BAR
    forest = f.batch_of([group], f.augtree(), 4).forest
    assert not forest.scored[:10].any() and forest.scored[10:].all() and len(forest.scored) == 20
    one_token = advantages(f.group(prompt, (1,), (4,), (5,), (7,)), 1, -1, 2, -2)
    same(lab, [one_token], oracle=gradient)


def test_case_2_gradients_of_branches_add_and_lanes_change_nothing(lab):
    """By `constant`: its denominator is the same whichever branches are on."""
    config, answers = LossConfig(aggregation="constant"), [(5, 9, 3), (6, 1), (7, 7, 2, 2)]
    group = advantages(f.group(f.tokens(1, 11), *answers), 1, -0.5, 2)

    def grads(made, program, world):
        batch = f.batch_of([made], program, world)
        return f.play(lab.tree, batch, loss_fn=Objective(batch, "grpo", config)).grads

    def only(index):
        masked = [a if i == index else dataclasses.replace(a, loss_mask=(False,) * len(a.tokens))
                  for i, a in enumerate(group.responses)]
        return dataclasses.replace(group, responses=tuple(masked))

    for program, world in ((f.augtree(), 1), (f.augtree(), 2), (f.augtree(lane_degree=2), 4), (MOVED, 4)):
        whole, parts = grads(group, program, world), [grads(only(i), program, world) for i in range(3)]
        summed = {name: sum(part[name] for part in parts) for name in whole}
        assert f.err(whole, summed) < BAR
    twice = advantages(f.group(f.tokens(1, 11), answers[0], answers[0]), 1, 1)
    once = advantages(f.group(f.tokens(1, 11), answers[0]), 2)
    assert f.err(grads(twice, f.augtree(), 2), grads(once, f.augtree(), 1)) < BAR


def test_case_4_duplicates_nested_and_empty(lab):
    group = advantages(f.group(f.tokens(2, 7), (5, 9), (5, 9), (5,), ()), 1, 1, -2, 5)
    want = same(lab, [group], oracle=gradient)
    assert len(want.logprobs) == 5
    batch = f.batch_of([group], f.augtree(), 4)
    assert batch.forest.shape.total_rows == 6 + 2 and batch.logical_rows == 5
    same(lab, [advantages(f.group(f.tokens(2, 7), (), ()), 3, -3), group], oracle=gradient)


def test_case_5_few_groups_few_rows_and_a_masked_group(lab):
    prompt = f.tokens(3, 9)
    for world, group in ((4, f.group(prompt, (1, 2, 3, 4), (5, 6), (7, 8, 9))),
                         (8, f.group(prompt, (1, 2, 3, 4))), (4, f.group((3, 9), (1, 2, 3, 4), (5, 6)))):
        same(lab, f.with_policy(lab.stock, [group]), worlds=(world,))
    masked = f.group(f.tokens(4, 5), *[f.response((i, i), (False, False)) for i in range(3)])
    same(lab, f.with_policy(lab.stock, [masked, *f.ragged()]))
    # Nothing is scored: loss 0 and gradients of exactly 0.
    for program in SAMPLE:
        got = f.play(lab.tree, f.batch_of([masked], program, 4), "nll")
        assert got.loss == 0 and not len(got.logprobs)
        assert all(not grad.any() for grad in got.grads.values())


def test_case_6_old_logprobs_of_any_plan_give_ratio_1(lab):
    groups = [advantages(f.ragged()[0], 1, -1, 2, -2)]
    plans = [f.augtree(lane_degree=8), f.BASELINES[0], MOVED]

    def logprobs(program):
        batch = f.batch_of(groups, program, 4)
        schedule = AugTreeSchedule(AugTreeConfig(), transport=LocalTransport(4))
        f.play(lab.tree, batch, schedule=schedule, loss_fn=lambda values: (values.values.sum() * 0, {}))
        return schedule.last.values[:, 0]

    def with_old(values):
        parts = values.split([len(a.tokens) for a in groups[0].responses])
        answers = [dataclasses.replace(a, old_logprobs=tuple(p.tolist()), ref_logprobs=tuple(p.tolist()))
                   for a, p in zip(groups[0].responses, parts)]
        return [dataclasses.replace(groups[0], responses=tuple(answers))]

    own = f.oracle(lab.stock, groups, gradient).logprobs
    for old, values in [(None, own), *[(p, logprobs(p)) for p in plans]]:
        for program in plans:
            batch = f.batch_of(with_old(values), program, 4)
            schedule = AugTreeSchedule(AugTreeConfig(), transport=LocalTransport(4))
            loss = Objective(batch, "grpo", LossConfig(kl_coef=0.1))
            f.play(lab.tree, batch, schedule=schedule, loss_fn=loss)
            found = schedule.last.metrics
            if program == old:
                assert found["min/ratio"] == found["max/ratio"] == 1 and found["kl"] == 0
            assert abs(found["min/ratio"] - 1) < 1e-12 and abs(found["max/ratio"] - 1) < 1e-12
            assert abs(found["kl"]) < 1e-12


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_case_6_three_steps_follow_the_oracle(kind):
    """Each step under another plan, with the first step's policy as the old one: ratios leave 1."""
    lab = f.Lab()
    groups = f.with_policy(lab.stock, f.ragged())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) if kind == "sgd" else
                  torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-4) for m in (lab.stock, lab.tree)]
    for program, world in ((f.augtree(), 4), (MOVED, 2), (f.augtree(degree=-2, copies=2), 4)):
        want = f.oracle(lab.stock, groups)
        got = f.play(lab.tree, f.batch_of(groups, program, world))
        assert f.worst(f.errors(got, want, dict(lab.stock.named_parameters()))) < BAR
        for optimizer in optimizers:
            optimizer.step()
        assert f.err(dict(lab.tree.named_parameters()), dict(lab.stock.named_parameters())) < BAR
    assert f.err(dict(lab.stock.named_parameters()), lab.start) > 5e-3


def test_case_13_18_19_weights_by_hand_over_layouts(lab):
    """Four aggregations on lengths 1, 9, 3, 5: the same loss and gradients over ranks, copies and waves."""
    lengths, constant = [1, 9, 3, 5], 37.0
    groups = f.with_policy(lab.stock, [f.group(f.tokens(5, 8), *[
        (i, *f.tokens(40 + i, n - 1)) for i, n in enumerate(lengths)])])
    weights = {"token-mean": lambda n: 1 / 18, "seq-mean-token-mean": lambda n: 1 / (4 * n),
               "seq-mean-token-sum": lambda n: 1 / 4, "constant": lambda n: 1 / constant}
    for name, weight in weights.items():
        config = LossConfig(aggregation=name)
        want = f.oracle(lab.stock, groups,
                        lambda lp, answer, _, w=weight: f.grpo(lp, answer, 1) * w(len(answer.tokens)))
        for world in (1, 2, 4):
            for program in SAMPLE:
                batch = f.batch_of(groups, program, world)
                got = f.play(lab.tree, batch, loss_fn=Objective(batch, "grpo", config, constant))
                assert f.worst(f.errors(got, want, lab.start)) < BAR, (name, world, str(program))


def test_case_13_one_valid_token_on_any_number_of_ranks(lab):
    groups, want = lab.data("one_valid_token")
    for world in (1, 2, 4):
        for program in f.PROGRAMS:
            assert f.worst(lab.compare(groups, want, f.batch_of(groups, program, world))) < BAR


def test_case_15_37_metrics_entropy_kl_and_temperature(lab):
    """Loss and every metric from the un-shared logits, by formula; gradients with all terms on."""
    temperature, config = 0.7, LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.3, kl_coef=0.2,
                                          kl_kind="k3", entropy_coef=0.05, temperature=0.7)
    groups = f.with_policy(lab.stock, f.inner_losses(), seed=4)
    moved = [dataclasses.replace(a, ref_logprobs=tuple(x + 0.1 * i for i, x in enumerate(a.old_logprobs)))
             for a in groups[0].responses]
    groups = [dataclasses.replace(groups[0], responses=tuple(moved))]
    sums = dict.fromkeys(("ratio_mean", "clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "kl",
                          "entropy"), 0.0)
    total, ratios, count = 0.0, [], sum(sum(a.loss_mask) for a in groups[0].responses)
    lab.stock.zero_grad()
    for (ids, mask), answer, logits in zip(f.sequences(groups), groups[0].responses,
                                           unshared_logits(lab.stock, f.sequences(groups))):
        targets = [t for t, wanted in zip(ids[1:], mask[1:]) if wanted]
        kept = [i for i, wanted in enumerate(answer.loss_mask) if wanted]
        every = torch.log_softmax(logits / temperature, -1)
        share = torch.zeros((), dtype=torch.float64)
        for row, target, i in zip(every, targets, kept):
            ratio = (row[target] - answer.old_logprobs[i]).exp()
            term = torch.maximum(-answer.advantage * ratio, -answer.advantage * ratio.clamp(0.8, 1.28))
            if answer.advantage < 0:
                term = torch.minimum(term, torch.tensor(-answer.advantage * 1.3, dtype=torch.float64))
            gap = answer.ref_logprobs[i] - row[target]
            kl, entropy = gap.exp() - 1 - gap, -(row.exp() * row).sum()
            share = share + (term + 0.2 * kl - 0.05 * entropy) / count
            negative, value = answer.advantage < 0, float(ratio.detach())
            for name, found in (("ratio_mean", value), ("kl", float(kl.detach())),
                                ("entropy", float(entropy.detach())),
                                ("clip_fraction_low", negative and value < 0.8),
                                ("clip_fraction_high", not negative and value > 1.28),
                                ("clip_fraction_dual", negative and value > 1.3)):
                sums[name] += found / count
            ratios.append(value)
        if share.requires_grad:
            share.backward()
            total += share.item()
    want = f.gradients(lab.stock)
    expected = {**sums, "loss": total, "tokens": count, "sequences": 5, "min/ratio": min(ratios),
                "max/ratio": max(ratios)}
    assert all(expected[f"clip_fraction_{side}"] > 0 for side in ("low", "high", "dual"))
    for world in (1, 2, 4):
        for program in SAMPLE:
            batch = f.batch_of(groups, program, world)
            schedule = AugTreeSchedule(AugTreeConfig(), temperature=temperature, entropy=True,
                                       transport=LocalTransport(world))
            got = f.play(lab.tree, batch, schedule=schedule, loss_fn=Objective(batch, "grpo", config))
            assert f.err(got.grads, want) < BAR
            assert schedule.last.metrics == pytest.approx(expected, rel=1e-10, abs=1e-14)


def test_case_16_25_ranks_without_a_scored_row_and_tiny_batches(lab):
    groups = f.with_policy(lab.stock, [f.group(f.tokens(6, 60), f.tokens(7, 4))])
    batch = f.batch_of(groups, f.Program("ring"), 8)
    scored = [batch.forest.scored[rows_of(batch.forest.shape, spans)].sum()
              for spans in batch.plan.passes[0].placement]
    assert 0 in scored and sum(scored) == 4
    same(lab, groups)
    for tiny in ([f.group((5,), (9,))], [f.group((5,), (9,)), f.group((6,), (9,))], f.one_prompt_token()):
        same(lab, tiny, "nll", alive=False)


def test_case_24_every_residue_of_lengths_twice(lab):
    """Single sequences of 3..11 tokens and packed mixtures on 2 and 4 ranks; the same bits again."""
    singles = [[f.group(f.tokens(n, 3), f.tokens(50 + n, n - 2))] for n in range(3, 11)]
    mixtures = [[g for made in singles[i:i + 3] for g in made] for i in (0, 3)]
    for groups in [*singles, *mixtures]:
        want = f.oracle(lab.stock, groups, "nll")
        for world in (2, 4):
            for program in (f.Program("ring"), f.Program("gather-reuse"), f.augtree(lane_degree=8)):
                batch = f.batch_of(groups, program, world)
                first, second = (f.play(lab.tree, batch, "nll") for _ in range(2))
                assert f.worst(f.errors(first, want, lab.start)) < BAR
                assert all(torch.equal(first.grads[n], second.grads[n]) for n in first.grads)


def test_case_34_a_step_without_a_valid_token_under_weight_decay(lab):
    """Gradients of exactly 0, as a step of the un-shared run would have: decay alone moves the parameters."""
    masked = [f.group((1, 2, 3), f.response((4, 5), (False, False)), f.response((6,), (False,)))]
    grads = f.play(lab.tree, f.batch_of(masked, f.augtree(), 4), "nll").grads
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())


def test_case_56_60_forward_only_between_two_accumulation_passes(lab):
    """Evaluation, in inference mode too, leaves accumulated gradients alone and gives the same log-probs."""
    groups, want = lab.data("ragged")
    batch = f.batch_of(groups, MOVED, 4)
    schedule = AugTreeSchedule(AugTreeConfig(), transport=LocalTransport(4))

    def step(**how):
        forward = functools.partial(schedule_module.forward_step, loss_fn=Objective(batch, "grpo"))
        (result,) = schedule(forward_step_func=forward, data_iterator=iter([batch]), model=lab.tree,
                             collect=True, **how)
        return result["loss"], schedule.last.values[:, 0]

    lab.tree.zero_grad()
    step()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            loss, logprobs = step(forward_only=True)
        assert math.isclose(loss, want.loss, rel_tol=BAR) and f.err({"": logprobs}, {"": want.logprobs}) < BAR
    step()
    twice = {name: 2 * grad for name, grad in want.grads.items()}
    assert f.err(f.gradients(lab.tree), twice) < BAR
