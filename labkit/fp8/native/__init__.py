"""The C kernel of fake quantisation: compiled on first use, called through ctypes.

Needs nothing but a C compiler (``CC`` or ``cc``). The library is cached in ``LABKIT_CACHE`` (default
``~/.cache/labkit``) under a hash of source, compiler, flags and CPU, and renamed into place, so that
processes starting together cannot see half a file. ``LABKIT_NATIVE=0`` turns it off. ctypes releases the
interpreter lock during a call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from labkit.fp8.formats import FORMATS
from labkit.fp8.quantization import Tile, scale_rule, tile_size

SOURCE = Path(__file__).with_name("fake_quantize.c")
# Never -ffast-math: it deletes the rounding, and linking with it sets flush-to-zero for the whole process.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared")
FORMAT_INDEX = {name: index for index, name in enumerate(FORMATS)}
FORMULA_INDEX = {"te": 0, "deepgemm": 1, "vllm": 2}
INT, SIZE, POINTER, FLOAT = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


def available() -> tuple[bool, str]:
    """Whether the C kernel is in use, and why (not)."""
    if os.environ.get("LABKIT_NATIVE") == "0":
        return False, "turned off by LABKIT_NATIVE=0"
    library, reason = _library()
    return library is not None, reason


def fake_quantize(x_MK: Tensor, fmt: str, tile: Tile, scale: str, formula: str, out_dtype: torch.dtype) -> Tensor:
    """As ``emulation.torch_fake_quantize``, for a 2-D bfloat16 or float32 tensor on the CPU."""
    x_MK = x_MK.contiguous()
    out = torch.empty(x_MK.shape, dtype=out_dtype)
    rows, columns = x_MK.shape
    rule = scale_rule(formula, tile, columns, x_MK.dtype)
    if tile is None:
        rows, columns = 1, x_MK.numel()
    r, c = tile_size(tile, rows, columns)
    _loaded().labkit_fake_quantize(
        x_MK.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        r,
        c,
        x_MK.dtype == torch.bfloat16,
        out_dtype == torch.bfloat16,
        FORMAT_INDEX[fmt],
        FORMULA_INDEX[rule.formula],
        rule.divide,
        scale == "pow2",
        rule.overflow,
    )
    return out


def to_grid(x: Tensor, scale: float, fmt: str) -> Tensor:
    """As ``emulation.torch_to_grid``, for a bfloat16 or float32 tensor on the CPU."""
    x = x.contiguous()
    out = torch.empty_like(x)
    bf16 = x.dtype == torch.bfloat16
    _loaded().labkit_to_grid(x.data_ptr(), out.data_ptr(), x.numel(), scale, bf16, FORMAT_INDEX[fmt])
    return out


def _loaded() -> ctypes.CDLL:
    library, reason = _library()
    assert library is not None, reason
    return library


@lru_cache(maxsize=1)
def _library() -> tuple[ctypes.CDLL | None, str]:
    command = shlex.split(os.environ.get("CC", "cc"))
    compiler = shutil.which(command[0])
    if compiler is None:
        return None, f"no C compiler: {command[0]} is not on the PATH (install one, or set CC)"
    try:
        path = _build([compiler, *command[1:], *FLAGS])
        library = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} could not compile the kernel: {error.stderr.strip()[-300:]}"
    except OSError as error:
        return None, f"the compiled kernel could not be stored or loaded: {error}"
    library.labkit_fake_quantize.argtypes = [POINTER, POINTER, *[SIZE] * 4, *[INT] * 6, FLOAT]
    library.labkit_to_grid.argtypes = [POINTER, POINTER, SIZE, FLOAT, INT, INT]
    library.labkit_fake_quantize.restype = library.labkit_to_grid.restype = None
    return library, f"compiled by {compiler}"


def _build(command: list[str]) -> Path:
    """The shared library for this source, command and CPU, compiled unless it is in the cache."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
    key = "\0".join([SOURCE.read_text(), *command, version, _cpu()])
    cache = Path(os.environ.get("LABKIT_CACHE") or Path.home() / ".cache" / "labkit") / "native"
    path = cache / f"fake_quantize-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / path.name
            subprocess.run([*command, "-o", str(built), str(SOURCE)], capture_output=True, text=True, check=True)
            built.replace(path)
    return path


def _cpu() -> str:
    """What -march=native depends on: a home directory may be shared by machines with different CPUs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    features = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), *(features[:2] or lines[:1])])
