"""Losses by case of the public reports, numbered as in tests/cases.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_augtree.rl.losses import (
    AGGREGATIONS,
    Denominators,
    LossConfig,
    SequenceRows,
    nll_loss,
    policy_loss,
)
from tests.unit.loss_oracle import (
    CONFIGS,
    CONSTANT,
    FIELDS,
    call,
    denominators_of,
    draw,
    nll_rows,
    oracle,
    pack,
)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("per_token", [False, True])
def test_case_15_37_loss_and_every_metric_equal_the_oracle(name, per_token):
    for seed, lengths in enumerate(([11, 0, 5, 1, 9, 3], [1], [40, 2])):
        sequences = draw(lengths, seed, per_token=per_token, masked=0.25 if seed else 0.4)
        loss, metrics, _, _ = call(sequences, CONFIGS[name])
        expected = oracle(sequences, CONFIGS[name])
        assert metrics == pytest.approx(expected, rel=1e-12, abs=1e-14)
        assert loss == metrics["loss"]


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
