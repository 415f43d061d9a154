"""Rotary position embedding: channel pairs (i, i + d/2) of q and k turn by ``position * frequency_i``.

    frequency_i = theta^(-2i/d),    i = 0 .. d/2 - 1

Llama 3.1 and later stretch the slow ones, so that a model trained on `original_max_positions` (P) tokens reaches
further: with w = P / wavelength = P * frequency / 2π, the turns that a pair makes within P,

    w > high_freq_factor        as it is: the pair tells neighbours apart
    w < low_freq_factor         frequency / factor
    between                     s * frequency + (1 - s) * frequency / factor,   s = (w - low) / (high - low)

Angles, sines and cosines are FP32, then rounded to the activations' dtype. Source: arXiv 2104.09864 (RoPE, in the
half-split layout of Hugging Face models); the rule "llama3" of Meta's llama-models. Left out: linear, dynamic, YaRN and
LongRoPE scaling, rotation of a part of the channels.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"RoPE's low_freq_factor {self.low_freq_factor:g} is not below high_freq_factor "
                f"{self.high_freq_factor:g}; copy both again from the model's source"
            )

    def __call__(self, frequency_d: Tensor) -> Tensor:
        turns_d = self.original_max_positions * frequency_d / (2 * math.pi)
        kept_d = (turns_d - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept_d = kept_d.clamp(0, 1)
        return kept_d * frequency_d + (1 - kept_d) * frequency_d / self.factor


def rope_table(
    positions_BT: Tensor, head_dim: int, theta: float, scaling: Llama3Scaling | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, d]."""
    frequency_d = theta ** (-torch.arange(0, head_dim, 2, device=positions_BT.device).float() / head_dim)
    if scaling is not None:
        frequency_d = scaling(frequency_d)
    angle_BTd = positions_BT[..., None].float() * frequency_d
    angle_B1Td = torch.cat([angle_BTd, angle_BTd], dim=-1)[:, None]
    return angle_B1Td.cos().to(dtype), angle_B1Td.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
