"""Ray, as far as labkit uses it: a cluster, actors, calls. The only file that imports it.

A local cluster is started by the process that connects and dies with it, even when that is killed: the kernel ends
Ray's servers with their parent, and actors end when they miss their node (about 2 s); two idle agents of Ray notice
after a minute. An actor belongs to the process that started it, and ends with that too.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from labkit.cluster.plan import Reservation
from labkit.runs.store import RunError

_ANSWER = 5.0  # seconds that the head of a cluster may take to answer
_TEMPORARY = "labkit-ray-"
_DETAIL = re.compile(r"(?:Worker exit detail|The actor is dead because|The actor is unavailable)[: ]*([^\n]+)")


class Lost(Exception):
    """The actor is gone, or can't be reached."""


@contextlib.contextmanager
def cluster(address: str, needed: list[Reservation], store_bytes: int | None) -> Iterator[None]:
    """Connected to the cluster at `address`, or to a new one on this machine. Raises RunError with the way out."""
    on_signal = signal.getsignal(signal.SIGTERM)  # Ray puts its own in its place
    folder = None if address else _temporary_folder()
    try:
        try:
            _connect(address, needed, store_bytes, folder)
        finally:
            signal.signal(signal.SIGTERM, on_signal)
        _check_room(needed)
        yield
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _connect(address: str, needed: list[Reservation], store_bytes: int | None, folder: Path | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if folder is None:
        try:
            _check_answers(address)
            ray.init(address, **quiet)
        except Exception as error:  # nobody there, or another version of Python or Ray
            raise RunError(
                f"cluster.address {address}: no Ray cluster can be reached there ({_line(error)}); give the HOST:PORT "
                "that `ray start --head` prints, or leave the address empty for a cluster on this machine"
            ) from error
        return
    try:
        ray.init(
            "local",  # without it Ray may join a cluster that somebody else started
            num_cpus=sum(each.cpus for each in needed),
            num_gpus=sum(each.gpus for each in needed) or None,  # None: those that it finds
            include_dashboard=False,
            object_store_memory=store_bytes,
            _temp_dir=str(folder),
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
            **quiet,
        )
    except Exception as error:
        raise RunError(
            f"Ray did not start on this machine ({_line(error)}); it may be too busy: resume the run later, or set "
            "cluster.placement to process"
        ) from error


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError("it is no HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()


def _temporary_folder() -> Path:
    """Short, because the paths of sockets are limited to 107 bytes. Those of workers that were killed are removed."""
    root = Path("/tmp")
    for old in root.glob(f"{_TEMPORARY}*"):
        pid = old.name.split("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=root))


def _check_room(needed: list[Reservation]) -> None:
    """An actor that no node can ever take would wait for ever."""
    there = ray.cluster_resources()
    for name, asked in (("CPU", sum(each.cpus for each in needed)), ("GPU", sum(each.gpus for each in needed))):
        if there.get(name, 0) < asked:
            raise RunError(
                f"the run reserves {asked} {name}s, the Ray cluster has {there.get(name, 0):.0f}: add a node, lower "
                "threads, or change cluster.placement"
            )


def nodes() -> list[dict[str, float]]:
    """The resources of every node that lives: CPU, GPU, memory (bytes)."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class Call:
    """Something asked of an actor."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def done(self, timeout: float) -> bool:
        """Whether its outcome is there, waiting `timeout` seconds for it."""
        return bool(ray.wait([self._reference], timeout=timeout)[0])

    def result(self) -> Any:
        """What it returns or raises; Lost if the actor is gone."""
        try:
            return ray.get(self._reference)
        except (RayActorError, ObjectLostError) as error:  # it, or what it returned with its node
            raise Lost(_how(error)) from None
        except RayTaskError as error:
            raise error.cause from error  # the cause says what, the other one where


class Actor:
    """An object of a class of ours in a process of its own. Two threads: calls one after the other, and control."""

    def __init__(self, body: type, reserved: Reservation, environment: dict[str, str], *args: Any) -> None:
        remote = ray.remote(
            num_cpus=reserved.cpus,
            num_gpus=reserved.gpus,
            memory=reserved.memory or None,
            concurrency_groups={"control": 1},
        )(body)
        self._handle = remote.options(runtime_env={"env_vars": environment}).remote(*args)

    def call(self, method: str, *args: Any) -> Call:
        return Call(getattr(self._handle, method).remote(*args))

    def control(self, method: str, *args: Any) -> Call:
        """Called at once, beside a call that goes on."""
        return Call(getattr(self._handle, method).options(concurrency_group="control").remote(*args))

    def end(self) -> None:
        ray.kill(self._handle)


def put(value: Any) -> Any:
    """A value in the object store, for as long as the reference that is returned lives."""
    return ray.put(value)


def _how(error: Exception) -> str:
    """Ray's report of several lines, as one."""
    found = _DETAIL.findall(str(error))
    return (found[-1] if found else _line(error)).strip().split(". ")[0]


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
