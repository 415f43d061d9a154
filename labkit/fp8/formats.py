"""The two 8-bit floating-point formats (OCP 8-bit Floating Point Specification, revision 1.0).

    name   layout    largest   smallest normal   smallest subnormal   infinity   NaN codes
    e4m3   1-4-3         448              2^-6                 2^-9   none       0x7f, 0xff
    e5m2   1-5-2       57344             2^-14                2^-16   yes        0x7d-0x7f, 0xfd-0xff

``e4m3`` is the "fn" variant (finite, no infinity) which all deep-learning stacks mean by E4M3. The relative
rounding error of a normal value is at most 2^-4 (E4M3) or 2^-3 (E5M2); for Gaussian data the root mean square
is 2.6 % and 5.3 %.

A code is one byte; torch holds it as ``uint8`` here because most torch operators reject float8 tensors.
Rounding is to nearest, ties to even. Whether a cast saturates depends on the torch version and the format
(E5M2 goes to infinity), so labkit always clamps to ``max`` before casting.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int
    """Exponent of the smallest normal number."""


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0, 2, -14)
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2)}
NAN_CODE = 0x7F


def get_format(name: str) -> Format:
    """The format called ``name``; raises ValueError listing the names otherwise."""
    if name not in FORMATS:
        raise ValueError(f"unknown FP8 format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def decode(codes: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Values of finite ``codes`` (uint8) as float32; a NaN code gives some number, so callers handle NaN.

    Both formats are read as float16 by shifting: E5M2 is the upper byte of a float16, E4M3 fits below it up
    to a factor of 2^8. Unlike a shift into bfloat16 no step holds a subnormal float32, so flush-to-zero modes
    cannot change a bit, and torch converts float16 with vector instructions where it converts float8 one
    element at a time.
    """
    wide = codes.view(torch.int8).to(torch.int16)
    if fmt is E5M2:
        return wide.bitwise_left_shift_(8).view(torch.float16).to(torch.float32)
    wide = wide.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # keep the sign and the seven bits below bit 14
    return wide.view(torch.float16).to(torch.float32).mul_(256.0)
