import pytest
import torch

from labkit.fp8.formats import E4M3, E5M2, FORMATS, decode, get_format


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_format_describes_the_torch_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    assert fmt.max == info.max
    assert 2.0**fmt.min_exponent == info.smallest_normal
    assert 2.0**-fmt.mantissa_bits == info.eps


@pytest.mark.parametrize("flush_denormal", [False, True])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_decode_equals_the_torch_cast_for_every_finite_code(fmt, flush_denormal):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.view(fmt.dtype).to(torch.float32)
    finite = expected.isfinite()
    assert int(finite.sum()) == {E4M3: 254, E5M2: 248}[fmt]
    torch.set_flush_denormal(flush_denormal)
    try:
        decoded = decode(codes, fmt)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(decoded[finite].view(torch.int32), expected[finite].view(torch.int32))


def test_unknown_format_lists_the_known_ones():
    with pytest.raises(ValueError, match="e4m3, e5m2"):
        get_format("fp8")
