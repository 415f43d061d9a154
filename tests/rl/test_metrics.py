import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import CORRECTIONS, Correction, Filter
from labkit.rl import METRICS, LossTerms, correction, correction_from, mismatch, weight_statistics
from labkit.rl.objectives import Clip
from labkit.runs.metrics import describe

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
        ("gen_kl_max", math.exp(-1.5) + 0.5),
        ("train_log_ppl", (3.1 / 3 + 5.2 / 2) / 2),
        ("rollout_log_ppl", (3.5 / 3 + 3.7 / 2) / 2),
        ("log_ppl_abs_diff", (0.4 / 3 + 0.75) / 2),
        ("log_ppl_diff_max", 0.75),
        ("log_ppl_diff_min", -0.4 / 3),
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
        g = torch.tensor([[-1.0, -2.0, -3.0]] * 2)
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


# ---- values of verl's own functions (rollout_corr_helper, commit 1dda039b), run unmodified on this batch

VERL_DELTA = torch.tensor([[0.1, -0.2, 0.3, 9.0], [1.0, -0.5, 7.0, 7.0], [-0.05, 0.02, 0.0, 0.01]], dtype=torch.float64)
VERL_MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
VERL_P = torch.full_like(VERL_DELTA, -1.0)


def verl(settings: Correction) -> dict[str, float]:
    return weight_statistics(correction_from(settings)(VERL_P - VERL_DELTA, VERL_P, VERL_MASK), VERL_MASK)


def test_verl_off_policy_metrics():
    wanted = {
        "kl_k1": -0.075556,
        "gen_kl_error": 0.100006,
        "train_ppl": 2.718282,
        "rollout_ppl": 3.033582,
        "rollout_log_ppl": 1.103889,
        "log_ppl_diff": -0.103889,
        "log_ppl_abs_diff": 0.107222,
        "log_ppl_diff_max": 0.005,
        "log_ppl_diff_min": -0.25,
        "ppl_ratio": 0.90644,
        "chi2_token": 0.715181,
        "chi2_seq": 0.723632,
    }
    metrics = mismatch(VERL_P - VERL_DELTA, VERL_P, VERL_MASK)
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            Correction(name="tis", cap=1.2),
            {
                "mean_applied": 0.990213,
                "max_applied": 1.2,
                "min_applied": 0.606531,
                "std_applied": 0.176624,
                "ess": 0.969165,
                "above_cap_share": 0.222222,
                "seq_weight_mean": 0.979979,
                "seq_weight_std": 0.070293,
                "seq_weight_max": 1.041301,
                "seq_weight_min": 0.903265,
                "seq_weight_max_deviation": 0.096735,
            },
        ),
        (
            Correction(name="sequence-tis", cap=1.2),
            {
                "mean_applied": 1.102311,
                "max_raw": 1.648721,
                "min_raw": 0.980199,
                "seq_above_cap_share": 0.666667,
                "std_applied": 0.109221,
                "ess": 0.990278,
                "seq_weight_mean": 1.126733,
                "seq_weight_std": 0.126902,
            },
        ),
        (
            Correction(name="icepop", low=0.7, high=1.5),
            {
                "is_oob_ratio": 0.222222,
                "rejected_ratio": 0.222222,
                "mean_applied": 0.806138,
                "std_applied": 0.451044,
                "ess": 0.761583,
                "seq_weight_std": 0.604261,
            },
        ),
        (
            Correction(name="sequence-mask", low=0.9, high=1.5),
            {"std_applied": 0.46262, "ess": 0.768452, "rejected_sum_ratio": 2 / 9, "num_rejected_seqs": 1},
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Correction) else "",
)
def test_verl_weight_metrics(settings, wanted):
    statistics = verl(settings)
    assert {name: statistics[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


def test_verl_icepop_vector():
    """verl, test_rollout_corr.py: w_raw = [0.4, 0.8, 6.0]."""
    p = torch.tensor([[0.4, 0.8, 6.0]], dtype=torch.float64).log()
    weights = correction("icepop", low=0.5, high=5.0)(torch.zeros_like(p), p, torch.ones_like(p))
    statistics = weight_statistics(weights, torch.ones_like(p))
    wanted = {"is_oob_ratio": 2 / 3, "std_applied": 0.3771236, "ess": 1 / 3, "mean_raw": 2.4, "max_raw": 6.0}
    assert {name: statistics[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)


def test_verl_share_of_responses_above_the_cap():
    p = torch.tensor([[1.0, 6.0], [0.9, 1.1]], dtype=torch.float64).log()
    weights = correction("tis")(torch.zeros_like(p), p, torch.ones_like(p))
    assert weight_statistics(weights, torch.ones_like(p))["seq_above_cap_share"] == 0.5


# ---- what else the correction did


def test_a_floor_and_a_cap_are_told_apart_and_a_normalised_weight_too():
    p = torch.tensor([[0.1, 1.0, 4.0, 8.0]], dtype=torch.float64).log()
    for normalize in (False, True):
        settings = Correction(name="custom", weight="token", floor=0.5, cap=2.0, normalize=normalize)
        weights = correction_from(settings)(torch.zeros_like(p), p, torch.ones_like(p))
        statistics = weight_statistics(weights, torch.ones_like(p))
        assert (statistics["above_cap_share"], statistics["below_floor_share"]) == (0.5, 0.25)
        assert statistics["mean_raw"] == pytest.approx(3.275)
        assert statistics["mean_applied"] == pytest.approx(1.0 if normalize else 1.375)


def test_weights_before_the_correction_are_seen_beside_those_after():
    """NeMo RL PR #3900: the mean weight after truncation looks healthy whatever the mismatch."""
    statistics = weight_statistics(correction("tis")(G, P, MASK), MASK)
    assert statistics["mean_raw"] == pytest.approx(0.955338, abs=1e-6)
    rejecting = weight_statistics(correction("icepop")(G, P, MASK), MASK)
    assert rejecting["mean_raw"] == pytest.approx(0.955338, abs=1e-6)
    assert rejecting["ess_raw"] == pytest.approx(statistics["ess_raw"])
    assert rejecting["ess"] < rejecting["ess_raw"]


def test_kept_and_rejected_tokens_are_measured_apart():
    def k3(delta: float) -> float:
        return math.exp(delta) - 1 - delta

    weights = correction("icepop")(G, P, MASK)
    metrics = mismatch(G, P, MASK, weights=weights)
    assert metrics["gen_kl_rejected"] == pytest.approx(k3(-1.5), abs=1e-6)
    assert metrics["gen_kl_kept"] == pytest.approx((k3(-0.1) + k3(0.5)) / 4, abs=1e-6)
    assert metrics["max_seq_mult_prob_error_kept"] == pytest.approx((math.exp(0.1) + math.exp(0.5) + 1) / 3, abs=1e-6)
    assert metrics["min_seq_mult_prob_error_kept"] == 1.0
    assert metrics["token_mult_prob_error"] == pytest.approx(1.847116, abs=1e-6)


def test_what_concerns_rejected_tokens_is_absent_where_none_is():
    weights = correction("tis")(G, P, MASK)
    assert "gen_kl_rejected" not in mismatch(G, P, MASK, weights=weights)
    statistics = weight_statistics(weights, MASK, torch.tensor([True, False]))
    assert "rejected_correct_share" not in statistics
    assert statistics["num_rejected_seqs"] == 0


def test_right_answers_among_the_rejected_responses():
    g, mask = torch.zeros(4, 3, dtype=torch.float64), torch.ones(4, 3)
    mask[3] = 0
    p = torch.tensor([0.0, 0.5, -0.5, 9.0], dtype=torch.float64)[:, None].expand(4, 3)
    weights = correction("geometric-mask", low=0.9, high=1.1)(g, p, mask)
    statistics = weight_statistics(weights, mask, torch.tensor([True, True, False, True]))
    assert statistics["num_rejected_seqs"] == 2, "a response without tokens is none"
    assert statistics["rejected_correct_share"] == 0.5
    assert statistics["kept_share"] == pytest.approx(1 / 3)


def test_observed_quantiles_of_what_a_filter_judges():
    """verl#3984: a window that rejects everything can be chosen again from them."""
    means = torch.linspace(-0.1, 0.1, 21, dtype=torch.float64)
    g = torch.zeros(21, 4, dtype=torch.float64)
    p = means[:, None] + torch.tensor([0.3, -0.3, 0.2, -0.2], dtype=torch.float64)
    statistics = weight_statistics(correction("geometric-mask")(g, p, torch.ones_like(g)), torch.ones_like(g))
    assert statistics["judged_mean_ratio_q05"] == pytest.approx(math.exp(-0.09), abs=1e-6)
    assert statistics["judged_mean_ratio_q95"] == pytest.approx(math.exp(0.09), abs=1e-6)
    veto = Correction(name="custom", filters=(Filter(over="max", low=0.5, high=2.0),))
    statistics = weight_statistics(correction_from(veto)(g, p, torch.ones_like(g)), torch.ones_like(g))
    assert statistics["judged_max_ratio_q05"] == pytest.approx(math.exp(-0.39), abs=1e-6), "of the smallest token"
    assert statistics["judged_max_ratio_q95"] == pytest.approx(math.exp(0.39), abs=1e-6), "of the largest token"


def test_standard_error_correlation_and_spread():
    g = torch.tensor([[0.2, 0.4, 0.6, 0.8]], dtype=torch.float64).log()
    p = torch.tensor([[0.25, 0.35, 0.65, 0.75]], dtype=torch.float64).log()
    metrics = mismatch(g, p, torch.ones_like(g))
    assert metrics["std_abs_prob_diff"] == pytest.approx(0.0, abs=1e-12)
    # deviations of g (-.3, -.1, .1, .3) and of p (-.25, -.15, .15, .25): .18 / sqrt(.2 * .17)
    assert metrics["prob_correlation"] == pytest.approx(0.18 / math.sqrt(0.2 * 0.17))
    ratios = [1.25, 0.875, 0.65 / 0.6, 0.9375]
    mean = sum(ratios) / 4
    variance = sum((r - mean) ** 2 for r in ratios) / 4
    assert metrics["sampling_ratio_se"] == pytest.approx(math.sqrt(variance / 4))
    assert math.isnan(mismatch(g[:, :1], p[:, :1], torch.ones(1, 1))["prob_correlation"])
    assert math.isnan(mismatch(g, 0 * p, torch.ones_like(g))["prob_correlation"]), "one side is constant"


def test_entropy_puts_the_mismatch_in_proportion():
    metrics = mismatch(G, P, MASK, entropy=torch.tensor([[1.0, 2.0, 0.5], [0.5, 1.0, NAN]]))
    assert metrics["kl_ent_ratio"] == pytest.approx(0.175338, abs=1e-6)
    assert metrics["surprisal_gap"] == pytest.approx((0.1 - 0.5 + 0 + 0.2 + 3.5) / 5, abs=1e-6)
    assert math.isnan(mismatch(G, P, MASK, entropy=torch.zeros(2, 3))["kl_ent_ratio"])


@pytest.mark.parametrize(("temperature", "wrong"), [(1.0, False), (0.6, True)])
def test_the_surprisal_gap_sees_a_temperature_that_no_ratio_shows(temperature, wrong):
    """Tokens drawn at T = 0.6 but reported at T = 1: g = p, and the mismatch is 0 (TRL#4159's silent twin)."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    drawn = torch.multinomial(
        (logits / temperature).softmax(-1), 4000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    p = logprobs[drawn][None]
    entropy = torch.full_like(p, float(-(logprobs.exp() * logprobs).sum()))
    metrics = mismatch(p, p, torch.ones_like(p), entropy=entropy)
    assert metrics["token_mult_prob_error"] == 1.0
    assert (abs(metrics["surprisal_gap"]) > 4 * metrics["surprisal_gap_se"]) == wrong


def test_sampler_semantics_show_in_the_mean_ratio():
    """TRL#6789: logits [2, 1, 0, -1], top_p 0.8 keeps two tokens of mass .8808; only the sampler renormalises."""
    logprobs = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64).log_softmax(-1)[None, :2]
    metrics = mismatch(logprobs - logprobs.logsumexp(-1), logprobs, torch.ones(1, 2))
    assert metrics["sampling_importance_ratio"] == pytest.approx(0.8808, abs=1e-4)
    assert metrics["sampling_ratio_se"] == pytest.approx(0.0, abs=1e-12)


def test_every_metric_is_described_and_every_description_is_computed():
    weights = correction("geometric-mask")(G, P, MASK)
    computed = {
        **mismatch(G, P, MASK, current=P, entropy=-P, weights=weights, clip=Clip(0.2, 0.28)),
        **weight_statistics(weights, MASK, torch.tensor([True, False])),
        **LossTerms.summary([]),
    }
    of_the_loop = {
        *("reward", "accuracy", "heldout_accuracy", "response_length", "truncated_share", "zero_advantage_share"),
        *("entropy", "lr", "grad_norm", "staleness", "codes_changed", "kv_saturation_k", "kv_saturation_v"),
        *("clip_low", "clip_high", "expert_load_max", "generation_hidden", "heldout_accuracy_engine"),
        *("router_flip_rate", "router_flip_rate_own", "router_flip_tokens", "router_routes_missing"),
    }
    of_the_filter = {"rejected_mean_ratio", "judged_mean_ratio_q05", "judged_mean_ratio_q95"}
    assert computed.keys() | of_the_loop == METRICS.keys() | of_the_filter
    for name in computed:
        metric = describe(name)
        assert all((metric.definition, metric.unit, metric.source)), name
        assert metric.healthy is None or metric.healthy[0] <= metric.healthy[1], name


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_in_use_has_finite_metrics(name):
    rule = correction(name)
    for g, p in ((G, P), (G, P - 30), (G - 30, P)):
        weights = rule(g, p, MASK, torch.tensor([1.0, -1.0]))
        metrics = mismatch(g, p, MASK, entropy=-P, weights=weights) | weight_statistics(weights, MASK)
        nothing_kept = not weights.keep.any()
        for metric, value in metrics.items():
            assert math.isfinite(value) or (nothing_kept and metric.endswith("_kept")), metric
            describe(metric)


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
    assert turned == pytest.approx(mismatch(g, p, mask), rel=1e-9, abs=1e-9, nan_ok=True)


@given(batches)
def test_divergences_are_never_negative(batch):
    g, p = (torch.tensor([row[side] for row in batch], dtype=torch.float64) for side in (0, 1))
    metrics = mismatch(g, p, torch.ones_like(g))
    assert metrics["token_mult_prob_error"] >= 1.0
    for name in ("gen_kl_error", "policy_kl_error", "js_divergence_error", "kl_k2"):
        assert metrics[name] >= -1e-12, name
    assert metrics["mean_abs_diff"] <= metrics["max_abs_diff"] + 1e-12
