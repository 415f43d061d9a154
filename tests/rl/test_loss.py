import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import GRPO
from labkit.rl import LossTerms, correction, grpo_loss

NAN = math.nan


def loss(c, p, advantages, weights=None, mask=None, reference=None, num_tokens=None, num_sequences=None, **changes):
    """LossTerms and d loss / dc."""
    c = torch.as_tensor(c).detach().clone().requires_grad_()
    mask = torch.ones_like(c) if mask is None else torch.as_tensor(mask)
    terms = grpo_loss(
        c,
        torch.as_tensor(p),
        torch.as_tensor(advantages),
        torch.ones_like(c) if weights is None else torch.as_tensor(weights),
        mask,
        None if reference is None else torch.as_tensor(reference),
        settings=GRPO(**changes),
        num_tokens=int(mask.sum()) if num_tokens is None else num_tokens,
        num_sequences=len(mask) if num_sequences is None else num_sequences,
    )
    terms.loss.backward()
    return terms, c.grad


def test_on_policy_loss_is_minus_the_advantage_and_so_is_its_gradient():
    terms, gradient = loss([[-1.0, -2.0]], [[-1.0, -2.0]], [0.5])
    assert terms.loss.item() == -0.5
    assert gradient.tolist() == [[-0.25, -0.25]]
    assert terms.clipped == 0


def test_icepop_with_an_overflowing_ratio_stays_finite():
    """OpenRLHF#1314: delta = [1000, 0], bounds (.5, 5), A = 1, mean over tokens."""
    g, p, mask = torch.tensor([[-1001.0, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2)
    weights = correction("icepop", low=0.5, high=5.0)(g, p, mask).applied
    terms, gradient = loss(p, p, [1.0], weights)
    assert terms.loss.item() == -0.5
    assert gradient.tolist() == [[0.0, -0.5]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_overflowing_ratio_of_the_update_itself_stays_finite(advantage):
    terms, gradient = loss([[-1.0, -1.0]], [[-1001.0, -1.0]], [advantage], [[0.0, 1.0]])
    assert terms.loss.item() == -advantage / 2
    assert gradient.tolist() == [[0.0, -advantage / 2]]
    terms, gradient = loss([[-1.0, -1.0]], [[-1001.0, -1.0]], [advantage])
    assert torch.isfinite(terms.loss)
    assert torch.isfinite(gradient).all()


def test_everything_rejected_gives_zero_loss_and_gradient():
    terms, gradient = loss([[-1.0, -2.0]], [[-1.5, -2.5]], [1.0], [[0.0, 0.0]])
    assert terms.loss.item() == 0.0
    assert gradient.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted", "has_gradient"),
    [
        (1.5, 1.0, -1.28, False),  # gained enough
        (0.5, 1.0, -0.5, True),  # lost: pull it back
        (1.5, -1.0, 1.5, True),  # gained though bad: push it down
        (0.5, -1.0, 0.8, False),  # lost enough
        (1.1, 1.0, -1.1, True),
        (0.9, -1.0, 0.9, True),
    ],
)
def test_the_four_corners_of_the_clip(ratio, advantage, wanted, has_gradient):
    terms, gradient = loss([[math.log(ratio)]], [[0.0]], [advantage])
    assert terms.loss.item() == pytest.approx(wanted)
    assert gradient.item() == pytest.approx(-advantage * ratio if has_gradient else 0.0)
    assert terms.clipped.item() == (not has_gradient)


def test_dual_clip_bounds_the_loss_of_bad_answers_only():
    bad, gradient = loss([[math.log(9.0)]], [[0.0]], [-2.0], dual_clip=3.0)
    assert bad.loss.item() == pytest.approx(6.0)
    assert gradient.item() == 0.0
    assert bad.clipped == 1
    assert loss([[math.log(2.0)]], [[0.0]], [-2.0], dual_clip=3.0)[0].loss.item() == pytest.approx(4.0)
    assert loss([[math.log(9.0)]], [[0.0]], [2.0], dual_clip=3.0)[0].loss.item() == pytest.approx(-2.56)


def test_weights_multiply_the_policy_term_and_have_no_gradient():
    weights = torch.tensor([[0.5, 2.0]], requires_grad=True)
    c = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    grpo_loss(
        c,
        c.detach(),
        torch.ones(1),
        weights,
        torch.ones(1, 2),
        settings=GRPO(),
        num_tokens=2,
        num_sequences=1,
    ).loss.backward()
    assert c.grad.tolist() == [[-0.25, -1.0]]
    assert weights.grad is None


def test_token_and_sequence_level():
    """Lengths 1 and 3: every token alike, or every answer alike."""
    zeros, mask = torch.zeros(2, 3), [[1, 0, 0], [1, 1, 1]]
    token, token_gradient = loss(zeros, zeros, [1.0, -1.0], mask=mask)
    assert token.loss.item() == pytest.approx((-1 + 3) / 4)
    assert token_gradient.tolist() == [[-0.25, 0.0, 0.0], [0.25] * 3]
    sequence, gradient = loss(zeros, zeros, [1.0, -1.0], mask=mask, loss_level="sequence")
    assert sequence.loss.item() == pytest.approx(0.0)
    assert gradient[0].tolist() == [-0.5, 0.0, 0.0]
    assert gradient[1].tolist() == pytest.approx([1 / 6] * 3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_kl_term_is_not_weighted_and_counts_on_rejected_tokens(level):
    c, r = [[-1.0, -2.0]], [[-1.5, -2.0]]
    terms, gradient = loss(c, c, [0.0], [[0.0, 7.0]], reference=r, kl_coef=0.1, loss_level=level)
    assert terms.kl.item() == pytest.approx(0.106531 / 2, abs=1e-6)
    assert terms.loss.item() == pytest.approx(0.0106531 / 2, abs=1e-7)
    assert terms.policy_loss == 0.0
    # k3 with the on-policy factor: c - r
    assert gradient[0].tolist() == pytest.approx([0.1 * 0.5 / 2, 0.0], abs=1e-7)


def test_a_reference_without_coefficient_is_only_watched():
    terms, gradient = loss([[-1.0]], [[-1.0]], [0.0], reference=[[-1.5]])
    assert terms.kl.item() == pytest.approx(0.106531, abs=1e-6)
    assert terms.loss.item() == gradient.item() == 0.0


def test_a_coefficient_without_reference_raises():
    with pytest.raises(ValueError, match="pass reference, or set kl_coef to 0"):
        loss([[-1.0]], [[-1.0]], [1.0], kl_coef=0.1)


def test_non_finite_log_probs_are_left_out_and_reported():
    c = [[-1.0, NAN, -1.0, -1.0]]
    p = [[-1.0, -1.0, -math.inf, NAN]]
    reference = [[NAN, -1.0, -1.0, -1.0]]
    terms, gradient = loss(c, p, [1.0], mask=[[1, 1, 1, 0]], reference=reference, num_tokens=1, kl_coef=0.1)
    assert terms.loss.item() == -1.0
    assert gradient.tolist() == [[-1.0, 0.0, 0.0, 0.0]]
    assert terms.nonfinite == 2
    assert terms.kl == 0.0


def test_an_empty_batch_has_no_loss():
    terms, gradient = loss([[-1.0]], [[-1.0]], [1.0], mask=[[0]], num_sequences=0)
    assert terms.loss.item() == gradient.item() == 0.0


def test_summary_of_a_step():
    """Two updates, the first in two micro-batches: shares and ratios over tokens, losses over updates."""
    first, _ = loss([[math.log(2.0), 0.0]], [[0.0, 0.0]], [1.0], num_tokens=3)
    second, _ = loss([[math.log(0.5)]], [[0.0]], [1.0], num_tokens=3)
    third, _ = loss([[0.0]], [[0.0]], [-1.0])
    summary = LossTerms.summary([first, second, third], num_updates=2)
    assert summary["loss"] == summary["policy_loss"] == pytest.approx(((-1.28 - 1.0 - 0.5) / 3 + 1.0) / 2)
    assert summary["clip_share"] == pytest.approx(1 / 4)
    assert summary["probs_ratio"] == pytest.approx(4.5 / 4)
    assert (summary["probs_ratio_min"], summary["probs_ratio_max"]) == pytest.approx((0.5, 2.0))
    assert summary["loss_nan_count"] == summary["kl"] == 0.0


def test_summary_of_a_step_that_trained_nothing():
    summary = LossTerms.summary([])
    assert summary["loss"] == 0.0
    assert math.isnan(summary["probs_ratio"])


def random_batch(seed: int, B: int = 6, T: int = 5):
    generator = torch.Generator().manual_seed(seed)
    c, p, r, g = (-3 * torch.rand(4, B, T, generator=generator)).unbind()
    mask = torch.arange(T) < torch.randint(0, T + 1, (B, 1), generator=generator)
    return c, p, r, correction("tis")(g, p, mask).applied, mask, torch.randn(B, generator=generator)


@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]), st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch(seed, level, cut):
    c, p, r, weights, mask, advantages = random_batch(seed)
    totals = dict(num_tokens=int(mask.sum()), num_sequences=len(mask), loss_level=level, kl_coef=0.1, dual_clip=3.0)
    whole, gradient = loss(c, p, advantages, weights, mask, r, **totals)
    parts = [
        loss(c[rows], p[rows], advantages[rows], weights[rows], mask[rows], r[rows], **totals)
        for rows in (slice(None, cut), slice(cut, None))
    ]
    torch.testing.assert_close(parts[0][0].loss + parts[1][0].loss, whole.loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    assert LossTerms.summary([part[0] for part in parts]) == pytest.approx(
        LossTerms.summary([whole]), rel=1e-4, abs=1e-6, nan_ok=True
    )


@given(st.integers(0, 10**6), st.sampled_from(["token", "sequence"]))
def test_order_and_padding_change_nothing(seed, level):
    c, p, r, weights, mask, advantages = random_batch(seed)
    order = torch.randperm(len(c), generator=torch.Generator().manual_seed(seed))
    options = dict(loss_level=level, kl_coef=0.1)
    _, gradient = loss(c, p, advantages, weights, mask, r, **options)

    def pad(x, value):
        return torch.nn.functional.pad(x[order], (0, 3), value=value)

    _, turned = loss(
        pad(c, NAN),
        pad(p, 5.0),
        advantages[order],
        pad(weights, 1.0),
        pad(mask, False),
        pad(r, -math.inf),
        **options,
    )
    torch.testing.assert_close(turned[:, :-3], gradient[order])
    assert (turned[:, -3:] == 0).all()
