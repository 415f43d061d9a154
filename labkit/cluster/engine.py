"""RemoteEngine: the Engine protocol over a rollout actor. It returns what an engine in this process would return.

    random numbers    the generator's state goes with a call and comes back with the rollouts
    weights           put into the object store once per refit, and kept there until the next one
    the engine's word state, active, saturation and codes_changed come with every reply, read from the engine then
    waiting           calls on_microstep; what that raises ends the call on the other side too

An actor that is lost is replaced: a new engine is built, takes the last weights and scales, and the call is made
again with the same random numbers, so nothing but an event tells of it.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from labkit.cluster.actors import Actor, Call, Lost, put
from labkit.cluster.rollout import Reply, Report
from labkit.cluster.wire import pack, unpack
from labkit.config import Experiment, Sampling
from labkit.fp8 import KVScales
from labkit.models.lora import only_adapters
from labkit.models.rollouts import Rollouts
from labkit.rollout import EngineState, Request
from labkit.runs.record import Active

_POLL = 0.02  # seconds between two looks at what clients ask for
_PATIENCE = 30.0  # seconds that an aborted call may take to come back
_NUMBERS = itertools.count()  # of calls, over all engines: an abort must never meet another call


class Host(Protocol):
    """Where the rollout actor comes from. An engine that is built in it takes the place of the one before."""

    def actor(self) -> Actor:
        """The actor, started if there is none."""

    def replace(self, why: str) -> None:
        """The actor was lost, another is wanted. Raises when that was once too often."""

    def built(self, pid: int, host: str) -> None:
        """An engine was built, in that process."""


@dataclass(frozen=True)
class _Begun:
    """A call, with what it takes to make it again."""

    number: int
    method: str
    args: tuple[Any, ...]
    actor: Actor
    call: Call

    def abandon(self) -> None:
        """End it on the other side, so that the actor can take the next call."""
        self.actor.control("abort", self.number)
        if not self.call.done(_PATIENCE):
            self.actor.end()


class RemoteEngine:
    def __init__(self, host: Host, experiment: Experiment, on_microstep: Callable[[], None]) -> None:
        self._host, self._experiment, self._on_microstep = host, experiment, on_microstep
        self._delivered: list[tuple[Any, KVScales | None, int]] = []  # what a new actor needs, in this order
        self._device = torch.device("cpu")  # of the trainer's weights
        self._report: Report | None = None
        self._host.built(*self._call("build", experiment))

    # ---- calls

    def _call(self, method: str, *args: Any) -> Any:
        return self._finish(self._begin(method, *args)).value

    def _begin(self, method: str, *args: Any) -> _Begun:
        number, actor = next(_NUMBERS), self._host.actor()
        return _Begun(number, method, args, actor, actor.call("call", number, method, *args))

    def _finish(self, begun: _Begun) -> Reply:
        """Its reply, from the actor that it was made to or from a later one."""
        while True:
            try:
                reply = self._reply(begun)
            except Lost as lost:
                self._replace(str(lost))
                begun = self._begin(begun.method, *begun.args)
            else:
                self._take(begun.method, reply.report)
                return reply

    def _take(self, method: str, report: Report) -> None:
        """An engine that took another's place has not seen what happened to that one: its word counts from then on."""
        self._report = report
        if method in ("build", "generate"):
            self.saturation = report.saturation
        if method in ("build", "refit"):
            self.codes_changed = report.codes_changed

    def _reply(self, begun: _Begun) -> Reply:
        try:
            while not begun.call.done(_POLL):
                self._on_microstep()
        except BaseException:
            begun.abandon()
            raise
        return begun.call.result()

    def _replace(self, why: str) -> None:
        """Another actor with an engine like the one that was lost. What that one said last is still what holds."""
        while True:
            self._host.replace(why)
            try:
                self._host.built(*self._reply(self._begin("build", self._experiment)).value)
                for delivery in self._delivered:
                    self._reply(self._begin("refit", *delivery))
                if measured := self._measured():
                    self._reply(self._begin("keep_scales", measured))
                return
            except Lost as lost:
                why = str(lost)

    def _measured(self) -> KVScales | None:
        """Scales that the lost engine measured itself, on prompts that are gone."""
        own = self._experiment.recipe.recalibration.policy == "engine"
        return self._report.state.kv_scales if own and self._report else None

    # ---- sampling

    def generate(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> Rollouts:
        return self.begin(prompts, request, generator).result()[0]

    def begin(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> "_Generation":
        state, device = generator.get_state(), str(generator.device)
        return _Generation(self, self._begin("generate", prompts, request, state, device), generator)

    def score(self, rollouts: Rollouts, sampling: Sampling) -> Tensor:
        return self._call("score", rollouts, sampling)

    # ---- weights and scales

    def refit(self, weights: Mapping[str, Tensor], kv_scales: KVScales | None, version: int) -> None:
        delivery = (put(pack(weights)), kv_scales, version)
        self._device = next(iter(weights.values())).device
        self._call("refit", *delivery)  # lost on the way, the next actor takes the delivery before first
        self._delivered = [*self._delivered[:1], delivery] if only_adapters(weights) else [delivery]

    def keep_scales(self, measured: KVScales) -> None:
        self._call("keep_scales", measured)

    def read_back(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in unpack(self._call("read_back")).items():
            yield name, tensor.to(self._device)  # where it is compared

    # ---- what it says about itself

    @property
    def _said(self) -> Report:
        assert self._report, "an engine that was built has reported"
        return self._report

    def state(self) -> EngineState:
        return self._said.state

    def active(self) -> dict[str, Active]:
        return self._said.active

    def close(self) -> None:
        """The next engine takes its place in the actor, which ends with the run."""


class _Generation:
    """`labkit.rollout.Pending`: what the engine says about itself is from before, until the result is taken."""

    def __init__(self, engine: RemoteEngine, begun: _Begun, generator: torch.Generator) -> None:
        self._engine, self._begun, self._generator = engine, begun, generator

    def result(self) -> tuple[Rollouts, float]:
        reply = self._engine._finish(self._begun)
        rollouts, state = reply.value
        self._generator.set_state(state)
        return rollouts, reply.seconds

    def drop(self) -> None:
        self._begun.abandon()
