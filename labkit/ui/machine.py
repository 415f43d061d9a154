"""What this machine offers a run, and which workers are running on it. No widgets, and no torch: a few files are read
and nvidia-smi is asked, so that looking costs a fraction of a second and no memory.
"""

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from labkit import __version__
from labkit.hardware.host import RUN_MEMORY
from labkit.hardware.packages import installed, torch_cuda
from labkit.runs.process import Run
from labkit.runs.store import runs_root

State = Literal["ok", "note", "problem"]

PANEL = ("jupyterlab", "ipykernel", "ipywidgets", "plotly", "anywidget")
RUN_DISK = 0.2  # GiB that it may write, checkpoints included
# compute capability from which tensor cores multiply: FP8 at all; blocks scaled in software; MX blocks in hardware
FP8, BLOCKS, MX = (8, 9), (9, 0), (10, 0)
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    name: str
    state: State
    found: str
    advice: str = ""


def checks(root: str | Path | None = None) -> list[Check]:
    """Everything to know before a run is started, the kernel's own state first."""
    return [_kernel(), _packages(), _cores(), _memory(), _disk(runs_root(root)), _compiler(), *_gpus()]


def _kernel() -> Check:
    started = psutil.Process().create_time()
    found = f"labkit {__version__}, Python {platform.python_version()}, started {_clock(started)}"
    newest = max(path.stat().st_mtime for path in Path(__file__).parents[1].rglob("*.py"))
    if newest > started + 1:  # the kernel's own clock is no finer
        return Check("this kernel", "note", found, "labkit's files are newer than this kernel: restart it to load them")
    return Check("this kernel", "ok", found)


def _packages() -> Check:
    versions = {name: installed(name) for name in ("torch", *PANEL)}
    found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    if absent := [name for name, number in versions.items() if number is None]:
        return Check("packages", "problem", found, f"missing: {', '.join(absent)}; pip install -e '.[lab]'")
    return Check("packages", "ok", found)


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"{count}, load {load:.1f}"
    if load > 1.5 * count:
        return Check("CPU cores", "note", found, "they are busy with something else: runs take longer")
    return Check("CPU cores", "ok", found)


def _memory() -> Check:
    """What is free here, within the limit that a container sets, and how many runs that holds."""
    total, free = psutil.virtual_memory().total, psutil.virtual_memory().available
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None and limit < total:
        total, free = limit, min(free, limit - used)
    runs = int(free / _GIB / RUN_MEMORY)
    need = f"a run of the tiny policy takes up to {RUN_MEMORY:g} GiB"
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free; {need}"
    if runs == 0:
        return Check("memory", "problem", found, "end other programs or kernels before you start a run")
    return Check("memory", "ok" if runs > 1 else "note", found, "" if runs > 1 else "one run at a time")


def _disk(root: Path) -> Check:
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


def _compiler() -> Check:
    command = os.environ.get("CC", "cc").split()[0]
    if path := shutil.which(command):
        return Check("FP8 on the CPU", "ok", f"emulated to the bit, by a C kernel ({path} compiles it once)")
    return Check(
        "FP8 on the CPU", "note", "emulated to the bit, by torch", f"about ten times dearer than with {command}"
    )


def _gpus() -> list[Check]:
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


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        return int(Path(path).read_text())
    return None


def _clock(seconds: float) -> str:
    return time.strftime("%d %b %H:%M:%S", time.localtime(seconds))


@dataclass(frozen=True)
class Worker:
    """A process of this user that carries out a run, in whatever folder that is."""

    pid: int
    started: float
    path: Path = field(compare=False)
    owner: Literal["this kernel", "another process", "gone"] = field(compare=False)
    memory: int = field(compare=False)  # bytes

    @property
    def label(self) -> str:
        owner = {"gone": "whoever started it has ended", "this kernel": "started by this kernel"}.get(
            self.owner, "started by another process that is still there"
        )
        return f"process {self.pid}, since {_clock(self.started)}, {self.memory / _GIB:.1f} GiB: {owner}"

    @property
    def alive(self) -> bool:
        """Whether it is still the same process, and not only waiting to be buried by its parent."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE
        return False

    def end(self, kill: bool = False) -> None:
        """Ask it to stop with a checkpoint, as the panel's Stop does; or kill it, its children included."""
        if not self.alive:
            return
        with contextlib.suppress(ValueError, OSError):
            run = Run.open(self.path)
            return run.kill() if kill else run.stop()
        os.killpg(self.pid, signal.SIGKILL if kill else signal.SIGTERM)  # its folder is gone or damaged


def workers() -> list[Worker]:
    """All workers of this user on this machine, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "labkit.runs.worker" not in words or process.uids().real != os.getuid():
                continue
            path = Path(words[words.index("labkit.runs.worker") + 1])
            path = path if path.is_absolute() else Path(process.cwd()) / path
            found.append(Worker(process.pid, process.create_time(), path, _owner(process), process.memory_info().rss))
    return sorted(found, key=lambda worker: worker.started)


def _owner(process: psutil.Process) -> Literal["this kernel", "another process", "gone"]:
    """A worker whose starter has ended is handed to init or to the session's manager, which are no Python."""
    parent = process.parent()
    if parent is not None and parent.pid == os.getpid():
        return "this kernel"
    known = parent is not None and parent.pid != 1 and any(word in parent.name() for word in ("python", "labkit"))
    return "another process" if known else "gone"
