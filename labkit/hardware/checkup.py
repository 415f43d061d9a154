"""All the checks of this machine, one list for `labkit doctor` and the panel's preflight.

No torch: a few files are read and nvidia-smi is asked, so that looking costs a fraction of a second and no memory.
"""

from pathlib import Path

from labkit.hardware import machine, software
from labkit.hardware.check import Check


def checkup(root: Path) -> list[Check]:
    """`root`: where runs are written."""
    return [
        software.python(),
        machine.cores(),
        machine.memory(),
        machine.disk(root),
        machine.compiler(),
        *machine.gpus(),
        software.vllm(),
        software.transformer_engine(),
        software.ray(),
        software.tasks(),
        software.models(),
        software.datasets(),
    ]
