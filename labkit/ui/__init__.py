"""The panel: widgets of JupyterLab around runs that live in processes of their own. Imports no torch.

`Lab` starts and drives runs; `open_lab` shows those that are there, after a page, a kernel or a night has passed.
The names are looked up on first use, so that importing this costs nothing.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {"Lab": "lab", "Session": "session", "SweepGrid": "sweep_grid", "open_lab": "lab"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"labkit.ui has no attribute {name!r}")
    return getattr(import_module(f"labkit.ui.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
