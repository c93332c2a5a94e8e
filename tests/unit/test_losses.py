"""Losses against an oracle in plain Python floats, row by row, and by case of the public reports."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.rl.losses import (
    AGGREGATIONS,
    PRESETS,
    Denominators,
    LossConfig,
    SequenceRows,
    count_valid,
    nll_loss,
    policy_loss,
)

FIELDS = ("logprob", "advantage", "old", "ref", "entropy")
CONSTANT = 37.0


def draw(lengths, seed=0, *, per_token=False, masked=0.25):
    """Sequences as lists of rows; a row is a dict of floats and ``valid``. Ratios spread over 0.4 .. 2.5."""
    generator = random.Random(seed)
    sequences = []
    for length in lengths:
        advantage = generator.choice([-2.0, -0.7, 0.0, 0.5, 1.5])
        rows = []
        for _ in range(length):
            logprob = -generator.uniform(0.1, 4)
            rows.append({
                "logprob": logprob,
                "advantage": generator.uniform(-2, 2) if per_token else advantage,
                "old": logprob + generator.uniform(-0.9, 0.9),
                "ref": logprob + generator.uniform(-1.5, 1.5),
                "entropy": generator.uniform(0, 3),
                "valid": generator.random() >= masked,
            })
        sequences.append(rows)
    return sequences


def oracle(sequences, config, *, tokens=None, count=None, constant=CONSTANT):
    """Loss and metrics by loops, in PPO's max form; shares nothing with the code under test."""
    valid = [[row for row in rows if row["valid"]] for rows in sequences]
    tokens = sum(map(len, valid)) if tokens is None else tokens
    count = sum(1 for rows in valid if rows) if count is None else count
    totals = {"loss": 0.0, "ratio_mean": 0.0, "kl": 0.0, "entropy": 0.0}
    totals.update({f"clip_fraction_{side}": 0.0 for side in ("low", "high", "dual")})
    ratios = []
    for rows in valid:
        total = 0.0
        for row in rows:
            exponent = row["logprob"] - row["old"]
            if config.ratio == "sequence":
                exponent = sum(other["logprob"] - other["old"] for other in rows) / len(rows)
            ratio, advantage = math.exp(exponent), row["advantage"]
            low, high = 1 - config.clip_low, 1 + config.clip_high
            held = min(max(ratio, low), high)
            term = max(-advantage * ratio, -advantage * held)
            if config.dual_clip is not None and advantage < 0:
                totals["clip_fraction_dual"] += ratio > config.dual_clip
                term = min(term, -advantage * config.dual_clip)
            totals["clip_fraction_low"] += advantage < 0 and ratio < low
            totals["clip_fraction_high"] += advantage > 0 and ratio > high
            gap = row["logprob"] - row["ref"]
            kl = {"k1": gap, "k2": gap * gap / 2, "k3": math.exp(-gap) - 1 + gap}[config.kl_kind]
            totals["kl"] += kl
            totals["entropy"] += row["entropy"]
            totals["ratio_mean"] += ratio
            ratios.append(ratio)
            total += term + config.kl_coef * kl - config.entropy_coef * row["entropy"]
        totals["loss"] += total / len(rows) if config.aggregation == "seq-mean-token-mean" and rows else total
    divisor = {"token-mean": tokens, "constant": constant}.get(config.aggregation, count)
    metrics = {name: value / max(tokens, 1) for name, value in totals.items()}
    metrics["loss"] = totals["loss"] / max(divisor, 1)
    if config.dual_clip is None:
        del metrics["clip_fraction_dual"]
    metrics.update({"tokens": len([1 for rows in valid for _ in rows])})
    metrics.update({"sequences": len([rows for rows in valid if rows])})
    metrics.update({"min/ratio": min(ratios, default=math.inf), "max/ratio": max(ratios, default=-math.inf)})
    return metrics


def pack(sequences, dtype=torch.float64, **replaced):
    """Sequences -> (logprobs, rows, entropy)."""
    flat = [row for rows in sequences for row in rows]
    column = {name: torch.tensor([row[name] for row in flat], dtype=dtype) for name in FIELDS}
    column.update(replaced)
    offsets = torch.tensor([0, *(len(rows) for rows in sequences)]).cumsum(0)
    mask = torch.tensor([row["valid"] for row in flat], dtype=torch.bool)
    rows = SequenceRows(offsets, column["advantage"], column["old"], column["ref"], mask)
    return column["logprob"].requires_grad_(), rows, column["entropy"].requires_grad_()


def denominators_of(sequences, constant=CONSTANT):
    tokens, count = count_valid(pack(sequences)[1])
    return Denominators(tokens, count, constant)


def call(sequences, config, denominators=None, dtype=torch.float64):
    """Loss, metrics as floats, gradients of log-probs and entropy."""
    logprobs, rows, entropy = pack(sequences, dtype)
    denominators = denominators or denominators_of(sequences)
    share, metrics = policy_loss(logprobs, rows, denominators, config, entropy)
    assert share.dtype == dtype and share.dim() == 0
    assert not any(value.requires_grad for value in metrics.values())
    share.backward()
    entropy_grad = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    return share.item(), {name: value.item() for name, value in metrics.items()}, logprobs.grad, entropy_grad


CONFIGS = {
    **{f"preset-{name}": LossConfig.preset(name) for name in PRESETS},
    **{f"aggregation-{name}": LossConfig(aggregation=name, kl_coef=0.3, entropy_coef=0.1)
       for name in AGGREGATIONS},
    **{f"kl-{kind}": LossConfig(kl_coef=0.3, kl_kind=kind) for kind in ("k1", "k2", "k3")},
    "dual": LossConfig(clip_high=0.28, dual_clip=1.6),
    "gspo-wide": LossConfig.preset("gspo", clip_low=0.1, clip_high=0.2, dual_clip=1.3, kl_coef=0.2),
    "gspo-token-mean": LossConfig.preset("gspo", clip_low=0.1, clip_high=0.2, aggregation="token-mean"),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("per_token", [False, True])
def test_case_15_37_loss_and_every_metric_equal_the_oracle(name, per_token):
    for seed, lengths in enumerate(([11, 0, 5, 1, 9, 3], [1], [40, 2])):
        sequences = draw(lengths, seed, per_token=per_token, masked=0.25 if seed else 0.4)
        loss, metrics, _, _ = call(sequences, CONFIGS[name])
        expected = oracle(sequences, CONFIGS[name])
        assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert loss == metrics["loss"]


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


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 1.27, 1.29, 1.5, 3.1])
def test_case_37_clip_by_hand(advantage, ratio):
    """Clip 0.2 / 0.28, dual clip 3: value and gradient of one row."""
    row = {"logprob": -1.0, "advantage": advantage, "old": -1.0 - math.log(ratio), "ref": 0.0, "entropy": 0.0}
    config = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    loss, metrics, grad, _ = call([[{**row, "valid": True}]], config)
    held = min(ratio, 1.28) if advantage > 0 else min(max(ratio, 0.8), 3.0)
    assert loss == pytest.approx(-advantage * held, rel=1e-12)
    assert grad.item() == pytest.approx(-advantage * ratio if held == ratio else 0, rel=1e-12, abs=0)
    clipped = {"low": advantage < 0 and ratio < 0.8, "high": advantage > 0 and ratio > 1.28,
               "dual": advantage < 0 and ratio > 3}
    assert {side: metrics[f"clip_fraction_{side}"] for side in clipped} == clipped


def test_case_37_temperature_acts_once_where_logprobs_are_made():
    """Logits over 0.7 on both sides: ratio 1 on policy, gradient 1 / 0.7 of the untempered; no second use."""
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 8, dtype=torch.float64), torch.tensor([1, 7, 0, 3, 3])

    def gradient(temperature, config):
        leaf = logits.clone().requires_grad_()
        scaled = (leaf / temperature).log_softmax(-1)
        logprobs = scaled.gather(1, targets[:, None])[:, 0]
        rows = SequenceRows(torch.tensor([0, 5]), torch.ones(5, dtype=torch.float64), logprobs.detach())
        share, metrics = policy_loss(logprobs, rows, Denominators(5, 1), config)
        share.backward()
        assert metrics["min/ratio"] == metrics["max/ratio"] == 1
        return leaf.grad, scaled.detach().exp()

    grad, probabilities = gradient(0.7, LossConfig(temperature=0.7))
    one_hot = torch.nn.functional.one_hot(targets, 8)
    torch.testing.assert_close(grad, (probabilities - one_hot) / 0.7 / 5, rtol=1e-12, atol=1e-14)
    assert torch.equal(grad, gradient(0.7, LossConfig())[0])


LAYOUT = st.tuples(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=9),
    st.integers(0, 10**6),
    st.sampled_from(sorted(CONFIGS)),
)


@settings(deadline=None, max_examples=80)
@given(LAYOUT)
def test_case_19_any_partition_into_calls_gives_the_same_loss_gradients_and_metrics(layout):
    """Sequences go to four calls (ranks, passes, micro-batches), in another order; a call may be empty."""
    placed, seed, name = layout
    sequences, config = draw([length for length, _ in placed], seed), CONFIGS[name]
    denominators = denominators_of(sequences)
    loss, metrics, grad, entropy_grad = call(sequences, config, denominators)
    starts = [sum(length for length, _ in placed[:index]) for index in range(len(placed))]
    total, sums = 0.0, {key: -math.inf if key.startswith("max/") else 0.0 for key in metrics}
    sums["min/ratio"] = math.inf
    pieces, entropy_pieces = torch.zeros_like(grad), torch.zeros_like(entropy_grad)
    for rank in (3, 0, 2, 1):
        mine = [index for index, (_, owner) in enumerate(placed) if owner == rank]
        own = [sequences[index] for index in mine]
        share, part, part_grad, part_entropy = call(own, config, denominators)
        total += share
        for key, value in part.items():
            reduce = {"min": min, "max": max}.get(key.partition("/")[0], lambda one, other: one + other)
            sums[key] = reduce(sums[key], value)
        where = [starts[index] + row for index in mine for row in range(placed[index][0])]
        pieces[where] += part_grad
        entropy_pieces[where] += part_entropy
    assert total == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert sums == pytest.approx(metrics, rel=1e-12, abs=1e-14)
    # A row's gradient depends on its own sequence and the denominators alone: not one bit may move.
    assert torch.equal(pieces, grad) and torch.equal(entropy_pieces, entropy_grad)


def nll_rows(values_by_sequence):
    """Log-probs whose negative log-likelihoods are the given values."""
    flat = [-value for values in values_by_sequence for value in values]
    offsets = torch.tensor([0, *(len(values) for values in values_by_sequence)]).cumsum(0)
    return torch.tensor(flat, dtype=torch.float64, requires_grad=True), SequenceRows(offsets)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token-mean", 48 / 18), ("seq-mean-token-mean", (1 + 2 + 3 + 4) / 4),
     ("seq-mean-token-sum", 48 / 4), ("constant", 48 / CONSTANT)],
)
def test_case_19_aggregations_by_hand_over_lengths_1_9_3_5(aggregation, expected):
    parts = [[1.0] * 1, [2.0] * 9, [3.0] * 3, [4.0] * 5]
    step = Denominators(18, 4, CONSTANT)
    for calls in ([parts], [parts[:2], parts[2:]], [[part] for part in parts]):
        shares = [nll_loss(*nll_rows(own), step, aggregation)[0] for own in calls]
        assert sum(shares).item() == pytest.approx(expected, rel=1e-14)


def test_case_13_three_tokens_of_loss_1_here_and_one_of_loss_5_there():
    step = Denominators(4, 2)
    one, other = nll_rows([[1.0] * 3]), nll_rows([[5.0]])
    shares = [nll_loss(*side, step)[0] for side in (one, other)]
    assert sum(shares).item() == 2.0
    sum(shares).backward()
    assert one[0].grad.tolist() == [-0.25] * 3 and other[0].grad.tolist() == [-0.25]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_case_13_one_valid_token_in_the_whole_batch(ranks):
    sequences = draw([5] * 4, masked=1.0)
    sequences[2][3].update(valid=True, advantage=1.5, old=sequences[2][3]["logprob"])
    for aggregation in AGGREGATIONS:
        config = LossConfig(aggregation=aggregation)
        grads, metrics = [], []
        for rank in range(ranks):
            mine = sequences[rank * 4 // ranks : (rank + 1) * 4 // ranks]
            _, part, grad, _ = call(mine, config, Denominators(1, 1, 2.0))
            grads.append(grad)
            metrics.append(part)
        expected = torch.zeros(20, dtype=torch.float64)
        expected[13] = -1.5 / (2.0 if aggregation == "constant" else 1)
        assert torch.equal(torch.cat(grads), expected)
        assert sum(part["tokens"] for part in metrics) == sum(part["ratio_mean"] for part in metrics) == 1


def test_case_18_two_tokens_of_loss_1_and_eight_of_loss_0():
    step = Denominators(10, 2)
    shares = [nll_loss(*nll_rows(side), step)[0].item() for side in ([[1.0] * 2], [[0.0] * 8])]
    assert sum(shares) == pytest.approx(0.2, rel=1e-15)


def test_case_14_a_loss_returns_two_values_and_the_share_needs_no_count_to_be_rescaled():
    """Per-token loss: the engine takes (share, metrics); no third value scales the gradient a second time."""
    sequences, config = draw([4, 6], seed=2), LossConfig()
    step = denominators_of(sequences)
    logprobs, rows, entropy = pack(sequences)
    result = policy_loss(logprobs, rows, step, config, entropy)
    assert isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    result[0].backward()
    halved = [call([rows_], config, step)[2] for rows_ in sequences]
    assert torch.equal(torch.cat(halved), logprobs.grad)
    logprobs, rows = nll_rows([[1.0, 2.0]])
    assert len(nll_loss(logprobs, rows, Denominators(2, 1))) == 2


def test_case_2_gradients_of_branches_add_at_a_shared_row():
    """Branches 0 and 1 are identical (advantage 1) and read the same row; branch 2 has advantage 2."""
    config = LossConfig(aggregation="seq-mean-token-sum")

    def at_rows(index, advantages):
        computed = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
        rows = SequenceRows(torch.arange(len(index) + 1), torch.tensor(advantages, dtype=torch.float64))
        policy_loss(computed[torch.tensor(index)], rows, Denominators(3, 3), config)[0].backward()
        return computed.grad

    alone = [at_rows([0], [1.0]), at_rows([0], [1.0]), at_rows([1], [2.0])]
    together = at_rows([0, 0, 1], [1.0, 1.0, 2.0])
    assert torch.equal(together, sum(alone)) and torch.equal(together, at_rows([0, 1], [2.0, 2.0]))
    assert together.tolist() == pytest.approx([-2 / 3, -2 / 3])


@pytest.mark.parametrize("name", CONFIGS)
def test_case_4_duplicates_count_twice_and_the_empty_response_adds_nothing(name):
    pair = draw([2], seed=1, masked=0)[0]
    responses = [[dict(row, advantage=value) for row in rows]
                 for rows, value in ((pair, 1.0), (pair, 1.0), (pair[:1], -2.0), ([], 5.0))]
    step = denominators_of(responses)
    assert (step.tokens, step.sequences) == (5, 3)
    loss, metrics, grad, _ = call(responses, CONFIGS[name], step)
    assert metrics == pytest.approx(oracle(responses, CONFIGS[name]), rel=1e-12)
    assert torch.equal(grad[:2], grad[2:4]) and torch.isfinite(grad).all()
    without, _, grad_without, _ = call(responses[:3], CONFIGS[name], step)
    assert loss == without and torch.equal(grad, grad_without)
    empty = call(responses[3:], CONFIGS[name], step)
    assert empty[0] == 0 and empty[1]["tokens"] == empty[1]["sequences"] == 0
    once = call(responses[:1], CONFIGS[name], step)[0]
    assert loss == pytest.approx(2 * once + call(responses[2:3], CONFIGS[name], step)[0], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e10, 200.0])
@pytest.mark.parametrize("name", CONFIGS)
def test_case_32_masked_values_change_no_bit(name, garbage, dtype):
    clean = draw([6, 4, 3], seed=2, masked=0.4)
    for row in clean[2]:
        row["valid"] = False
    dirty = [[row if row["valid"] else dict(row, **dict.fromkeys(FIELDS, garbage)) for row in rows]
             for rows in clean]
    assert sum(not row["valid"] for rows in clean for row in rows) >= 5
    expected, actual = (call(sequences, CONFIGS[name], dtype=dtype) for sequences in (clean, dirty))
    assert actual[:2] == expected[:2] and math.isfinite(actual[0])
    for gradient, reference in zip(actual[2:], expected[2:]):
        assert torch.equal(gradient, reference)
    hidden = torch.tensor([not row["valid"] for rows in clean for row in rows])
    assert (actual[2][hidden] == 0).all() and (actual[2] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_case_32_a_valid_difference_of_100_is_finite_and_points_the_right_way(dtype):
    """exp continues as its tangent above 20: documented in the module, for k3 and for the ratio."""
    edge = math.exp(20)
    logprobs = torch.tensor([-100.0, -1.0], dtype=dtype, requires_grad=True)
    rows = SequenceRows(torch.tensor([0, 2]), torch.zeros(2), None, torch.tensor([0.0, -1.0]))
    share, metrics = policy_loss(logprobs, rows, Denominators(1, 1), LossConfig(kl_coef=1.0))
    share.backward()
    assert share.item() == pytest.approx(edge * 81 - 101, rel=1e-6) and metrics["kl"] == share.double()
    assert logprobs.grad.tolist() == pytest.approx([1 - edge, 0], rel=1e-6)

    logprobs = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    rows = SequenceRows(torch.tensor([0, 1]), torch.tensor([-2.0]), torch.tensor([-101.0]))
    share, metrics = policy_loss(logprobs, rows, Denominators(1, 1), LossConfig())
    share.backward()
    assert share.item() == pytest.approx(2 * edge * 81, rel=1e-6)
    assert logprobs.grad.item() == pytest.approx(2 * edge, rel=1e-6)


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


def test_case_34_equal_rewards_keep_the_gradient_of_kl():
    sequences = draw([4, 3], seed=6, masked=0)
    for rows in sequences:
        for row in rows:
            row["advantage"] = 0.0
    assert (call(sequences, LossConfig(kl_coef=0.0))[2] == 0).all()
    loss, _, grad, _ = call(sequences, LossConfig(kl_coef=0.1))
    closed = [0.1 * (1 - math.exp(row["ref"] - row["logprob"])) / 7 for rows in sequences for row in rows]
    assert loss > 0 and grad.tolist() == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [[3, 2], [0, 0], []])
def test_case_34_a_step_without_a_valid_token(name, lengths):
    """Loss 0 and gradients of exactly 0, attached to the graph; AdamW still decays weights, nothing else."""
    weight = torch.nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    sequences = draw(lengths, masked=1.0)
    logprobs, rows, _ = pack(sequences)
    fed = torch.where(logprobs.detach() < 0, math.nan, 0.0) + (weight.sum() * torch.ones_like(logprobs))
    share, metrics = policy_loss(fed, rows, Denominators(0, 0), CONFIGS[name], torch.ones_like(logprobs))
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way either, not even one masked later
        share.backward()
    assert share.item() == 0 and weight.grad.tolist() == [0.0] * 3
    extremes = {"min/ratio": math.inf, "max/ratio": -math.inf}
    assert {key: value.item() for key, value in metrics.items()} == dict.fromkeys(metrics, 0.0) | extremes
    optimizer.step()
    assert weight.tolist() == [2.0 * (1 - 0.1 * 0.5)] * 3
    assert nll_loss(fed, rows, Denominators(0, 0))[0].item() == 0


def test_case_60_beta_0_needs_no_reference_and_no_gradient_mode():
    sequences = draw([5, 2], seed=8)
    logprobs, rows, _ = pack(sequences)
    bare = SequenceRows(rows.offsets, rows.advantages, rows.old_logprobs, None, rows.mask)
    step = denominators_of(sequences)
    with_reference, _ = policy_loss(logprobs, rows, step, LossConfig())
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            share, metrics = policy_loss(logprobs, bare, step, LossConfig())
            assert torch.equal(share, with_reference) and "kl" not in metrics
            assert share.requires_grad == (mode is torch.enable_grad)
    # A useless reference is not multiplied by a beta of 0.
    useless = SequenceRows(rows.offsets, rows.advantages, rows.old_logprobs,
                           torch.full_like(rows.old_logprobs, math.inf), rows.mask)
    share, _ = policy_loss(logprobs, useless, step, LossConfig())
    share.backward()
    assert torch.equal(share, with_reference) and torch.isfinite(logprobs.grad).all()


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
