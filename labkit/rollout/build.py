"""The engine that an Experiment asks for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.config.errors import ConfigError
from labkit.config.own import KINDS, lacking, load, short
from labkit.rollout.engine import Engine
from labkit.rollout.local import LocalEngine

if TYPE_CHECKING:
    from labkit.config import Experiment
    from labkit.models import Policy

EngineBuilder = Callable[["Policy", "Experiment", Callable[[], None]], Engine]


def build_engine(policy: "Policy", experiment: "Experiment", on_microstep: Callable[[], None]) -> Engine:
    """An engine without weights: `refit` brings them. Raises ValueError, with the way out, where it can't work."""
    if experiment.engine == "vllm":
        if policy.config.moe is not None:
            raise ValueError("engine: vllm takes dense models only here; set engine to local for a mixture of experts")
        from labkit.rollout.vllm import VLLMEngine

        return VLLMEngine(policy, experiment, on_microstep)
    if KINDS["engine"].owns(experiment.engine):
        return _own(policy, experiment, on_microstep)
    return LocalEngine(
        policy.config, experiment.recipe, policy.tokenizer.pad_id, on_microstep, experiment.device, experiment.lora
    )


def _own(policy: "Policy", experiment: "Experiment", on_microstep: Callable[[], None]) -> Engine:
    engine: Engine = load("engine", experiment.engine)(policy, experiment, on_microstep)
    if missing := lacking(engine, Engine):
        name = short(experiment.engine)
        raise ConfigError(f"engine: {name} lacks {missing}; labkit.rollout.Engine says what they do")
    return engine
