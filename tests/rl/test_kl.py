import math

import pytest
import torch

from labkit.rl.kl import ESTIMATORS, k1, k2, k3, kl_penalty

YES = torch.tensor([True])


def penalty_and_gradient(c: float, r: float, kl_type: str) -> tuple[float, float]:
    current = torch.tensor([c], requires_grad=True)
    penalty = kl_penalty(current, torch.tensor([r]), YES, kl_type)
    penalty.sum().backward()
    return penalty.item(), current.grad.item()


def test_estimators_by_hand():
    d = torch.tensor([-0.5])
    assert k1(d).item() == 0.5
    assert k2(d).item() == 0.125
    assert k3(d).item() == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-6)


def test_k3_keeps_its_digits_for_tiny_differences():
    # exp(d) - 1 - d in FP32 has no correct digit here
    assert k3(torch.tensor([1e-3])).item() == pytest.approx(5.001667e-7, rel=1e-3)


def test_k1_and_k3_estimate_the_same_kl():
    P, Q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    d = Q.log() - P.log()
    kl = (P * (P / Q).log()).sum()
    torch.testing.assert_close((P * k1(d)).sum(), kl)
    torch.testing.assert_close((P * k3(d)).sum(), kl)


@pytest.mark.parametrize(
    ("kl_type", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.106531, 0.393469)]
)
def test_penalty_has_the_on_policy_gradient(kl_type, value, slope):
    """d/dc [exp(c - sg(c)) k] = k + dk/dc."""
    penalty, gradient = penalty_and_gradient(-1.0, -1.5, kl_type)
    assert penalty == pytest.approx(value, abs=1e-6)
    assert gradient == pytest.approx(value + slope, abs=1e-6)


def test_expected_gradient_is_that_of_the_kl():
    """Sum over the whole vocabulary, weighted by the policy, against autograd through the exact KL."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = (logits.softmax(0) * (logits.log_softmax(0) - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    for kl_type in ("k1", "k3"):
        current = logits.log_softmax(0)
        sampled = kl_penalty(current, reference, torch.ones(3, dtype=torch.bool), kl_type)
        (gradient,) = torch.autograd.grad((logits.softmax(0).detach() * sampled).sum(), logits)
        torch.testing.assert_close(gradient, wanted)


def test_penalty_is_clamped():
    assert penalty_and_gradient(-30.0, -1.0, "k3") == (10.0, 0.0)
    assert penalty_and_gradient(-30.0, -1.0, "k1") == (-10.0, 0.0)
    assert all(penalty_and_gradient(0.0, -1000.0, kl_type) == (10.0, 0.0) for kl_type in ESTIMATORS)


def test_tokens_that_do_not_count_have_no_penalty_and_no_gradient():
    current = torch.tensor([-1.0, math.nan, -1.0], requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, -math.inf])
    penalty = kl_penalty(current, reference, torch.tensor([True, False, False]), "k3")
    penalty.sum().backward()
    assert penalty[1:].tolist() == [0.0, 0.0]
    assert current.grad.tolist() == [pytest.approx(1.0), 0.0, 0.0]
