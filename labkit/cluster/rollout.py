"""The rollout actor's side: one engine, and a report of what it holds after every call.

Calls are numbered by the caller. `abort(n)` comes in beside a running call and makes the engine's own `on_microstep`
raise during call n, so a generation ends between two tokens, and the engine can go on with the next call.
"""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.cluster import surroundings
from labkit.config import Experiment, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from labkit.cluster.wire import Packed
    from labkit.fp8 import KVScales
    from labkit.models.rollouts import Rollouts
    from labkit.rollout import Engine, EngineState, Request
    from labkit.runs.record import Active


class Aborted(Exception):
    """The caller no longer wants what it asked for."""


@dataclass(frozen=True)
class Report:
    """What the engine says about itself."""

    state: "EngineState"
    saturation: dict[str, float]
    codes_changed: float
    active: "dict[str, Active]"


@dataclass(frozen=True)
class Reply:
    value: Any
    report: Report
    seconds: float


class RolloutActor:
    """No torch before `enter`: threads are settled there."""

    def __init__(self, log: Path, threads_asked: bool) -> None:
        surroundings.enter(log, threads_asked)
        self._built: Engine | None = None
        self._number = self._aborted = -1

    def abort(self, number: int) -> None:
        self._aborted = number

    def call(self, number: int, method: str, *args: Any) -> Reply:
        """One of the public methods below."""
        self._number = number
        start = time.perf_counter()
        value = getattr(self, method)(*args)
        seconds = time.perf_counter() - start
        engine = self._engine
        report = Report(engine.state(), dict(engine.saturation), engine.codes_changed, engine.active())
        return Reply(value, report, seconds)

    @property
    def _engine(self) -> "Engine":
        assert self._built, "build() comes first"
        return self._built

    def _poll(self) -> None:
        if self._aborted == self._number:
            raise Aborted

    def build(self, experiment: Experiment) -> tuple[int, str]:
        """An engine in the place of the one before, which gives its memory back first. Returns where that is."""
        from labkit import models
        from labkit.rollout import build_engine

        if self._built:
            self._built.close()
            self._built = None
        self._built = build_engine(models.load(experiment.model), experiment, self._poll)
        return os.getpid(), socket.gethostname()

    def generate(
        self, prompts: "Sequence[Sequence[int]]", request: "Request", random_state: "Tensor", device: str
    ) -> "tuple[Rollouts, Tensor]":
        import torch

        generator = torch.Generator(device)
        generator.set_state(random_state)
        rollouts = self._engine.generate(prompts, request, generator)
        return rollouts, generator.get_state()

    def score(self, rollouts: "Rollouts", sampling: Sampling) -> "Tensor":
        return self._engine.score(rollouts, sampling)

    def refit(self, weights: "Packed", kv_scales: "KVScales | None", version: int) -> None:
        from labkit.cluster.wire import unpack

        self._engine.refit(unpack(weights), kv_scales, version)

    def keep_scales(self, measured: "KVScales") -> None:
        self._engine.keep_scales(measured)

    def read_back(self) -> "Packed":
        """Every bit of it: whether they are the right ones is for the trainer's side to judge."""
        from labkit.cluster.wire import pack

        return pack(dict(self._engine.read_back()))
