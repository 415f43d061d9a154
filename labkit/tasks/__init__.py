"""Tasks by name: arithmetic, sums, gsm8k, reasoning-gym:NAME, dataset:PATH_OR_HUB_NAME, or one of the user's own.

Each has an options class, a small group of settings; unknown options are refused with a suggestion. The options of a
task of the user's (labkit.config.own) are what its class or function takes.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from labkit.config.errors import ConfigError, did_you_mean
from labkit.config.experiment import TASK_FORMS
from labkit.config.own import KINDS, installed, is_reference, lacking, load, short
from labkit.tasks.arithmetic import Arithmetic, ArithmeticOptions
from labkit.tasks.dataset import DatasetOptions, DatasetTask
from labkit.tasks.gsm8k import GSM8K, GSM8KOptions
from labkit.tasks.reasoning_gym import ReasoningGym, ReasoningGymOptions
from labkit.tasks.sums import Sums, SumsOptions
from labkit.tasks.task import Problem, Task, TaskError, is_heldout

__all__ = [
    "Arithmetic",
    "DatasetTask",
    "Problem",
    "ReasoningGym",
    "Sums",
    "Task",
    "TaskError",
    "is_heldout",
    "load_task",
]


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Raises ConfigError for unknown names and options, TaskError for data that can't be used."""
    if KINDS["task"].owns(name) and (is_reference(name) or name in installed("task")):
        return _own(name, options or {})
    try:
        task = _make(name, options or {})
    except ConfigError as error:
        raise error.under("task_options") from None
    if task is None:
        raise ConfigError(f"task: no task {name!r}; {did_you_mean(name, TASK_FORMS.split(', '))}")
    return task


def _make(name: str, given: Mapping[str, Any]) -> Task | None:
    match name.partition(":"):
        case ("arithmetic", "", _):
            return Arithmetic(ArithmeticOptions(**given))
        case ("sums", "", _):
            return Sums(SumsOptions(**given))
        case ("gsm8k", "", _):
            return DatasetTask(GSM8K, GSM8KOptions(**given), name="gsm8k")
        case ("reasoning-gym", ":", dataset) if dataset:
            return ReasoningGym(dataset, ReasoningGymOptions(**given))
        case ("dataset", ":", source) if source:
            return DatasetTask(source, DatasetOptions(**given))
    return None


def _own(reference: str, given: Mapping[str, Any]) -> Task:
    make, name = load("task", reference), short(reference)
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        raise ConfigError(f"task_options: {error}; {name} takes {inspect.signature(make)}") from None
    task: Task = make(**given)
    if missing := lacking(task, Task):
        raise ConfigError(f"task: {name} lacks {missing}; labkit.tasks.Task says what they do")
    return task
