import math

import pytest
import torch

from labkit.rl.ratio import MAX_LOG_RATIO, counted, log_ratio, ratio


def test_counted_needs_the_mask_and_every_log_prob_finite():
    nan, inf = math.nan, math.inf
    a = torch.tensor([-1.0, nan, -1.0, -1.0, -inf])
    b = torch.tensor([-1.0, -1.0, inf, -1.0, -1.0])
    mask = torch.tensor([1, 1, 1, 0, 1])
    assert counted(mask, a, b).tolist() == [True, False, False, False, False]


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="don't match the mask"):
        counted(torch.ones(2, 3), torch.zeros(3))


def test_log_ratio_is_zero_and_without_gradient_where_a_token_does_not_count():
    numerator = torch.tensor([-1.0, -math.inf, 7.0], requires_grad=True)
    denominator = torch.tensor([-2.0, -math.inf, 1.0])
    values = log_ratio(numerator, denominator, torch.tensor([True, False, False]))
    assert values.tolist() == [1.0, 0.0, 0.0]
    ratio(values).sum().backward()
    assert numerator.grad.tolist() == [pytest.approx(math.e), 0.0, 0.0]


def test_ratio_is_exact_up_to_1e10_and_saturates_far_beyond():
    assert float(ratio(torch.tensor(math.log(1e10), dtype=torch.float64))) == pytest.approx(1e10, rel=1e-12)
    saturated = ratio(torch.tensor([1000.0, MAX_LOG_RATIO]))
    assert saturated[0] == saturated[1]
    assert torch.isfinite(saturated.square()).all()


def test_a_mask_of_anything_but_zero_and_one_is_refused() -> None:
    logprobs = torch.zeros(1, 2)
    assert counted(torch.tensor([[1.0, 0.0]]), logprobs).tolist() == [[True, False]]
    for value in (0.5, -1.0, float("nan")):
        with pytest.raises(ValueError, match="other values than 0 and 1"):
            counted(torch.tensor([[1.0, value]]), logprobs)
