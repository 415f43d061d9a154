"""Data of a chosen shape: Gaussian, with an outlier, or with magnitudes spread over many orders.

    x_TC = sigma_TC z_TC        z standard normal; sigma 1, or 10^(-spread u), u evenly spaced in [0, 1]

The outlier is one value of so many sigma, or a channel or token multiplied by that. Real activations look like
both: a few channels far above the rest, and tokens of very different size. Noise is drawn once, so that a slider moves
nothing but what it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

PLACES = ("one value", "one channel", "one token")
SPREADS = ("tokens", "channels, sorted", "channels, shuffled")


@dataclass(frozen=True)
class Data:
    """x [T, C] in bfloat16; ``sigma`` is the size of ordinary values, ``ordinary`` where no outlier was put."""

    x: Tensor
    sigma: Tensor
    ordinary: Tensor


@lru_cache(maxsize=8)
def noise(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Standard normal float32 [rows, columns], the same for the same arguments. Not to be written to."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def shaped(
    rows: int, columns: int, outlier: float = 1.0, place: str = "one value", spread: float = 0.0, across: str = "tokens"
) -> Data:
    """Data with an outlier of ``outlier`` sigma (1: none) and magnitudes over ``spread`` decades."""
    if place not in PLACES or across not in SPREADS:
        raise ValueError(f"place is one of {PLACES}, across one of {SPREADS}; got {place!r} and {across!r}")
    sigma = _sigma(rows, columns, spread, across)
    x = noise(rows, columns) * sigma
    ordinary = torch.ones(rows, columns, dtype=torch.bool)
    if outlier > 1.0:
        row, column = rows // 2, columns // 2
        places: dict[str, Any] = {
            "one value": (row, column),
            "one channel": (slice(None), column),
            "one token": (row, slice(None)),
        }
        index = places[place]
        x[index] = outlier if place == "one value" else x[index] * outlier
        ordinary[index] = False
    return Data(x.bfloat16(), sigma, ordinary)


def _sigma(rows: int, columns: int, spread: float, across: str) -> Tensor:
    count = rows if across == "tokens" else columns
    sizes = 10.0 ** (-spread * torch.linspace(0, 1, count))
    if across != "channels, sorted":
        sizes = sizes[torch.randperm(count, generator=torch.Generator().manual_seed(1))]
    return sizes[:, None].expand(rows, columns) if across == "tokens" else sizes.expand(rows, columns)
