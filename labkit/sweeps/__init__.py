"""Sweeps: one question, arms that differ in what is asked about, seeds, and what came of it with its uncertainty.

    sweep = labkit.sweep(labkit.preset("bf16"), {"preset": ["bf16", "fp8-rollout", "fp8-e2e"]}, seeds=3)
    for finished in sweep.run():        # starts, resumes, and yields each cell as it ends
        print(finished)
    print(sweep.results().text())

    plan           what is asked: experiment, axes or arms, seeds, baseline; checked as a whole before anything starts
    sweep          its folder: sweep.yaml, a Run for each cell, and what is known about them
    drive          starts and resumes cells, as many at once as executor says; survives being killed
    over_ray       the executor that gives them to a Ray cluster
    statistics     paired by seed: intervals, tests, verdicts in words, seeds needed
    results        from the records of cells to those verdicts
    report         the same as a page, as Markdown and as CSV
    claims         NVIDIA's statements about FP8 RL as sweeps that share their cells

Imports no torch. The names below are looked up on first use.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Cell": "plan",
    "Finished": "drive",
    "LocalProcesses": "executor",
    "Plan": "plan",
    "Results": "results",
    "Sweep": "sweep",
    "executor_for": "executor",
    "open_sweep": "sweep",
    "sweep_of": "sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"labkit.sweeps has no attribute {name!r}")
    return getattr(import_module(f"labkit.sweeps.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
