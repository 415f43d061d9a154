import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.rl import METRICS, LossTerms, correction, mismatch, weight_statistics

NAN, INF = math.nan, math.inf
G = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -3.0, NAN]])
P = torch.tensor([[-1.1, -1.5, -0.5], [-0.7, -4.5, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_mult_prob_error", 1.847116),
        ("mean_abs_diff", 0.42),
        ("max_abs_diff", 1.5),
        ("mean_abs_prob_diff", 0.0322963),
        ("max_abs_prob_diff", 0.0877949),
        ("kl_k1", 0.22),
        ("kl_k2", 0.251),
        ("gen_kl_error", 0.175338),
        ("policy_kl_error", 0.418678),
        ("js_divergence_error", 0.0580891),
        ("sampling_importance_ratio", 0.955338),
        ("chi2_token", 0.117360),
        ("chi2_seq", 0.137664),
        ("train_ppl", 8.137078),
        ("rollout_ppl", 4.785545),
        ("ppl_ratio", 1.496087),
        ("log_ppl_diff", 0.308333),
        ("extreme_fraction", 0.2),
        ("tokens_differing", 0.6),
        ("max_seq_mult_prob_error", (1 + math.exp(1.5)) / 2),
        ("mean_seq_mult_prob_error", 1.996071),
        ("min_seq_mult_prob_error", (math.exp(0.1) + math.exp(0.5) + 1) / 3),
        ("num_tokens", 5),
        ("num_valid_samples", 2),
        ("nan_count", 0),
    ],
)
def test_golden_vector(name, value):
    assert mismatch(G, P, MASK)[name] == pytest.approx(value, abs=1.01e-6 if value > 0.1 else 1e-7)


def test_nemo_rl_vector_without_a_batch_axis():
    metrics = mismatch(torch.tensor([-1.0, -2.5, -0.2]), torch.tensor([-1.5, 0.0, -0.4]), torch.ones(3))
    wanted = {
        "token_mult_prob_error": 5.017539,
        "gen_kl_error": 2.935918,
        "policy_kl_error": 0.584070,
        "js_divergence_error": 0.223888,
        "sampling_importance_ratio": 4.535918,
    }
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


def test_extreme_vector():
    metrics = mismatch(torch.tensor([[-5.0]]), torch.tensor([[-15.0]]), torch.ones(1, 1))
    assert metrics["gen_kl_error"] == pytest.approx(9.000045, abs=1e-6)
    assert metrics["policy_kl_error"] == pytest.approx(22015.4658, abs=1e-4)
    assert metrics["token_mult_prob_error"] == pytest.approx(22026.4658, abs=1e-4)
    assert metrics["js_divergence_error"] == pytest.approx(4.307, abs=1e-3)


def test_identical_log_probs_are_exactly_in_agreement():
    metrics = mismatch(G, G, MASK)
    assert metrics["token_mult_prob_error"] == 1.0
    assert metrics["gen_kl_error"] == metrics["policy_kl_error"] == metrics["tokens_differing"] == 0.0
    assert metrics["js_divergence_error"] == pytest.approx(0.0, abs=1e-15)


def test_gaussian_mismatch_reads_as_documented():
    """delta ~ N(0, s^2): mean exp|delta| = 2 exp(s^2 / 2) Phi(s), and mean k3 = exp(s^2 / 2) - 1."""
    delta = 0.05 * torch.randn(400, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = torch.full_like(delta, -2.0)
    metrics = mismatch(g, g + delta, torch.ones_like(delta))
    assert metrics["token_mult_prob_error"] == pytest.approx(1.041, abs=5e-4)
    assert metrics["gen_kl_error"] == pytest.approx(0.00125, rel=0.02)


def test_non_finite_log_probs_are_counted_and_left_out():
    g = torch.tensor([[-1.0, NAN, -2.0, -INF], [-1.0, -1.0, -1.0, -1.0]])
    p = torch.tensor([[-1.2, -1.0, -2.1, -1.0], [INF, NAN, -INF, NAN]])
    metrics = mismatch(g, p, torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    clean = mismatch(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.2, -2.1]]), torch.ones(1, 2))
    assert metrics["nan_count"] == 5
    assert {**metrics, "nan_count": 0.0} == pytest.approx(clean)


def test_a_huge_difference_gives_no_nan_or_infinity():
    for delta in (1000.0, -1000.0):
        g = torch.full((2, 3), -1.0)
        metrics = mismatch(g, g + torch.tensor([delta, 0.0, 0.0]), torch.ones(2, 3), current=g)
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["token_mult_prob_error"] > 1e16
    assert mismatch(g, g - 1000.0, torch.ones(2, 3))["gen_kl_error"] == pytest.approx(999.0)


def test_large_ratios_are_exact_up_to_1e10():
    p = torch.zeros(1, 2, dtype=torch.float64)
    metrics = mismatch(p - math.log(1e10), p, torch.ones(1, 2))
    assert metrics["sampling_importance_ratio"] == pytest.approx(1e10, rel=1e-9)


def test_nothing_that_counts_gives_nan_means_and_zero_shares():
    nothing = torch.zeros_like(MASK)
    metrics = mismatch(G, P, nothing, current=G)
    assert metrics.pop("num_tokens") == metrics.pop("num_valid_samples") == metrics.pop("nan_count") == 0.0
    assert all(math.isnan(value) for value in metrics.values())
    statistics = weight_statistics(correction("icepop")(G, P, nothing), nothing)
    assert statistics["ess"] == statistics["kept_share"] == 0.0


def test_empty_responses_enter_no_mean_over_sequences():
    with_empty = mismatch(torch.cat([G, G[:1]]), torch.cat([P, P[:1] - 9]), torch.cat([MASK, 0 * MASK[:1]]))
    assert with_empty == pytest.approx(mismatch(G, P, MASK))


def test_metrics_of_the_current_policy():
    g, p, c = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]), torch.tensor([[-0.5, -2.0]])
    metrics = mismatch(g, p, torch.ones(1, 2), current=c)
    assert metrics["approx_entropy"] == pytest.approx((0.5 * math.exp(0.5) + 2.0) / 2)
    assert metrics["probs_ratio"] == pytest.approx((math.exp(0.5) + math.exp(-0.5)) / 2)
    assert metrics["probs_ratio_min"] == pytest.approx(math.exp(-0.5))
    assert metrics["probs_ratio_max"] == pytest.approx(math.exp(0.5))


def test_ess_is_the_share_of_equal_weights():
    g = torch.zeros(1, 4)
    weights = correction("icepop", low=0.5, high=2.0)(g, torch.tensor([[0.0, 0.0, 9.0, -9.0]]), g + 1)
    assert weight_statistics(weights, g + 1)["ess"] == pytest.approx(0.5)


def test_every_metric_is_described_and_every_description_is_computed():
    weights = correction("tis")(G, P, MASK)
    computed = {
        **mismatch(G, P, MASK, current=P),
        **weight_statistics(weights, MASK),
        **LossTerms.summary([]),
    }
    assert computed.keys() == METRICS.keys()
    for name, metric in METRICS.items():
        assert all((metric.definition, metric.unit, metric.source)), name
        assert metric.healthy is None or metric.healthy[0] <= metric.healthy[1], name


def test_healthy_bands_hold_for_perfect_agreement():
    perfect = mismatch(G, G, MASK, current=G)
    perfect |= weight_statistics(correction("tis")(G, G, MASK), MASK)
    for name, value in perfect.items():
        if METRICS[name].healthy:
            low, high = METRICS[name].healthy
            assert low <= value <= high, name


batches = st.lists(
    st.tuples(
        st.lists(st.floats(-30, 0), min_size=5, max_size=5),
        st.lists(st.floats(-30, 0), min_size=5, max_size=5),
    ),
    min_size=1,
    max_size=5,
)


@given(batches, st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_and_padding_change_nothing(batch, random, padding):
    g = torch.tensor([row[0] for row in batch], dtype=torch.float64)
    p = torch.tensor([row[1] for row in batch], dtype=torch.float64)
    lengths = torch.tensor([random.randint(0, 5) for _ in batch])
    lengths[0] = 5
    mask = torch.arange(5) < lengths[:, None]
    order = random.sample(range(len(batch)), len(batch))

    def pad(x, value):
        return torch.nn.functional.pad(x[order], (0, padding), value=value)

    turned = mismatch(pad(g, NAN), pad(p, -INF), pad(mask, False))
    assert turned == pytest.approx(mismatch(g, p, mask), rel=1e-9, abs=1e-9)


@given(batches)
def test_divergences_are_never_negative(batch):
    g, p = (torch.tensor([row[side] for row in batch], dtype=torch.float64) for side in (0, 1))
    metrics = mismatch(g, p, torch.ones_like(g))
    assert metrics["token_mult_prob_error"] >= 1.0
    for name in ("gen_kl_error", "policy_kl_error", "js_divergence_error", "kl_k2"):
        assert metrics[name] >= -1e-12, name
    assert metrics["mean_abs_diff"] <= metrics["max_abs_diff"] + 1e-12
