import pytest
import torch

from labkit.explorer.accumulation import accumulate, running_sums
from labkit.fp8.emulation import to_grid


def codes(rows: int, step: int) -> torch.Tensor:
    """E4M3 values of all sizes and signs, [rows, 384]."""
    n = torch.arange(rows * 384)
    codes = (n * step * n) % 120 + 128 * ((n * 7 // 5) % 2)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float().view(rows, 384)


@pytest.mark.parametrize(
    ("accumulator", "expected"),
    [
        ("fast", [[275840.0, 567232.0, -721280.0], [501632.0, 275872.0, 576128.0]]),
        ("promoted", [[275992.0, 567360.0, -722144.0], [502096.0, 276000.0, 576176.0]]),
    ],
)
def test_bits_of_the_reference_model(accumulator, expected):
    """mmaemu 0.1.0, accumulate(use_fast_accum=True | False, splitk=1); exact: [[276224.3, ...], ...]."""
    assert accumulate(codes(2, 37), codes(3, 53), accumulator).tolist() == expected


def test_a_product_13_bits_below_the_largest_still_counts_and_one_below_14_does_not():
    def total(small: float, accumulator: str) -> float:
        row = torch.full((1, 128), small)
        row[0, 0] = 1.0
        return accumulate(row, row, accumulator).item()

    assert total(2.0**-7, "fp32") == 1 + 127 * 2.0**-14
    assert total(2.0**-7, "fast") == 1.0  # each product, 2^-14, is cut before it is added
    assert total(2.0**-6, "fast") == 1 + 127 * 2.0**-12


def test_sums_of_one_sign_fall_behind_in_one_long_chain():
    generator = torch.Generator().manual_seed(0)
    a, b = (to_grid(torch.rand(8, 2048, generator=generator) * 448, 1.0) for _ in range(2))
    exact = a.double() @ b.double().T
    off = {name: ((accumulate(a, b, name) - exact) / exact) for name in ("fp32", "promoted", "fast")}
    assert float(off["fast"].max()) < 0  # cutting loses, always
    assert float(off["fast"].mean()) < -0.02
    assert -1e-3 < float(off["promoted"].mean()) < 0
    assert float(off["fp32"].abs().max()) < 1e-6


def test_running_sums_end_with_the_sum_and_chunks_of_zeros_change_nothing():
    a, b = codes(2, 37), codes(3, 53)
    for name in ("fp32", "promoted", "fast"):
        sums = running_sums(a, b, name)
        assert sums.shape == (3, 2, 3)
        torch.testing.assert_close(sums[0], accumulate(a[:, :128], b[:, :128], name), rtol=0, atol=0)
        padded = [torch.cat([t, torch.zeros(len(t), 128)], 1) for t in (a, b)]
        if name != "fp32":
            assert accumulate(*padded, name).equal(sums[-1])


def test_e5m2_subnormals_use_their_own_smallest_exponent():
    tiny = torch.full((1, 128), 2.0**-16)  # the smallest E5M2 subnormal
    assert accumulate(tiny, torch.ones(1, 128), "fast", "e5m2").item() == 128 * 2.0**-16


def test_refusals_name_the_way_out():
    with pytest.raises(ValueError, match="fp32, promoted, fast"):
        accumulate(torch.ones(1, 128), torch.ones(1, 128), "slow")
    with pytest.raises(ValueError, match="multiple of 128"):
        accumulate(torch.ones(1, 100), torch.ones(1, 100), "fast")
