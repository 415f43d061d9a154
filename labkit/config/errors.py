"""ConfigError: one line for each problem of a configuration: dotted key, what is wrong, the way out."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError


class ConfigError(ValueError):
    """A setting, a combination of settings or a name that can't be carried out."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = tuple(problems.splitlines() if isinstance(problems, str) else problems)
        super().__init__("\n".join(self.problems))

    def under(self, prefix: str) -> "ConfigError":
        """The same problems, their keys seen from a group further out."""
        return ConfigError(f"{prefix}.{problem}" for problem in self.problems)


def wrong(key: str, what: str) -> PydanticCustomError:
    """Raised by a validator that looks at a whole group: `key` is the setting in it that has to change."""
    return PydanticCustomError("setting", "{what}", {"key": key, "what": what})


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "choose one of ") -> str:
    """The way out of an unknown name: the nearest known ones, or else all of them."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"{otherwise}{', '.join(known)}"


def explain(error: ValidationError, root: type[BaseModel]) -> ConfigError:
    return ConfigError(_line(detail, root) for detail in error.errors(include_url=False))


def _line(detail: ErrorDetails, root: type[BaseModel]) -> str:
    path = [str(part) for part in detail["loc"]]
    value = detail["input"]
    match detail["type"]:
        case "setting":
            context = detail["ctx"]
            return f"{'.'.join([*path, context['key']])}: {context['what']}"
        case "extra_forbidden":
            return f"{'.'.join(path)}: no such setting; {_suggestion(path, root)}"
        case "model_type":
            group = _group(root, path)
            hint = "; for a preset use labkit.config.presets.recipe(NAME)" if group.__name__ == "Recipe" else ""
            return (
                f"{'.'.join(path)}: is a group of settings ({', '.join(group.model_fields)}), got {_short(value)}{hint}"
            )
        case _:
            what = detail["msg"].split(", unable")[0].split(", got")[0]
            what = what.removeprefix("Value error, ").replace("Input should", "must").replace("String should", "must")
            if detail["type"] == "string_type" and isinstance(value, int | float):
                what += " (in YAML put it in quotes)"
            return f"{'.'.join(path)}: {what}, got {_short(value)}"


def _suggestion(path: list[str], root: type[BaseModel]) -> str:
    *groups, key = path
    group = _group(root, groups)
    here = [*group.model_fields, *getattr(group, "shorthand", ())]
    everywhere = list(_dotted_keys(root))
    exact = [dotted for dotted in everywhere if dotted.rpartition(".")[2] == key]
    near = [".".join([*groups, name]) for name in difflib.get_close_matches(key, here, n=2, cutoff=0.6)]
    if not exact and not near:
        names = difflib.get_close_matches(key, {dotted.rpartition(".")[2] for dotted in everywhere}, n=1)
        near = [dotted for dotted in everywhere if dotted.rpartition(".")[2] in names]
    found = exact[:3] or near[:3]
    if found:
        return f"did you mean {' or '.join(found)}?"
    return f"choose one of {', '.join(here)}" if here else "there are none here"


def _group(root: type[BaseModel], path: Iterable[str]) -> type[BaseModel]:
    for part in path:
        if not part.isdigit():  # a place in a list, which was resolved with the list's name
            annotation: Any = root.model_fields[part].annotation
            root = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    return root


def _dotted_keys(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in root.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _dotted_keys(field.annotation, f"{prefix}{name}.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
