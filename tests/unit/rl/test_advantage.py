"""Advantages and the overlong punishment, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl.rl.advantage import compute_advantages, overlong_punishment, reward_varies

NAN = math.nan


def test_one_group_by_hand():
    # mean 1, deviations -1 -1 1 1, unbiased variance 4/3
    result = compute_advantages([[0.0, 0.0, 2.0, 2.0]])
    a = 1 / (math.sqrt(4 / 3) + 1e-4)
    assert result == [pytest.approx([-a, -a, a, a], rel=1e-12)]


def test_scale_batch_uses_the_spread_of_all_rewards_and_each_groups_mean():
    # rewards 0 2 | 1 5: group means 1 and 3; mean 2, deviations -2 0 -1 3, unbiased variance 14/3
    result = compute_advantages([[0.0, 2.0], [1.0, 5.0]], scale="batch")
    d = math.sqrt(14 / 3) + 1e-4
    assert result == [pytest.approx([-1 / d, 1 / d]), pytest.approx([-2 / d, 2 / d])]


def test_scale_none_only_centres():
    assert compute_advantages([[0.0, 3.0, 3.0]], scale="none") == [[-2.0, 1.0, 1.0]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(scale):
    # 0.1 + 0.2 differs from 0.3 in the last bit: with a spread of 6e-17, a division would make noise of it
    result = compute_advantages([[0.3, 0.1 + 0.2, 0.3], [0.0, 1.0, 1.0]], scale=scale)
    assert result[0] == [0.0, 0.0, 0.0]
    assert result[1][0] < 0 < result[1][1]


def test_the_tolerance_is_a_distance_between_rewards():
    assert not reward_varies([0.0, 0.5], tolerance=0.5)
    assert reward_varies([0.0, 0.5], tolerance=0.4999)
    assert compute_advantages([[0.0, 0.5]], tolerance=0.5) == [[0.0, 0.0]]


def test_unscored_completions_are_left_out():
    result = compute_advantages([[0.0, NAN, 2.0], [1.0, NAN, NAN], [NAN, NAN, NAN]])
    a = 1 / (math.sqrt(2) + 1e-4)
    assert result == [pytest.approx([-a, 0.0, a]), [0.0] * 3, [0.0] * 3]
    assert not reward_varies([1.0, NAN], tolerance=0.0)
    assert not reward_varies([], tolerance=0.0)


def test_unscored_completions_do_not_enter_the_batch_spread():
    values = compute_advantages([[0.0, 2.0, NAN], [NAN, NAN, 7.0]], scale="batch")
    d = math.sqrt(13) + 1e-4  # of 0, 2, 7
    assert values[0] == pytest.approx([-1 / d, 1 / d, 0.0])


def test_nothing_at_all():
    assert compute_advantages([]) == []
    assert compute_advantages([[NAN, NAN]], scale="batch") == [[0.0, 0.0]]


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.2, 1.0, 2.2, NAN]), min_size=1, max_size=6), max_size=5),
    st.sampled_from(["group", "batch", "none"]),
)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards, scale):
    result = compute_advantages(rewards, scale=scale)
    for group, values in zip(rewards, result, strict=True):
        assert math.fsum(values) == pytest.approx(0, abs=1e-9)
        assert all(math.isfinite(a) for a in values)
        if reward_varies(group, 1e-6):
            ranked = sorted((r, a) for r, a in zip(group, values, strict=True) if not math.isnan(r))
            assert [a for _, a in ranked] == sorted(a for _, a in ranked)
            assert ranked[0][1] < 0 < ranked[-1][1]


def test_overlong_punishment_by_hand():
    # limit 100, buffer 20: free up to 80, a twentieth of the penalty for each token after it
    lengths = [0, 79, 80, 81, 90, 99, 100, 120]
    expected = [0, 0, 0, 0.05, 0.5, 0.95, 1, 1]
    assert [overlong_punishment(n, 100, 20) for n in lengths] == pytest.approx(expected)
    assert [overlong_punishment(n, 100, 20, 0.5) for n in lengths] == pytest.approx([0.5 * e for e in expected])
    assert overlong_punishment(100, 100, 0) == 0.0
