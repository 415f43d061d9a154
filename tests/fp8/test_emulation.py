"""The C kernel, the torch fallback and the definition (quantise, then dequantise) must give the same bits."""

import pytest
import torch

from labkit.fp8 import native
from labkit.fp8.emulation import fake_quantize, to_grid, torch_fake_quantize, torch_to_grid
from labkit.fp8.formats import FORMATS, get_format
from labkit.fp8.quantization import quantize

TILES = [(1, 128), (128, 1), (128, 128), (1, 32), (32, 1), None, "row", "column", (3, 7)]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def every_bfloat16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).float()


def with_bad_values() -> torch.Tensor:
    x = random(130, 200)
    x[3, 5], x[100, 150], x[101, 2] = float("nan"), float("inf"), -float("inf")
    return x


DATA = {
    "random": lambda: random(130, 200),
    "wide range, ragged": lambda: random(131, 301) * torch.exp2(20 * random(131, 301, seed=1)),
    "longer than a chunk": lambda: random(140, 1000),
    "ties": lambda: torch.arange(1, 65, 0.0625).repeat(40).view(128, 320),
    "tiny": lambda: random(130, 200) * 1e-36,
    "subnormal": lambda: random(130, 200) * 1e-40,
    "huge": lambda: random(130, 256) * 1e38,
    "zero": lambda: torch.zeros(3, 300),
    "negative zero": lambda: -torch.zeros(3, 300),
    "one element": lambda: torch.tensor([[0.3]]),
    "not finite": with_bad_values,
    "every bfloat16": every_bfloat16,
    "finite bfloat16": lambda: every_bfloat16().nan_to_num(0.0, 0.0, 0.0).sort(dim=1).values,
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, equal NaN positions, and every other element equal to the bit (so -0 differs from 0)."""
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    numbers = ~a.isnan()
    return (
        a.dtype == b.dtype
        and torch.equal(numbers, ~b.isnan())
        and torch.equal(a[numbers].view(integer), b[numbers].view(integer))
    )


def require_native() -> None:
    usable, reason = native.available()
    if not usable:
        pytest.skip(reason)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", DATA)
def test_native_fallback_and_definition_agree(name, tile):
    require_native()
    for dtype in (torch.bfloat16, torch.float32):
        x = DATA[name]().to(dtype)
        shape = {"row": (1, x.shape[1]), "column": (x.shape[0], 1)}.get(tile, tile)
        for fmt in FORMATS:
            for scale, formula in [(s, f) for s in ("pow2", "fp32") for f in ("te", "deepgemm", "vllm")]:
                out_dtype = dtype if scale == "pow2" else torch.float32
                definition = quantize(x, fmt, shape, scale, formula).dequantize(out_dtype)
                fallback = torch_fake_quantize(x, fmt, shape, scale, formula, out_dtype)
                kernel = native.fake_quantize(x, fmt, shape, scale, formula, out_dtype)
                case = (dtype, fmt, scale, formula)
                assert same_bits(fallback, definition), case
                assert same_bits(kernel, definition), case


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 2.109375, 2.0**-8, 0.3])
def test_to_grid_is_the_clamped_torch_cast_for_every_bfloat16(scale, dtype, fmt):
    require_native()
    form = get_format(fmt)
    x = every_bfloat16().to(dtype)
    expected = (x.float() / scale).clamp(-form.max, form.max).to(form.dtype).to(dtype)
    assert same_bits(native.to_grid(x, scale, fmt), expected)
    assert same_bits(torch_to_grid(x, scale, fmt), expected)
    assert same_bits(to_grid(x, scale, fmt), expected)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_fake_quantize_restores_the_shape_and_reads_strided_input(monkeypatch, switch):
    monkeypatch.setenv("LABKIT_NATIVE", switch)
    x = random(2, 5, 200).bfloat16()
    expected = quantize(x, tile=(4, 128)).dequantize(torch.bfloat16)
    assert same_bits(fake_quantize(x, tile=(4, 128)), expected)
    transposed = x.reshape(10, 200).T
    assert same_bits(fake_quantize(transposed), quantize(transposed).dequantize(torch.bfloat16))
    assert fake_quantize(x, scale="fp32").dtype == torch.float32


def test_quantising_along_tokens_is_quantising_the_transpose():
    x = random(130, 200)
    assert same_bits(fake_quantize(x, tile=(128, 1)), fake_quantize(x.T, tile=(1, 128)).T.contiguous())


@pytest.mark.parametrize("switch", ["0", "1"])
def test_flush_to_zero_mode_changes_nothing(monkeypatch, switch):
    monkeypatch.setenv("LABKIT_NATIVE", switch)
    x = random(64, 256)
    expected = [fake_quantize(x, fmt) for fmt in FORMATS]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode")
    try:
        found = [fake_quantize(x, fmt) for fmt in FORMATS]
    finally:
        torch.set_flush_denormal(False)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_repeated_quantisation_changes_nothing():
    once = fake_quantize(random(64, 256).bfloat16(), tile=(1, 128))
    assert torch.equal(fake_quantize(once, tile=(1, 128)), once)


def test_float16_and_lost_gradients_are_refused():
    x = random(2, 128)
    with pytest.raises(ValueError, match="convert x to bfloat16"):
        fake_quantize(x.half())
    with pytest.raises(ValueError, match="convert x first"):
        to_grid(x.half(), 1.0)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive and finite"):
            to_grid(x, scale)
    x.requires_grad_()
    for function in (fake_quantize, lambda t: to_grid(t, 1.0)):
        with pytest.raises(ValueError, match="no_grad"):
            function(x)
    with torch.no_grad():
        assert not fake_quantize(x).requires_grad


def test_a_rule_of_ones_own_goes_through_torch_in_any_number_of_pieces() -> None:
    def rule(amax: torch.Tensor, fp8_max: float) -> torch.Tensor:
        return 0.75 * amax / fp8_max

    x = random(600, 1000)
    for tile in ((1, 128), (128, 128), (128, 1), None):
        expected = quantize(x, tile=tile, scale="fp32", formula=rule).dequantize()
        assert torch.equal(fake_quantize(x, tile=tile, scale="fp32", formula=rule), expected)
