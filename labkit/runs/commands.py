"""What clients ask of the worker that carries a run out, read from commands.jsonl between micro-steps."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from labkit.runs.state import RunState, StateName
from labkit.runs.store import RunDirectory

StateOf = Callable[..., RunState]
"""(name, why) -> the state to write, in the name of the process that clients take for the worker."""

_PAUSE_POLL = 0.05


class StopRequested(Exception):
    """Raised between micro-steps when the run was asked to stop: the unfinished step counts for nothing."""


class Commands:
    """What clients ask of this worker; `poll` is the hook that the loop calls between micro-steps."""

    def __init__(self, directory: RunDirectory, state: StateOf | None = None) -> None:
        self._directory, self._state = directory, state or partial(RunState, pid=os.getpid())
        self._offset = 0
        self._paused = False
        self.terminated = False
        self.at_boundary: list[dict[str, Any]] = []  # what can only be done between two steps
        self.stopping = False
        self.may_stop: Callable[[], bool] = lambda: True

    def poll(self) -> None:
        """Act on new commands: returns at once or after a pause, or raises StopRequested."""
        self._take()
        while self._paused and not self.stopping:
            time.sleep(_PAUSE_POLL)
            self._take()
        if self.stopping and self.may_stop():
            raise StopRequested

    def _take(self) -> None:
        if self.terminated:
            self._stop("SIGTERM")
        commands, self._offset = self._directory.commands(self._offset)
        for entry in commands:
            command = str(entry.get("command"))
            if command in ("switch", "checkpoint") and not self.stopping:
                self.at_boundary.append(entry)
            elif command == "stop":
                self._stop("stop")
            elif command == "pause" and not self._paused and not self.stopping:
                self._pause(True, "paused")
            elif command == "resume" and self._paused and not self.stopping:
                self._pause(False, "running")
            else:
                self._directory.append_event("ignored", command=command)

    def _pause(self, paused: bool, state: StateName) -> None:
        self._paused = paused
        self._directory.write_state(self._state(state))
        self._directory.append_event(state, command="pause" if paused else "resume")

    def _stop(self, command: str) -> None:
        if not self.stopping:
            self.stopping = True
            self._directory.write_state(self._state("stopping"))
            self._directory.append_event("stopping", command=command)
