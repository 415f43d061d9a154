"""The trainer actor's side: a Worker that carries the run out in its directory, in the supervisor's name.

States carry the process id and host of the supervising worker process, which is what clients watch and kill. A lock of
its own keeps two trainers apart: one whose node lost touch, or whose worker was killed, may live some seconds longer.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cluster import surroundings
from labkit.cluster.losses import Losses
from labkit.cluster.plan import ROLLOUT, actors
from labkit.config import Experiment
from labkit.runs import lock
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory, RunError
from labkit.runs.worker import Outcome, Worker, failed

if TYPE_CHECKING:
    from labkit.cluster.actors import Actor
    from labkit.models import Policy
    from labkit.rollout import Engine

_LOCK = "trainer.lock"
_LAST_TRAINER = 60.0  # seconds that the trainer before may take to end


class TrainerActor:
    """No torch before `enter`: threads are settled there."""

    def __init__(self, path: Path, threads_asked: bool) -> None:
        self._directory = RunDirectory(path)
        if not (path / "experiment.yaml").is_file():
            raise RunError(
                f"{path} is not there on {socket.gethostname()}, where the trainer is: keep runs in a folder that all "
                "nodes share (LABKIT_RUNS)"
            )
        surroundings.enter(path / "worker.log", threads_asked)

    def where(self) -> tuple[int, str]:
        return os.getpid(), socket.gethostname()

    def carry_out(self, signed: RunState, since: float, recovering: bool) -> Outcome:
        """`signed`: a state in the supervisor's name. Every outcome is returned, none is raised."""
        try:
            with _alone(self._directory.path):
                return self._carry_out(signed, since, recovering)
        except Exception as error:
            return failed(error)

    def _carry_out(self, signed: RunState, since: float, recovering: bool) -> Outcome:
        experiment = self._directory.experiment
        state = partial(RunState, pid=signed.pid, host=signed.host)
        if experiment.cluster.placement == "colocated":
            return Worker(self._directory, state, recovering=recovering).train(experiment)
        rollouts = Rollouts(self._directory, experiment, since)
        try:
            return Worker(self._directory, state, rollouts.engine, recovering).train(experiment)
        finally:
            rollouts.end()


class Rollouts:
    """The one rollout actor, of this process: it ends with it, however that ends."""

    def __init__(self, directory: RunDirectory, experiment: Experiment, since: float) -> None:
        self._directory, self._experiment = directory, experiment
        self._losses = Losses(directory, experiment.cluster.restarts, since)
        self._actor: Actor | None = None
        self._place: tuple[int, str] | None = None

    def engine(self, policy: "Policy", experiment: Experiment, on_microstep: Callable[[], None]) -> "Engine":
        from labkit.cluster.engine import RemoteEngine

        return RemoteEngine(self, experiment, on_microstep)

    def actor(self) -> "Actor":
        from labkit.cluster.actors import Actor
        from labkit.cluster.rollout import RolloutActor

        if self._actor is None:
            environment = surroundings.for_actor(self._experiment)
            log, asked = self._directory.path / "worker.log", surroundings.threads_asked()
            self._actor = Actor(RolloutActor, actors(self._experiment)[ROLLOUT], environment, log, asked)
        return self._actor

    def replace(self, why: str) -> None:
        self.end()
        self._losses.count(ROLLOUT, why)

    def built(self, pid: int, host: str) -> None:
        if self._place != (pid, host):
            self._place = pid, host
            self._directory.append_event("placed", actor=ROLLOUT, pid=pid, host=host)

    def end(self) -> None:
        if self._actor is not None:
            self._actor.end()
            self._actor = None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LAST_TRAINER
    while True:
        try:
            held = lock.take(path, _LOCK)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunError(f"another trainer still writes in {path}: end it, then resume the run") from None
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(held)
