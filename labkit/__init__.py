"""labkit: an FP8 reinforcement-learning lab.

Importing labkit is cheap and imports no torch: the names below are looked up on first use. Import it before torch, so
that it can see to torch's threads and kernels (labkit.environment).
"""

from importlib import import_module
from typing import Any

from labkit import environment

__version__ = "0.1.0"

environment.prepare()

_SUBMODULES = {
    "analysis",
    "config",
    "explorer",
    "fp8",
    "gallery",
    "hardware",
    "models",
    "rl",
    "rollout",
    "runs",
    "sweeps",
    "tasks",
    "training",
    "ui",
}
_EXPORTS = {
    "Batch": "labkit.analysis:Batch",
    "Correction": "labkit.config:Correction",
    "Experiment": "labkit.config:Experiment",
    "Filter": "labkit.config:Filter",
    "Lab": "labkit.ui:Lab",
    "Recipe": "labkit.config:Recipe",
    "Run": "labkit.runs:Run",
    "SweepGrid": "labkit.ui:SweepGrid",
    "attribute": "labkit.analysis:attribute",
    "collect": "labkit.analysis:collect",
    "compare": "labkit.runs.compare:compare",
    "curves": "labkit.runs.report:curves",
    "demo_reading": "labkit.demo:reading",
    "demo_table": "labkit.demo:table",
    "kernels": "labkit.analysis:kernels",
    "open_lab": "labkit.ui:open_lab",
    "open_sweep": "labkit.sweeps:open_sweep",
    "preflight": "labkit.ui.preflight:preflight",
    "preset": "labkit.config:preset",
    "run_demo": "labkit.demo:run_demo",
    "sweep": "labkit.sweeps:sweep_of",
    "whatif": "labkit.analysis:whatif",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"labkit.{name}")
    if name in _EXPORTS:
        module, _, attribute = _EXPORTS[name].partition(":")
        return getattr(import_module(module), attribute)
    raise AttributeError(f"labkit has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_SUBMODULES, *_EXPORTS, "__version__"])
