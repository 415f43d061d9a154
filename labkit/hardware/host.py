"""Host: what this machine has for runs, within the limits that a container sets. Reads a few files; imports no torch.

    memory of a run = RUN_MEMORY + TRAINED_MEMORY · bytes of the model's BF16 file

FP32 master, gradient and two Adam moments are 16 bytes a parameter, BF16 copies of trainer, engine and evaluation 6:
22 bytes where the file has 2.
"""

import contextlib
import math
import os
from pathlib import Path

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


def free_memory() -> float | None:
    """GiB that programs may still take; None where the system doesn't say."""
    found = None
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) / 2**20
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        left = (limit - used) / _GIB
        found = left if found is None else min(found, left)
    return found


def run_memory(experiment: Experiment) -> float:
    """GiB that a run of this Experiment may take at its peak."""
    files = []
    with contextlib.suppress(ConfigError):  # a model that isn't here: its run is refused with a better word
        files = list(model_folder(experiment.model).glob("*.safetensors"))
    return RUN_MEMORY + TRAINED_MEMORY * sum(file.stat().st_size for file in files) / _GIB
