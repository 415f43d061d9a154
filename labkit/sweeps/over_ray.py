"""Cells over Ray: as many at once as the cluster has room for, each where Ray finds it.

    with over_ray("local") as executor:               a Ray of the sweep's own on this machine, which ends with it
    with over_ray("HOST:6379") as executor:           a cluster that is there; the runs' folder must be shared
        for finished in sweep.run(executor): ...

A cell's Experiment says nothing of it: it is the cell of `LocalProcesses`, with the same bits, so a sweep may begin
here and end there. What is reserved for a cell is its threads, its memory and, on CUDA, a GPU. A node that is lost
leaves its cells unfinished; the same sweep resumes them from their checkpoints. Raises RunError, with the way out,
where no Ray can be reached or started, and ValueError for cells that themselves run over Ray.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from labkit import environment
from labkit.cluster import surroundings
from labkit.cluster.actors import Actor, Call, Lost, cluster, nodes
from labkit.cluster.cell import CellActor
from labkit.cluster.plan import Reservation
from labkit.config import Experiment
from labkit.hardware import host
from labkit.runs.process import Run
from labkit.runs.state import RunState, StateName
from labkit.runs.store import RunDirectory, RunError
from labkit.sweeps.executor import Capacity, at_once
from labkit.sweeps.plan import Cell

LOCAL = "local"
_STORE = 128 << 20  # bytes: no weights go through it


@contextmanager
def over_ray(address: str, parallel: int | None = None) -> "Iterator[OverRay]":
    whole_machine = [Reservation(host.cores(), 0)] if address == LOCAL else []
    with cluster("" if address == LOCAL else address, whole_machine, _STORE):
        yield OverRay(parallel)


class OverRay:
    """Get one from `over_ray`. At most `parallel` cells at a time (None: as many as fit)."""

    def __init__(self, parallel: int | None) -> None:
        self._parallel = parallel

    def capacity(self, experiments: Sequence[Experiment]) -> Capacity:
        """Raises RunError if no node has room for a cell."""
        largest = _largest([reservation(experiment) for experiment in experiments])
        there = nodes()
        fits = sum(_fits(largest, resources) for resources in there)
        gpu = f", {largest.gpus} GPU" if largest.gpus else ""
        needs = f"{largest.cpus} CPU, {largest.memory / 2**30:.1f} GiB{gpu} a cell"
        if not fits:
            raise RunError(f"no node of the Ray cluster has room for a cell ({needs}): add a node or lower threads")
        return at_once({f"Ray nodes: {len(there)}, {needs}": fits}, self._parallel)

    def start(self, cell: Cell, folder: Path) -> Run:
        return self._placed(RunDirectory.create(Run.check(cell.experiment), folder, cell.id))

    def resume(self, run: Run) -> Run:
        return self._placed(run.directory)

    def _placed(self, directory: RunDirectory) -> Run:
        experiment = directory.experiment
        for_worker = environment.for_worker(experiment.same_kernels, experiment.threads)
        actor = Actor(
            CellActor, reservation(experiment), surroundings.for_actor(experiment, for_worker),
            directory.path, surroundings.threads_asked(for_worker),
        )  # fmt: skip
        return PlacedRun(directory, actor)


class PlacedRun(Run):
    """A Run whose worker has yet to find its place; until then nothing of it is in the directory."""

    def __init__(self, directory: RunDirectory, actor: Actor) -> None:
        super().__init__(directory)
        self._actor = actor
        self._placing: Call | None = actor.call("begin")
        self._not_begun: RunState | None = None
        self._released = False

    @property
    def status(self) -> RunState:
        if self._placing and self._placing.done(0):
            self._begun(self._placing)
        if self._placing:
            return RunState("starting")
        status = self._not_begun or super().status
        if not status.active:
            self._release()
        return status

    def stop(self) -> None:
        if self._placing:
            self._give_up("stopped", "before it found a place")
        else:
            super().stop()

    def kill(self) -> None:
        if self._placing:
            self._give_up("stopped", "before it found a place")
        self._release()  # ends the worker as well

    def _begun(self, placing: Call) -> None:
        try:
            placing.result()
        except Lost as lost:
            self._give_up("stopped", str(lost))
        except Exception as error:
            self._give_up("failed", str(error))
        self._placing = None

    def _give_up(self, name: StateName, why: str) -> None:
        self._placing, self._not_begun = None, RunState(name, why)
        self._release()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._actor.end()


def reservation(experiment: Experiment) -> Reservation:
    if experiment.cluster.placement != "process":
        raise ValueError(
            f"cluster.placement: {experiment.name} would start a Ray inside Ray; set it to process, or drive the sweep "
            "without Ray"
        )
    memory = int(host.run_memory(experiment) * 2**30)
    return Reservation(experiment.threads or 1, 1 if experiment.device == "cuda" else 0, memory)


def _largest(reserved: Sequence[Reservation]) -> Reservation:
    return Reservation(
        *(max((getattr(each, name) for each in reserved), default=0) for name in ("cpus", "gpus", "memory"))
    )


def _fits(cell: Reservation, node: dict[str, float]) -> int:
    bounds = ((cell.cpus, node.get("CPU", 0)), (cell.gpus, node.get("GPU", 0)), (cell.memory, node.get("memory", 0)))
    return min((int(there // needed) for needed, there in bounds if needed), default=0)
