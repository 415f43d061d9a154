"""Reinforcement learning: advantages, corrections, loss, mismatch metrics, and the loop that joins them."""

from labkit.rl.advantages import group_advantages
from labkit.rl.corrections import Weights, correction, correction_from
from labkit.rl.loss import LossTerms, grpo_loss
from labkit.rl.metrics import METRICS, mismatch, weight_statistics

__all__ = [
    "METRICS",
    "LossTerms",
    "Weights",
    "correction",
    "correction_from",
    "group_advantages",
    "grpo_loss",
    "mismatch",
    "weight_statistics",
]
