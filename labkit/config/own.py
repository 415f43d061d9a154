"""What is the user's own: a task, reward, correction, scaling rule or engine, named in an Experiment by a reference.

    path/to/mine.py:NAME      NAME at the top level of a file
    package.module:NAME       of a module that is installed
    NAME                      of an entry point that an installed package has in the group of its kind

    kind         setting                     group                 NAME is called with
    task         task                        labkit.tasks          (**task_options) -> labkit.tasks.Task
    reward       task_options.reward         labkit.rewards        (response: str, answer: str) -> float in [0, 1]
    correction   recipe.correction.weight    labkit.corrections    (delta_BR, mask_BR) -> weights_BR
    scaling      recipe.scaling.formula      labkit.scalings       (amax, fp8_max) -> scale
    engine       engine                      labkit.engines        (policy, experiment, on_microstep) -> an Engine

Nobody's code runs because an Experiment names it. Making one, and so reading one from a run or a sweep, looks at the
form of the reference alone: a run stays readable when the file is gone. Starting a run looks into the file (`check`),
still without executing it. Only the process that computes does that (`load`), once, until it is told to `forget`.

Raises ConfigError with the way out. Imports no torch.
"""

import ast
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator

from labkit.config.errors import ConfigError
from labkit.config.settings import Name

if TYPE_CHECKING:
    from labkit.config.experiment import Experiment
    from labkit.config.recipe import Recipe

KindName = Literal["task", "reward", "correction", "scaling", "engine"]
FORM = "path/to/file.py:NAME or package.module:NAME"
_FILE = re.compile(r"(?P<path>.+\.py):(?P<name>[^\W\d]\w*)")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+:[^\W\d]\w*")
_PREFIX = "labkit_own_"  # of the modules that files become


@dataclass(frozen=True)
class Kind:
    setting: str  # its key in an Experiment
    built_in: tuple[str, ...]
    families: tuple[str, ...] = ()  # built in too, as family:NAME

    def owns(self, value: object) -> bool:
        """Whether a value of the setting is the user's own, and not one of labkit's."""
        if not isinstance(value, str) or value in self.built_in or value.partition(":")[0] in self.families:
            return False
        return is_reference(value) or bool(re.fullmatch(r"[^\W\d][\w-]*", value))


KINDS: dict[KindName, Kind] = {
    "task": Kind("task", ("arithmetic", "sums", "gsm8k"), ("reasoning-gym", "dataset")),
    "reward": Kind("task_options.reward", ("match", "math-verify")),
    "correction": Kind("recipe.correction.weight", ("none", "token", "sequence", "geometric")),
    "scaling": Kind("recipe.scaling.formula", ("te", "deepgemm", "vllm")),
    "engine": Kind("engine", ("local", "vllm")),
}


def is_reference(text: str) -> bool:
    """Whether it is written like a reference to a file or a module."""
    return (_FILE.fullmatch(text) or _MODULE.fullmatch(text)) is not None


def installed(kind: KindName) -> tuple[str, ...]:
    """The names of the kind that installed packages announce."""
    return tuple(sorted({point.name for point in entry_points(group=_group(kind))} - set(KINDS[kind].built_in)))


def options(kind: KindName) -> tuple[str, ...]:
    """All names that the setting can have, without references."""
    return KINDS[kind].built_in + installed(kind)


def _known(kind: KindName) -> AfterValidator:
    def known(value: str) -> str:
        if value in KINDS[kind].built_in or is_reference(value) or value in installed(kind):
            return value
        raise ValueError(f"must be {', '.join(map(repr, options(kind)))}, or your own as {FORM}")

    return AfterValidator(known)


Reward = Annotated[Name, _known("reward")]
Weight = Annotated[Name, _known("correction")]
Formula = Annotated[Name, _known("scaling")]
EngineName = Annotated[Name, _known("engine")]


# ---- what an Experiment names


def used(experiment: "Experiment") -> Iterator[tuple[KindName, str]]:
    """(kind, reference) of all that is the user's own in an Experiment."""
    values: dict[KindName, Any] = {"engine": experiment.engine, "task": experiment.task}
    if not KINDS["task"].owns(experiment.task):  # a task of the user's may call its options as it likes
        values["reward"] = experiment.task_options.get("reward")
    yield from ((kind, value) for kind, value in values.items() if KINDS[kind].owns(value))
    yield from used_by_recipe(experiment.recipe)


def used_by_recipe(recipe: "Recipe") -> Iterator[tuple[KindName, str]]:
    values: dict[KindName, str] = {"correction": recipe.correction.weight, "scaling": recipe.scaling.formula}
    yield from ((kind, value) for kind, value in values.items() if KINDS[kind].owns(value))


def checked_recipe(recipe: "Recipe") -> "Recipe":
    """With absolute paths. Raises ConfigError for what isn't there."""
    changes: dict[str, Any] = {}
    for kind, reference in used_by_recipe(recipe):
        check(kind, reference)
        changes[KINDS[kind].setting.removeprefix("recipe.")] = absolute(reference)
    return recipe.override({**changes, "name": recipe.name}) if changes else recipe


def absolute(reference: str) -> str:
    """The same from any folder."""
    found = _FILE.fullmatch(reference)
    return f"{Path(found['path']).expanduser().absolute()}:{found['name']}" if found else reference


def short(reference: str) -> str:
    """For people: mine.py:NAME without its folders. What is no reference to a file stays as it is."""
    found = _FILE.fullmatch(reference)
    return f"{Path(found['path']).name}:{found['name']}" if found else reference


# ---- looked at, and not executed


def check(kind: KindName, reference: str) -> Path:
    """The file that a reference names, which has that name at its top level."""
    setting = KINDS[kind].setting
    if found := _FILE.fullmatch(reference):
        path, name = Path(found["path"]).expanduser().absolute(), found["name"]
        if not path.is_file():
            raise ConfigError(f"{setting}: there is no file {path}; write {FORM}, a path as seen from this folder")
    else:
        point = None if is_reference(reference) else _entry_point(kind, reference)
        module, _, attribute = (point.value if point else reference).partition(":")
        path, name = _file_of(module, setting), attribute.strip().split(".")[0]
    try:
        names = set(_top_level(ast.parse(path.read_bytes(), str(path)).body))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{setting}: {path}{line} is not Python: {_said(error)}; mend it") from None
    if name not in names:
        there = ", ".join(sorted(each for each in names if not each.startswith("_"))) or "nothing"
        raise ConfigError(f"{setting}: {path} defines no {name} at its top level; it has {there}")
    return path


def _file_of(module: str, setting: str) -> Path:
    """Found as an import would, but without the import of the packages around it."""
    spec, inside, part = None, None, ""
    for word in module.split("."):
        part = f"{part}.{word}".lstrip(".")
        found = (finder.find_spec(part, inside) for finder in sys.meta_path)
        spec = next((each for each in found if each is not None), None)
        if spec is None:
            raise ConfigError(f"{setting}: no module {part} is installed here; install its package, or write {FORM}")
        inside = spec.submodule_search_locations or []
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise ConfigError(f"{setting}: {module} is no module of Python source; name the file or module that defines it")
    assert spec.origin
    return Path(spec.origin)


def _top_level(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            case ast.If() | ast.Try() | ast.With():
                yield from _top_level([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)])


def _group(kind: KindName) -> str:
    return f"labkit.{kind}s"


def _entry_point(kind: KindName, name: str) -> EntryPoint:
    for point in entry_points(group=_group(kind), name=name):
        return point
    raise ConfigError(f"{KINDS[kind].setting}: no installed package has {name!r} in {_group(kind)}; write {FORM}")


# ---- executed

_modules: dict[Path, ModuleType] = {}


def forget() -> None:
    """Files are read anew when they are loaded next: for notebooks, where they change between two looks at a batch."""
    _modules.clear()


def load(kind: KindName, reference: str) -> Any:
    """The object itself. A file is executed once in a process, so that one that is edited meanwhile changes nothing."""
    path = check(kind, reference)
    try:
        if found := _FILE.fullmatch(reference):
            value = getattr(_modules.get(path) or _executed(path), found["name"])
        elif is_reference(reference):
            module, _, name = reference.partition(":")
            value = getattr(import_module(module), name)
        else:
            value = _entry_point(kind, reference).load()
    except Exception as error:
        raise ConfigError(f"{KINDS[kind].setting}: {short(reference)} can't be loaded: {_said(error)}") from error
    if not callable(value):
        what = f"is of type {type(value).__name__}; name a function or a class"
        raise ConfigError(f"{KINDS[kind].setting}: {short(reference)} {what}")
    return value


def _executed(path: Path) -> ModuleType:
    name = f"{_PREFIX}{path.stem}_{sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # the loader's cache goes by whole seconds
    _modules[path] = module
    return module


def _said(error: Exception) -> str:
    place = place_in(error)
    return f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"


def lacking(made: object, protocol: type) -> str:
    """The members of a protocol that an object doesn't have; "" if it has them all."""
    members = {*vars(protocol), *protocol.__annotations__}
    return ", ".join(sorted(name for name in members if name[0] != "_" and not hasattr(made, name)))


def place_in(error: BaseException) -> str:
    """The last line of a file of the user's that an error came through: "mine.py, line 12"; "" if there is none."""
    frames = [
        f"{Path(frame.f_code.co_filename).name}, line {line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith(_PREFIX)
    ]
    return frames[-1] if frames else ""
