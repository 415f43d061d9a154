"""Tensors on their way between processes: one buffer of bytes, so that bits arrive as they were sent.

NumPy has neither BF16 nor FP8, so what travels is bytes, with dtype and shape of each tensor beside them. Ray puts a
NumPy array into its object store without pickling it, and one large array far faster than many small ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16  # bytes; a view needs an offset that its element size divides


@dataclass(frozen=True)
class Packed:
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    data: np.ndarray  # uint8


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    buffer = torch.empty(sum(_padded(dtype, shape) for _, dtype, shape in layout), dtype=torch.uint8)
    start = 0
    for tensor, (_, dtype, shape) in zip(tensors.values(), layout, strict=True):
        end = start + dtype.itemsize * prod(shape)
        buffer[start:end].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        start += _padded(dtype, shape)
    return Packed(layout, buffer.numpy())


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Views of one copy: arrays from the object store can't be written to."""
    buffer, tensors, start = torch.from_numpy(packed.data.copy()), {}, 0
    for name, dtype, shape in packed.layout:
        end = start + dtype.itemsize * prod(shape)
        tensors[name] = buffer[start:end].view(dtype).reshape(shape)
        start += _padded(dtype, shape)
    return tensors


def _padded(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-dtype.itemsize * prod(shape) // _ALIGN) * _ALIGN
