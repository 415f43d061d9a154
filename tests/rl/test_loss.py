import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import CORRECTIONS, GRPO, Correction, Filter
from labkit.rl import LossTerms, Weights, correction, correction_from, grpo_loss
from labkit.rl.loss import clip_of
from labkit.rl.objectives import Clip

NAN = math.nan


def weights_of(applied, mask) -> Weights:
    """As a correction would give them: whatever has weight 0 was rejected."""
    sampled, keep = mask.bool(), mask.bool() & (applied != 0)
    return Weights(applied, applied, keep, torch.zeros_like(sampled), {"ratio": sampled & ~keep}, {}, sampled)


def loss(
    c, p, advantages, weights=None, mask=None, reference=None, num_tokens=None, num_sequences=None, g=None,
    correction="none", **changes,
):  # fmt: skip
    """LossTerms and d loss / dc."""
    c = torch.as_tensor(c).detach().clone().requires_grad_()
    mask = torch.ones_like(c) if mask is None else torch.as_tensor(mask)
    terms = grpo_loss(
        c,
        torch.as_tensor(p if g is None else g),
        torch.as_tensor(p),
        torch.as_tensor(advantages),
        weights
        if isinstance(weights, Weights)
        else weights_of(torch.ones_like(c) if weights is None else torch.as_tensor(weights), mask),
        mask,
        None if reference is None else torch.as_tensor(reference),
        settings=GRPO(**changes),
        correction=correction if isinstance(correction, Correction) else Correction(name=correction),
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
    weights = correction("icepop", low=0.5, high=5.0)(g, p, mask)
    terms, gradient = loss(p, p, [1.0], weights, g=g, correction="icepop")
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
    """verl#7559: r = 10, 20 and .01 outside .5 and 5."""
    p = torch.tensor([[10.0, 20.0, 0.01]]).log()
    for denominator in ("keep", "drop"):
        chosen = Correction(weight="token", filters=(Filter(low=0.5, high=5.0),), denominator=denominator)
        weights = correction_from(chosen)(torch.zeros(1, 3), p, torch.ones(1, 3))
        terms, gradient = loss(
            p, p, [1.0], weights, g=torch.zeros(1, 3), correction=chosen,
            num_tokens=int(weights.counting.sum()), num_sequences=int(weights.counting.any()),
        )  # fmt: skip
        assert terms.loss.item() == 0.0
        assert gradient.tolist() == [[0.0] * 3]


def test_an_engine_that_returned_nan_for_a_token():
    """TRL#6297: log-probs -1, NaN, -2."""
    g, p = torch.tensor([[-1.0, NAN, -2.0]]), torch.tensor([[-1.0, -1.0, -2.0]])
    for name in CORRECTIONS:
        weights = correction(name)(g, p, torch.ones(1, 3), torch.ones(1), p)
        terms, gradient = loss(p, p, [1.0], weights, g=g, correction=name, num_tokens=2)
        assert terms.nonfinite == 1
        assert terms.loss.isfinite(), name
        assert gradient[0].tolist() == pytest.approx([-0.5, 0.0, -0.5]), name


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


def test_weights_multiply_the_policy_term():
    terms, gradient = loss([[-1.0, -1.0]], [[-1.0, -1.0]], [1.0], [[0.5, 2.0]])
    assert terms.loss.item() == -1.25
    assert gradient.tolist() == [[-0.25, -1.0]]


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


# ---- corrections that come with an objective, a denominator or a pull


def test_a_correction_brings_its_clip_or_takes_that_of_the_settings():
    settings = GRPO(clip_low=0.1, clip_high=0.3, dual_clip=4.0)
    assert clip_of(settings, Correction(name="tis")) == Clip(0.1, 0.3, 4.0)
    assert clip_of(settings, Correction(name="gspo")) == Clip(3e-4, 4e-4, 4.0)
    assert clip_of(settings, Correction(clip_high=0.5)) == Clip(0.1, 0.5, 4.0)


# Inputs that verl's own functions were run on: three responses, their p - g and c - p, clip .2 and .28, dual clip 3.
DELTA = torch.tensor([[0.1, -0.2, 0.3, 9.0], [1.0, -0.5, 7.0, 7.0], [-0.05, 0.02, 0.0, 0.01]])
MOVED = torch.tensor([[0.1, 0.4, -0.3, 0.0], [0.2, -0.4, 0.0, 0.0], [0.0, 0.3, -0.1, 0.05]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
VERL = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}


def verl_loss(chosen, level="token", num_tokens=None):
    """verl's functions divide by what is left after the rejection."""
    p = torch.full_like(DELTA, -1.0)
    g, c, advantages = p - DELTA, p + MOVED, torch.tensor([1.0, -1.0, 0.5])
    weights = correction_from(chosen)(g, p, MASK, advantages, c)
    return loss(
        c, p, advantages, weights, MASK, g=g, correction=chosen, loss_level=level,
        num_tokens=int(weights.counting.sum()) if num_tokens is None else num_tokens,
        num_sequences=int(weights.counting.any(-1).sum()), **VERL,
    )  # fmt: skip


def test_three_policies():
    """verl, decoupled vanilla PPO: weights up to 1.2, tokens outside .5 and 2 rejected."""
    chosen = Correction(weight="token", cap=1.2, filters=(Filter(low=0.5, high=2.0),), denominator="drop")
    terms, gradient = verl_loss(chosen)
    assert terms.loss.item() == pytest.approx(-0.598127, abs=1e-6)
    assert gradient.flatten().tolist() == pytest.approx(
        [-0.152675, 0, -0.111123, 0, 0, 0, 0, 0, -0.059452, 0, -0.056552, -0.066365], abs=1e-6
    )
    assert verl_loss(chosen, "sequence")[0].loss.item() == pytest.approx(-0.365177, abs=1e-6)
    kept = chosen.override({"denominator": "keep"})
    assert verl_loss(kept)[0].loss.item() == pytest.approx(-0.531668, abs=1e-6), "over all nine tokens"
    assert verl_loss(Correction())[0].loss.item() == pytest.approx(-0.358071, abs=1e-6)
    assert verl_loss(Correction(), "sequence")[0].loss.item() == pytest.approx(-0.186936, abs=1e-6)


def test_two_policies():
    """verl, bypass: the second response is rejected on c - g, and all weights that are left are 1.2."""
    rejecting = {"filters": (Filter(low=0.5, high=2.0),), "denominator": "drop", "old_policy": "rollout"}
    terms, _ = verl_loss(Correction(**rejecting))
    assert terms.loss.item() == pytest.approx(-0.79168, abs=1e-6)
    assert verl_loss(Correction(**rejecting), "sequence")[0].loss.item() == pytest.approx(-0.83617, abs=1e-6)
    reinforce = Correction(**rejecting, objective="reinforce", weight="sequence", cap=1.2)
    terms, gradient = verl_loss(reinforce)
    assert terms.loss.item() == pytest.approx(0.801429, abs=1e-6)
    assert gradient.sum(-1).tolist() == pytest.approx([-0.171429 * 3, 0.0, -0.085714 * 4], abs=1e-5)
    assert terms.clipped == 0
    assert verl_loss(reinforce, "sequence")[0].loss.item() == pytest.approx(0.84125, abs=1e-6)


# One token each: p = -1, then c and g. NeMo RL's test_loss_functions.py (clip .2) and verl's TI:237-269.
NEMO_C, NEMO_G, NEMO_A = [-1.69315, -1.0, -0.59453], [-0.5, -1.5, -0.8], [1.0, -1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "bounds", "c", "g", "wanted"),
    [
        ("nemo-rl/importance-sampling", {}, NEMO_C, NEMO_G, -0.2065),
        ("icepop", {}, [-1.0] * 3, [-0.5, -3.5, -0.8], -0.747997),  # r = .6065, 12.182 and .8187
        ("verl/decoupled_token_icepop", {}, [-1.0] * 3, [-0.5, -3.5, -0.8], -0.747997),
        ("nemo-rl/tis", {}, [-1.0] * 3, [math.log(q) - 1 for q in (10.0, 1.0, 1 / 3)], (-0.1 + 1.0 - 4.0) / 3),
        ("skyrl/cispo", {}, [-1.69315, -1.0, 0.5], [-1.0] * 3, (0.5 * 1.69315 - 1.0 - 2 * 4.481689 * 0.5) / 3),
    ],
)
def test_token_level_corrections(name, bounds, c, g, wanted):
    g, p, c = (torch.tensor(values)[:, None] for values in (g, [-1.0] * 3, c))
    weights = correction(name, **bounds)(g, p, torch.ones(3, 1))
    terms, _ = loss(c, p, NEMO_A, weights, g=g, correction=name, clip_high=0.2)
    assert terms.loss.item() == pytest.approx(wanted, abs=5e-5)


def test_the_ratio_of_a_response_and_its_weight():
    """NeMo RL, the same vector as one response, whose advantages average to 2/3: with W = .8187, and without."""
    p, g = torch.full((1, 3), -1.0), torch.tensor([NEMO_G])
    for chosen, wanted in ((Correction(name="nemo-rl/sequence"), -0.4959), (Correction(objective="gspo"), -0.6057)):
        weights = correction_from(chosen)(g, p, torch.ones(1, 3))
        terms, _ = loss([NEMO_C], p, [2 / 3], weights, g=g, correction=chosen, loss_level="sequence", clip_high=0.2)
        assert terms.loss.item() == pytest.approx(wanted, abs=1e-4)


def test_the_pull_to_the_engine_acts_on_rejected_tokens_too():
    """prime-rl: kl_tau (c - g)^2 with 1e-3, c - g = .7 rejected and -.1 kept."""
    c, g = torch.tensor([[-0.3, -1.1]]), torch.tensor([[-1.0, -1.0]])
    weights = correction("prime-rl/dppo")(g, c, torch.ones(1, 2), torch.ones(1), c)
    terms, gradient = loss(c, c, [1.0], weights, g=g, correction="prime-rl/dppo")
    assert weights.applied.tolist() == [[0.0, 1.0]]
    assert terms.policy_loss.item() == pytest.approx(-math.exp(-0.1) / 2)
    assert terms.loss.item() == pytest.approx((-math.exp(-0.1) + 1e-3 * (0.49 + 0.01)) / 2)
    assert gradient[0].tolist() == pytest.approx([1e-3 * 0.7, -math.exp(-0.1) / 2 - 1e-3 * 0.1])


def test_tokens_dropped_from_the_denominator_leave_the_whole_loss():
    """One of two responses is rejected: the other counts alone, its pulls to reference and engine too."""
    p, g = torch.tensor([[-1.0, -1.0], [-2.0, -2.0]]), torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    reference = p - 0.5
    chosen = Correction(filters=(Filter(over="mean", low=0.5, high=2.0),), denominator="drop", anchor=0.1)
    for level in ("token", "sequence"):
        weights = correction_from(chosen)(g, p, torch.ones(2, 2))
        both, gradient = loss(
            p, p, [1.0, 1.0], weights, None, reference, g=g, correction=chosen, kl_coef=0.1, loss_level=level,
            num_tokens=2, num_sequences=1,
        )  # fmt: skip
        alone, own = loss(
            p[:1], p[:1], [1.0], weights[torch.tensor([0])], None, reference[:1], g=g[:1], correction=chosen,
            kl_coef=0.1, loss_level=level,
        )  # fmt: skip
        assert both.loss.item() == pytest.approx(alone.loss.item())
        assert gradient[:1].equal(own)
        assert gradient[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_split_into_micro_batches_changes_nothing_under_any_correction(name, level):
    """Verdicts that follow the update are given per micro-batch, as the update gives them."""
    generator = torch.Generator().manual_seed(1)
    p = -3 * torch.rand(6, 4, generator=generator) - 0.3
    g, c, reference = (p + 0.3 * torch.randn(6, 4, generator=generator) for _ in range(3))
    mask = torch.arange(4) < torch.tensor([4, 3, 0, 2, 1, 4])[:, None]
    advantages, chosen = torch.tensor([1.0, -1.0, 1.0, 0.5, -2.0, 0.0]), Correction(name=name)
    weigh = correction_from(chosen)
    weights = weigh(g, p, mask, advantages)
    totals = {
        "num_tokens": int(weights.counting.sum()), "num_sequences": int(weights.counting.any(-1).sum()),
        "loss_level": level, "kl_coef": 0.1, "dual_clip": 3.0, "correction": chosen,
    }  # fmt: skip

    def part(rows):
        verdict = weights[rows]
        if chosen.judges_current:
            verdict = weigh(g[rows], p[rows], mask[rows], advantages[rows], c[rows])
        return loss(c[rows], p[rows], advantages[rows], verdict, mask[rows], reference[rows], g=g[rows], **totals)

    whole, gradient = part(torch.arange(6))
    parts = [part(rows) for rows in (torch.tensor([0, 3]), torch.tensor([1]), torch.tensor([2, 4, 5]))]
    torch.testing.assert_close(sum(terms.loss for terms, _ in parts), whole.loss)
    torch.testing.assert_close(torch.cat([piece for _, piece in parts]), gradient[[0, 3, 1, 2, 4, 5]])
    assert gradient.any()


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
