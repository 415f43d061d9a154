"""What FP8 costs attention: Q, K, V and the probabilities P, each on its own tick, with fresh, stale or no scales.

    S = q k^T sm_scale        P = softmax(S)        o = P v          one sequence, 4 heads of 64, 16 queries, T keys

    output error   || o_FP8 - o || / || o ||                    o in float32 from the same BF16 q, k, v
    attention      mean over queries of 1/2 sum_k |P_FP8 - P|    total variation: the share of attention that moved
    clipped        share of K (V) beyond the largest value the scale allows

``size`` is the largest |k| and |v|; sm_scale is set so that scores keep a standard deviation of ``sharpness`` whatever
the size, since a trained model balances its Q against its K. So size tells one thing only: whether the numbers fit.

Scales: calibrated (1.05 amax / 448), stale (calibrated before K and V grew by ``growth``), or 1 as an engine uses when
scales are missing. E4M3 at scale 1 is right up to 448 and down to about 0.1: models with QK-norm lie inside, and look
fine without any calibration.

An outlier channel of K that varies from token to token carries attention; one that is the same for every token adds
the same to all scores of a query, which softmax removes: clipping it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.explorer.data import noise
from labkit.explorer.svg import BLUE, GREY, PURPLE, VERMILION, WIDTH, Axis, Bar, Picture, percent
from labkit.explorer.widget import Control, Explorer, View, choice, log_slider, slider, tick
from labkit.fp8.attention import fp8_attention
from labkit.fp8.emulation import to_grid
from labkit.fp8.formats import get_format
from labkit.fp8.kv_scales import saturation

HEADS, QUERIES, DIM = 4, 16, 64
MARGIN = 1.05
OUTLIER = 8.0  # sigma of K's outlier channel
PARTS = ("q", "k", "v", "p")
CHANNELS = (("none", "none"), ("8 σ, by token", "varies"), ("8 σ, constant", "constant"))
SHOWN = 32  # keys in the picture


@dataclass(frozen=True)
class Tensors:
    """q [1, H, Tq, d], k and v [1, H, T, d] in bfloat16."""

    q: Tensor
    k: Tensor
    v: Tensor
    sm_scale: float


def tensors(keys: int, size: float, sharpness: float, channel: str) -> Tensors:
    """Gaussian q, k and v; the largest |k| and |v| are ``size``, scores have the standard deviation ``sharpness``."""
    q, k, v = (noise(HEADS * n, DIM, seed).view(1, HEADS, n, DIM) for n, seed in ((QUERIES, 4), (keys, 5), (keys, 6)))
    k = k.clone()
    if channel == "varies":
        k[..., DIM // 2] *= OUTLIER
    if channel == "constant":
        k[..., DIM // 2] = 4 * OUTLIER
    k, v = (t * (size / float(t.abs().amax())) for t in (k, v))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    scores = q.float() @ k.float().mT
    return Tensors(q, k, v, sharpness / float(scores.std(-1).mean()))


def scales_of(t: Tensors, kind: str, growth: float, fmt: str) -> dict[str, float]:
    """The scales of q, k and v. Only K and V grow: a cache is what lives between calibrations."""
    if kind == "unit":
        return {"q": 1.0, "k": 1.0, "v": 1.0}
    fresh = {name: MARGIN * float(getattr(t, name).abs().amax()) / get_format(fmt).max for name in "qkv"}
    return {"q": fresh["q"], "k": fresh["k"] / growth, "v": fresh["v"] / growth}


def attend(t: Tensors, parts: frozenset[str], scales: dict[str, float], fmt: str, v: Tensor | None = None) -> Tensor:
    """The output in float32 with ``parts`` in FP8, by the engine's own kernel.

    ``v`` [B, H, T, d] replaces the values, unquantised; q and k are then the same for every b.
    """
    given: dict[str, Tensor] = {name: getattr(t, name).float() for name in "qkv"}
    used = {name: scales[name] if name in parts else 1.0 for name in "qkv"}
    grid = {name: to_grid(x, scales[name], fmt) if name in parts else x for name, x in given.items()}
    if v is not None:
        grid = {"q": grid["q"].expand(len(v), -1, -1, -1), "k": grid["k"].expand(len(v), -1, -1, -1), "v": v}
        used["v"] = 1.0
    return fp8_attention(
        *(grid["q"], grid["k"], grid["v"], torch.zeros(len(grid["q"]), 1, 1, t.k.shape[2])),
        sm_scale=t.sm_scale,
        q_scale=used["q"],
        k_scale=used["k"],
        v_scale=used["v"],
        fmt=fmt,
        quantize_p="p" in parts,
    )


def probabilities(t: Tensors, parts: frozenset[str], scales: dict[str, float], fmt: str) -> Tensor:
    """P [H, Tq, T] as the kernel uses it: its output where the values are the identity, d columns at a time."""
    keys = t.k.shape[2]
    identity_BHTd = torch.eye(keys).view(keys, -1, DIM).transpose(0, 1)[:, None].expand(-1, HEADS, -1, -1)
    return torch.cat(list(attend(t, parts, scales, fmt, identity_BHTd)), -1)


@dataclass(frozen=True)
class Found:
    """Errors of the output with each part alone and with the ticked ones, and what became of attention."""

    alone: dict[str, float]
    ticked: float
    fresh: float
    """As ``ticked``, with scales calibrated on these very tensors."""
    moved: float
    clipped: dict[str, float]
    exact_p: Tensor
    ticked_p: Tensor


def measure(t: Tensors, parts: frozenset[str], scales: dict[str, float], fmt: str) -> Found:
    nothing: frozenset[str] = frozenset()
    exact, exact_p = attend(t, nothing, scales, fmt), probabilities(t, nothing, scales, fmt)

    def error(some: frozenset[str], in_force: dict[str, float] = scales) -> float:
        return float((attend(t, some, in_force, fmt) - exact).norm() / exact.norm())

    ticked_p = probabilities(t, parts, scales, fmt)
    return Found(
        alone={part: error(frozenset(part)) for part in PARTS},
        ticked=error(parts),
        fresh=error(parts, scales_of(t, "calibrated", 1.0, fmt)),
        moved=float((ticked_p - exact_p).abs().sum(-1).mean() / 2),
        clipped={name: saturation(getattr(t, name), scales[name], fmt) if name in parts else 0.0 for name in "kv"},
        exact_p=exact_p,
        ticked_p=ticked_p,
    )


class AttentionExplorer(Explorer):
    """The error of attention under each switch, with fresh, stale or missing scales."""

    title = "Attention with Q, K, V and P in FP8"

    def make_controls(self) -> dict[str, Control]:
        return {
            **{part: tick(f"{part.upper()} in FP8", True) for part in PARTS},
            "fmt": choice("format", [("E4M3", "e4m3"), ("E5M2", "e5m2")], "e4m3"),
            "scales": choice("scales", [("calibrated", "calibrated"), ("missing: all 1.0", "unit")], "calibrated"),
            "growth": slider("growth since cal.", 1.0, 1.0, 8.0, 0.05),
            "size": log_slider("largest |k|, |v|", 20.0, 1e-3, 1e4),
            "channel": choice("K's outlier channel", CHANNELS, "none"),
            "sharpness": slider("sharpness", 2.0, 0.0, 8.0),
            "keys": slider("keys T", 128, DIM, 512, step=DIM),
        }

    def show(
        self,
        q: bool,
        k: bool,
        v: bool,
        p: bool,
        fmt: str,
        scales: str,
        growth: float,
        size: float,
        channel: str,
        sharpness: float,
        keys: int,
    ) -> View:
        self.enable("growth", scales != "unit", "scale 1 isn't stale")
        parts = frozenset(name for name, on in zip(PARTS, (q, k, v, p), strict=True) if on)
        t = tensors(keys, size, sharpness, channel)
        in_force = scales_of(t, scales, growth, fmt)
        found = measure(t, parts, in_force, fmt)
        reading = _reading(found, parts, scales, growth, size, channel, fmt)
        picture = Picture(422, reading)
        bars = [Bar(f"{part.upper()} alone", error, BLUE) for part, error in found.alone.items()]
        bars.append(Bar("as ticked", found.ticked, VERMILION))
        picture.percent_bars(10, 4, 470, "Error of the output", bars, 96)
        moved = [
            Bar("attention moved", found.moved, VERMILION),
            *[Bar(f"{name.upper()} clipped", share, PURPLE) for name, share in found.clipped.items()],
        ]
        picture.percent_bars(490, 4, 420, "Why: as ticked", moved, 136)
        _one_query(picture, found)
        numbers = {
            "alone": found.alone,
            "ticked": found.ticked,
            "fresh": found.fresh,
            "moved": found.moved,
            "clipped": found.clipped,
            "scales": in_force,
        }
        return View(picture.html(), reading, numbers)


def _reading(
    found: Found, parts: frozenset[str], scales: str, growth: float, size: float, channel: str, fmt: str
) -> str:
    if not parts:
        return "Nothing is in FP8. Tick Q, K, V or P."
    alone, top = found.alone, get_format(fmt).max
    text = f"The output is {percent(found.ticked)} off, and {percent(found.moved)} of attention moved to other keys. "
    against = f"Freshly calibrated it would be {percent(found.fresh)}. "
    clipped = max(found.clipped.values())
    if scales == "unit" and found.ticked > 1.25 * found.fresh:
        if size > top:
            return (
                text
                + f"A scale of 1 ends at {top:g} and K and V reach {size:.4g}: {percent(clipped)} clipped. "
                + against
            )
        return text + f"With a scale of 1, values up to {size:.2g} lie among the subnormals or become zero. " + against
    if scales == "unit":
        return text + against + f"Missing scales do no harm while K and V fit: until {top:g}, and not for tiny values."
    if growth > 1:
        text += f"K and V grew by {growth:.2f} since calibration: {percent(clipped)} clipped. " + against
    if channel == "constant":
        return (
            text
            + f"Clipped or not, K alone costs {percent(alone['k'])}: a channel equal for all tokens cancels in softmax."
        )
    if growth > 1:
        return text + "Recalibrating after each update keeps growth near 1."
    return text + (
        f"V costs its own rounding ({percent(alone['v'])}), P no more than that ({percent(alone['p'])}); Q and K cost "
        f"{percent(alone['q'])} and {percent(alone['k'])}, the more the sharper attention is."
    )


def _one_query(picture: Picture, found: Found) -> None:
    """Attention of one query to its strongest keys: exact as outline, FP8 as filled bar beside it."""
    exact, ticked = found.exact_p[0, 0], found.ticked_p[0, 0]
    order = exact.argsort(descending=True)[:SHOWN]
    top, bottom = 232, 390
    largest = max(float(exact.max()), float(ticked.max()), 1e-6)
    height = Axis(0, largest, bottom, top)
    axis = Axis(0, SHOWN, 64, WIDTH - 10)
    picture.text(10, top - 22, f"Attention of one query, its {SHOWN} strongest keys", bold=True)
    picture.rect(480, top - 34, 14, 14, GREY)
    picture.text(500, top - 22, "exact")
    picture.rect(570, top - 34, 14, 14, VERMILION)
    picture.text(590, top - 22, "FP8, as ticked")
    for share in (0.0, largest / 2, largest):
        picture.line(axis.start, height.at(share), axis.end, height.at(share))
        picture.text(axis.start - 8, height.at(share) + 5, f"{100 * share:.3g} %", "end")
    for place, key in enumerate(order.tolist()):
        left = axis.at(place)
        for offset, weights, colour in ((3, exact, GREY), (14, ticked, VERMILION)):
            tall = bottom - height.at(float(weights[key]))
            picture.rect(left + offset, bottom - tall, 10, tall, colour)
    picture.text(axis.start, bottom + 22, "strongest key")
    picture.text(axis.end, bottom + 22, "weaker →", "end")
