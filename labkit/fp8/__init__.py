"""FP8 numerics, emulated exactly on any CPU: formats, quantisation, linears, attention, KV-cache scales."""

from labkit.fp8.attention import fp8_attention, math_attention
from labkit.fp8.emulation import fake_quantize, to_grid
from labkit.fp8.formats import E4M3, E5M2, FORMATS, Format, get_format
from labkit.fp8.kv_scales import AmaxObserver, KVScales, saturation
from labkit.fp8.linear import Float8Linear, LinearFormat
from labkit.fp8.quantization import Quantized, quantize

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "AmaxObserver",
    "Float8Linear",
    "Format",
    "KVScales",
    "LinearFormat",
    "Quantized",
    "fake_quantize",
    "fp8_attention",
    "get_format",
    "math_attention",
    "quantize",
    "saturation",
    "to_grid",
]
