"""Each objective against published numbers, and the clip that is calibrated against a BF16 shadow."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import Correction
from labkit.rl.objectives import OBJECTIVES, Clip, Tokens, calibrated

CLIP = Clip(0.2, 0.28)


def evaluate(objective, current, old, advantages, clip=CLIP, mask=None):
    """Loss, its gradient by c, and the clip flags; [B, T]."""
    c = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    count = torch.ones_like(c, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    log_rho = torch.where(count, c - torch.tensor(old, dtype=torch.float64), 0.0)
    advantages = torch.tensor(advantages, dtype=torch.float64)[:, None]
    loss, clipped = OBJECTIVES[objective](Tokens(torch.where(count, c, 0.0), log_rho, advantages, count), clip)
    torch.where(count, loss, 0.0).sum().backward()
    return loss.detach(), c.grad, clipped


def test_every_objective_of_a_recipe_exists():
    assert tuple(OBJECTIVES) == get_args(Correction.model_fields["objective"].annotation)


def test_ppo():
    """NeMo RL, test_loss_functions.py: ratios .5, 1, 1.5 and clip .2: losses -.5, 1, -2.4."""
    c, old, advantages = [[-1.69315], [-1.0], [-0.59453]], [[-1.0]] * 3, [1.0, -1.0, 2.0]
    loss, gradient, clipped = evaluate("ppo", c, old, advantages, Clip(0.2, 0.2))
    assert loss[:, 0].tolist() == pytest.approx([-0.5, 1.0, -2.4], abs=1e-5)
    assert gradient[:, 0].tolist() == pytest.approx([-0.5, 1.0, 0.0], abs=1e-5)
    assert clipped[:, 0].tolist() == [False, False, True]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """SkyRL, test_losses.py: ratios .5, 1, 10 clipped to .8, 1, 1.2: losses add up to -2.9930."""
    c, old, advantages = [[-1.69315], [-1.0], [-0.69741]], [[-1.0], [-1.0], [-3.0]], [1.0, -1.0, -4.0]
    loss, gradient, clipped = evaluate("cispo", c, old, advantages, Clip(0.2, 0.2))
    assert loss.sum().item() == pytest.approx(-2.9930, abs=1e-4)
    assert gradient[:, 0].tolist() == pytest.approx([-0.8, 1.0, 4.8])
    assert clipped[:, 0].tolist() == [True, False, True]


def test_gspo_has_one_ratio_for_a_response():
    """NeMo RL, test_loss_functions.py: log-ratios -.69315, 0, .40547 have the geometric mean .9086."""
    c, old = [[-1.69315, -1.0, -0.59453, 9.0]], [[-1.0] * 4]
    loss, gradient, clipped = evaluate("gspo", c, old, [2 / 3], mask=[[1, 1, 1, 0]])
    assert loss[0, :3].tolist() == pytest.approx([-0.6057] * 3, abs=1e-4)
    assert gradient[0].tolist() == pytest.approx([-0.6057] * 3 + [0.0], abs=1e-4)
    assert not clipped.any()
    loss, gradient, clipped = evaluate("gspo", c, old, [-1.0], Clip(3e-4, 4e-4), mask=[[1, 1, 1, 0]])
    assert loss[0, :3].tolist() == pytest.approx([1 - 3e-4] * 3)
    assert gradient.tolist() == [[0.0] * 4]
    assert clipped[0, :3].all()


def test_the_unclipped_ratio_and_reinforce():
    """DPPO's tokens that its mask keeps: ratio exp(.1) with A = 1, exp(.7) with A = -1."""
    c, old, advantages = [[-0.9], [-0.3]], [[-1.0], [-1.0]], [1.0, -1.0]
    loss, gradient, clipped = evaluate("ratio", c, old, advantages)
    assert loss[:, 0].tolist() == pytest.approx([-1.105171, 2.013753])
    assert gradient[:, 0].tolist() == pytest.approx([-1.105171, 2.013753])
    assert not clipped.any()
    loss, gradient, clipped = evaluate("reinforce", c, old, advantages)
    assert loss[:, 0].tolist() == pytest.approx([0.9, -0.3])
    assert gradient[:, 0].tolist() == [-1.0, 1.0]
    assert not clipped.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_before_the_first_update_all_push_by_the_advantage(objective):
    c = [[-1.0, -0.2, -3.0], [-0.5, -0.5, -0.1]]
    _, gradient, clipped = evaluate(objective, c, c, [1.5, -0.5])
    torch.testing.assert_close(gradient, torch.tensor([[-1.5] * 3, [0.5] * 3], dtype=torch.float64))
    assert not clipped.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_all_measure_stays_finite(objective, advantage):
    loss, gradient, _ = evaluate(objective, [[-1.0, -900.0]], [[-900.0, -1.0]], [advantage])
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("objective", ["ppo", "gspo"])
def test_dual_clip_bounds_the_loss_of_bad_answers(objective):
    c, old, dual = [[math.log(9.0)], [math.log(9.0)], [math.log(2.0)]], [[0.0]] * 3, Clip(0.2, 0.28, 3.0)
    loss, gradient, clipped = evaluate(objective, c, old, [-2.0, 2.0, -2.0], dual)
    assert loss[:, 0].tolist() == pytest.approx([6.0, -2.56, 4.0])
    assert gradient[:, 0].tolist() == pytest.approx([0.0, 0.0, 4.0])
    assert clipped[:, 0].tolist() == [True, True, False]


# ---- calibrated clipping


def logs(*ratios):
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_bounds_move_to_where_bf16_would_clip_as_often():
    """BF16 clips a fifth on either side: of .3, .6, 1, 1.2, 2 that is what lies outside .45 and 1.6."""
    clip = calibrated(Clip(0.2, 0.28, 3.0), logs(2.0, 0.3, 1.0, 1.2, 0.6), logs(0.5, 0.9, 1.0, 1.1, 1.5))
    assert (clip.low, clip.high) == pytest.approx((1 - 0.45, 1.6 - 1))
    assert clip.dual == 3.0
    narrower = calibrated(CLIP, logs(0.9, 0.95, 1.0, 1.02, 1.1), logs(0.5, 0.9, 1.0, 1.1, 1.5))
    assert (narrower.low, narrower.high) == pytest.approx((1 - 0.925, 1.06 - 1))


def test_a_bound_that_bf16_never_reaches_moves_out_to_the_furthest_noisy_ratio():
    clip = calibrated(CLIP, logs(0.3, 1.0, 2.0), logs(0.9, 1.0, 1.1))
    assert (clip.low, clip.high) == pytest.approx((0.7, 1.0))
    clip = calibrated(CLIP, logs(0.95, 1.0, 1.05), logs(0.9, 1.0, 1.1))
    assert (clip.low, clip.high) == pytest.approx((0.2, 0.28)), "and never in"


def test_bounds_stay_on_their_own_side_of_1():
    up = calibrated(CLIP, logs(1.1, 1.2, 1.3), logs(0.5, 1.0, 1.0))
    assert up.low == 0.0
    down = calibrated(CLIP, logs(0.7, 0.8, 0.9), logs(1.0, 1.0, 1.5))
    assert down.high == 0.0


def test_nothing_to_calibrate_on_leaves_the_clip():
    assert calibrated(CLIP, torch.zeros(0), torch.zeros(0)) == CLIP


@given(st.lists(st.integers(100, 3000), min_size=2, max_size=40))
def test_without_noise_the_same_tokens_are_clipped(thousandths):
    """All below or all above a bound excepted: a quantile can't lie past the furthest ratio."""
    rho = torch.tensor(thousandths, dtype=torch.float64) / 1000
    clip = calibrated(CLIP, rho.log(), rho.log())
    below, above = rho < 1 - CLIP.low, rho > 1 + CLIP.high
    if not below.all():
        assert (rho < 1 - clip.low).equal(below)
    if not above.all():
        assert (rho > 1 + clip.high).equal(above)


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=30))
def test_calibrated_bounds_are_bounds_and_clip_no_more_often_than_bf16(pairs):
    noisy, shadow = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    clip = calibrated(CLIP, noisy, shadow)
    assert 0.0 <= clip.low <= 1.0
    assert clip.high >= 0.0
    assert (noisy.exp() < 1 - clip.low - 1e-12).sum() <= (shadow.exp() < 1 - CLIP.low).sum()
    assert (noisy.exp() > 1 + clip.high + 1e-12).sum() <= (shadow.exp() > 1 + CLIP.high).sum()


def test_a_ratio_that_is_no_number_leaves_the_bounds_finite():
    clip = calibrated(CLIP, torch.tensor([math.nan, 0.0]), torch.tensor([0.0, 0.0]))
    assert math.isfinite(clip.low)
    assert math.isfinite(clip.high)
