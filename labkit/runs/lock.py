"""The lock of a run directory: one worker at a time writes in it.

An flock on the file `lock`, taken by the client that starts a worker and handed to the worker as an open
file, so two clients can't both start one. The system drops it when the worker ends, however it ends: no
stale lock is left to remove. It belongs to the file and not to its name, so it goes along when the
directory is moved. The file holds the worker's process id once that is known.
"""

import contextlib
import fcntl
import os
from pathlib import Path


def take(directory: Path, name: str = "lock") -> int:
    """The open lock file, to be closed by `os.close`; BlockingIOError while a worker holds the lock."""
    path = directory / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)  # the last worker's number says nothing about the next
    except OSError as error:
        os.close(descriptor)
        raise type(error)(error.errno, error.strerror, str(path)) from None
    return descriptor


def sign(descriptor: int, pid: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a number
        os.pwrite(descriptor, str(pid).encode(), 0)


def holder(directory: Path) -> int | None:
    """The process id of the worker that holds the lock or, if none does, held it last."""
    with contextlib.suppress(OSError, ValueError):
        return int((directory / "lock").read_bytes())
    return None
