"""FP8 in the hand, without any training: move a slider, see what becomes of numbers, tensors, layers and attention.

    NumberLine           one number: its code, its neighbours, its rounding error, and how a scale moves the line
    ScalingExplorer      a tensor of chosen shape (outliers, spread, growth) under every granularity of scales
    LinearExplorer       the three GEMMs of a linear layer, what each operand costs, and the accumulator's width
    AttentionExplorer    Q, K, V and P in FP8, with fresh, stale or missing scales

    NumberLine()                             in a notebook cell shows it
    ScalingExplorer(outlier=1e4).numbers     what it shows, without a notebook

Settings are the constructor's arguments, ``set(...)`` and the controls. The arithmetic is `labkit.fp8`, as in a run.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "AttentionExplorer": "attention",
    "LinearExplorer": "linear",
    "NumberLine": "number_line",
    "ScalingExplorer": "scaling",
}
__all__ = ["AttentionExplorer", "LinearExplorer", "NumberLine", "ScalingExplorer"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"labkit.explorer.{_EXPORTS[name]}"), name)
    raise AttributeError(f"labkit.explorer has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
