"""A cell of a sweep on some node: an actor that starts its worker process there and reserves what it needs.

The worker is the ordinary one, in the run directory that all nodes share, so commands, records and resuming are what
they are elsewhere. It ends with its actor: asked by the kernel, it stops with a checkpoint.
"""

import os
import socket
from pathlib import Path

from labkit.cluster import surroundings
from labkit.runs.process import Run


class CellActor:
    def __init__(self, path: Path, threads_asked: bool) -> None:
        surroundings.enter(path / "worker.log", threads_asked)
        self._path = path

    def begin(self) -> tuple[int, str]:
        """Start the worker, from the last checkpoint if there is one. Returns where that is."""
        Run.open(self._path).resume_from_checkpoint(with_parent=True)
        return os.getpid(), socket.gethostname()
