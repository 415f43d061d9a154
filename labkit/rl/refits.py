"""Refits: weights and scales on their way from the trainer to the engine, and the proof that they arrived.

    staleness 0    what the trainer sends arrives at once
    staleness s    what arrives was sent s steps earlier, as in asynchronous training; the rest is in flight

Every arrival is read back from the engine and compared (`labkit.rollout.refit`), unless a fault of the run breaks
refits on purpose.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from labkit.config import Recipe
from labkit.fp8 import KVScales
from labkit.models.lora import adapters
from labkit.rl.faults import Faults
from labkit.rl.measure import Stopwatch
from labkit.rollout import Delivery, Engine, verify

NOTHING_IN_FLIGHT: dict[str, Any] = {"in_flight": [], "codes_changed": None, "measured": None}


class Refits:
    def __init__(self, engine: Engine, recipe: Recipe, faults: Faults, staleness: int) -> None:
        self.engine, self.recipe, self.faults, self.staleness = engine, recipe, faults, staleness
        self.in_flight: list[Delivery] = []  # the first of them is in the engine
        self.arrived: Delivery | None = None  # what the engine took last
        self.codes_changed: float | None = None  # share of FP8 weight values that the last arrival changed, if any

    def send(self, weights: Mapping[str, Tensor], scales: KVScales | None, version: int, watch: Stopwatch) -> None:
        """New weights set out; those sent `staleness` steps earlier arrive."""
        if self.staleness:  # the trainer goes on changing its own
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.in_flight.append(Delivery(weights, scales, version))
        self.in_flight = self.in_flight[-1 - self.staleness :]
        if self.in_flight[0].version != self.engine.state().weight_version:
            self._arrive_anew(watch)

    def advance(self, watch: Stopwatch) -> None:
        """Have what the next step is sampled with arrive now, before this step's weights set out. Needs staleness."""
        if len(self.in_flight) > self.staleness:
            del self.in_flight[0]
            self._arrive_anew(watch)

    def switch(self, engine: Engine, recipe: Recipe, scales: KVScales | None) -> None:
        """The same weights go to another engine, with these scales."""
        self.replace(engine, recipe)
        self.in_flight = [dataclasses.replace(sent, scales=scales) for sent in self.in_flight]
        self._arrive(Stopwatch())

    def replace(self, engine: Engine, recipe: Recipe) -> None:
        """Another engine, which has no weights yet."""
        self.engine.close()
        self.engine, self.recipe = engine, recipe

    def _arrive_anew(self, watch: Stopwatch) -> None:
        self._arrive(watch)
        changed = self.engine.codes_changed  # NaN: the first weights, or no FP8 linears
        self.codes_changed = None if math.isnan(changed) else changed

    def _arrive(self, watch: Stopwatch) -> None:
        sent = self.in_flight[0]
        with watch("refit"):
            arriving = self.faults.delivery(sent)
            weights = arriving.weights
            if self.engine.state().weight_version >= 0:
                weights = adapters(weights) or weights  # a frozen base is sent once
            self.engine.refit(weights, arriving.scales, arriving.version)
            self.arrived = arriving
        with watch("verify"):
            if self.faults.verified:
                verify(self.engine, self.recipe, sent)

    def state_dict(self) -> dict[str, Any]:
        """Without staleness what is in the engine is what the trainer has, and need not be kept twice."""
        kept = self.in_flight if self.staleness else []
        in_flight = [
            {"weights": dict(sent.weights), "scales": scales_to_dict(sent.scales), "version": sent.version}
            for sent in kept
        ]
        measured = self.engine.state().kv_scales if self.recipe.recalibration.policy == "engine" else None
        return {"in_flight": in_flight, "codes_changed": self.codes_changed, "measured": scales_to_dict(measured)}

    def load_state_dict(self, state: dict[str, Any], latest: Delivery) -> None:
        """`latest`: what the trainer has."""
        kept = [
            Delivery(sent["weights"], scales_from_dict(sent["scales"]), sent["version"]) for sent in state["in_flight"]
        ]
        self.in_flight = kept or [latest]
        self._arrive(Stopwatch())
        if measured := scales_from_dict(state["measured"]):  # by the engine, on a batch that is gone
            self.engine.keep_scales(measured)
        self.codes_changed = state["codes_changed"]


def scales_to_dict(scales: KVScales | None) -> dict[str, Any] | None:
    return None if scales is None else dataclasses.asdict(scales)


def scales_from_dict(state: dict[str, Any] | None) -> KVScales | None:
    return None if state is None else KVScales(**state)
