"""Known values: error of a Gaussian tensor in E4M3 with outliers, beside INT8 (numpy, 256 x 1024)."""

import pytest
import torch

from labkit.explorer import ScalingExplorer
from labkit.explorer.data import shaped
from labkit.explorer.scaling import CALIBRATED, INT8, costs, scaled_sizes


def of(name: str, fmt: str = "e4m3", growth: float = 1.0, **shape):
    return costs(shaped(128, 512, **shape), fmt, "fp32", growth)[name]


@pytest.mark.parametrize(
    ("outlier", "e4m3", "int8"),
    [(10, 0.0265, 0.023), (100, 0.0265, 0.227), (1e4, 0.027, 1.0), (3e4, 0.0397, 1.0), (1e5, 0.126, 1.0)],
)
def test_fp8_does_not_feel_an_outlier_until_30000_sigma_and_int8_does_at_10(outlier, e4m3, int8):
    assert of("one per tensor", outlier=outlier).error == pytest.approx(e4m3, rel=0.03)
    assert of(INT8, outlier=outlier).error == pytest.approx(int8, rel=0.03)


def test_e5m2_costs_twice_as_much_and_reaches_further():
    assert of("one per tensor", "e5m2").error == pytest.approx(0.053, rel=0.03)
    assert of("one per tensor", "e5m2", outlier=1e6).lost < 1e-3
    assert of("one per tensor", "e4m3", outlier=1e6).lost > 0.5


def test_without_an_outlier_int8_is_better():
    assert of(INT8).error < 0.5 * of("one per tensor").error


def test_power_of_two_scales_kill_the_gain_of_small_blocks():
    """1 x 128: 2.57 % with FP32 scales, 2.65 % with powers of two."""
    data = shaped(128, 512)
    fp32, pow2 = (costs(data, "e4m3", scale, 1.0)["blocks of 1 × 128"].error for scale in ("fp32", "pow2"))
    assert fp32 == pytest.approx(0.0257, abs=2e-4)
    assert pow2 == pytest.approx(0.0265, abs=3e-4)


def test_blocks_help_where_small_and_large_lie_in_different_blocks():
    def errors(across: str) -> tuple[float, float, float]:
        found = costs(shaped(128, 512, spread=6.0, across=across), "e4m3", "fp32", 1.0)
        return tuple(
            found[name].error for name in ("one per token (1 × 512)", "blocks of 128 × 128", "blocks of 1 × 128")
        )

    token, square, row = errors("tokens")
    assert token < 0.03 < 0.3 < square
    assert row < 0.03
    token, square, row = errors("channels, sorted")
    assert square < 0.03 < 0.2 < token
    token, square, row = errors("channels, shuffled")
    assert min(token, square, row) > 0.2  # every block holds the largest channels: nothing helps


def test_a_stale_scale_shows_little_below_a_quarter_of_growth():
    fresh = of(CALIBRATED).error
    assert of(CALIBRATED, growth=1.25).error < 1.05 * fresh
    assert of(CALIBRATED, growth=2.0).error > 2 * fresh
    assert of("one per tensor", growth=8.0) == of("one per tensor")


def test_the_outlier_goes_where_it_is_said_and_is_left_out():
    for place, count in (("one value", 1), ("one channel", 128), ("one token", 512)):
        data = shaped(128, 512, 1000.0, place)
        assert int((~data.ordinary).sum()) == count
        assert data.x[data.ordinary].equal(shaped(128, 512).x[data.ordinary])
    assert float(shaped(128, 512, 1000.0).x.abs().max()) == 1000.0
    with pytest.raises(ValueError, match="one channel"):
        shaped(8, 8, 2.0, "nowhere")


def test_the_histogram_reaches_the_largest_value_and_past_it_where_clipped():
    data = shaped(128, 512)
    top = torch.tensor(448.0).log2().item()
    assert scaled_sizes(data, "one per tensor", "e4m3", "fp32", 1.0).max().item() == pytest.approx(top, abs=1e-5)
    stale = scaled_sizes(data, CALIBRATED, "e4m3", "fp32", 4.0).max().item()
    assert stale == pytest.approx(top + 2 - torch.tensor(1.05).log2().item(), abs=1e-5)


def test_explorer_reads_its_own_numbers():
    explorer = ScalingExplorer(outlier=100.0)
    assert "no gain yet" in explorer.view.reading
    assert "22.7 %" in explorer.view.reading
    explorer.set(outlier=1e5)
    assert "no longer reaches" in explorer.view.reading
    explorer.set(outlier=1.0, growth=2.0)
    assert "calibrated scale clips" in explorer.view.reading
    for look_at in explorer.numbers:
        if look_at != INT8:
            explorer.set(look_at=look_at)
