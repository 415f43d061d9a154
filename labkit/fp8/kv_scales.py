"""Per-layer scales of Q, K and V for an FP8 KV cache and FP8 attention, and their calibration.

    stored = FP8(t / scale_t),  used as stored * scale_t      one float per layer and tensor, t in {q, k, v}

Calibration (NeMo RL's ``calibrate_qkv_fp8_scales``): over microbatches m of a forward pass with the current
weights,

    A_t(layer, m) = max |t|                after q/k-norm and RoPE, over all tokens and heads
    P_t(layer)    = A sorted, entry number round(percentile / 100 * (M - 1)): nearest rank
    scale_t       = margin * P_t / F       F = 448 for E4M3; margin 1.05 leaves room until the next refit

The percentile is over microbatch maxima, not over elements: up to M = 500 the default 99.9 is the maximum.
Scales that are missing or stale clip K and V silently, so nothing here has a default: a gap, a NaN or a
non-positive scale raises ValueError naming the layer and the tensor. A tensor that was zero throughout gets
scale 1. Source: NeMo RL, PR #1212.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from labkit.fp8.formats import get_format

TENSORS = ("q", "k", "v")


@dataclass(frozen=True)
class KVScales:
    """Scales by layer, with the version of the weights they were measured on."""

    version: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]

    @classmethod
    def unit(cls, num_layers: int, version: int = 0) -> KVScales:
        """Uncalibrated: every scale 1."""
        ones = (1.0,) * num_layers
        return cls(version, ones, ones, ones)

    def validate(self, num_layers: int) -> None:
        """Raise ValueError, naming layer and tensor, unless every scale is finite, positive and there."""
        for name in TENSORS:
            scales = getattr(self, name)
            if len(scales) != num_layers:
                raise ValueError(
                    f"{name} has scales for {len(scales)} layers but the model has {num_layers}: "
                    "calibrate with this model"
                )
            for layer, scale in enumerate(scales):
                if not (math.isfinite(scale) and scale > 0):
                    raise ValueError(
                        f"layer {layer}: {name} scale is {scale}, it must be finite and positive: recalibrate"
                    )


class AmaxObserver:
    """Collects max |q|, |k|, |v| per layer and microbatch, and turns them into :class:`KVScales`."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], float] = {}
        self._microbatches: list[dict[tuple[int, str], float]] = []

    def observe(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Record a layer's tensors as attention sees them; calls within a microbatch combine by maximum."""
        for name, tensor in zip(TENSORS, (q, k, v), strict=True):
            amax = float(tensor.detach().abs().amax())
            if not math.isfinite(amax):
                raise ValueError(f"layer {layer}: {name} holds NaN or infinity, so it has no scale")
            key = (layer, name)
            self._open[key] = max(self._open.get(key, 0.0), amax)

    def end_microbatch(self) -> None:
        """Close the microbatch; raises ValueError if it saw other layers than the ones before."""
        if not self._open:
            raise ValueError("the microbatch observed no layer: call observe() in the forward pass first")
        if self._microbatches and self._open.keys() != self._microbatches[0].keys():
            odd = sorted({layer for layer, _ in self._open.keys() ^ self._microbatches[0].keys()})
            raise ValueError(f"layers {odd} were observed in some microbatches only")
        self._microbatches.append(self._open)
        self._open = {}

    def scales(self, version: int, fmt: str = "e4m3", percentile: float = 99.9, margin: float = 1.05) -> KVScales:
        """The scales of everything observed so far, labelled with the weight ``version``."""
        if self._open or not self._microbatches:
            raise ValueError("call end_microbatch() after each microbatch, then scales()")
        layers = sorted({layer for layer, _ in self._microbatches[0]})
        if layers != list(range(len(layers))):
            raise ValueError(f"observed layers {layers}: layers must be numbered from 0 without gaps")
        factor = margin / get_format(fmt).max
        q, k, v = (tuple(self._layer_scales(name, len(layers), percentile, factor)) for name in TENSORS)
        return KVScales(version, q, k, v)

    def _layer_scales(self, name: str, num_layers: int, percentile: float, factor: float) -> Iterator[float]:
        for layer in range(num_layers):
            amax = nearest_rank([seen[layer, name] for seen in self._microbatches], percentile)
            yield amax * factor if amax > 0 else 1.0


def nearest_rank(values: list[float], percentile: float) -> float:
    """The entry of sorted ``values`` at round(percentile / 100 * (n - 1))."""
    return sorted(values)[round(percentile / 100 * (len(values) - 1))]


def saturation(x: Tensor, scale: float, fmt: str = "e4m3") -> float:
    """Share of elements that FP8(x / scale) clips, from 0 to 1."""
    return float((x.detach().float().abs() > scale * get_format(fmt).max).float().mean())
