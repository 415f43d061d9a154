"""The trainer that an Experiment asks for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.training.local import LocalTrainer
from labkit.training.trainer import Trainer

if TYPE_CHECKING:
    from labkit.config import Experiment
    from labkit.models import Policy


def build_trainer(policy: "Policy", experiment: "Experiment", on_microstep: Callable[[], None]) -> Trainer:
    """Raises ValueError, with the way out, where it can't work."""
    if experiment.trainer == "te":
        if policy.config.moe is not None:
            raise ValueError("trainer: te takes dense models only here; set trainer to local for a mixture of experts")
        from labkit.training.te import TETrainer

        return TETrainer(policy, experiment, on_microstep)
    return LocalTrainer(policy, experiment, on_microstep)
