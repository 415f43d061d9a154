"""What a correction does to a batch: golden vectors, defects that projects have reported, each kind of filter.

A number for every name is in test_known_corrections.py, what holds for all of them in test_correction_properties.py.
"""

import math

import pytest
import torch

from labkit.config import CORRECTIONS, Correction, Filter
from labkit.rl import Weights, correction, correction_from, mismatch, weight_statistics

NAN = math.nan
G = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -3.0, NAN]])
P = torch.tensor([[-1.1, -1.5, -0.5], [-0.7, -4.5, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def weigh(name, g, p, mask, current=None, **bounds) -> Weights:
    """With advantages 1, -1, 1, ... for those that ask."""
    advantages = torch.where(torch.arange(len(g)) % 2 == 0, 1.0, -1.0) if g.dim() == 2 else torch.tensor(1.0)
    return correction(name, **bounds)(g, p, mask, advantages, current)


def weigh_ratios(name: str, ratios: list[float], **bounds):
    p = torch.tensor(ratios, dtype=torch.float64).log()[None]
    return correction(name, **bounds)(torch.zeros_like(p), p, torch.ones_like(p))


def golden(name: str, **bounds) -> tuple[list[float], dict[str, float]]:
    weights = correction(name, **bounds)(G, P, MASK)
    return weights.applied[MASK.bool()].tolist(), weight_statistics(weights, MASK)


def test_golden_none():
    applied, statistics = golden("none")
    assert applied == [1.0] * 5
    assert statistics["ess"] == 1.0
    assert correction("none")(G, P, MASK).raw[MASK.bool()].mean().item() == pytest.approx(0.955338, abs=1e-6)


def test_golden_tis():
    applied, statistics = golden("tis", cap=1.2)
    assert applied == pytest.approx([0.904837, 1.2, 1, 1, 0.223130], abs=1e-6)
    assert statistics["mean_applied"] == pytest.approx(0.865594, abs=1e-6)
    assert statistics["ess"] == pytest.approx(0.869501, abs=1e-6)
    assert statistics["is_oob_ratio"] == statistics["clipped_weight_share"] == pytest.approx(0.2)
    assert statistics["kept_share"] == 1.0
    applied, statistics = golden("tis")
    assert statistics["ess"] == pytest.approx(0.816810, abs=1e-6)
    assert [w / statistics["mean_applied"] for w in applied] == pytest.approx(
        [0.947139, 1.725799, 1.046750, 1.046750, 0.233562], abs=1e-6
    )


def test_golden_icepop():
    _, statistics = golden("icepop")
    assert statistics["mean_applied"] == pytest.approx(0.910712, abs=1e-6)
    assert statistics["ess"] == pytest.approx(0.748956, abs=1e-6)
    assert statistics["is_oob_ratio"] == pytest.approx(0.2)
    assert statistics["clipped_weight_share"] == 0.0
    assert statistics["kept_share"] == pytest.approx(0.8)


def test_golden_sequence_tis():
    weights = correction("sequence-tis", cap=2.0)(G, P, MASK)
    assert weights.raw[:, 0].tolist() == pytest.approx([1.491825, 0.223130], abs=1e-6)
    assert weights.raw[:, 0].tolist() == weights.applied[:, 0].tolist()
    assert weights.applied[:, 0].mean().item() == pytest.approx(0.857477, abs=1e-6)
    assert weight_statistics(weights, MASK)["ess"] == pytest.approx(0.714958, abs=1e-6)
    assert correction("sequence-tis", cap=1.2)(G, P, MASK).applied[0].tolist() == pytest.approx([1.2] * 3)


def test_golden_sequence_mask():
    weights = correction("sequence-mask")(G, P, MASK)
    assert weights.applied.tolist() == [pytest.approx([1.491825] * 3, abs=1e-6), [0.0] * 3]
    assert weights.keep.tolist() == [[True] * 3, [False] * 3]
    statistics = weight_statistics(weights, MASK)
    assert statistics["is_oob_ratio"] == 0.5, "of sequences"
    assert statistics["kept_share"] == pytest.approx(3 / 5), "of tokens"


def test_golden_geometric_mask():
    weights = correction("geometric-mask", low=0.9, high=1.2)(G, P, MASK)
    assert weights.judged["mean_ratio"][:, 0].tolist() == pytest.approx([1.142631, 0.472367], abs=1e-6)
    assert weights.raw[0].tolist() == pytest.approx([0.904837, 1.648721, 1.0], abs=1e-6)
    assert weights.applied.tolist() == [pytest.approx([0.904837, 1.648721, 1.0], abs=1e-6), [0.0] * 3]


def test_nemo_rl_vector():
    g, p = torch.tensor([[-1.0, -2.5, -0.2]]), torch.tensor([[-1.5, 0.0, -0.4]])
    mask = torch.ones(1, 3)
    raw = correction("none")(g, p, mask).raw
    assert raw[0].tolist() == pytest.approx([0.606531, 12.182494, 0.818731], abs=1e-6)
    assert correction("sequence-mask")(g, p, mask).raw[0, 0].item() == pytest.approx(6.049647, abs=1e-6)
    geometric = correction("geometric-mask")(g, p, mask)
    assert geometric.judged["mean_ratio"][0, 0].item() == pytest.approx(1.822119, abs=1e-6)
    tis = weight_statistics(correction("tis", cap=2)(g, p, mask), mask)
    assert tis["mean_applied"] == pytest.approx(1.141754, abs=1e-6)
    assert tis["is_oob_ratio"] == pytest.approx(1 / 3)
    icepop = weight_statistics(correction("icepop", low=0.5, high=5)(g, p, mask), mask)
    assert icepop["mean_applied"] == pytest.approx(0.475087, abs=1e-6)


def test_everything_rejected_is_not_an_error():
    """verl#7559: effective sample size divided by a mean weight of zero."""
    weights = weigh_ratios("icepop", [10, 20, 0.01])
    statistics = weight_statistics(weights, torch.ones(1, 3))
    assert weights.applied.tolist() == [[0.0, 0.0, 0.0]]
    assert statistics["ess"] == statistics["kept_share"] == statistics["mean_applied"] == 0.0
    assert statistics["is_oob_ratio"] == 1.0


def test_overflowing_ratio_is_rejected_without_nan():
    """OpenRLHF#1314: inf * 0."""
    g, p = torch.tensor([[-1001.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    for name in CORRECTIONS:
        weights = weigh(name, g, p, torch.ones(1, 2))
        assert torch.isfinite(weights.applied).all(), name
        assert torch.isfinite(weights.raw).all(), name
    assert correction("icepop")(g, p, torch.ones(1, 2)).applied.tolist() == [[0.0, 1.0]]


def test_tiny_mismatches_add_up_over_a_long_sequence_but_not_in_the_geometric_mean():
    """TRL#4772: delta = 0.012 throughout."""
    for length, product, kept in [(91, 2.980, True), (92, 3.016, False)]:
        g, mask = torch.zeros(1, length, dtype=torch.float64), torch.ones(1, length)
        weights = correction("sequence-mask", low=0.5, high=3.0)(g, g + 0.012, mask)
        assert weights.raw[0, 0].item() == pytest.approx(product, abs=1e-3)
        assert weights.keep.all().item() == weights.keep.any().item() == kept
        geometric = correction("geometric-mask", low=0.98, high=1.02)(g, g + 0.012, mask)
        assert geometric.judged["mean_ratio"][0, 0].item() == pytest.approx(1.01207, abs=1e-5)
        assert geometric.keep.all()


@pytest.mark.parametrize("side", ["engine", "trainer", "current"])
def test_a_non_finite_log_prob_takes_its_token_out_and_nothing_else(side):
    """TRL#6297: the engine's log-probs are -1, NaN, -2."""
    g, p = torch.tensor([[-1.0, -1.5, -2.0]]), torch.tensor([[-1.2, -1.0, -2.1]])
    c = p.clone()
    for broken in {"engine": [g], "trainer": [p, c], "current": [c]}[side]:
        broken[0, 1] = -math.inf if side == "trainer" else NAN
    for name in CORRECTIONS:
        weights = weigh(name, g, p, torch.ones(1, 3), c)
        without = weigh(name, g[:, ::2], p[:, ::2], torch.ones(1, 2))
        assert weights.valid.tolist() == [[True, False, True]], name
        assert weights.keep[:, ::2].equal(without.keep), name
        assert weights.applied[:, ::2].tolist() == without.applied.tolist(), name
        assert weights.applied[0, 1] == 0.0, name
        assert not weights.keep[0, 1], name
        assert not weights.counting[0, 1], name


def test_a_token_without_log_prob_is_counted_and_in_no_mean():
    g, p = torch.tensor([[-1.0, NAN, -2.0]]), torch.tensor([[-1.2, -1.0, -2.1]])
    assert mismatch(g, p, torch.ones(1, 3))["nan_count"] == 1
    statistics = weight_statistics(correction("tis")(g, p, torch.ones(1, 3)), torch.ones(1, 3))
    assert statistics["kept_share"] == pytest.approx(2 / 3)
    assert statistics["mean_applied"] == pytest.approx((math.exp(-0.2) + math.exp(-0.1)) / 2)


def test_a_window_too_tight_for_the_mismatch_rejects_every_sequence():
    """verl#3984: G = .9868 everywhere."""
    g, mask = torch.zeros(4, 5), torch.ones(4, 5)
    weights = correction("geometric-mask", low=0.99, high=1.001)(g, g + math.log(0.9868), mask)
    statistics = weight_statistics(weights, mask)
    assert weights.judged["mean_ratio"][0, 0].item() == pytest.approx(0.9868)
    assert statistics["judged_mean_ratio_q05"] == pytest.approx(0.9868), "from which a window can be chosen"
    assert (statistics["kept_share"], statistics["is_oob_ratio"], statistics["ess"]) == (0.0, 1.0, 0.0)


def test_bounds_are_inclusive_and_the_lowest_cap_marks_no_padding():
    assert weigh_ratios("icepop", [0.5, 2.0], low=0.5, high=2.0).keep.all()
    weights = correction("tis", cap=1)(G, P, MASK)
    assert not weights.outside[1, 2]
    assert weights.valid.sum() == 5


def test_a_single_sequence_may_come_without_a_batch_axis():
    for name in CORRECTIONS:
        batched = weigh(name, G[:1], P[:1], MASK[:1])
        single = weigh(name, G[0], P[0], MASK[0])
        assert single.applied.tolist() == batched.applied[0].tolist()
        assert weight_statistics(single, MASK[0]) == weight_statistics(batched, MASK[:1])


def test_weights_carry_no_gradient_and_are_float32():
    current = P.clone().requires_grad_()
    for name in CORRECTIONS:
        weights = weigh(name, G, P.clone().requires_grad_(), MASK, current)
        for values in (weights.raw, weights.applied, *weights.judged.values()):
            assert not values.requires_grad, name
            assert values.dtype == torch.float32, name


def test_recipe_bounds_are_used():
    rule = correction_from(Correction(name="tis", cap=1.2))
    assert rule(G, P, MASK).applied.max().item() == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("name", "bounds", "message"),
    [
        ("ice-pop", {}, "did you mean icepop"),
        ("zzz", {}, "labkit corrections. lists the named ones"),
        ("tis", {"high": 2.0}, "high: .*tis has cap"),
        ("none", {"cap": 2.0}, "cap: .*none has no bound"),
        ("icepop", {"hight": 2.0}, "did you mean high"),
        ("tis", {"cap": NAN}, "cap: .*finite"),
        ("icepop", {"low": NAN}, "low: .*finite"),
        ("tis", {"cap": "two"}, "cap: .*number"),
        ("tis", {"cap": 0.0}, "cap: .*choose cap >= 1"),
        ("sequence-tis", {"cap": -1.0}, "cap: .*choose cap >= 1"),
        ("icepop", {"low": 6.0}, "low: 6 is above high 5"),
        ("sequence-mask", {"low": -0.5}, "low: .*0"),
        ("geometric-mask", {"low": 1.1, "high": 0.9}, "low: 1.1 is above high 0.9"),
    ],
)
def test_what_raises(name, bounds, message):
    with pytest.raises(ValueError, match=message):
        correction(name, **bounds)


def test_sampling_ratio_is_taken_before_the_correction():
    raw = correction("tis", cap=1.2)(G, P, MASK).raw[MASK.bool()].mean().item()
    assert mismatch(G, P, MASK)["sampling_importance_ratio"] == pytest.approx(raw)


# ---- filters


@pytest.mark.parametrize(
    ("chosen", "judged", "kept"),
    [  # three responses of lengths 3, 2 and 4 that verl's own functions were run on; its k1 is -delta as well
        (Filter(statistic="k1", over="sum", low=-0.1, high=0.1), [-0.2, -0.5, 0.02], [0, 0, 1]),
        (Filter(statistic="k1", over="mean", low=-0.1, high=0.1), [-0.066667, -0.25, 0.005], [1, 0, 1]),
        (Filter(statistic="k2", over="sum", high=0.1), [0.07, 0.625, 0.0015], [1, 0, 1]),
        (Filter(statistic="k2", over="mean", high=0.1), [0.07 / 3, 0.3125, 0.000375], [1, 0, 1]),
        (Filter(statistic="k3", over="sum", high=0.1), [0.073761, 0.824812, 0.001481], [1, 0, 1]),
        (Filter(statistic="k3", over="mean", high=0.01), [0.024587, 0.412406, 0.00037], [0, 0, 1]),
        (Filter(over="sum", low=0.9, high=1.5), [1.221403, 1.648721, 0.980199], [1, 0, 1]),
        (Filter(over="mean", low=0.9, high=1.1), [1.068939, 1.284025, 0.995012], [1, 0, 1]),
        (Filter(statistic="mult-error", over="mean", high=1.5), [1.225478, 2.183502, 1.020381], [1, 0, 1]),
    ],
    ids=lambda value: value.short_str() if isinstance(value, Filter) else "",
)
def test_a_filter_on_responses(chosen, judged, kept):
    delta = torch.tensor([[0.1, -0.2, 0.3, 9.0], [1.0, -0.5, 7.0, 7.0], [-0.05, 0.02, 0.0, 0.01]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    weights = correction_from(Correction(filters=(chosen,)))(torch.full_like(delta, -1.0), delta - 1.0, mask)
    assert weights.judged[chosen.key][:, 0].tolist() == pytest.approx(judged, abs=2e-6)
    assert weights.keep.equal(mask.bool() & torch.tensor(kept).bool()[:, None])
    assert weights.per_sequence


@pytest.mark.parametrize(
    ("chosen", "delta", "kept"),
    [
        (Filter(low=1 / 2.0, high=2.0), [1.0, -0.5, 0.0], [0, 1, 1]),  # verl, token_k1 "0.5_2.0"
        (Filter(low=1 / 1.3, high=1 / 0.7), [1.0, -0.5, 0.3], [0, 0, 1]),  # verl, token_k1 "0.7_1.3": bounds 1 / r
        (Filter(statistic="k2", over="max", high=0.05), [0.1, -0.2, 0.3], [1, 1, 1]),  # verl, seq_max_k2: .045
        (Filter(statistic="k2", over="max", high=0.05), [1.0, -0.5], [0, 0]),  # .5
        (Filter(statistic="k3", over="max", high=0.05), [1.0, -0.5], [0, 0]),  # .718282
        (Filter(statistic="k1", low=-1.0, high=0.5), [0.0, 1.0, -0.3], [1, 1, 1]),  # bounds included
        (Filter(statistic="k1", low=-0.9, high=0.2), [0.0, 1.0, -0.3], [1, 0, 0]),
        (Filter(statistic="k3", high=0.5), [-0.5, 0.5, -2.0], [1, 1, 0]),  # AReaL: .1065, .1487, 1.1353
        (Filter(over="max", high=3.0), [0.0, 0.0, 2.0], [0, 0, 0]),  # AReaL, sequence max ratio
        (Filter(over="max", high=3.0), [0.0, 0.5, 0.0], [1, 1, 1]),
        (Filter(statistic="mult-error", high=2.0), [0.6, -0.6, 0.8, -0.8], [1, 1, 0, 0]),
        (Filter(statistic="probability", low=-0.1, high=0.2), [0.5, -0.5, -0.3], [0, 0, 1]),  # moves .239, -.145, -.095
        (Filter(statistic="probability", over="max", high=0.2), [0.5, 0.0], [0, 0]),
        (Filter(statistic="binary-kl", over="max", high=0.01), [0.05, -0.05], [1, 1]),
        (Filter(statistic="binary-kl", over="max", high=0.01), [0.05, -0.5], [0, 0]),
    ],
    ids=lambda value: value.short_str() if isinstance(value, Filter) else "",
)
def test_a_filter_on_tokens(chosen, delta, kept):
    delta = torch.tensor([delta], dtype=torch.float64)
    weights = correction_from(Correction(filters=(chosen,)))(delta * 0 - 1.0, delta - 1.0, torch.ones_like(delta))
    assert weights.keep.int().tolist() == weights.applied.tolist() == [kept]
    assert weights.per_sequence == (chosen.over == "max")


def test_a_product_is_not_clamped_token_by_token():
    """verl on delta = [30, -25]: the weight is exp(5)."""
    weights = weigh("sequence-tis", torch.tensor([[-31.0, -1.0]]), torch.tensor([[-1.0, -26.0]]), torch.ones(1, 2))
    assert weights.raw[0].tolist() == pytest.approx([148.4132] * 2, rel=1e-6)


def test_a_filter_on_the_sign_of_the_advantage_asks_for_it():
    with pytest.raises(ValueError, match=r"mean-k1-negative\.\.0\.5 depends on the sign .*: pass advantages"):
        correction("off-policy-mask")(G, P, MASK)


# ---- a weight of the user's own

OWN = """
import torch

def sigmoid(delta, mask):
    assert delta.dtype == torch.float64 and mask.dtype == torch.bool
    assert bool((delta[~mask] == 0).all())
    return 2 * torch.sigmoid(delta)

def flat(delta, mask):
    return delta.sum(-1)

def number(delta, mask):
    return 1.0

def bad(delta, mask):
    return torch.where(delta == 0, 1.0, torch.nan)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


def test_a_weight_of_ones_own_is_truncated_filtered_and_normalised_like_any(mine):
    weights = correction(f"{mine}:sigmoid")(G, P, MASK)
    expected = [[2 / (1 + math.exp(0.1)), 2 / (1 + math.exp(-0.5)), 1.0], [1.0, 2 / (1 + math.exp(1.5)), 0.0]]
    assert torch.allclose(weights.applied, torch.tensor(expected), atol=1e-6)
    assert torch.equal(weights.raw, weights.applied)

    low = Filter(low=0.5)  # of r, as always
    settings = Correction(weight=f"{mine}:sigmoid", cap=1.2, filters=(low,), normalize=True)
    weights = correction_from(settings)(G, P, MASK)
    assert weights.clipped.tolist() == [[False, True, False], [False, False, False]]
    assert weights.keep.tolist() == [[True, True, True], [True, False, False]]
    capped = [0.950042, 1.2, 1.0, 1.0, 0.364851]
    mean = sum(capped) / 5
    assert weights.applied[weights.keep].tolist() == pytest.approx([each / mean for each in capped[:4]], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flat", r"mine.py:flat must return a weight for each token, a tensor \[2, 3\], got \[2\]"),
        ("number", r"mine.py:number must return a weight for each token, a tensor \[2, 3\], got float"),
        ("bad", "mine.py:bad gave 3 of 5 tokens a weight that isn't finite"),
    ],
)
def test_a_weight_of_ones_own_that_is_none_is_refused(mine, name, message):
    with pytest.raises(ValueError, match=message):
        correction(f"{mine}:{name}")(G, P, MASK)
