import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.rl import group_advantages


def advantages(rewards: list[float], **options) -> list[float]:
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), len(rewards), **options).tolist()


def test_leave_one_out_one_right_of_four_is_the_known_quirk():
    """The others of the right answer have no spread, so it isn't normalised."""
    assert advantages([1, 0, 0, 0], baseline="leave-one-out") == pytest.approx([1.0] + [-0.577349] * 3, abs=1e-6)


def test_leave_one_out_two_right_of_four():
    assert advantages([1, 1, 0, 0], baseline="leave-one-out") == pytest.approx(
        [1.154699, 1.154699, -1.154699, -1.154699], abs=2e-6
    )


def test_leave_one_out_not_normalised():
    assert advantages([1, 0, 0, 0], baseline="leave-one-out", normalize=False) == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3]
    )


def test_group_baseline():
    assert advantages([1, 0, 0, 0], normalize=False) == [0.75, -0.25, -0.25, -0.25]
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=1e-6)


def test_each_group_has_its_own_baseline():
    both = group_advantages(torch.tensor([1.0, 0.0, 0.2, 0.6]), 2)
    torch.testing.assert_close(both[:2], group_advantages(torch.tensor([1.0, 0.0]), 2))
    torch.testing.assert_close(both[2:], group_advantages(torch.tensor([0.2, 0.6]), 2))


@pytest.mark.parametrize("baseline", ["group", "leave-one-out"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_equal_rewards_have_no_advantage_in_spite_of_rounding(baseline, size):
    assert advantages([0.1] * size, baseline=baseline) == [0.0] * size


def test_equal_others_do_not_divide_by_a_rounding_error():
    """The mean of three 0.1 is not 0.1: a spread of 1e-17 would divide the advantage by 1e-6."""
    assert advantages([0.4, 0.1, 0.1, 0.1], baseline="leave-one-out")[0] == pytest.approx(0.3)


def test_a_pair_left_one_out_compares_the_two():
    assert advantages([1.0, 0.25], baseline="leave-one-out") == [0.75, -0.75]


@given(st.lists(st.floats(0, 1, width=16), min_size=2, max_size=9))
def test_group_baseline_is_the_textbook_z_score(rewards):
    deviation = statistics.stdev(rewards)
    wanted = [(reward - statistics.fmean(rewards)) / (deviation + 1e-6) for reward in rewards]
    assert advantages(rewards) == pytest.approx(wanted, abs=1e-5)


@given(st.lists(st.floats(0, 1, width=16), min_size=3, max_size=9))
def test_leave_one_out_is_the_others_z_score(rewards):
    for i, advantage in enumerate(advantages(rewards, baseline="leave-one-out")):
        others = rewards[:i] + rewards[i + 1 :]
        deviation = statistics.stdev(others)
        wanted = (rewards[i] - statistics.fmean(others)) / (deviation + 1e-6 if deviation > 0 else 1)
        assert advantage == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@given(st.permutations([0.0, 0.25, 0.25, 1.0]), st.sampled_from(["group", "leave-one-out"]))
def test_order_within_a_group_does_not_matter(rewards, baseline):
    wanted = dict(zip([0.0, 0.25, 0.25, 1.0], advantages([0.0, 0.25, 0.25, 1.0], baseline=baseline), strict=True))
    assert advantages(rewards, baseline=baseline) == pytest.approx([wanted[reward] for reward in rewards])


@pytest.mark.parametrize(
    ("rewards", "size", "baseline", "message"),
    [
        ([1.0, 0.0, 1.0], 2, "group", "whole groups of 2"),
        ([1.0, 0.0], 2, "loo", "group, leave-one-out"),
        ([1.0, float("nan")], 2, "group", r"rows \[1\]"),
    ],
)
def test_what_raises(rewards, size, baseline, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), size, baseline)
