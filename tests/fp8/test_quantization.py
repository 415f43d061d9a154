from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from labkit.fp8.emulation import fake_quantize
from labkit.fp8.formats import FORMATS
from labkit.fp8.quantization import SCALES, quantize

GOLDEN = Path(__file__).parent / "golden"
FORMULA = {"te": "te", "dg": "deepgemm", "vllm_native": "vllm", "vllm_block": "vllm"}
TILES = {"1x128": (1, 128), "128x128": (128, 128), "tensor": None}


@cache
def golden() -> dict[str, np.ndarray]:
    """Codes and scales written by Transformer Engine's, DeepGEMM's and vLLM's own code, and inputs."""
    return {name: array for path in sorted(GOLDEN.glob("*.npz")) for name, array in np.load(path).items()}


def golden_input(name: str) -> torch.Tensor:
    x = torch.from_numpy(golden()["in/" + name].copy())
    return x.view(torch.bfloat16) if name.endswith("bf16") else x


def differing_bytes(name: str) -> int:
    source, input_name, *middle, tile, which = name.split("/")
    fmt, scale = middle if source == "te" else ("e4m3", *middle)
    x = golden_input(input_name)
    if which in ("qt", "st"):
        x = x.T
    shape = (1, x.shape[1]) if tile == "token" else TILES[tile]
    quantized = quantize(x, fmt, shape, "fp32" if scale == "fp32" else "pow2", FORMULA[source])
    found = (quantized.codes if which[0] == "q" else quantized.scales).numpy()
    expected = golden()[name]
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return int((found.view(np.uint8) != expected.view(np.uint8)).sum())


def test_golden_set_is_complete():
    names = [name for name in golden() if not name.startswith("in/")]
    per_source = {source: sum(name.startswith(source + "/") for name in names) for source in FORMULA}
    assert per_source == {"te": 256, "dg": 64, "vllm_native": 64, "vllm_block": 32}


@pytest.mark.parametrize("input_name", sorted(name[3:] for name in golden() if name.startswith("in/")))
@pytest.mark.parametrize("source", FORMULA)
def test_codes_and_scales_equal_the_references_bit_for_bit(source, input_name, record_property):
    names = [name for name in golden() if name.startswith(f"{source}/{input_name}/")]
    differing = {name: count for name in names if (count := differing_bytes(name))}
    record_property("arrays_compared", len(names))
    print(f"{source}/{input_name}: {len(names)} arrays compared, {len(differing)} differ")
    assert len(names) >= 4
    assert differing == {}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_bfloat16_rounds_as_the_torch_cast(fmt):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.float().abs() <= fmt.max]
    largest = torch.tensor([fmt.max], dtype=torch.bfloat16)  # makes the scale 1
    row = torch.cat([x, largest])[None]
    quantized = quantize(row, fmt.name, (1, row.shape[1]), "fp32", "te")
    assert quantized.scales.item() == 1.0
    assert torch.equal(quantized.codes, row.to(fmt.dtype).view(torch.uint8))


def test_rounding_is_to_nearest_ties_to_even():
    """Against the definition in exact arithmetic: the nearest value, or the even code of two."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).double()
    middle = (values[:-1] + values[1:]) / 2
    even = torch.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:])
    row = torch.cat([middle, middle * (1 + 2**-20), middle * (1 - 2**-20), torch.tensor([448.0])]).float()[None]
    expected = torch.cat([even, codes[1:], codes[:-1], torch.tensor([126], dtype=torch.uint8)])[None]
    assert torch.equal(quantize(row, "e4m3", None, "fp32", "te").codes, expected)


@pytest.mark.parametrize("formula", ["te", "deepgemm", "vllm"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (128, 1), None])
def test_zero_tiles_have_zero_codes_and_a_finite_positive_scale(tile, scale, formula):
    quantized = quantize(torch.zeros(5, 300), "e4m3", tile, scale, formula)
    assert not quantized.codes.any()
    assert bool((quantized.scales.isfinite() & (quantized.scales > 0)).all())
    assert not quantized.dequantize().any()


@pytest.mark.parametrize("formula", ["te", "deepgemm", "vllm"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tile_with_nan_or_infinity_becomes_nan_and_no_other_does(fmt, bad, formula):
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(0))
    clean = quantize(x, fmt, (1, 128), "fp32", formula)
    x[0, 130] = bad
    quantized = quantize(x, fmt, (1, 128), "fp32", formula)
    assert bool((quantized.codes[0, 128:] == 0x7F).all())
    assert quantized.scales[0, 1].item() == 1.0
    assert bool(quantized.dequantize()[0, 128:].isnan().all())
    assert torch.equal(quantized.codes[0, :128], clean.codes[0, :128])
    assert torch.equal(quantized.codes[1], clean.codes[1])


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_dequantize_is_the_code_value_times_its_tile_scale(fmt, scale):
    x = torch.randn(70, 200, generator=torch.Generator().manual_seed(1))
    quantized = quantize(x, fmt.name, (32, 48), scale, "deepgemm")
    assert quantized.scales.shape == (3, 5)
    for row, column in [(0, 0), (31, 47), (32, 48), (69, 199), (40, 100)]:
        code = quantized.codes[row, column].view(fmt.dtype).float()
        expected = code * quantized.scales[row // 32, column // 48]
        assert quantized.dequantize()[row, column] == expected


@pytest.mark.parametrize("formula", ["te", "deepgemm", "vllm"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_pow2_scales_dequantise_exactly_in_bfloat16(fmt, formula):
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 30, 64)[:, None]
    quantized = quantize(x, fmt, (1, 128), "pow2", formula)
    mantissa, _ = quantized.scales.frexp()
    assert bool((mantissa == 0.5).all())
    assert torch.equal(quantized.dequantize(torch.bfloat16).float(), quantized.dequantize())


def test_formulas_agree_for_pow2_scales_above_their_floors():
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(3))
    te, deepgemm, vllm = (quantize(x, "e4m3", (1, 128), "pow2", f) for f in ("te", "deepgemm", "vllm"))
    assert torch.equal(te.codes, deepgemm.codes)
    assert torch.equal(te.codes, vllm.codes)
    assert torch.equal(te.scales, deepgemm.scales)
    assert torch.equal(te.scales, vllm.scales)


def test_formulas_differ_for_fp32_scales():
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(4))
    te, deepgemm, vllm = (quantize(x, "e4m3", (1, 128), "fp32", f).codes for f in ("te", "deepgemm", "vllm"))
    for other in (deepgemm, vllm):
        assert 0 < int((te != other).sum()) < 0.01 * x.numel()


@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128), (1, 32), None])
def test_ragged_tails_equal_zero_padding(tile):
    x = torch.randn(130, 576, generator=torch.Generator().manual_seed(5))
    padded = torch.nn.functional.pad(x, (0, 64, 0, 126))
    found, expected = quantize(x, tile=tile), quantize(padded, tile=tile)
    assert torch.equal(found.codes, expected.codes[:130, :576])
    rows, columns = found.scales.shape if tile else (1, 1)
    assert torch.equal(found.scales, expected.scales[:rows, :columns] if tile else expected.scales)


def test_leading_dimensions_count_as_rows_and_come_back():
    x = torch.randn(2, 3, 4, 200, generator=torch.Generator().manual_seed(6))
    quantized = quantize(x, tile=(8, 128))
    flat = quantize(x.reshape(24, 200), tile=(8, 128))
    assert quantized.codes.shape == x.shape
    assert quantized.scales.shape == (3, 2)
    assert torch.equal(quantized.codes.view(24, 200), flat.codes)
    assert quantized.dequantize().shape == x.shape


def test_float16_is_accepted():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(7)).half()
    assert torch.equal(quantize(x).codes, quantize(x.float()).codes)


@pytest.mark.parametrize(("fmt", "low", "high"), [("e4m3", 0.025, 0.028), ("e5m2", 0.050, 0.055)])
def test_relative_error_of_gaussian_data(fmt, low, high):
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(8))
    error = (quantize(x, fmt).dequantize() - x).norm() / x.norm()
    assert low < error < high


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fmt": "e3m4"}, "e4m3, e5m2"),
        ({"scale": "ue8m0"}, "pow2, fp32"),
        ({"formula": "torchao"}, "te, deepgemm, vllm"),
        ({"tile": (0, 128)}, "pair of positive sizes"),
        ({"tile": (128,)}, "pair of positive sizes"),
        ({"tile": (1, 12.8)}, "pair of positive sizes"),
        ({"x": torch.zeros(128)}, r"x\[None\]"),
        ({"x": torch.zeros(0, 128)}, "non-empty"),
        ({"x": torch.zeros(2, 128, dtype=torch.int64)}, "convert to bfloat16"),
        ({"x": torch.zeros(2, 128, dtype=torch.float64)}, "convert to bfloat16"),
    ],
)
def test_mistakes_raise_with_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize(**{"x": torch.zeros(2, 128), **arguments})


@pytest.mark.parametrize(
    ("x", "tile"),
    [
        ([[1.0]], None),
        (None, None),
        (torch.ones(2, 2).to_sparse(), None),
        (torch.ones(2, 2), 128),
        (torch.ones(2, 2), (True, 128)),
        (torch.ones(2, 2), [1, 128]),
    ],
)
def test_wrong_types_are_value_errors(x: object, tile: object) -> None:
    with pytest.raises(ValueError, match=r"dense torch tensor|pair of positive sizes"):
        quantize(x, tile=tile)


def test_a_tile_beyond_the_tensor_costs_nothing_and_changes_nothing() -> None:
    x = torch.randn(3, 100)
    huge = quantize(x, tile=(2**40, 2**40))
    assert huge.scales.shape == (1, 1)
    assert torch.equal(huge.codes, quantize(x, tile=(3, 100)).codes)
    assert torch.equal(huge.dequantize(), fake_quantize(x, tile=(2**70, 2**70)))


# ---- a rule of the caller's own


def test_a_rule_of_ones_own_that_says_what_deepgemm_says_gives_its_bits():
    x = torch.randn(150, 300, generator=torch.Generator().manual_seed(0))
    for tile in ((1, 128), (128, 128), None):
        for scale in SCALES:
            theirs = quantize(x, tile=tile, scale=scale, formula="deepgemm")
            mine = quantize(x, tile=tile, scale=scale, formula=lambda amax, fp8_max: amax / fp8_max)
            assert torch.equal(mine.codes, theirs.codes)
            assert torch.equal(mine.scales, theirs.scales)


def test_a_rule_of_ones_own_may_clip():
    x = torch.tensor([[448.0, 100.0, -448.0, 0.5]])
    assert quantize(x, scale="fp32", formula=lambda amax, fp8_max: amax / fp8_max / 2).dequantize().tolist() == [
        [224.0, 96.0, -224.0, 0.5]
    ]  # 100 is half-way between 96 and 104, and 96 is even


def test_a_rule_of_ones_own_meets_no_zero_no_nan_and_no_infinity():
    seen = []

    def rule(amax, fp8_max):
        seen.append(amax)
        return amax / fp8_max

    x = torch.tensor([[0.0] * 4, [torch.nan, 1, 2, 3], [torch.inf, 1, 2, 3], [1e-44, 0, 0, 0]])
    q = quantize(x, tile=(1, 4), formula=rule)
    assert bool((seen[0].isfinite() & (seen[0] > 0)).all())
    assert q.codes[0].tolist() == [0] * 4
    assert q.codes[1].tolist() == q.codes[2].tolist() == [0x7F] * 4
    assert q.scales.isfinite().all()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda amax, fp8_max: 1.0, r"must return a scale for each amax, a tensor \[2, 1, 1, 1\], got float"),
        (lambda amax, fp8_max: amax[0], r"a tensor \[2, 1, 1, 1\], got \[1, 1, 1\]"),
        (lambda amax, fp8_max: 0 * amax, "must return positive finite scales, got 0 to 0"),
        (lambda amax, fp8_max: amax / 0, "must return positive finite scales, got inf to inf"),
        (lambda amax, fp8_max: amax * torch.nan, "must return positive finite scales"),
    ],
)
def test_a_rule_of_ones_own_that_gives_no_scales_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(2, 4), tile=(1, 128), formula=rule)
