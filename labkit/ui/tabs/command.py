"""`labkit run PRESET KEY=VALUE...`: the command that carries out an Experiment, for a shell."""

import json
import shlex
from typing import Any

from labkit.config import ConfigError, Experiment
from labkit.config.overrides import parse_assignments
from labkit.config.presets import RECIPES, preset


def command(experiment: Experiment) -> str | None:
    """The shortest one over all presets, that of the recipe's own name first; None if only a YAML file can say it."""
    own = experiment.recipe.name.removesuffix("*")
    names = [own] if own in RECIPES else list(RECIPES)
    found = [words for name in names if (words := _words(name, experiment)) is not None]
    return shlex.join(min(found, key=lambda words: len(list(words)))) if found else None


def _words(name: str, experiment: Experiment) -> list[str] | None:
    """The words of the command; None where overrides of this preset don't lead to the experiment."""
    assignments = [f"model={experiment.model}"] if experiment.model != "tiny" else []
    try:
        # Changing a correction's name brings its own bounds, so what then still differs comes in a second round.
        start = preset(name, experiment.model)
        if start.recipe.correction.name != experiment.recipe.correction.name:
            assignments.append(f"recipe.correction.name={experiment.recipe.correction.name}")
            start = start.override({"recipe.correction.name": experiment.recipe.correction.name})
        changes = {key: _plain(theirs) for key, (_, theirs) in start.diff(experiment).items()}
        changes = _with_short_bounds(start, experiment, changes)
        if experiment.name != start.override(changes).name:
            changes["name"] = experiment.name
        assignments += [_assignment(key, value) for key, value in changes.items()]
        given = parse_assignments(assignments)
        made = preset(name, given.pop("model", "tiny"), **given)
    except (ConfigError, TypeError):
        return None
    return ["labkit", "run", name, *assignments] if not made.diff(experiment) else None


def _with_short_bounds(start: Experiment, experiment: Experiment, changes: dict[str, Any]) -> dict[str, Any]:
    """recipe.correction.high=3 rather than the whole list of filters, where only a bound of a named one differs."""
    before, after = start.recipe.correction.bounds, experiment.recipe.correction.bounds
    bounds = {f"recipe.correction.{key}": value for key, value in after.items() if value != before.get(key)}
    others = {key: value for key, value in changes.items() if not key.startswith("recipe.correction.")}
    short = others | bounds
    return short if bounds and not start.override(short).diff(experiment) else changes


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _assignment(key: str, value: Any) -> str:
    """The value as plain text where that reads back as the same, else as JSON, which YAML takes."""
    plain = f"{key}={value}"
    try:
        if isinstance(value, str) and parse_assignments([plain]) == {key: value}:
            return plain
    except ConfigError:
        pass
    return f"{key}={json.dumps(value)}"
