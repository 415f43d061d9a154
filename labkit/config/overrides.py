"""Overrides from a command line: `recipe.rollout.kv_cache=true grpo.lr=1e-4 model=smollm2`."""

from collections.abc import Iterable
from typing import Any, TypeVar

from labkit.config import yaml_io
from labkit.config.errors import ConfigError
from labkit.config.settings import Settings

SettingsT = TypeVar("SettingsT", bound=Settings)

_NULL = {"null", "Null", "NULL", "~"}


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """{"grpo.lr": 0.0001, ...}: values are YAML; `key=` is the empty text, `key=null` no value."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or not key:
            raise ConfigError(f"{assignment}: write an override as key=value, such as grpo.lr=1e-4")
        if key in changes:
            raise ConfigError(f"{key}: given twice; keep one of the two")
        changes[key] = _value(key, text)
    return changes


def _value(key: str, text: str) -> Any:
    value = yaml_io.parse(text, source=f"the value of {key}")
    if isinstance(value, dict) and list(value.values()) == [None] and text.endswith(":"):
        return text  # `task=dataset:` lacks its name; it is not meant as a map
    return text if value is None and text not in _NULL else value


def apply(settings: SettingsT, assignments: Iterable[str]) -> SettingsT:
    return settings.override(parse_assignments(assignments))
