"""Settings: the base of every group of settings. Immutable, strict about names, changed only by `override`.

A group is checked as a whole whenever one is made, so an invalid Experiment can't exist; every mistake raises
ConfigError. Settings that belong to another one (the bounds of a correction) follow when that one changes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError
from pydantic_core import PydanticCustomError

from labkit.config import yaml_io
from labkit.config.errors import ConfigError, explain


def _number(value: Any) -> Any:
    """Pydantic would take True for 1, and the texts "010" and "1_0" for 10."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number")
    if isinstance(value, str):
        raise PydanticCustomError("number", "must be a number, written like 10, 0.5 or 1e-4 without quotes")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
Name = Annotated[str, StringConstraints(strip_whitespace=True)]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    label: ClassVar[str] = ""  # the setting that only names the group and changes nothing
    shorthand: ClassVar[tuple[str, ...]] = ()  # names that are taken for settings further inside

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise explain(error, type(self)) from None

    # Groups inside groups are then checked by pydantic itself, so that an error knows its whole dotted key.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{name}: {type(self).__name__} is immutable; make a changed copy with .override({{{name!r}: ...}})"
        )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        return self.override(update or {})

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A changed copy, checked like a new one. Keys may be dotted: {"recipe.rollout.kv_cache": True}.

        A dict given for a group changes what it names and leaves the rest of the group.
        """
        return type(self)(**self._merged(nest(changes)))

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        data = dict(self)
        for key, value in changes.items():
            current = data.get(key)
            if isinstance(current, Settings) and isinstance(value, dict):
                with _under(key):
                    data[key] = current._merged(value)
            elif isinstance(current, tuple) and isinstance(value, _Branch):
                with _under(key):
                    data[key] = _with_items(current, value)
            elif isinstance(current, dict) and isinstance(value, _Branch):
                data[key] = current | value
            else:
                data[key] = value
        return data

    def diff(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """What differs, by dotted key: {"rollout.kv_cache": (mine, theirs)}. Labels don't count."""
        theirs = other._flat()
        return {key: (mine, theirs[key]) for key, mine in self._flat().items() if mine != theirs[key]}

    def _flat(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in self:
            if isinstance(value, Settings):
                flat |= {f"{name}.{key}": inner for key, inner in value._flat().items()}
            elif name != self.label:
                flat[name] = value
        return flat

    def to_yaml(self) -> str:
        return yaml_io.dump(self.model_dump())

    @classmethod
    def from_yaml(cls, text_or_path: str | Path) -> Self:
        return cls(**yaml_io.load(text_or_path))


@contextmanager
def _under(key: str) -> Iterator[None]:
    """Errors inside name their whole dotted key."""
    try:
        yield
    except ConfigError as error:
        raise error.under(key) from None


def _with_items(items: tuple[Any, ...], changes: dict[str, Any]) -> list[Any]:
    """A list of groups in which `changes` names some by their place: {"0": {"low": 0.5}}."""
    changed = list(items)
    for place, value in changes.items():
        if not place.isdigit() or int(place) >= len(items):
            raise ConfigError(f"{place}: there is no such entry; it has {len(items)}, counted from 0")
        item = items[int(place)]
        group = isinstance(item, Settings) and isinstance(value, dict)
        changed[int(place)] = item._merged(value) if group else value
    return changed


class _Branch(dict[str, Any]):
    """A dict that came from dotted keys, so that it adds to a value that is itself a dict."""


def nest(changes: Mapping[str, Any]) -> dict[str, Any]:
    root = _Branch()
    for dotted, value in changes.items():
        *groups, key = dotted.split(".")
        node = root
        for depth, group in enumerate(groups):
            inner = node.setdefault(group, _Branch())
            if not isinstance(inner, _Branch):
                raise ConfigError(f"{dotted}: {'.'.join(groups[: depth + 1])} is given as well; keep one of the two")
            node = inner
        if key in node:
            raise ConfigError(f"{dotted}: settings inside it are given as well; keep one of the two")
        node[key] = value
    return root


def flatten(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys that `nest` was given."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        inner = flatten(value) if isinstance(value, _Branch) else {"": value}
        flat |= {f"{key}.{rest}" if rest else key: leaf for rest, leaf in inner.items()}
    return flat
