"""Driving a sweep: start what is missing, resume what was interrupted, watch, and yield each cell as it ends.

    standing      what it means                                                 what driving does
    missing       not begun                                                     starts it
    running       its worker lives, whoever started it                          watches it, it fills a slot
    unfinished    stopped, killed, or its worker vanished without a word        resumes it from its last checkpoint
    done                                                                        nothing
    failed        its worker said why                                           reports it; again only with `retry`

All that is known is in the run directories, so there is nothing to lose: after Ctrl-C, kill -9 or a power cut the same
call goes on. Workers are processes of their own; those of a driver that was killed go on and are watched by the next.
A cell that ends badly while it is watched isn't started again by the same driver.

One process drives a folder at a time (a lock that the system drops when it ends, however it ends). An interrupt stops
the cells with a checkpoint and waits for them; a second one kills them.

    python -m labkit.sweeps.drive FOLDER [--parallel N] [--ray-address A] [--retry]      what `Sweep.start` runs
"""

import argparse
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labkit.runs import lock
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.store import RunError
from labkit.sweeps.executor import Executor, executor_for
from labkit.sweeps.plan import Cell

Standing = Literal["missing", "running", "unfinished", "done", "failed"]
OnRecord = Callable[[Cell, StepRecord], None]
_POLL = 0.2


@dataclass(frozen=True)
class Finished:
    """A cell that needs no more work, or can't be worked on. `before`: it had ended before this driver came."""

    cell: Cell
    run: Run
    standing: Standing
    reason: str
    before: bool

    def __str__(self) -> str:
        return f"{self.cell.id} {self.standing}" + (f" ({self.reason})" if self.reason else "")


def run_of(cell: Cell, folder: Path) -> Run | None:
    """The run of a cell, if it was begun. Raises RunError if its folder holds another experiment."""
    path = folder / cell.id
    if not (path / "experiment.yaml").is_file():
        return None
    run = Run.open(path)
    if changed := run.experiment.diff(cell.experiment):
        said = "; ".join(f"{key} is {old} there and {new} here" for key, (old, new) in changed.items())
        raise RunError(f"{path} holds another experiment ({said}): give this sweep another name, or remove the folder")
    return run


def standing_of(run: Run | None) -> Standing:
    if run is None:
        return "missing"
    written, status = run.directory.read_state(), run.status
    if status.active:
        return "running"
    if status.name == "done":
        return "done"
    if written.active or written.reason == "killed" or status.name in ("stopped", "idle"):
        return "unfinished"
    return "failed"


def drive(
    cells: Sequence[Cell], folder: Path, where: Executor, retry: bool = False, on_record: OnRecord | None = None
) -> Iterator[Finished]:
    """See the head. Raises RunError if another process drives this folder."""
    with _locked(folder):
        runs = {cell.id: run_of(cell, folder) for cell in cells}
        waiting: list[Cell] = []
        watched: dict[str, tuple[Cell, Run]] = {}
        for cell in cells:
            run, standing = runs[cell.id], standing_of(runs[cell.id])
            if run and standing == "running":
                watched[cell.id] = (cell, run)
            elif run and (standing == "done" or (standing == "failed" and not retry)):
                yield Finished(cell, run, standing, run.status.reason, before=True)
            else:
                waiting.append(cell)
        slots = where.capacity([cell.experiment for cell in cells]).slots
        try:
            while waiting or watched:
                while waiting and len(watched) < slots:
                    cell = waiting.pop(0)
                    with _uninterrupted():  # no worker may be left that nobody watches
                        watched[cell.id] = (cell, _begin(cell, runs[cell.id], folder, where))
                for cell, run in list(watched.values()):
                    status = run.status  # first: a run that has ended writes no record after it
                    for record in run.tail():
                        if on_record:
                            on_record(cell, record)
                    if not status.active:
                        del watched[cell.id]
                        standing = standing_of(run)
                        reason = status.reason or ("" if standing == "done" else status.name)
                        yield Finished(cell, run, standing, reason, before=False)
                if watched:
                    time.sleep(_POLL)
        except BaseException:
            _end([run for _, run in watched.values()])
            raise


def _begin(cell: Cell, run: Run | None, folder: Path, where: Executor) -> Run:
    return where.start(cell, folder) if run is None else where.resume(run)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised afterwards."""
    if threading.current_thread() is not threading.main_thread():  # others get none
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _end(runs: Sequence[Run]) -> None:
    """Stop cells with a checkpoint and wait until they have; interrupted once more, kill them."""
    try:
        for run in runs:
            with contextlib.suppress(RunError):  # it has just ended
                run.stop()
        for run in runs:
            run.wait()
    except BaseException:
        for run in runs:
            with contextlib.suppress(RunError, OSError):
                run.kill()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        held = lock.take(folder)
    except BlockingIOError:
        raise RunError(
            f"{folder} is driven by another process ({lock.holder(folder)}): watch it, or end it with Ctrl-C there"
        ) from None
    lock.sign(held, os.getpid())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.ftruncate(held, 0)  # nobody drives it now
        os.close(held)


def main() -> None:
    from labkit.sweeps.sweep import Sweep

    parser = argparse.ArgumentParser(prog="labkit.sweeps.drive")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parallel", type=int)
    parser.add_argument("--ray-address")
    parser.add_argument("--retry", action="store_true")
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # a background process may have inherited that SIGINT is ignored
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), executor_for(given.parallel, given.ray_address) as where:
        for finished in Sweep.open(given.folder).run(where, retry=given.retry):
            print(finished, flush=True)


if __name__ == "__main__":
    main()
