"""Data sheets, in the units of the code."""

import pytest

from labkit.hardware import DEVICES
from labkit.hardware.devices import device_named


def test_fp8_doubles_the_peak_of_every_device_that_has_it() -> None:
    for name, device in DEVICES.items():
        assert (device.fp8 is None) == (name == "a100") == (not device.rollout and not device.train)
        if device.fp8:
            assert device.fp8 / device.bf16 == pytest.approx(2, rel=0.03), name


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth", "memory"),
    [
        ("a100", 312, 2.04, 80),
        ("l4", 121, 0.3, 24),
        ("l40s", 362, 0.864, 48),
        ("h100", 989, 3.35, 80),
        ("h200", 989, 4.8, 140),
        ("b200", 2250, 8.0, 180),
    ],
)
def test_figures_of_the_data_sheets(name: str, bf16: float, bandwidth: float, memory: float) -> None:
    device = device_named(name)
    assert (device.bf16 / 1e12, device.bandwidth / 1e12, device.memory / 2**30) == (bf16, bandwidth, memory)


def test_block_scaling_is_native_to_hopper_and_mx_to_blackwell() -> None:
    assert {name for name, device in DEVICES.items() if "block" in device.train} == {"h100", "h200"}
    assert {name for name, device in DEVICES.items() if "mx" in device.train} == {"b200"}


def test_a_wrong_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match="h100"):
        device_named("h10")
