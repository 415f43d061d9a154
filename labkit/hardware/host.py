"""Host: what this machine has for runs, within the limits that a container sets. Reads a few files; imports no torch.

    memory of a run = RUN_MEMORY + TRAINED_MEMORY · bytes of the model's BF16 file

FP32 master, gradient and two Adam moments are 16 bytes a parameter, BF16 copies of trainer, engine and evaluation 6:
22 bytes where the file has 2.
"""

import contextlib
import math
import os
from pathlib import Path

import psutil

from labkit.config import ConfigError, Experiment
from labkit.config.locations import model_folder

RUN_MEMORY = 1.5  # GiB that a run of the tiny policy holds at its peak; 0.9 to 1.35 were measured, growing with it
TRAINED_MEMORY = 11
_GIB = 2**30


def cores() -> int:
    """CPU cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max 100000" where there is no limit
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, max(1, math.floor(quota / period)))
    return count


def memory() -> tuple[float, float]:
    """GiB that programs may still take, and in all."""
    seen = psutil.virtual_memory()
    free, total = seen.available, seen.total
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit < total:
        free, total = min(free, limit - used), limit
    return free / _GIB, total / _GIB


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        return int(Path(path).read_text())
    return None


def run_memory(experiment: Experiment) -> float:
    """GiB that a run of this Experiment may take at its peak."""
    files = []
    with contextlib.suppress(ConfigError):  # a model that isn't here: its run is refused with a better word
        files = list(model_folder(experiment.model).glob("*.safetensors"))
    return RUN_MEMORY + TRAINED_MEMORY * sum(file.stat().st_size for file in files) / _GIB
