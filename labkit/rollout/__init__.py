"""Engines: what generates rollouts, in the precision the Recipe asks for."""

from labkit.rollout.engine import Engine, EngineState, Request
from labkit.rollout.local import LocalEngine
from labkit.rollout.refit import Delivery, RefitError, verify

__all__ = ["Delivery", "Engine", "EngineState", "LocalEngine", "RefitError", "Request", "verify"]
