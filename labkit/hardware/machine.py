"""What this machine has: cores, memory, disk, a compiler, and GPUs with what they can do in FP8."""

import os
import shutil
import subprocess
from pathlib import Path

from labkit.hardware import host
from labkit.hardware.check import Check
from labkit.hardware.host import RUN_MEMORY
from labkit.hardware.packages import torch_cuda

RUN_DISK = 0.2  # GiB that a run of the tiny policy may write, checkpoints included
# compute capability from which tensor cores multiply: FP8 at all; blocks scaled in software; MX blocks in hardware
FP8, BLOCKS, MX = (8, 9), (9, 0), (10, 0)
_GIB = 2**30


def cores() -> Check:
    count = host.cores()
    load = os.getloadavg()[0]
    found = f"{count}, load {load:.1f}"
    if load > 1.5 * count:
        return Check("CPU cores", "note", found, "they are busy with something else: runs take longer")
    return Check("CPU cores", "ok", found)


def memory() -> Check:
    """What is free here, within the limit that a container sets, and how many runs that holds."""
    free, total = host.memory()
    runs = int(free / RUN_MEMORY)
    need = f"a run of the tiny policy takes up to {RUN_MEMORY:g} GiB"
    found = f"{free:.1f} of {total:.1f} GiB free; {need}"
    if runs == 0:
        return Check("memory", "problem", found, "end other programs or kernels before you start a run")
    return Check("memory", "ok" if runs > 1 else "note", found, "" if runs > 1 else "one run at a time")


def disk(root: Path) -> Check:
    place = root.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / _GIB
    found = f"{free:.1f} GiB free for runs in {root.absolute()}"
    if not os.access(place, os.W_OK):
        return Check("disk", "problem", found, "it can't be written: set LABKIT_RUNS to another folder")
    if free < RUN_DISK:
        return Check("disk", "problem", found, "delete old runs, or set LABKIT_RUNS to another folder")
    return Check("disk", "ok", found)


def compiler() -> Check:
    command = os.environ.get("CC", "cc").split()[0]
    if path := shutil.which(command):
        return Check("FP8 on the CPU", "ok", f"emulated to the bit, by a C kernel ({path} compiles it once)")
    return Check(
        "FP8 on the CPU", "note", "emulated to the bit, by torch", f"about ten times dearer than with {command}"
    )


def gpus() -> list[Check]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return [
            Check("GPU", "note", "none found (no nvidia-smi)", "FP8 is emulated: its numbers are real, not its speed")
        ]
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    try:
        lines = subprocess.check_output(
            [command, query, "--format=csv,noheader,nounits"], text=True, timeout=10, stderr=subprocess.STDOUT
        ).splitlines()
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "output", "") or str(error)
        return [Check("GPU", "note", f"nvidia-smi fails: {' '.join(str(said).split())[:120]}", "runs use the CPU")]
    return [gpu(line, torch_cuda()) for line in lines if line.strip()]


def gpu(line: str, torch_cuda: str | None) -> Check:
    """What a line of nvidia-smi (name, MiB, compute capability, driver) means for FP8."""
    name, memory, capability, driver = (cell.strip() for cell in line.split(","))
    found = f"{name}, {float(memory) / 1024:.0f} GiB, compute capability {capability}, driver {driver}"
    major, _, minor = capability.partition(".")
    has = (int(major), int(minor or 0))
    if has < FP8:
        return Check("GPU", "note", f"{found}: no FP8 tensor cores", f"they begin with {_dotted(FP8)} (Ada, Hopper)")
    can = ["per tensor and row", *(["128-blocks"] if has >= BLOCKS else []), *(["MX blocks"] if has >= MX else [])]
    found = f"{found}: FP8 tensor cores, scales {', '.join(can)}"
    if torch_cuda is None:
        return Check("GPU", "note", found, "this torch is built without CUDA and can't use it; see pytorch.org")
    return Check("GPU", "ok", f"{found}; torch has CUDA {torch_cuda}")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
