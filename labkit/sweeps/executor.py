"""Executor: where cells run, and how many at once.

`LocalProcesses` gives each cell a worker process on this machine. As many run at once as

    cores / threads of a cell,    free memory / memory of a cell,    what was asked for

allow, whichever is least, and `Capacity.why` says which it was. `labkit.sweeps.over_ray` gives them to a Ray cluster.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from labkit.config import Experiment
from labkit.hardware import host, packages
from labkit.runs.process import Run
from labkit.runs.store import RunError
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

    def resume(self, run: Run) -> Run:
        """Go on with a cell from its last checkpoint. Returns at once, with the Run to be watched."""
        ...


@contextmanager
def executor_for(parallel: int | None = None, ray_address: str | None = None) -> Iterator[Executor]:
    """Processes on this machine, or a Ray cluster: "local" for one of its own, HOST:PORT for one that is there."""
    check_ray(ray_address)
    if ray_address is None:
        yield LocalProcesses(parallel)
        return
    from labkit.sweeps.over_ray import over_ray

    with over_ray(ray_address, parallel) as cells:
        yield cells


def check_ray(ray_address: str | None) -> None:
    """Raises RunError if Ray is asked for and isn't installed."""
    there, why = packages.ray()
    if ray_address is not None and not there:
        raise RunError(f"--ray-address: not available here: {why}")


def at_once(bounds: Mapping[str, int], asked: int | None) -> Capacity:
    """The least of what is there, by its description, and of what was asked for."""
    bounds = {**bounds, **({} if asked is None else {f"{asked} asked for": asked})}
    slots = min(bounds.values())
    deciding = next(words for words, bound in bounds.items() if bound == slots)
    others = [words for words in bounds if words != deciding]
    return Capacity(slots, f"{slots} at once: {deciding}" + (f" ({'; '.join(others)})" if others else ""))


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
        return at_once(bounds, self._parallel)

    def start(self, cell: Cell, folder: Path) -> Run:
        return Run.start(cell.experiment, folder, cell.id)

    def resume(self, run: Run) -> Run:
        run.resume_from_checkpoint()
        return run


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
