import pytest
import torch

from labkit.config import Sampling
from labkit.models.logprobs import restrict, token_logprobs
from labkit.rollout.sampling import sample

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def frequencies(sampling: Sampling, draws: int = 40_000) -> torch.Tensor:
    tokens, _ = sample(LOGITS.expand(draws, -1), sampling, torch.Generator().manual_seed(0))
    return torch.bincount(tokens, minlength=4) / draws


def test_tokens_are_drawn_with_their_probability() -> None:
    sampling = Sampling(temperature=0.6)
    expected = (LOGITS[0] / 0.6).softmax(-1)
    torch.testing.assert_close(frequencies(sampling), expected, atol=0.01, rtol=0)


def test_g_is_the_log_probability_of_the_distribution_sampled_from() -> None:
    for sampling in (
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_p=0.8),
        Sampling(top_k=3, top_p=0.9),
    ):
        tokens, g = sample(LOGITS.expand(512, -1), sampling, torch.Generator().manual_seed(0))
        p, _ = token_logprobs(LOGITS.expand(512, -1), tokens, sampling)
        assert torch.equal(g, p), sampling


def test_temperature_enters_before_the_softmax() -> None:
    """Forgetting T on one side gives ratios .793, 1.544, 3.008, 5.858 on these logits; dividing log-probs .591."""
    tokens = torch.arange(4)
    sampler, _ = token_logprobs(LOGITS.expand(4, -1), tokens, Sampling(temperature=0.6))
    forgot, _ = token_logprobs(LOGITS.expand(4, -1), tokens, Sampling())
    torch.testing.assert_close((forgot - sampler).exp(), torch.tensor([0.793, 1.544, 3.008, 5.858]), atol=1e-3, rtol=0)


def test_top_p_keeps_the_smallest_nucleus_and_renormalises() -> None:
    """T = 1, top-p = .8: the nucleus is {0, 1} with mass .8808, so a trainer that ignores it sees r = .8808."""
    kept = restrict(LOGITS, Sampling(top_p=0.8)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]
    tokens = torch.tensor([0, 1])
    sampler, _ = token_logprobs(LOGITS.expand(2, -1), tokens, Sampling(top_p=0.8))
    ignored, _ = token_logprobs(LOGITS.expand(2, -1), tokens, Sampling())
    torch.testing.assert_close((ignored - sampler).exp(), torch.full((2,), 0.8808), atol=1e-4, rtol=0)
    assert frequencies(Sampling(top_p=0.8))[2:].sum() == 0


def test_top_k_alone_and_with_top_p() -> None:
    assert restrict(LOGITS, Sampling(top_k=1)).isfinite().sum() == 1
    assert restrict(LOGITS, Sampling(top_k=3, top_p=0.99)).isfinite().sum() == 3


def test_a_sampled_token_outside_the_trainers_nucleus_stays_finite() -> None:
    p, _ = token_logprobs(LOGITS, torch.tensor([3]), Sampling(top_p=0.5))
    assert p.isfinite().all()


def test_the_kept_set_is_a_constant_for_the_gradient() -> None:
    logits = LOGITS.clone().requires_grad_(True)
    p, entropy = token_logprobs(logits, torch.tensor([0]), Sampling(top_p=0.8))
    p.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0, 2:].eq(0).all()
    assert not entropy.requires_grad


def test_logits_that_are_not_finite_are_named() -> None:
    with pytest.raises(RuntimeError, match="logits hold NaN or infinity"):
        sample(torch.tensor([[0.0, float("nan")]]), Sampling(), torch.Generator())
