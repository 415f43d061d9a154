"""YAML as people write it: `1e-4` is a number, a key given twice is an error, a mistake names its line.

PyYAML follows YAML 1.1, where `1e-4` (no point) is text, the second of two equal keys silently wins, and 010 is
8, 1:30 is 90 and 1_0 is 10. Here the last three are text; written as text, they are quoted for other readers.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from labkit.config.errors import ConfigError

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)
_NUMBERS = {"tag:yaml.org,2002:int": _INT, "tag:yaml.org,2002:float": _FLOAT}


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            problem = "a list or a map can't be the name before a colon; write text there"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
        seen.add(key.value)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _side in (_Loader, _Dumper):
    for _tag, _form in _NUMBERS.items():
        _side.add_implicit_resolver(_tag, _form, list("-+.0123456789"))
_Dumper.add_representer(
    tuple, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)


def dump(data: dict[str, Any]) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def parse(text: str, source: str = "YAML") -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise ConfigError(f"{place}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def load(text_or_path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML text or file. One line that ends in .yaml or .yml, or names a file, is a path."""
    text, source = _read(text_or_path)
    data = parse(text, source)
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds {type(data).__name__} {str(data)[:40]!r}"
        raise ConfigError(f"{source}: {found}; give a YAML file or lines of `key: value`")
    if bad := [key for key in data if not isinstance(key, str)]:
        raise ConfigError(f"{source}: {bad[0]!r} is no name of a setting; put names before the colons")
    return data


def _read(text_or_path: str | Path) -> tuple[str, str]:
    if isinstance(text_or_path, str) and not _names_a_file(text_or_path):
        return text_or_path, "YAML"
    path = Path(text_or_path)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: can't be read: {reason}; check the path of the YAML file") from None


def _names_a_file(text: str) -> bool:
    if "\n" in text or ": " in text:
        return False
    return text.endswith((".yaml", ".yml")) or (0 < len(text) < 1024 and Path(text).is_file())
