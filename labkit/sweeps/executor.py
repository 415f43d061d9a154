"""Executor: where cells run, and how many at once.

`LocalProcesses` gives each cell a worker process on this machine. As many run at once as

    cores / threads of a cell,    free memory / memory of a cell,    what was asked for

allow, whichever is least, and `Capacity.why` says which it was. Another executor (a cluster) has the same two methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from labkit.config import Experiment
from labkit.hardware import host
from labkit.runs.process import Run
from labkit.sweeps.plan import Cell


@dataclass(frozen=True)
class Capacity:
    """How many cells at once, and the reason in words."""

    slots: int
    why: str


class Executor(Protocol):
    def capacity(self, experiments: Sequence[Experiment]) -> Capacity: ...

    def start(self, cell: Cell, folder: Path) -> Run:
        """Start a cell in the folder. Returns at once."""
        ...


class LocalProcesses:
    """Worker processes on this machine, at most `parallel` at a time (None: as many as fit)."""

    def __init__(self, parallel: int | None = None) -> None:
        if parallel is not None and parallel < 1:
            raise ValueError(f"parallel must be at least 1, not {parallel}")
        self._parallel = parallel

    def capacity(self, experiments: Sequence[Experiment]) -> Capacity:
        threads = max((experiment.threads or 1 for experiment in experiments), default=1)
        memory = max(map(host.run_memory, experiments), default=host.RUN_MEMORY)
        cores, (free, _) = host.cores(), host.memory()
        bounds = {
            f"{_many(cores, 'core')}, {_many(threads, 'thread')} a cell": max(1, cores // threads),
            f"{free:.1f} GiB free, up to {memory:.1f} GiB a cell": max(1, int(free / memory)),
        }
        if self._parallel is not None:
            bounds[f"{self._parallel} asked for"] = self._parallel
        slots = min(bounds.values())
        deciding = next(words for words, bound in bounds.items() if bound == slots)
        others = [words for words in bounds if words != deciding]
        return Capacity(slots, f"{slots} at once: {deciding}" + (f" ({'; '.join(others)})" if others else ""))

    def start(self, cell: Cell, folder: Path) -> Run:
        return Run.start(cell.experiment, folder, cell.id)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
