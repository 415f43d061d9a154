"""Run: a client's view of one run, and its remote control.

The work is done by `python -m labkit.runs.worker DIRECTORY`, a process in a session of its own: it goes
on when the notebook kernel restarts, the terminal closes or this client exits. Client and worker meet
only in the run directory, so the Run that started the worker, one opened an hour later and one on another
node can do the same: read steps, append commands. Nothing here blocks except `wait`.

A worker that is killed cannot say so. A run that calls itself active while its process is gone, or whose
heartbeat is older than 10 s, is therefore reported as failed, with the last line of its log.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import environment
from labkit.config import ConfigError, Experiment, Recipe, own
from labkit.config.experiment import MODEL_TASKS
from labkit.config.locations import model_folder
from labkit.hardware.packages import unavailable
from labkit.runs import lock
from labkit.runs.alarms import Alarm, alarms_in_force
from labkit.runs.fork import fork, origin
from labkit.runs.record import StepRecord
from labkit.runs.state import RunState, StateName
from labkit.runs.store import RunDirectory, RunError, Switch, Tail, list_directories
from labkit.tasks import load_task

HEARTBEAT_LIMIT = 10.0
_POLL = 0.1
_EXIT = 10.0  # seconds that a worker may take to exit once its state is final


@dataclass(frozen=True)
class _Worker:
    """A worker started by this process, and the state that stood in the directory when it was."""

    process: subprocess.Popen[bytes]
    launched: RunState


_workers: dict[Path, _Worker] = {}


class Run:
    """One Experiment being carried out. Get one from `Run.start(experiment)` or `Run.open(path_or_id)`."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.experiment = directory.experiment
        self._tail = Tail(directory.path / "metrics.jsonl")

    @classmethod
    def start(cls, experiment: Experiment, root: str | Path | None = None, run_id: str | None = None) -> "Run":
        """Create the run directory and start its worker. Returns at once.

        Raises ValueError, before anything is created, for what `check` finds, or if `run_id` is taken; without one
        the name and the time make it.
        """
        run = cls(RunDirectory.create(cls.check(experiment), root, run_id))
        with run._lock() as held:
            run._launch(held)
        return run

    @staticmethod
    def check(experiment: Experiment) -> Experiment:
        """The experiment as its run keeps it: with absolute paths, so that it can be resumed from any folder.

        Raises ValueError if the model, the task, a package or a file of the user's isn't there. That file is looked
        into, but not executed: sweeps are checked when they are only opened.
        """
        if missing := unavailable(experiment):
            raise ConfigError(missing)
        model_folder(experiment.model)
        if not own.KINDS["task"].owns(experiment.task):
            load_task(experiment.task, experiment.task_options)
        for kind, reference in own.used(experiment):
            own.check(kind, reference)
        return _with_absolute_paths(experiment)

    @classmethod
    def open(cls, run: str | Path, root: str | Path | None = None) -> "Run":
        """Attach to a run, alive or finished, by its path, its id or the beginning of its id."""
        return cls(RunDirectory.find(run, root))

    @classmethod
    def all(cls, root: str | Path | None = None) -> "list[Run]":
        """The runs under the root, the newest first, without those whose experiment can't be read.

        `labkit list` names these and says what is wrong with them.
        """
        runs = []
        for directory in list_directories(root):
            with contextlib.suppress(ValueError, OSError):
                runs.append(cls(directory))
        return runs

    def __repr__(self) -> str:
        return f"Run({self.id!r}, {self.status})"

    @property
    def id(self) -> str:
        return self.directory.id

    @property
    def path(self) -> Path:
        return self.directory.path

    # what is known about it

    @property
    def status(self) -> RunState:
        """State and reason, with the worker's death taken into account."""
        state = self.directory.read_state()
        if not state.active or not (silence := self._silence(state)):
            return state
        state = self.directory.read_state()  # the worker may have ended properly between the two looks
        if not state.active:
            return state
        last = self.directory.log(lines=1)
        return RunState("failed", f"{silence}: {last or 'its log is empty'}", state.pid, state.host, state.updated)

    @property
    def state(self) -> StateName:
        return self.status.name

    @property
    def alive(self) -> bool:
        """Whether a worker is carrying the run out now."""
        return self.status.active

    def records(self, since: int = 0) -> list[StepRecord]:
        """The completed steps from step `since` on."""
        return self.directory.records(since)

    def tail(self) -> list[StepRecord]:
        """The completed steps since the last call. See `Tail.read` about resumed runs."""
        return self._tail.read()

    def alarms(self) -> list[Alarm]:
        """What in the steps under the Recipe in force says that something is broken, why, and what to do about it."""
        return alarms_in_force(self.records(), self.experiment, self.switches())

    def events(self) -> list[dict[str, Any]]:
        """What the worker did besides steps: started, paused, checkpoint, switched, refused, ..."""
        return self.directory.events()

    def switches(self) -> list[Switch]:
        return self.directory.switches()

    @property
    def recipe(self) -> Recipe:
        """The Recipe in force: the Experiment's, or what the run was last switched to."""
        switches = self.switches()
        return switches[-1].recipe if switches else self.experiment.recipe

    def checkpoints(self) -> list[int]:
        """The steps that the run can be forked from."""
        return self.directory.checkpoints()

    @property
    def parent(self) -> tuple[str, int] | None:
        """(id, step) of the run that this one was forked from."""
        found = origin(self.directory)
        return (found.run, found.step) if found else None

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """The rollouts that were kept of a step; None: of the latest step that kept any."""
        return self.directory.samples(step)

    def log(self, lines: int | None = None) -> str:
        return self.directory.log(lines)

    # remote control

    def pause(self) -> None:
        self._command("pause")

    def resume(self) -> None:
        """Go on after a pause. A run whose worker has ended is continued by `resume_from_checkpoint`."""
        self._command("resume")

    def stop(self) -> None:
        """End at the next micro-step with a checkpoint of the last completed step. A second stop kills."""
        if self.alive and any(command["command"] == "stop" for command in self.directory.commands()[0]):
            self.kill()
        else:
            self._command("stop")

    def switch(self, recipe: Recipe) -> None:
        """Go on under another Recipe from the next step on, everything else as it is.

        Returns at once; the worker's answer is an event: switched, or refused with the reason.
        """
        self._command("switch", recipe=own.checked_recipe(recipe).model_dump(mode="json"))

    def checkpoint(self) -> None:
        """Write a checkpoint when the step at hand is complete."""
        self._command("checkpoint")

    def fork(
        self,
        recipe: Recipe,
        step: int | None = None,
        *,
        steps: int | None = None,
        name: str | None = None,
        root: str | Path | None = None,
    ) -> "Run":
        """A new run that goes on from a checkpoint (the latest, or that of `step`) under another Recipe.

        Data order and random numbers are this run's, and so are the records up to there. Returns at once.
        """
        recipe = own.checked_recipe(recipe)
        forked = Run(fork(self.directory, recipe, step, steps, name, Path(root) if root else self.path.parent))
        with forked._lock() as held:
            forked._launch(held)
        return forked

    def kill(self) -> None:
        """End the worker and everything it started at once. Only the last checkpoint remains."""
        state = self.directory.read_state()
        if not state.active:
            return
        if state.host != socket.gethostname():
            raise RunError(f"{self.id} runs on {state.host}: kill it there (stop works from here)")
        worker = self._own_worker(state)
        pid = worker.pid if worker else state.pid or lock.holder(self.path)
        if pid is None and self.alive:
            raise RunError(f"{self.id} is only just starting: kill it again in a moment")
        if pid is not None and _is_worker(pid):
            _end_session(pid)
        if worker:
            worker.wait()
        self.directory.write_state(RunState("failed", "killed", pid))

    def wait(self, timeout: float | None = None, on_record: Callable[[StepRecord], None] | None = None) -> RunState:
        """Block until the run ends and return its last state. For scripts; in a notebook watch `tail`.

        `on_record` is called with each step completed since the last `tail`. Raises TimeoutError after
        `timeout` seconds.
        """
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        while True:
            status = self.status
            for record in self.tail():
                if on_record:
                    on_record(record)
            if not status.active:
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} is still {status} after {timeout} s")
            time.sleep(_POLL)

    def resume_from_checkpoint(self, with_parent: bool = False) -> None:
        """Continue a stopped, failed or killed run from its last checkpoint, in the same directory.

        Steps after the checkpoint are cut and done again, bit for bit as they were; a run without a
        checkpoint begins anew. Returns as soon as the new worker is started, like `start`. `with_parent`: the worker
        stops when this process ends.
        """
        with self._lock() as held:
            self._check_resumable()
            self.records()  # a line that can't be read is better said here than in the worker's log
            self.directory.keep(self.directory.owned())
            self._launch(held, with_parent)

    # how

    def _check_resumable(self) -> None:
        status = self.status
        if status.active:
            raise RunError(f"{self.id} is {status}: there is nothing to resume")
        if status.name == "done":
            raise RunError(f"{self.id} is done, all its {self.experiment.steps} steps: there is nothing to resume")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[int]:
        """The lock of the directory, for a worker to be started. The last worker has some time to exit."""
        deadline = time.monotonic() + _EXIT
        while True:
            try:
                held = lock.take(self.path)
                break
            except BlockingIOError:
                self._check_resumable()
                if time.monotonic() > deadline:
                    pid = lock.holder(self.path)
                    raise RunError(f"{self.id} still has a worker, process {pid}: kill it first") from None
                time.sleep(_POLL)
        try:
            yield held
        finally:
            os.close(held)

    def _command(self, command: str, **detail: Any) -> None:
        status = self.status
        if not status.active:
            raise RunError(f"cannot {command} {self.id}: it is {status}")
        self.directory.append_command(command, **detail)

    def _launch(self, held: int, with_parent: bool = False) -> None:
        """Start the worker, which inherits the lock."""
        self.directory.clear_commands()
        self.directory.beat()
        launched = RunState("starting")
        self.directory.write_state(launched)
        options = ["--with-parent", str(os.getpid())] if with_parent else []
        for worker in _workers.values():
            worker.process.poll()  # of one that has ended the system still keeps a trace until it is asked
        with (self.path / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "labkit.runs.worker", str(self.path), "--locked", *options],
                pass_fds=[held],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment.for_worker(self.experiment.same_kernels, self.experiment.threads),
                start_new_session=True,
            )
        lock.sign(held, process.pid)
        _workers[self.path] = _Worker(process, launched)

    def _own_worker(self, state: RunState) -> subprocess.Popen[bytes] | None:
        """The process behind this state if this client started it: its end shows at once."""
        worker = _workers.get(self.path)
        if worker and (state.pid == worker.process.pid or state == worker.launched):
            return worker.process
        return None

    def _silence(self, state: RunState) -> str:
        """Why the worker of an active run is taken for dead; empty while it is not."""
        worker = self._own_worker(state)
        gone = state.host == socket.gethostname() and state.pid is not None and not _is_worker(state.pid)
        if gone or (worker is not None and worker.poll() is not None):
            return "worker ended without a word"
        age = self.directory.heartbeat_age()
        return f"no sign of life from the worker for {age:.0f} s" if age > HEARTBEAT_LIMIT else ""


def _with_absolute_paths(experiment: Experiment) -> Experiment:
    model, task = experiment.model, experiment.task
    if model not in MODEL_TASKS and (folder := Path(model).expanduser()).is_dir():  # else one of the hub
        model = str(folder.absolute())
    source = Path(task.removeprefix("dataset:")).expanduser()
    if task.startswith("dataset:") and source.exists():
        task = f"dataset:{source.absolute()}"
    options = dict(experiment.task_options)
    if own.KINDS["task"].owns(task):
        task = own.absolute(task)
    elif own.KINDS["reward"].owns(options.get("reward")):
        options["reward"] = own.absolute(options["reward"])
    changes = {"model": model, "task": task, "task_options": options, "engine": own.absolute(experiment.engine)}
    return experiment.override({**changes, "recipe": own.checked_recipe(experiment.recipe)})


def _is_worker(pid: int) -> bool:
    """Whether the process exists and is a worker, not a stranger that got its number later."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False
    try:
        return b"labkit.runs.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return not Path("/proc/self").exists()  # no /proc on this system: the process exists, that must do


def _end_session(worker: int) -> None:
    """End the worker, which leads a session of its own, and all that it started: Ray's actors left its group."""
    os.killpg(worker, signal.SIGKILL)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
            session = stat.read_text().rpartition(")")[2].split()[3]
            if int(session) == worker:
                os.kill(int(stat.parent.name), signal.SIGKILL)
