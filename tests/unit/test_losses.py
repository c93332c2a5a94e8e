"""Losses against an oracle in plain Python floats, row by row; test_loss_cases.py has the public cases."""

import math

import pytest
import torch

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.rl.losses import Denominators, LossConfig, SequenceRows, nll_loss, policy_loss
from tests.unit.loss_oracle import CONFIGS, call, denominators_of, draw, nll_rows, oracle, pack


def test_the_fixture_reaches_every_branch():
    metrics = call(draw([60], per_token=True), CONFIGS["dual"])[1]
    assert all(metrics[f"clip_fraction_{side}"] > 0.03 for side in ("low", "high", "dual"))
    assert metrics["tokens"] < 60


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_finite_differences_of_the_oracle(name):
    config, step = CONFIGS[name], 1e-6
    sequences = draw([7, 0, 3, 1], seed=5)
    _, _, grad, entropy_grad = call(sequences, config)
    flat = [row for rows in sequences for row in rows]
    assert grad.abs().max() > 1e-3
    for field, gradient in (("logprob", grad), ("entropy", entropy_grad)):
        for row, value in zip(flat, gradient.tolist()):
            kept, values = row[field], []
            for shift in (step, -step):
                row[field] = kept + shift
                values.append(oracle(sequences, config)["loss"])
            row[field] = kept
            assert value == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-8)


def test_gspo_with_advantages_by_token_weighs_each_row_by_its_own():
    sequences = draw([6, 4], seed=3, per_token=True, masked=0)
    config = LossConfig.preset("gspo", clip_low=1.0, clip_high=50.0)
    _, _, grad, _ = call(sequences, config)
    expected = []
    for rows in sequences:
        ratio = math.exp(sum(row["logprob"] - row["old"] for row in rows) / len(rows))
        expected += [-row["advantage"] * ratio / len(rows) / 2 for row in rows]
    assert grad.tolist() == pytest.approx(expected, rel=1e-12)


def test_exponents_at_and_just_below_the_limit_are_plain_exp():
    differences = torch.tensor([-30.0, 0.0, 19.5, 20.0], dtype=torch.float64)
    logprobs = (differences - 50).requires_grad_()
    rows = SequenceRows(torch.tensor([0, 4]), -torch.ones(4), torch.full((4,), -50.0, dtype=torch.float64))
    share, _ = policy_loss(logprobs, rows, Denominators(1, 1), LossConfig(clip_low=1.0))
    share.backward()
    torch.testing.assert_close(logprobs.grad, differences.exp(), rtol=1e-12, atol=0)
    assert share.item() == pytest.approx(differences.exp().sum().item(), rel=1e-12)


def test_k3_of_a_small_difference_keeps_its_digits_in_fp32():
    logprobs = torch.tensor([-1e-4], requires_grad=True)
    rows = SequenceRows(torch.tensor([0, 1]), torch.zeros(1), None, torch.zeros(1))
    _, metrics = policy_loss(logprobs, rows, Denominators(1, 1), LossConfig())
    assert metrics["kl"].item() == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_without_old_logprobs_the_ratio_is_one_and_its_gradient_the_policy_gradient(ratio):
    sequences = draw([5, 3], seed=9, per_token=True)
    logprobs, rows, _ = pack(sequences)
    bare = SequenceRows(rows.offsets, rows.advantages, None, None, rows.mask)
    step, config = denominators_of(sequences), LossConfig(ratio=ratio, clip_low=0.0, clip_high=0.0)
    share, metrics = policy_loss(logprobs, bare, step, config)
    share.backward()
    expected = torch.where(rows.mask, -rows.advantages / step.tokens, 0.0)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-14, atol=0)
    assert metrics["min/ratio"] == metrics["max/ratio"] == 1 and metrics["clip_fraction_high"] == 0
    same = SequenceRows(rows.offsets, rows.advantages, logprobs.detach(), None, rows.mask)
    given_share, given_metrics = policy_loss(logprobs, same, step, config)
    assert torch.equal(given_share, share) and given_metrics["min/ratio"] == given_metrics["max/ratio"] == 1


def test_targets_of_the_loss_get_no_gradient():
    logprobs, rows, entropy = pack(draw([4], seed=2, masked=0))
    leaves = [getattr(rows, name).requires_grad_() for name in ("advantages", "old_logprobs", "ref_logprobs")]
    policy_loss(logprobs, rows, Denominators(4, 1), LossConfig(kl_coef=0.1), entropy)[0].backward()
    assert [leaf.grad for leaf in leaves] == [None] * 3 and logprobs.grad.abs().sum() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_agrees_with_fp64_and_lower_types_are_computed_in_fp32(name):
    sequences = draw([9, 5], seed=11)
    loss, _, grad, _ = call(sequences, CONFIGS[name])
    loss32, _, grad32, _ = call(sequences, CONFIGS[name], dtype=torch.float32)
    assert loss32 == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert (grad32 - grad).abs().max() <= 1e-5 * grad.abs().max()
    logprobs, rows, entropy = pack(sequences)
    half = logprobs.detach().bfloat16()
    share, _ = policy_loss(half, rows, denominators_of(sequences), CONFIGS[name], entropy)
    wide, _ = policy_loss(half.float(), rows, denominators_of(sequences), CONFIGS[name], entropy)
    assert share.dtype == torch.float32 and torch.equal(share, wide)


def test_presets_say_what_their_papers_say():
    grpo, dr_grpo, dapo, gspo = (LossConfig.preset(name) for name in ("grpo", "dr_grpo", "dapo", "gspo"))
    assert (grpo.aggregation, grpo.kl_kind, grpo.kl_coef) == ("seq-mean-token-mean", "k3", 0.04)
    assert (dr_grpo.aggregation, dr_grpo.advantage, dr_grpo.kl_coef) == ("constant", "mean", 0.0)
    assert (dapo.aggregation, dapo.clip_low, dapo.clip_high, dapo.kl_coef) == ("token-mean", 0.2, 0.28, 0.0)
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    changed = LossConfig.preset("dapo", clip_high=0.5, temperature=0.7)
    assert (changed.clip_high, changed.temperature, changed.aggregation) == (0.5, 0.7, "token-mean")


@pytest.mark.parametrize(
    "wrong",
    [{"ratio": "word"}, {"kl_kind": "k4"}, {"aggregation": "mean"}, {"advantage": "rank"}, {"clip_low": 1.5},
     {"clip_low": -0.1}, {"clip_high": -0.1}, {"clip_high": math.inf}, {"kl_coef": -1.0}, {"kl_coef": None},
     {"entropy_coef": math.nan}, {"temperature": 0.0}, {"dual_clip": 1.0}, {"clip_low": "0.2"},
     {"clip_low": True}],
)
def test_settings_out_of_range_name_field_value_rule_and_remedy(wrong):
    (field, value), = wrong.items()
    with pytest.raises(AugTreeError) as caught:
        LossConfig(**wrong)
    error = caught.value
    assert field in error.values and repr(value) in error.values and error.rule and error.remedy


def test_unknown_presets_and_settings_are_refused():
    with pytest.raises(AugTreeError, match=r"'ppo'(.|\n)*dr_grpo"):
        LossConfig.preset("ppo")
    with pytest.raises(AugTreeError, match=r"beta = 0.1(.|\n)*kl_coef"):
        LossConfig.preset("grpo", beta=0.1)
    with pytest.raises(AugTreeError, match="aggregation"):
        nll_loss(*nll_rows([[1.0]]), Denominators(1, 1), "mean")


def test_inputs_that_do_not_fit_are_refused():
    cuts, three = torch.tensor([0, 2, 3]), torch.zeros(3)
    for arguments in (
        {"offsets": torch.tensor([0.0, 3.0])}, {"offsets": torch.tensor([], dtype=torch.int64)},
        {"offsets": torch.tensor([1, 3])}, {"offsets": torch.tensor([0, 3, 2])},
        {"offsets": cuts, "advantages": torch.zeros(2)}, {"offsets": cuts, "old_logprobs": torch.zeros(3, 1)},
        {"offsets": cuts, "ref_logprobs": torch.zeros(4)}, {"offsets": cuts, "mask": torch.ones(3)},
    ):
        with pytest.raises(InputError, match="remedy"):
            SequenceRows(**arguments)
    rows, step = SequenceRows(cuts, three), Denominators(3, 2)
    for config, entropy, rule in (
        (LossConfig(kl_coef=0.1), None, "kl_coef above 0"),
        (LossConfig(entropy_coef=0.1), None, "entropy_coef above 0"),
        (LossConfig(), torch.zeros(2), "entropy has one entry"),
    ):
        with pytest.raises(InputError, match=rule):
            policy_loss(three, rows, step, config, entropy)
    with pytest.raises(InputError, match="advantages"):
        policy_loss(three, SequenceRows(cuts), step, LossConfig())
    for function in (nll_loss, lambda *given_: policy_loss(*given_, LossConfig())):
        with pytest.raises(InputError, match="logprobs"):
            function(torch.zeros(4), rows, step)
    for wrong in ((-1, 1, 1.0), (1, -1, 1.0), (1, 1, 0.0), (1, 1, math.nan)):
        with pytest.raises(InputError, match="count_valid"):
            Denominators(*wrong)
