"""Whether two answers are the same mathematics (1/2, 0.5, \\frac12), by the package math-verify.

It runs in a process of its own, started at the first comparison. What a policy writes can keep a computer algebra
system busy for ever or fill the memory; a process can be ended, whatever thread of a run waits for it.
"""

import atexit
import json
import subprocess
import sys
import threading
from importlib.util import find_spec

from labkit.tasks.task import TaskError


def available() -> tuple[bool, str]:
    if find_spec("math_verify") is None:
        return False, "the package math-verify is not installed: pip install math-verify"
    return True, "installed"


def equal(reference: str, answer: str) -> bool:
    """False too where `answer` can't be parsed, or the comparison takes too long. Any thread may ask."""
    return _process.ask(reference, answer)


class _Process:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None

    def ask(self, reference: str, answer: str) -> bool:
        with self._lock:
            if self._running is None or self._running.poll() is not None:
                self._running = _start()
            try:
                said = _exchange(self._running, json.dumps([reference, answer]))
            except BaseException:  # such as Ctrl-C: the answer to this would be taken for that to the next
                self._running.kill()
                raise
            return said == "1\n"

    def end(self) -> None:
        if self._running is not None:
            self._running.kill()


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """Its answer, or "" if it died of the question."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    if not (said := process.stdout.readline()):
        process.wait()
    return said


def _start() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit.tasks.mathematics_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the run, which ends this one by ending
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise TaskError(
            f"math-verify can't be started (exit code {process.wait()}); its error stands above or in the log"
        )
    return process


_process = _Process()
atexit.register(_process.end)
