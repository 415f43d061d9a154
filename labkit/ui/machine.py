"""What this machine and this kernel offer a run, and which workers are running on it. No widgets, and no torch."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from labkit.hardware.check import Check
from labkit.hardware.checkup import checkup
from labkit.runs.process import Run
from labkit.runs.store import runs_root

_GIB = 2**30


def checks(root: str | Path | None = None) -> list[Check]:
    """Everything to know before a run is started, the kernel's own state first."""
    return [_kernel(), *checkup(runs_root(root))]


def _kernel() -> Check:
    started = psutil.Process().create_time()
    found = f"started {_clock(started)}"
    newest = max(path.stat().st_mtime for path in Path(__file__).parents[1].rglob("*.py"))
    if newest > started + 1:  # the kernel's own clock is no finer
        return Check("this kernel", "note", found, "labkit's files are newer than this kernel: restart it to load them")
    return Check("this kernel", "ok", found)


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
