"""Fault: something broken on purpose, at the places of a run where real systems broke in silence.

A Fault changes nothing until it overrides a hook. The loop calls every hook at its place, in the order of the
Experiment's list of faults; without faults that list is empty. The faults themselves are in `labkit.rl.faults`.
"""

from typing import TYPE_CHECKING

from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.rollout.refit import Delivery

if TYPE_CHECKING:
    from torch import Tensor

    from labkit.config import Experiment
    from labkit.rollout import Engine, LocalEngine, Request


class Fault:
    """One fault of one run; hooks in the order of the run."""

    name = ""
    detail = ""  # what it does, for the record
    unverified = False  # it breaks the refit, so the refit can't be proved

    def policy(self, policy: Policy) -> Policy:
        """The policy as loaded."""
        return policy

    def request(self, request: "Request") -> "Request":
        """What the engine is asked to sample."""
        return request

    def trainer(self, experiment: "Experiment") -> "Experiment":
        """What the trainer takes its settings from."""
        return experiment

    def engine(self, engine: "LocalEngine") -> "LocalEngine":
        """The rollout engine as built, before its first refit."""
        return engine

    def delivery(self, sent: Delivery) -> Delivery:
        """What of a refit arrives at the engine."""
        return sent

    def rollouts(self, rollouts: Rollouts, engine: "Engine") -> Rollouts:
        """What the engine says that it sampled."""
        return rollouts

    def logprobs(self, rollouts: Rollouts, p_BR: "Tensor") -> Rollouts:
        """The rollouts as the loss sees them, once the trainer's p is known."""
        return rollouts
