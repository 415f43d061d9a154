"""Engines: what generates rollouts, in the precision the Recipe asks for."""

from labkit.rollout.build import EngineBuilder, build_engine
from labkit.rollout.engine import Engine, EngineState, Overlapping, Pending, Request
from labkit.rollout.local import LocalEngine
from labkit.rollout.refit import Delivery, RefitError, verify

__all__ = [
    "Delivery",
    "Engine",
    "EngineBuilder",
    "EngineState",
    "LocalEngine",
    "Overlapping",
    "Pending",
    "RefitError",
    "Request",
    "build_engine",
    "verify",
]
