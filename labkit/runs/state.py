"""RunState: where a run stands, and state.json, which says so.

state.json always fills one 4 KiB block. It is replaced in one piece or, when the disk has no room for a
second block, overwritten in place: that a run has failed gets through on a full disk.
"""

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

StateName = Literal["idle", "starting", "running", "paused", "stopping", "done", "stopped", "failed"]
ACTIVE: frozenset[StateName] = frozenset({"starting", "running", "paused", "stopping"})
_BYTES = 4096


@dataclass(frozen=True)
class RunState:
    """Where a run stands: idle → starting → running ⇄ paused → stopping → done | stopped | failed(reason)."""

    name: StateName
    reason: str = ""
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    host: str = field(default_factory=socket.gethostname)
    updated: float = field(default_factory=time.time)

    @property
    def active(self) -> bool:
        return self.name in ACTIVE

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


_STATE = TypeAdapter(RunState)


def write(path: Path, state: RunState) -> None:
    text = json.dumps(asdict(state)).ljust(_BYTES - 1) + "\n"
    if len(text) > _BYTES:
        return write(path, replace(state, reason=state.reason[:500] + "…"))
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(text, encoding="ascii")
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        with path.open("r+", encoding="ascii") as file:  # no space for a second block: reuse the first
            file.write(text)


def read(path: Path) -> RunState:
    """The state as it was last written; a failure with the reason where the file is lost or damaged."""
    try:
        return _STATE.validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        reason = f"{path.name} is missing"
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{path.name} cannot be read: {f'{place}: ' if place else ''}{first['msg']}"
    return RunState("failed", reason, host="", updated=0.0)
