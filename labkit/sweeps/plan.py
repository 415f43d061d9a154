"""Plan: what a sweep asks. Arms crossed with seeds give cells, and every cell is a checked Experiment.

    question: Does importance sampling repair FP8 rollouts?
    preset: bf16                       # or experiment: a whole one
    experiment: {steps: 40}            # what the arms have in common
    arms:                              # or axes: {grpo.lr: [1e-4, 2e-4], preset: [bf16, fp8-rollout]}
      bf16: {}
      rollout: {preset: fp8-rollout}
      repaired: {preset: fp8-rollout, recipe.correction: tis}
    seeds: 3                           # 0, 1, 2; or a list
    baseline: bf16                     # the arm that the others are held against; the first if not given
    effect: 0.02                       # the smallest difference in accuracy that would matter

`preset` in an arm or an axis sets the recipe; every other key is a dotted setting. Arms named here and axes may be
given together and are crossed then.

A cell's result must not depend on what runs beside it: `threads`, which decides in what order sums are taken, is fixed
in the Experiment (1 where it isn't given), never taken from the machine. Cells write checkpoints on the way
(every 20 steps where nothing is given), so that an interrupted sweep loses little.

Raises ConfigError, before anything is started, for unknown settings, arms that are the same experiment, a baseline that
isn't an arm, and for whatever an Experiment refuses.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from labkit.config import ConfigError, Experiment, preset, yaml_io
from labkit.config.errors import did_you_mean, wrong
from labkit.config.presets import recipe
from labkit.config.settings import Float, Int, Name, Settings, nest
from labkit.config.words import said

CHECKPOINT_EVERY = 20
_OWN = {"seed": "seeds", "name": "the arm's name"}  # settings that a sweep gives its cells itself


@dataclass(frozen=True)
class Cell:
    """One arm with one seed. `id` is its folder."""

    id: str
    arm: str
    seed: int
    experiment: Experiment


def _seeds(value: Any) -> Any:
    """A number of seeds stands for the first so many."""
    return list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value


class Plan(Settings):
    name: Name = ""
    question: Name = ""
    experiment: Experiment
    axes: dict[str, tuple[Any, ...]] = Field(default={})
    arms: dict[str, dict[str, Any]] = Field(default={})
    seeds: Annotated[tuple[Int, ...], BeforeValidator(_seeds)] = (0, 1, 2)
    baseline: Name = ""
    effect: Float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.seeds:
            raise wrong("seeds", "none is given; give a number or a list of them")
        if len(set(self.seeds)) < len(self.seeds):
            raise wrong("seeds", f"{_twice(self.seeds)} is given twice; each seed counts once")
        for key, values in self.axes.items():
            if not values:
                raise wrong(f"axes.{key}", "has no values; give a list of them, or drop it")
        experiments = self.experiments()
        _refuse_twins(experiments)
        if not self.baseline:
            object.__setattr__(self, "baseline", next(iter(experiments)))
        if self.baseline not in experiments:
            raise wrong("baseline", f"no arm {self.baseline!r}; {did_you_mean(self.baseline, experiments)}")
        self.cells()
        if not self.name:
            object.__setattr__(self, "name", f"sweep-{content(*experiments.values())[:8]}")
        return self

    @classmethod
    def from_file(cls, path: str | Path) -> "Plan":
        """A plan as people write it; its name is the file's, where it has none of its own."""
        data = yaml_io.load(Path(path))
        start, model = data.pop("preset", None), data.pop("model", "tiny")
        settings = data.pop("experiment", None) or {}
        if not isinstance(settings, dict):
            raise ConfigError(f"experiment: must be settings such as {{steps: 40}}, got {settings!r}")
        if not start and not settings:
            raise ConfigError("experiment: give a preset or an experiment to start from")
        try:
            base = preset(start, model).override(settings) if start else Experiment(**nest(settings))
        except ConfigError as error:
            raise error.under("experiment") from None
        arms = data.get("arms")
        if isinstance(arms, dict):  # `bf16:` with nothing behind it changes nothing
            data["arms"] = {arm: changes or {} for arm, changes in arms.items()}
        stem = Path(path).resolve().parent.name if Path(path).stem == "sweep" else Path(path).stem
        return cls(**{"name": stem, **data}, experiment=base)

    def experiments(self) -> dict[str, Experiment]:
        """arm -> its Experiment, with the seed still to be set."""
        base = self.experiment.override(
            {"threads": self.experiment.threads or 1,
             "checkpoint_every": self.experiment.checkpoint_every or CHECKPOINT_EVERY, "name": "cell"}
        )  # fmt: skip
        found: dict[str, Experiment] = {}
        for arm, where, changes in self._arms():
            if arm in found:
                raise wrong("arms" if self.arms else "axes", f"{arm} is there twice; drop one of them")
            try:
                found[arm] = changed(base, changes)
            except ConfigError as error:
                raise wrong(where, "; ".join(error.problems)) from None
        return found

    def cells(self) -> tuple[Cell, ...]:
        """All cells, seed by seed, so that whatever is there after an interruption can be compared in pairs."""
        experiments = self.experiments()
        cells = [
            Cell(cell_id, arm, seed, experiment.override({"seed": seed, "name": cell_id}))
            for seed in self.seeds
            for arm, experiment in experiments.items()
            if (cell_id := f"{slug(arm)}-s{seed}")
        ]
        if len({cell.id for cell in cells}) < len(cells):
            clash = _twice([cell.id for cell in cells])
            raise wrong("arms", f"two of them would share the folder {clash}; give them names that differ in letters")
        return tuple(cells)

    def _arms(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(name, where it was written, changes) of every arm."""
        keys, shorts = list(self.axes), _short_names(list(self.axes))
        for arm, changes in (self.arms or {"": {}}).items():
            for values in itertools.product(*self.axes.values()):
                given = dict(zip(keys, values, strict=True))
                words = [arm] if arm else []
                words += [f"{shorts[key]}={_value(value)}" if shorts[key] else str(value)
                          for key, value in given.items()]  # fmt: skip
                where = f"arms.{arm}" if self.arms else f"axes, {' '.join(words)}"
                if both := given.keys() & changes.keys():
                    raise wrong(f"arms.{arm}.{min(both)}", "is an axis as well; keep one of the two")
                yield " ".join(words) or self.experiment.recipe.name, where, {**changes, **given}


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """An experiment with an arm's changes: `preset` first, then what the arm changes of it."""
    for key, instead in _OWN.items():
        if key in changes:
            raise ConfigError(f"{key}: is set by the sweep itself; use {instead}")
    start = changes.get("preset")
    if start is not None:
        experiment = experiment.override({"recipe": recipe(str(start))})
    return experiment.override({key: value for key, value in changes.items() if key != "preset"})


def content(*experiments: Experiment) -> str:
    """A hash of all that can change results: names left out, so that arms of several sweeps can share a cell.

    Defaults are left out too: a setting that a later labkit adds must not give cells that are done another name.
    """
    named = [each.override({"name": "any", "recipe.name": "any"}) for each in experiments]
    said_by = [each.model_dump(mode="json", exclude_defaults=True) for each in named]
    return hashlib.sha256(json.dumps(said_by, sort_keys=True).encode()).hexdigest()


def slug(text: str) -> str:
    """As the name of a folder."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:60] or "cell"


def _refuse_twins(experiments: Mapping[str, Experiment]) -> None:
    known: dict[str, str] = {}
    for arm, experiment in experiments.items():
        twin = known.setdefault(content(experiment), arm)
        if twin != arm:
            raise wrong("arms", f"{twin} and {arm} are the same experiment; drop one of them")


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of a dotted setting where that tells them apart; a preset speaks for itself."""
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
    return short | ({"preset": ""} if "preset" in short else {})


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else said(value)


def _twice(values: Sequence[Any]) -> Any:
    return next(value for value in values if values.count(value) > 1)
