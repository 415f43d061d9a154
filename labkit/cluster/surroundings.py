"""The environment that Ray and its actors must find before they import anything.

    this process and a Ray that it starts    no usage statistics, no slow import (light/)
    every actor                              what labkit.environment prepared for the worker: threads, kernels,
                                             and the user's own settings of vLLM, Transformer Engine, NCCL, ...

Ray sets OMP_NUM_THREADS to the CPUs that an actor reserves. Where nobody asked for a number of threads that is taken
back, so that an actor computes with as many as a worker process would.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from labkit import environment
from labkit.config import Experiment

_LIGHT = str(Path(__file__).parent / "light")
_PASSED_ON = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "TORCH", "PYTORCH_", "CUDA_HOME", "CUDNN_"),
    *("VLLM_", "NVTE_", "NCCL_", "HF_", "LABKIT_", "PYTHONUNBUFFERED"),
)
_THREADS = "OMP_NUM_THREADS"


def prepare() -> None:
    """For Ray itself; before it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would starve actors beside ordinary processes
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns; CUDA_VISIBLE_DEVICES is ours
    if _LIGHT not in sys.path:
        sys.path.insert(0, _LIGHT)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{_LIGHT}{os.pathsep}{before}" if before else _LIGHT


def for_actor(experiment: Experiment, of_worker: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of an actor that computes for this Experiment, from those of its worker process."""
    passed_on = {name: value for name, value in of_worker.items() if name.startswith(_PASSED_ON)}
    if experiment.device == "cpu":
        passed_on["CUDA_VISIBLE_DEVICES"] = ""  # Ray shows all GPUs to actors that reserve none
    return passed_on


def enter(log: Path, threads_asked: bool) -> None:
    """In an actor, before it imports torch: its output goes to the run's log."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if not threads_asked:
        os.environ.pop(_THREADS, None)
    environment.keep_heap()


def threads_asked(of_worker: Mapping[str, str] = os.environ) -> bool:
    return _THREADS in of_worker
