import dataclasses

import pytest
import torch

from labkit.fp8.emulation import to_grid
from labkit.fp8.kv_scales import AmaxObserver, KVScales, nearest_rank, saturation


def observed(amaxes: list[float], layers: int = 1) -> AmaxObserver:
    """One microbatch per amax; K reaches it, Q half and V a quarter of it, with the sign negative."""
    observer = AmaxObserver()
    for amax in amaxes:
        for layer in range(layers):
            t = torch.tensor([[0.1, -amax]]) * (layer + 1)
            observer.observe(layer, t / 2, t, t / 4)
        observer.end_microbatch()
    return observer


def test_scale_is_margin_times_amax_over_the_largest_value():
    scales = observed([900.0], layers=2).scales(version=7)
    assert scales.version == 7
    assert scales.k == pytest.approx((2.109375, 4.21875))
    assert scales.q == pytest.approx((1.0546875, 2.109375))
    assert scales.v == pytest.approx((0.52734375, 1.0546875))
    assert observed([900.0]).scales(0, fmt="e5m2", margin=1.0).k == pytest.approx((900 / 57344,))
    scales.validate(2)


def test_unit_scale_clips_large_keys_and_a_calibrated_one_does_not():
    """K uniform up to 900, twice the largest E4M3 value."""
    k = torch.linspace(-900, 900, 4001)
    scale = observed([900.0]).scales(0).k[0]

    def error(s: float) -> float:
        return float((to_grid(k, s) * s - k).norm() / k.norm())

    assert error(1.0) >= 0.16
    assert error(scale) <= 0.027
    assert saturation(k, 1.0) == pytest.approx(1 - 448 / 900, abs=1e-3)
    assert saturation(k, scale) == 0.0
    assert saturation(k, 900 / 57344, "e5m2") == 0.0


def test_percentile_is_nearest_rank_over_microbatches():
    assert nearest_rank([4.0, 1.0, 3.0, 2.0], 100) == 4.0
    assert nearest_rank([4.0, 1.0, 3.0, 2.0], 0) == 1.0
    assert nearest_rank([4.0, 1.0, 3.0, 2.0], 60) == 3.0  # round(0.6 * 3) = 2
    assert nearest_rank([float(i) for i in range(500)], 99.9) == 499.0
    assert nearest_rank([float(i) for i in range(1001)], 99.9) == 999.0
    amaxes = [448.0] * 9 + [44800.0]
    assert observed(amaxes).scales(0, percentile=99.9, margin=1.0).k == pytest.approx((100.0,))
    assert observed(amaxes).scales(0, percentile=90, margin=1.0).k == pytest.approx((1.0,))


def test_calls_within_a_microbatch_combine_by_maximum():
    observer = AmaxObserver()
    for amax in (3.0, 448.0, 5.0):
        t = torch.tensor([amax])
        observer.observe(0, t, t, t)
    observer.end_microbatch()
    assert observer.scales(0, margin=1.0).q == (1.0,)


def test_a_tensor_that_is_zero_throughout_gets_scale_one():
    assert observed([0.0]).scales(0).k == pytest.approx((1.05 * 0.1 / 448,))
    observer = AmaxObserver()
    observer.observe(0, torch.ones(3), torch.zeros(3), torch.ones(3))
    observer.end_microbatch()
    assert observer.scales(0).k == (1.0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_name_layer_and_tensor(bad):
    t = torch.ones(3)
    with pytest.raises(ValueError, match="layer 4: v holds NaN or infinity"):
        AmaxObserver().observe(4, t, t, torch.tensor([1.0, bad]))


def test_gaps_in_the_observation_are_refused():
    t = torch.ones(3)
    with pytest.raises(ValueError, match="observed no layer"):
        AmaxObserver().end_microbatch()
    with pytest.raises(ValueError, match="end_microbatch"):
        AmaxObserver().scales(0)
    observer = observed([1.0], layers=2)
    observer.observe(0, t, t, t)
    with pytest.raises(ValueError, match="end_microbatch"):
        observer.scales(0)
    with pytest.raises(ValueError, match=r"layers \[1\] were observed in some microbatches only"):
        observer.end_microbatch()
    only_second = AmaxObserver()
    only_second.observe(1, t, t, t)
    only_second.end_microbatch()
    with pytest.raises(ValueError, match="numbered from 0 without gaps"):
        only_second.scales(0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_validate_names_layer_and_tensor(name, bad):
    scales = dataclasses.replace(KVScales.unit(3), **{name: (1.0, bad, 1.0)})
    with pytest.raises(ValueError, match=f"layer 1: {name} scale"):
        scales.validate(3)


def test_validate_counts_the_layers():
    KVScales.unit(3, version=2).validate(3)
    with pytest.raises(ValueError, match="k has scales for 2 layers but the model has 3"):
        dataclasses.replace(KVScales.unit(3), k=(1.0, 1.0)).validate(3)
