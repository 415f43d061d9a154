"""Check: one thing to know before a run is started: its state, what was found, and the way out."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
MARKS: dict[State, str] = {"ok": "✓ ok", "note": "! note", "problem": "✗ problem"}


@dataclass(frozen=True)
class Check:
    """A note says what is slower or not there; a problem, what will fail."""

    name: str
    state: State
    found: str
    advice: str = ""

    @property
    def mark(self) -> str:
        return MARKS[self.state]
