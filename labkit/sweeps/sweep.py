"""Sweep: a plan and its folder.

    <root>/<name>/sweep.yaml          the plan, as `labkit sweep` takes it
                  <arm>-s<seed>/      an ordinary Run for each cell: `labkit show <root>/<name>/<arm>-s0`
                  machine.json        on what, and with which versions, its cells were computed
                  lock                held by the process that drives it
                  sweep.log           what a driver in the background said

    sweep = sweep_of(experiment, axes, seeds=3)        made, or found again: the same call goes on with the same sweep
    for finished in sweep.run(): ...                   drives it here, cell by cell
    sweep.start()                                      drives it in the background, for notebooks; returns at once
    sweep.results()                                    what is there so far

More seeds or arms may be given to a sweep that is there: cells that are done stay done.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.config import ConfigError, Experiment, yaml_io
from labkit.runs import lock
from labkit.runs.process import Run
from labkit.runs.store import RunError, runs_root
from labkit.sweeps import provenance
from labkit.sweeps.drive import Finished, OnRecord, Standing, drive, run_of, standing_of
from labkit.sweeps.executor import Executor, LocalProcesses, check_ray
from labkit.sweeps.plan import Cell, Plan, slug

if TYPE_CHECKING:
    from labkit.sweeps.results import Results


class Sweep:
    """Get one from `sweep_of`, `Sweep.create(plan)` or `Sweep.open(folder)`."""

    def __init__(self, plan: Plan, path: Path, cells: Sequence[Cell] | None = None) -> None:
        self.plan, self.path = plan, path
        self.cells = tuple(plan.cells() if cells is None else cells)

    @classmethod
    def create(cls, plan: Plan, root: str | Path | None = None) -> "Sweep":
        """The folder of this plan. Raises ValueError, before anything is written, if a cell can't be run here.

        A folder that is there already is gone on with, unless one of its cells is another experiment.
        """
        path = (runs_root(root) / slug(plan.name)).absolute()
        if (path / "experiment.yaml").exists():
            raise RunError(f"{path} is a run: give the sweep another name")
        sweep = cls(plan, path, [_checked(cell) for cell in plan.cells()])
        for cell in sweep.cells:
            run_of(cell, path)
        path.mkdir(parents=True, exist_ok=True)
        draft = path / ".sweep.yaml"
        draft.write_text(plan.to_yaml(), encoding="utf-8")
        draft.replace(path / "sweep.yaml")
        return sweep

    @classmethod
    def open(cls, sweep: str | Path, root: str | Path | None = None) -> "Sweep":
        """A sweep that was made before, by its path or its name."""
        path = next((p for p in (Path(sweep), runs_root(root) / sweep) if (p / "sweep.yaml").is_file()), None)
        if path is None:
            there = sorted(file.parent.name for file in runs_root(root).glob("*/sweep.yaml"))
            raise RunError(f"no sweep {str(sweep)!r} in {runs_root(root)}: there {_are(there)}")
        plan = Plan(**yaml_io.load(path / "sweep.yaml"))
        cells = []
        for cell in plan.cells():
            with contextlib.suppress(ConfigError):  # what is there can be looked at without the model or a package
                cell = _checked(cell)
            cells.append(cell)
        return cls(plan, path.absolute(), cells)

    def __repr__(self) -> str:
        standings = list(self.standings().values())
        return f"Sweep({self.plan.name!r}, {standings.count('done')} of {len(standings)} cells done)"

    def run_of(self, cell: Cell) -> Run | None:
        return run_of(cell, self.path)

    def standings(self) -> dict[str, Standing]:
        """Where each cell stands, by its id."""
        return {cell.id: standing_of(self.run_of(cell)) for cell in self.cells}

    def results(self) -> "Results":
        """What the cells that are there say."""
        from labkit.sweeps.results import Results

        return Results.of(self)

    def run(
        self, executor: Executor | None = None, retry: bool = False, on_record: OnRecord | None = None
    ) -> Iterator[Finished]:
        """Drive the sweep in this process: yields each cell as it ends. Breaking off stops what runs."""
        executor = executor or LocalProcesses()
        provenance.note(self.path)
        yield from drive(self.cells, self.path, executor, retry, on_record)

    # in the background

    def start(self, parallel: int | None = None, retry: bool = False, ray_address: str | None = None) -> None:
        """Drive the sweep in a process of its own, which outlives this one. Returns at once."""
        if self.driver is not None:
            raise RunError(f"{self.path.name} is driven by process {self.driver} already")
        LocalProcesses(parallel)  # a wrong number is said here
        check_ray(ray_address)
        options = [] if parallel is None else ["--parallel", str(parallel)]
        options += [] if ray_address is None else ["--ray-address", ray_address]
        command = [sys.executable, "-m", "labkit.sweeps.drive", str(self.path), *options, *(["--retry"] * retry)]
        with (self.path / "sweep.log").open("ab") as log:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def stop(self) -> None:
        """Ask the driver to stop its cells with a checkpoint and end. Returns at once; a second call kills them."""
        driver = self.driver
        if driver is None:
            raise RunError(f"{self.path.name} isn't driven by any process on this machine")
        os.kill(driver, signal.SIGINT)

    @property
    def driver(self) -> int | None:
        """The process that drives the sweep, if one does."""
        pid = lock.holder(self.path)
        with contextlib.suppress(OSError):
            if pid is not None:
                os.kill(pid, 0)
                return pid
        return None


def sweep_of(
    experiment: Experiment,
    axes: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 3,
    *,
    arms: Mapping[str, Mapping[str, Any]] | None = None,
    baseline: str = "",
    question: str = "",
    name: str = "",
    root: str | Path | None = None,
) -> Sweep:
    """A sweep of `axes` ({"grpo.lr": [1e-4, 2e-4]}) or `arms` ({"fp8": {"preset": "fp8-e2e"}}), crossed with seeds."""
    given: dict[str, Any] = {"axes": dict(axes or {}), "arms": dict(arms or {}), "seeds": seeds, "name": name}
    return Sweep.create(Plan(experiment=experiment, baseline=baseline, question=question, **given), root)


def open_sweep(sweep: str | Path, root: str | Path | None = None) -> Sweep:
    return Sweep.open(sweep, root)


def _checked(cell: Cell) -> Cell:
    """The cell as its run will keep it."""
    try:
        return Cell(cell.id, cell.arm, cell.seed, Run.check(cell.experiment))
    except ConfigError as error:
        raise ConfigError(f"{cell.arm}: {problem}" for problem in error.problems) from None


def _are(names: Sequence[str]) -> str:
    return f"are {', '.join(names)}" if names else "is none"
