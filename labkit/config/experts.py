"""Settings that need a mixture of experts, refused for a model that has none, each with the way out.

A model known by name is judged when the Experiment is written down, a folder when the run has read it.
"""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from labkit.config.errors import ConfigError, wrong

if TYPE_CHECKING:
    from labkit.config.experiment import Experiment

DENSE = ("tiny", "smollm2")
_OFF: dict[str, Any] = {"recipe.router.dtype": "bf16", "recipe.router.replay": "off", "grpo.aux_loss_coef": 0.0}


def check(experiment: "Experiment") -> None:
    """For a validator of Experiment."""
    if experiment.model in DENSE:
        for key, what in _needing(experiment).items():
            raise wrong(key, what)
    if experiment.recipe.router.replay == "r3" and experiment.engine != "local":
        what = f"the routes that {experiment.engine} takes don't come back with its rollouts"
        raise wrong("recipe.router.replay", f"{what}; choose r2 or off, or set engine to local")


def check_dense(experiment: "Experiment") -> None:
    """For a model that turned out to have no experts. Raises ConfigError."""
    if found := _needing(experiment):
        raise ConfigError(f"{key}: {what}" for key, what in found.items())


def _needing(experiment: "Experiment") -> dict[str, str]:
    values = {key: attrgetter(key)(experiment) for key in _OFF}
    return {
        key: f"{value} has nothing to act on: {experiment.model} has no experts; set it to {_OFF[key]}, "
        "or take a mixture of experts such as model tiny-moe"
        for key, value in values.items()
        if value != _OFF[key]
    }
