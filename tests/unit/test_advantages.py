"""Advantages: the formulas against numbers worked out by hand, and what must not change them."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeError, InputError
from megatron_augtree.rl.advantages import HOWS, advantages_by_group, group_advantages, whiten

REWARDS = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=1, max_size=8)


def test_case_35_population_deviation_is_the_default_and_sample_is_a_choice():
    assert group_advantages([1, 3], eps=1e-300) == [-1.0, 1.0]
    assert group_advantages([1, 3]) == pytest.approx([-1, 1], abs=1e-7)
    half = math.sqrt(0.5)
    assert group_advantages([1, 3], unbiased=True) == pytest.approx([-half, half], abs=1e-7)


@pytest.mark.parametrize("how", ["mean_std", "mean", "leave_one_out"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_case_35_singletons_and_equal_rewards_give_exactly_zero(how, unbiased):
    assert group_advantages([5.0], how, unbiased=unbiased) == [0.0]
    assert group_advantages([0.1, 0.1, 0.1], how, unbiased=unbiased, eps=1e-300) == [0.0] * 3
    assert group_advantages([], how, unbiased=unbiased) == []


def test_case_35_interleaved_ids():
    rewards, ids = [1.0, 5.0, 0.1, 3.0, 0.1, 0.1], ["a", "b", 7, "a", 7, 7]
    assert advantages_by_group(rewards, ids, eps=1e-300) == [-1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert advantages_by_group(rewards, ids, "mean", eps=1e-300) == [-1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    assert advantages_by_group(rewards, ids, "none") == rewards


def test_the_four_formulas_on_one_group():
    rewards = [2.0, 4.0, 9.0]  # mean 5, population variance 26 / 3, sample variance 13
    assert group_advantages(rewards, "none") == rewards
    assert group_advantages(rewards, "mean") == [-3.0, -1.0, 4.0]
    assert group_advantages(rewards, "leave_one_out") == [-4.5, -1.5, 6.0]
    for unbiased, variance in ((False, 26 / 3), (True, 13.0)):
        expected = [shift / math.sqrt(variance) for shift in (-3, -1, 4)]
        assert group_advantages(rewards, unbiased=unbiased, eps=1e-12) == pytest.approx(expected, rel=1e-11)


def test_eps_is_added_to_the_deviation():
    assert group_advantages([1, 3], eps=1.0) == [-0.5, 0.5]


@given(REWARDS, st.sampled_from(HOWS), st.booleans(), st.randoms(use_true_random=False))
def test_order_of_the_samples_changes_no_bit(rewards, how, unbiased, shuffler):
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    plain = group_advantages(rewards, how, unbiased=unbiased)
    shuffled = group_advantages([rewards[index] for index in order], how, unbiased=unbiased)
    assert shuffled == [plain[index] for index in order]


@given(REWARDS)
def test_advantages_match_the_statistics_module(rewards):
    if len(set(rewards)) == 1:
        assert group_advantages(rewards) == [0.0] * len(rewards)
        return
    mean = statistics.fmean(rewards)
    for unbiased, deviation in ((False, statistics.pstdev(rewards)), (True, statistics.stdev(rewards))):
        expected = [(reward - mean) / (deviation + 1e-8) for reward in rewards]
        assert group_advantages(rewards, unbiased=unbiased) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for index, advantage in enumerate(group_advantages(rewards, "leave_one_out")):
        others = rewards[:index] + rewards[index + 1 :]
        assert advantage == pytest.approx(rewards[index] - statistics.fmean(others), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), max_size=12), st.sampled_from(HOWS))
def test_by_group_equals_each_group_alone(samples, how):
    ids, rewards = [group for group, _ in samples], [float(reward) for _, reward in samples]
    together = advantages_by_group(rewards, ids, how)
    for group in set(ids):
        alone = group_advantages([reward for owner, reward in zip(ids, rewards) if owner == group], how)
        assert [advantage for owner, advantage in zip(ids, together) if owner == group] == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200, None, "much"])
@pytest.mark.parametrize("how", HOWS)
def test_a_reward_that_is_not_finite_is_named(bad, how):
    with pytest.raises(InputError, match=r"reward 2(.|\n)*remedy"):
        group_advantages([1.0, 2.0, bad], how)
    with pytest.raises(InputError, match="reward 1"):
        advantages_by_group([1.0, bad], ["x", "y"], how)


def test_settings_and_lengths_that_do_not_fit_are_refused():
    with pytest.raises(AugTreeError, match=r"how = 'median'(.|\n)*mean_std"):
        group_advantages([1.0], "median")
    for eps in (0.0, -1e-8, math.inf, math.nan):
        with pytest.raises(AugTreeError, match="eps"):
            group_advantages([1.0, 2.0], eps=eps)
    with pytest.raises(InputError, match="2 rewards, 1 group_ids"):
        advantages_by_group([1.0, 2.0], ["a"])
    with pytest.raises(InputError, match="2 values, 1 mask"):
        whiten([1.0, 2.0], [True])


def test_case_23_whitening_over_all_ranks():
    ranks = [[1.0] * 3, [3.0] * 3]
    whole = whiten(ranks[0] + ranks[1], eps=1e-300)
    assert whole == [-1.0] * 3 + [1.0] * 3
    # Rank by rank the values are constant and the signal would be gone: that is the mistake of the case.
    assert whiten(ranks[0]) + whiten(ranks[1]) == [0.0] * 6


def test_whitening_weighs_tokens_and_ignores_what_is_masked():
    values = [math.nan, 2.0, math.inf, 4.0, 9.0, -1e200, None]
    mask = [False, True, False, True, True, False, False]
    whitened = whiten(values, mask, eps=1e-300)
    deviation = math.sqrt(26 / 3)
    assert whitened == pytest.approx([0, -3 / deviation, 0, -1 / deviation, 4 / deviation, 0, 0], rel=1e-12)
    with pytest.raises(InputError, match="value 2"):
        whiten(values, [False, True, True, True, True, False, False])


def test_whitening_of_many_values_has_mean_zero_and_deviation_one():
    generator = random.Random(0)
    values = [generator.gauss(3, 7) for _ in range(1001)]
    for unbiased, deviation in ((False, statistics.pstdev), (True, statistics.stdev)):
        whitened = whiten(values, unbiased=unbiased)
        assert math.fsum(whitened) == pytest.approx(0, abs=1e-9)
        assert deviation(whitened) == pytest.approx(1, rel=1e-7)
