"""Runs: an Experiment being carried out by a worker process, and what it leaves behind.

Only `worker` and `checkpoint` import torch. The names below are looked up on first use, so that a client
(a notebook, the command line) can watch a run without importing torch or plotly.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "METRICS": "metrics",
    "Alarm": "alarms",
    "Metric": "metrics",
    "Run": "process",
    "RunDirectory": "store",
    "RunError": "store",
    "RunState": "state",
    "StepRecord": "record",
    "curves": "report",
    "describe": "metrics",
    "figure": "report",
    "write_csv": "csv",
    "write_html": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"labkit.runs has no attribute {name!r}")
    return getattr(import_module(f"labkit.runs.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
