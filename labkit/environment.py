"""What torch's libraries must find in the environment before torch is imported; later they no longer look.

    threads that sleep while they wait    spinning OpenMP threads cost up to 60 times the work on a shared machine
    kernels that ignore the batch         oneDNN's AMX kernels sum a row of a BF16 product in an order that depends on
                                          how many rows there are, so a token scored in a batch gets another log-prob
                                          than it had when it was sampled. The kernels before them don't, at up to
                                          twice the time

`import labkit` sees to both, unless torch was there first. What the user has set wins.
"""

import contextlib
import ctypes
import os
import signal
import sys
from typing import Any

SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
BATCH_INVARIANT_KERNELS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
FASTEST_KERNELS = {"ONEDNN_MAX_CPU_ISA": "ALL"}

_ours: dict[str, str] = {}


def prepare() -> None:
    if "torch" in sys.modules:
        return
    for name, value in {**SLEEPING_THREADS, **BATCH_INVARIANT_KERNELS}.items():
        if name not in os.environ:
            os.environ[name] = _ours[name] = value


def for_worker(same_kernels: bool, threads: int | None) -> dict[str, str]:
    """The environment of a process that computes; `threads` wins over the user's own setting."""
    by_user = {name: value for name, value in os.environ.items() if _ours.get(name) != value}
    kernels = BATCH_INVARIANT_KERNELS if same_kernels else FASTEST_KERNELS
    environment = {**SLEEPING_THREADS, **kernels, "PYTHONUNBUFFERED": "1", **by_user}
    return environment if threads is None else {**environment, "OMP_NUM_THREADS": str(threads)}


def end_with(parent: int) -> None:
    """Have Linux send this process SIGTERM when the one that started it ends, however it does."""
    with contextlib.suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), signal.SIGTERM)


def keep_heap() -> None:
    """Have glibc keep freed blocks: giving each large one back costs page faults at every step."""
    with contextlib.suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
