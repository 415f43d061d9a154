"""The worker process (`python -m labkit.runs.worker DIRECTORY`): carries an Experiment out in its directory.

With a cluster placement other than "process" it hands the work to a Ray actor (`labkit.cluster`), which is a Worker
too, and keeps the directory's lock, its heartbeat and the last word in state.json.

It takes its commands from commands.jsonl between micro-steps (one `stat`, so polling costs nothing) and
every 50 ms while paused, and answers in events.jsonl. SIGTERM (what a cluster sends before it takes a
node back) is a stop.

    pause    wait at the next micro-step        resume   go on
    stop     drop the unfinished step (or complete it, once its update began), write a checkpoint, end
    switch   go on under another Recipe from the next step on     checkpoint   write one after this step

Whatever ends the run is written to state.json: done, stopped, or failed with the reason (the traceback is
in worker.log). A full disk is such a reason: what was recorded before it stays readable. A directory
has one worker at a time (lock.py); another one ends before it touches anything.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit import environment
from labkit.config import Experiment, Recipe, own
from labkit.runs import lock
from labkit.runs.commands import Commands, StateOf, StopRequested
from labkit.runs.fork import origin
from labkit.runs.state import RunState, StateName
from labkit.runs.store import RunDirectory, Switch

if TYPE_CHECKING:
    from labkit.rl.loop import Loop
    from labkit.rollout import EngineBuilder

Outcome = tuple[StateName, str]
_HEARTBEAT = 1.0


class Boundary:
    """The loop's state after a completed step.

    Its tensors are the trainer's own, not copies: they hold that state until the trainer's first update of
    the next step. Up to there a stop can drop the unfinished step; after it a stop waits for its end.
    """

    def __init__(self, loop: "Loop", step: int) -> None:
        self.step = step
        self.state = loop.state_dict()
        self._loop = loop

    def intact(self) -> bool:
        return self._loop.state_dict()["trainer"]["updates"] == self.state["trainer"]["updates"]


class Worker:
    """One life of a run: from the start or the last checkpoint to its end or the next stop.

    `state` makes the states that it writes: by default in the name of this process.
    `build_engine` is the Loop's; by default the engine works in this process.
    `recovering`: the worker before this one was lost. Switches that it made since the checkpoint are made again.
    """

    def __init__(
        self,
        directory: RunDirectory,
        state: StateOf | None = None,
        build_engine: "EngineBuilder | None" = None,
        recovering: bool = False,
    ) -> None:
        self.directory = directory
        self.state = state or partial(RunState, pid=os.getpid())
        self.commands = Commands(directory, self.state)
        self._build_engine, self._recovering = build_engine, recovering
        self._to_repeat: list[Switch] = []
        self._boundary: Boundary | None = None
        self._saved = -1  # the last step of which there is a checkpoint

    def carry_out(self) -> StateName:
        """Run to the end or to a stop, here or over Ray; every outcome is left in state.json."""
        self._state("starting")
        try:
            experiment = self.directory.experiment
            if experiment.cluster.placement == "process":
                outcome, why = self.train(experiment)
            else:
                from labkit.cluster.supervisor import supervise

                outcome, why = supervise(
                    self.directory, experiment, self.state("starting"), lambda: self.commands.terminated
                )
        except Exception as error:
            outcome, why = failed(error)
        self._state(outcome, why)
        with contextlib.suppress(OSError):  # on a full disk the state is what must get through
            self.directory.append_event(outcome, **({"reason": why} if why else {}))
        return outcome

    def train(self, experiment: Experiment) -> "Outcome":
        """Run to the end or to a stop in this process; whatever else ends it is raised."""
        self._experiment = experiment
        outcome: StateName = "done"
        try:
            self._run(experiment)
        except StopRequested:
            outcome = "stopped"
        self._checkpoint()
        return outcome, ""

    def _run(self, experiment: Experiment) -> None:
        from labkit.rl.loop import Loop
        from labkit.rollout import build_engine

        self.directory.keep(self.directory.owned())
        every = experiment.checkpoint_every or experiment.steps
        loop = Loop(experiment, self.commands.poll, self._build_engine or build_engine)
        self._resume(loop)
        self.commands.poll()  # what was asked while the loop was made
        self._state("running")
        for record in loop.steps():
            self.directory.append_record(record)
            self._pass(Boundary(loop, record.step))
            if record.step and record.step % every == 0:
                self._checkpoint()
            self._between_steps(loop, record.step)

    def _between_steps(self, loop: "Loop", step: int) -> None:
        self.commands.poll()
        self._repeat_switches(loop, step)
        asked, self.commands.at_boundary = self.commands.at_boundary, []
        for entry in asked:
            if entry["command"] == "checkpoint":
                self._checkpoint()
            else:
                self._switch(loop, step, entry.get("recipe"))

    def _repeat_switches(self, loop: "Loop", step: int) -> None:
        while self._to_repeat and self._to_repeat[0].step == step + 1:
            self._switched(loop, step, loop.switch(self._to_repeat.pop(0).recipe))

    def _switch(self, loop: "Loop", step: int, recipe: Any) -> None:
        """Accepted or refused, never forgotten: the answer is an event."""
        try:
            if step >= self._experiment.steps:
                raise ValueError("the run has no step left")
            wanted = Recipe(**recipe)
            self.directory.keep(own.used_by_recipe(wanted))
            changes = loop.switch(wanted)
        except StopRequested:
            self.directory.append_event("refused", command="switch", reason="the run was stopped before it could act")
            raise
        except (ValueError, TypeError) as error:
            self.directory.append_event("refused", command="switch", reason=reason(error))
        else:
            self._switched(loop, step, changes)

    def _switched(self, loop: "Loop", step: int, changes: dict[str, tuple[Any, Any]]) -> None:
        said = {key: [_plain(old), _plain(new)] for key, (old, new) in changes.items()}
        recipe = loop.recipe.model_dump(mode="json")
        self.directory.append_event("switched", step=step + 1, version=loop.recipe_version, changes=said, recipe=recipe)
        self._pass(Boundary(loop, step))
        self._saved = min(self._saved, step - 1)  # a checkpoint of this step holds the Recipe before

    def _resume(self, loop: "Loop") -> None:
        """Bring the loop to where the last checkpoint, if any, left it, and cut the records to match."""
        from labkit.runs import checkpoint

        latest = checkpoint.latest(self.directory)
        parent = None if latest else origin(self.directory)
        step = -1
        if latest:
            self._saved, loop_state = checkpoint.load(latest, self._experiment)
            step = self._saved
            loop.load_state_dict(loop_state)
        elif parent:
            step, loop_state = checkpoint.load(parent.checkpoint, parent.experiment)
            loop.load_state_dict(loop_state)
        self.directory.cut_records(step)
        if self._recovering:
            self._to_repeat = [made for made in self.directory.switches() if made.version > loop.recipe_version]
        self.directory.cut_switches(loop.recipe_version)
        if parent:
            self.directory.append_event("forked", parent=parent.run, step=step)
            self._switched(loop, step, loop.switch(self._experiment.recipe))
        else:
            self.directory.append_event("resumed" if latest else "started", step=step + 1)
        self._repeat_switches(loop, step)
        self._pass(Boundary(loop, step))

    def _pass(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self.commands.may_stop = boundary.intact

    def _checkpoint(self) -> None:
        from labkit.runs import checkpoint

        if self._boundary and self._boundary.step > self._saved:
            path = checkpoint.save(self.directory, self._experiment, self._boundary.step, self._boundary.state)
            self._saved = self._boundary.step
            self.directory.append_event("checkpoint", path=path.name)

    def _state(self, name: StateName, why: str = "") -> None:
        self.directory.write_state(self.state(name, why))


def _plain(value: Any) -> Any:
    """A setting as JSON has it; filters in their short form."""
    return [each.short_str() for each in value] if isinstance(value, tuple) else value


def failed(error: Exception) -> "Outcome":
    """To be called where the error is handled: its traceback goes to the log."""
    with contextlib.suppress(OSError):  # the disk that the log is on may be full
        traceback.print_exc()
    return "failed", reason(error)


def reason(error: Exception) -> str:
    """One line for people: their mistakes in the error's own words, other errors with their kind."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if place := own.place_in(error):
        return f"{type(error).__name__}: {text} ({place})"
    if isinstance(error, ValueError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _beat(directory: RunDirectory) -> None:
    while True:
        with contextlib.suppress(OSError):
            directory.beat()
        time.sleep(_HEARTBEAT)


def main(path: str, locked: bool = False, parent: int | None = None) -> None:
    """`locked`: a client took the lock for this process, which keeps it open to its end. `parent`: the end of that
    process, which started this one, is a stop."""
    directory = RunDirectory(Path(path))
    if not locked:
        try:
            lock.sign(lock.take(directory.path), os.getpid())
        except BlockingIOError:
            sys.exit(f"{path} already has a worker (process {lock.holder(directory.path)}): nothing was done")
    worker = Worker(directory)
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker.commands, "terminated", True))
    threading.Thread(target=_beat, args=(directory,), daemon=True).start()
    if parent is not None:
        environment.end_with(parent)
    environment.keep_heap()
    if worker.carry_out() == "failed":
        sys.exit(1)


if __name__ == "__main__":
    parent = int(sys.argv[sys.argv.index("--with-parent") + 1]) if "--with-parent" in sys.argv else None
    main(sys.argv[1], locked="--locked" in sys.argv[2:], parent=parent)
