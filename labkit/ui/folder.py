"""Folder: which runs have come into the runs folder since a panel opened: from the shell, or from another notebook.

Names are compared, because a folder's modification time can stay the same when two runs come within one tick of its
clock. A look lists the folder once every two seconds and opens only what is new, so a long history costs nothing.
"""

import os
import time
from pathlib import Path

from labkit.runs.store import RunDirectory

_EVERY = 2.0  # seconds between two looks


class Folder:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._looked = time.monotonic()
        self._seen = self._names()

    def see(self, *names: str) -> None:
        """These are known from now on; without names, all that are there."""
        self._seen.update(names or self._names())

    def new(self) -> list[RunDirectory]:
        """The runs that are not known yet, the oldest first; none between two looks."""
        if time.monotonic() - self._looked < _EVERY:
            return []
        self._looked = time.monotonic()
        names = self._names()
        self._seen &= names  # a name that is taken again is another run
        fresh = [RunDirectory(self._root / name) for name in names - self._seen]
        begun = [(written, each) for each in fresh if (written := _written(each))]
        return [each for _, each in sorted(begun, key=lambda pair: (pair[0], pair[1].id))]

    def _names(self) -> set[str]:
        try:
            return {name for name in os.listdir(self._root) if not name.startswith(".")}
        except (FileNotFoundError, NotADirectoryError):  # there has been no run yet
            return set()


def _written(directory: RunDirectory) -> int:
    """When the run was written down; 0 if this is no run, or one that its maker has not finished making."""
    try:
        written = (directory.path / "experiment.yaml").stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return written if directory.read_state().name != "idle" else 0
