import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config.recipe import BOUNDS, Correction, CorrectionName
from labkit.rl import correction, correction_from, mismatch, weight_statistics
from labkit.rl.corrections import CORRECTIONS

NAN = math.nan
G = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -3.0, NAN]])
P = torch.tensor([[-1.1, -1.5, -0.5], [-0.7, -4.5, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


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
    assert weights.raw[:, 0].tolist() == pytest.approx([1.142631, 0.472367], abs=1e-6)
    assert weights.applied.tolist() == [pytest.approx([0.904837, 1.648721, 1.0], abs=1e-6), [0.0] * 3]


def test_nemo_rl_vector():
    g, p = torch.tensor([[-1.0, -2.5, -0.2]]), torch.tensor([[-1.5, 0.0, -0.4]])
    mask = torch.ones(1, 3)
    raw = correction("none")(g, p, mask).raw
    assert raw[0].tolist() == pytest.approx([0.606531, 12.182494, 0.818731], abs=1e-6)
    assert correction("sequence-mask")(g, p, mask).raw[0, 0].item() == pytest.approx(6.049647, abs=1e-6)
    assert correction("geometric-mask")(g, p, mask).raw[0, 0].item() == pytest.approx(1.822119, abs=1e-6)
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
        weights = correction(name)(g, p, torch.ones(1, 2))
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
        assert geometric.raw[0, 0].item() == pytest.approx(1.01207, abs=1e-5)
        assert geometric.keep.all()


def test_a_non_finite_log_prob_takes_its_token_out_and_nothing_else():
    g, p = torch.tensor([[-1.0, NAN, -2.0]]), torch.tensor([[-1.2, -1.0, -2.1]])
    for name in CORRECTIONS:
        bounds = {"low": 0.1, "high": 10.0} if "low" in BOUNDS[name] else {}
        weights = correction(name, **bounds)(g, p, torch.ones(1, 3))
        without = correction(name, **bounds)(g[:, ::2], p[:, ::2], torch.ones(1, 2))
        assert weights.valid.tolist() == weights.keep.tolist() == [[True, False, True]], name
        assert weights.applied[:, ::2].tolist() == without.applied.tolist(), name
        assert weights.applied[0, 1] == 0.0, name
    statistics = weight_statistics(correction("tis")(g, p, torch.ones(1, 3)), torch.ones(1, 3))
    assert statistics["kept_share"] == pytest.approx(2 / 3)
    assert statistics["mean_applied"] == pytest.approx((math.exp(-0.2) + math.exp(-0.1)) / 2)


def test_a_window_too_tight_for_the_mismatch_rejects_every_sequence():
    """verl#3984: G = .9868 everywhere."""
    g, mask = torch.zeros(4, 5), torch.ones(4, 5)
    weights = correction("geometric-mask", low=0.99, high=1.001)(g, g + math.log(0.9868), mask)
    statistics = weight_statistics(weights, mask)
    assert weights.raw[0, 0].item() == pytest.approx(0.9868)
    assert (statistics["kept_share"], statistics["is_oob_ratio"], statistics["ess"]) == (0.0, 1.0, 0.0)


def test_bounds_are_inclusive_and_the_lowest_cap_marks_no_padding():
    assert weigh_ratios("icepop", [0.5, 2.0], low=0.5, high=2.0).keep.all()
    weights = correction("tis", cap=1)(G, P, MASK)
    assert not weights.outside[1, 2]
    assert weights.valid.sum() == 5


def test_a_single_sequence_may_come_without_a_batch_axis():
    for name in CORRECTIONS:
        batched = correction(name)(G[:1], P[:1], MASK[:1])
        single = correction(name)(G[0], P[0], MASK[0])
        assert single.applied.tolist() == batched.applied[0].tolist()
        assert weight_statistics(single, MASK[0]) == weight_statistics(batched, MASK[:1])


def test_weights_carry_no_gradient_and_are_float32():
    weights = correction("tis")(G, P.clone().requires_grad_(), MASK)
    assert not weights.applied.requires_grad
    assert weights.applied.dtype == weights.raw.dtype == torch.float32


def test_recipe_bounds_are_used():
    rule = correction_from(Correction(name="tis", cap=1.2))
    assert rule(G, P, MASK).applied.max().item() == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("name", "bounds", "message"),
    [
        ("ice-pop", {}, "did you mean 'icepop'"),
        ("ppo", {}, "choose one of none, tis, icepop"),
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


deltas = st.lists(st.lists(st.floats(-60, 60), min_size=4, max_size=4), min_size=1, max_size=5)


@given(deltas, st.sampled_from(list(CORRECTIONS)), st.integers(1, 3))
def test_rows_are_independent_and_padding_changes_nothing(rows, name, padding):
    delta = torch.tensor(rows, dtype=torch.float64)
    g, mask = torch.full_like(delta, -1.0), torch.ones_like(delta)
    mask[:, -1] = torch.arange(len(rows)) % 2
    weights = correction(name)(g, g + delta, mask)
    turned = correction(name)(g.flip(0), (g + delta).flip(0), mask.flip(0))
    assert turned.applied.flip(0).tolist() == weights.applied.tolist()

    def pad(x, value):
        return torch.nn.functional.pad(x, (0, padding), value=value)

    padded = correction(name)(pad(g, NAN), pad(g + delta, 3.0), pad(mask, 0))
    assert padded.applied[:, :4].tolist() == weights.applied.tolist()
    assert not padded.valid[:, 4:].any()
    assert weight_statistics(padded, pad(mask, 0)) == pytest.approx(weight_statistics(weights, mask))


@given(deltas, st.sampled_from(list(CORRECTIONS)))
def test_weights_are_finite_and_within_their_bounds(rows, name):
    delta = torch.tensor(rows, dtype=torch.float64)
    weights = correction(name)(torch.zeros_like(delta), delta, torch.ones_like(delta))
    assert torch.isfinite(weights.applied).all()
    assert (weights.applied[~weights.keep] == 0).all()
    assert weights.valid.all()
    bounds = BOUNDS[name]
    limit = bounds.get("cap", bounds.get("high", math.inf))
    assert name == "geometric-mask" or (weights.applied <= limit).all()
    assert 0.0 <= weight_statistics(weights, torch.ones_like(delta))["ess"] <= 1 + 1e-9


def test_sampling_ratio_is_taken_before_the_correction():
    raw = correction("tis", cap=1.2)(G, P, MASK).raw[MASK.bool()].mean().item()
    assert mismatch(G, P, MASK)["sampling_importance_ratio"] == pytest.approx(raw)


def test_every_correction_of_a_recipe_exists():
    assert list(CORRECTIONS) == list(BOUNDS) == list(get_args(CorrectionName))
