"""Values of settings as a reader sees them: on and off, filters by their short names, a dash for nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config.correction import Filter
from labkit.config.own import short


def said(value: Any) -> str:
    """`value` may come from a Recipe or from a file, where filters are dicts."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(map(_element, value)) or "–"
    return "–" if value is None or value == "" else short(str(value))


def said_changes(changes: Mapping[str, Sequence[Any]]) -> list[str]:
    """["rollout.linears off → on", …] for {"rollout.linears": (False, True), …}."""
    return [f"{key} {said(old)} → {said(new)}" for key, (old, new) in changes.items()]


def _element(value: Any) -> str:
    if isinstance(value, dict):
        value = Filter(**value)
    return value.short_str() if isinstance(value, Filter) else str(value)
