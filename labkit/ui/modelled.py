"""The modelled throughput of runs: a line a run, for a GPU and a workload that have nothing to do with this machine.

It has a level for each recipe that the run had: how fast a step of it would be. What a fork did before it was one is
its parent's, and has no value.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from labkit.config import Experiment, Recipe
from labkit.hardware import DEVICES, Modelled, modelled
from labkit.ui.panels import Curve, Panel, title
from labkit.ui.series import Array, SwitchMark

METRIC = "modelled"


class Recipes(Protocol):
    """What is needed of a run."""

    @property
    def label(self) -> str: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def switches(self) -> Sequence[SwitchMark]: ...
    @property
    def parent(self) -> tuple[str, int] | None: ...


def choices() -> list[tuple[str, str]]:
    """(text, name) of the devices that hold the model in BF16."""
    found = []
    for name, device in DEVICES.items():
        try:
            modelled(Recipe(), device=name)
        except ValueError:
            continue
        found.append((f"modelled for {device.label}", name))
    return found


def panel(device: str) -> Panel:
    told = modelled(Recipe(), device=device)
    return Panel(title("Throughput", METRIC), told.label, (Curve(METRIC),), include=(0.0,))


def assumed(device: str) -> str:
    """What the modelled numbers are for, in a line."""
    told = modelled(Recipe(), device=device)
    return f"Throughput {told.label}: {told.inputs['shape']}, {told.inputs['workload']}"


def rates(run: Recipes, steps: Array, device: str) -> Array:
    """Tokens/s/GPU of the whole step, at each of `steps`."""
    result = np.full(len(steps), np.nan)
    for start, recipe in _recipes(run):
        result[steps >= start] = modelled(recipe, device=device).end_to_end
    return result


def now(run: Recipes, device: str) -> Modelled:
    """That of the recipe in force."""
    return modelled(_recipes(run)[-1][1], device=device)


def _recipes(run: Recipes) -> list[tuple[int, Recipe]]:
    """The recipes in order, with the first step of each."""
    start = run.parent[1] + 1 if run.parent else 0
    return [(start, run.experiment.recipe), *((s.step, s.recipe) for s in run.switches if s.step >= start)]
