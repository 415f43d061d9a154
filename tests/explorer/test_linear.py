import math

import pytest
import torch

from labkit.explorer import LinearExplorer
from labkit.explorer.linear import accumulator_errors, gemm_errors, operand_errors, operands
from labkit.fp8.linear import LinearFormat

ALL = LinearFormat(True, True, True)


def test_each_operand_costs_2_65_percent_and_both_add_as_squares():
    found = operand_errors(operands(512, 1.0, "one value", 0.0), ALL)
    assert found["x alone"] == pytest.approx(0.0265, rel=0.04)
    assert found["w alone"] == pytest.approx(0.0265, rel=0.04)
    assert found["x and w"] == pytest.approx(math.hypot(found["x alone"], found["w alone"]), rel=0.02)


def test_a_gemm_that_is_off_costs_bf16_rounding():
    o = operands(512, 1.0, "one value", 0.0)
    off, fprop, both = (gemm_errors(o, p) for p in (LinearFormat.off(), LinearFormat(fprop=True), ALL))
    assert max(off.values()) < 0.002
    assert {name for name in off if fprop[name] != off[name]} == {"y = x wᵀ"}
    assert all(both[name] == pytest.approx(0.0377, rel=0.03) for name in both)


def test_e5m2_gradients_cost_dx_and_dw_only():
    o = operands(512, 1.0, "one value", 0.0)
    e4m3, e5m2 = gemm_errors(o, ALL), gemm_errors(o, LinearFormat(True, True, True, grad_fmt="e5m2"))
    assert e5m2["y = x wᵀ"] == e4m3["y = x wᵀ"]
    assert e5m2["dx = dy w"] == pytest.approx(math.hypot(0.0265, 0.053), rel=0.04)
    assert e5m2["dw = dyᵀ x"] > 1.4 * e4m3["dw = dyᵀ x"]


def test_accumulator_matters_for_one_sign_and_long_sums_only():
    noise, one_sign = accumulator_errors(2048, 0.0, "e4m3"), accumulator_errors(2048, 2.0, "e4m3")
    assert noise["fast"][-1] < 2e-3
    assert one_sign["fast"][-1] > 0.02
    assert one_sign["promoted"][-1] < 1e-3
    assert one_sign["fp32"][-1] < 1e-6
    assert len(noise["fast"]) == 16
    assert one_sign["fast"][0] == one_sign["promoted"][0]  # the first chain is the same


def test_settings_reach_the_numbers():
    explorer = LinearExplorer()
    before = dict(explorer.numbers)
    explorer.set(fprop=False)
    assert explorer.numbers["y = x wᵀ"] == explorer.numbers["bf16"]["y = x wᵀ"]
    assert explorer.numbers["x and w"] == before["x and w"]
    assert "y = x wᵀ, BF16" in explorer.view.picture
    explorer.set(fprop=True, fmt="e5m2")
    assert explorer.numbers["x and w"] > 1.8 * before["x and w"]
    explorer.set(fmt="e4m3", accumulator="fast", mean=2.0, chunks=16)
    assert "Promote each 128" in explorer.view.reading
    assert "more than as squares" in explorer.view.reading  # errors of operands with a mean aren't independent


def test_mx_takes_its_scale_type_from_its_definition():
    explorer = LinearExplorer(granularity="mx", scale="fp32")
    assert explorer.controls["scale"].disabled
    assert "by definition" in explorer.view.reading
    explorer.set(granularity="row")
    assert not explorer.controls["scale"].disabled


def test_cached_operands_are_not_written_to():
    before = operands(512, 1.0, "one value", 0.0)
    x = before.x.clone()
    gemm_errors(before, ALL)
    assert before.x.equal(x)
    assert not before.x.requires_grad
    assert torch.equal(operands(512, 1.0, "one value", 0.0).x, x)
