"""The faults a run can be given by name, each as small as the bug it stands for. `labkit.config.faults` tells where
each was reported, what to look at and what it does here.

    where              what goes wrong there
    what is sampled    the engine's and the trainer's idea of the distribution: temperature, top-p
    what is reported   log-probs of another temperature, of another token, NaN, or none at all
    what arrives       weights or scales that a refit loses or that are out of date
    how it is held     quantised weights without their scale, or with an old one; caches that outlive a refit

A fault that the read-back after a refit would catch is `unverified`: with it on, the loop skips that proof. A fault
changes its run alone, and only the rollout and the trainer of that run: held-out accuracy is measured without any.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.config import Sampling
from labkit.fp8 import AmaxObserver, KVScales
from labkit.models.attention import ObservedAttention, PaddedAttention
from labkit.models.decoder import Decoder
from labkit.models.lora import attach
from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.rl.engine_faults import (
    FP8NotInstalled,
    IdentityScale,
    StalePrefixCache,
    UnitScaleLargeK,
    WeightScalesStale,
    ZeroBlock,
)
from labkit.rl.fault import Fault
from labkit.rollout import Delivery, Engine, LocalEngine, Request
from labkit.runs.record import Active

if TYPE_CHECKING:
    from labkit.config import Experiment

COLDER = 0.6  # of the temperature
DUMMY_TOKENS = 32
EVERY_NAN = 50

# ---- what is sampled


class WrongTemperature(Fault):
    name = "wrong-temperature"
    detail = "samples at 0.6 of the temperature, reports log-probs at the temperature itself"

    def request(self, request: Request) -> Request:
        self.claimed = request.sampling
        colder = {"temperature": COLDER * request.sampling.temperature}
        return replace(request, sampling=request.sampling.override(colder))

    def rollouts(self, rollouts: Rollouts, engine: Engine) -> Rollouts:
        return replace(rollouts, logprobs_BR=engine.score(rollouts, self.claimed))


class TemperatureForgotten(Fault):
    name = "temperature-forgotten"
    detail = "the trainer scores at temperature 1"

    def trainer(self, experiment: "Experiment") -> "Experiment":
        return experiment.override({"sampling.temperature": 1.0, "faults": ()})


class TopPUnnormalised(Fault):
    name = "top-p-unnormalised"
    detail = "the trainer scores over the whole vocabulary, the sampler over top-p and top-k"

    def trainer(self, experiment: "Experiment") -> "Experiment":
        return experiment.override({"sampling.top_p": 1.0, "sampling.top_k": 0, "faults": ()})


# ---- what is reported


class RawLogprobs(Fault):
    name = "raw-logprobs"
    detail = "reports the log-probs of the raw logits, before temperature, top-p and top-k"

    def rollouts(self, rollouts: Rollouts, engine: Engine) -> Rollouts:
        return replace(rollouts, logprobs_BR=engine.score(rollouts, Sampling()))


class LogprobsDivided(Fault):
    name = "logprobs-divided"
    detail = "divides the log-probs by the temperature, instead of the logits"

    def request(self, request: Request) -> Request:
        self.temperature = request.sampling.temperature
        return request

    def rollouts(self, rollouts: Rollouts, engine: Engine) -> Rollouts:
        return replace(rollouts, logprobs_BR=engine.score(rollouts, Sampling()) / self.temperature)


class LogprobsShifted(Fault):
    name = "logprobs-shifted"
    detail = "each token carries the log-prob of the one before it"

    def rollouts(self, rollouts: Rollouts, engine: Engine) -> Rollouts:
        g_BR = rollouts.logprobs_BR
        shifted_BR = torch.cat([g_BR[:, :1], g_BR[:, :-1]], dim=1)
        return replace(rollouts, logprobs_BR=torch.where(rollouts.mask_BR, shifted_BR, 0.0))


class NaNLogprobs(Fault):
    name = "nan-logprobs"
    detail = f"reports NaN for one token in {EVERY_NAN}"

    def rollouts(self, rollouts: Rollouts, engine: Engine) -> Rollouts:
        place_BR = torch.arange(rollouts.logprobs_BR.numel()).view(rollouts.logprobs_BR.shape)
        broken_BR = rollouts.mask_BR & (place_BR % EVERY_NAN == 0)
        return replace(rollouts, logprobs_BR=rollouts.logprobs_BR.masked_fill(broken_BR, torch.nan))


class LogprobsMissing(Fault):
    name = "logprobs-missing"
    detail = "reports no log-probs, so the trainer's own stand in for them"

    def logprobs(self, rollouts: Rollouts, p_BR: Tensor) -> Rollouts:
        return replace(rollouts, logprobs_BR=p_BR)


# ---- what arrives with a refit


class ScalesDropped(Fault):
    name = "scales-dropped"
    detail = "calibrated Q/K/V scales never arrive; the engine uses 1.0"
    unverified = True

    def delivery(self, sent: Delivery) -> Delivery:
        scales = sent.scales
        assert scales is not None
        return replace(sent, scales=KVScales.unit(len(scales.k), scales.version))


class ScalesStaleGrowth(Fault):
    name = "scales-stale-growth"
    detail = "Q/K/V scales half of what they must be, as if every amax had doubled since they were measured"
    unverified = True

    def delivery(self, sent: Delivery) -> Delivery:
        scales = sent.scales
        assert scales is not None
        q, k, v = (tuple(scale / 2 for scale in side) for side in (scales.q, scales.k, scales.v))
        return replace(sent, scales=KVScales(scales.version, q, k, v))


class ScalesFromDummy(Fault):
    name = "scales-from-dummy"
    detail = f"Q/K/V scales measured on {DUMMY_TOKENS} copies of token 0 instead of real rollouts"
    unverified = True

    def engine(self, engine: LocalEngine) -> LocalEngine:
        self.scratch = attach(Decoder(engine.config), engine.lora).requires_grad_(False)
        self.recipe = engine.recipe
        return engine

    def delivery(self, sent: Delivery) -> Delivery:
        assert sent.scales is not None
        self.scratch.load_weights(dict(sent.weights))
        observer = AmaxObserver()
        attention = PaddedAttention(torch.zeros(1, dtype=torch.int64), DUMMY_TOKENS)
        tokens_1T = torch.zeros(1, DUMMY_TOKENS, dtype=torch.int64)
        self.scratch(tokens_1T, torch.arange(DUMMY_TOKENS)[None], ObservedAttention(attention, observer))
        observer.end_microbatch()
        margin = self.recipe.recalibration.margin
        scales = observer.scales(sent.scales.version, self.recipe.scaling.kv_format, margin=margin)
        return replace(sent, scales=scales)


class LayerNotRefitted(Fault):
    name = "layer-not-refitted"
    detail = "the first layer keeps its first weights for ever"
    unverified = True

    def __init__(self) -> None:
        self.first: dict[str, Tensor] = {}

    def delivery(self, sent: Delivery) -> Delivery:
        if not self.first:
            layer = {name: tensor for name, tensor in sent.weights.items() if name.startswith("model.layers.0.")}
            self.first = {name: tensor.clone() for name, tensor in layer.items()}
        return replace(sent, weights={**sent.weights, **self.first})


class OneVersionBehind(Fault):
    name = "one-version-behind"
    detail = "every second refit is skipped, and reported as done"
    unverified = True

    def __init__(self) -> None:
        self.held: Delivery | None = None

    def delivery(self, sent: Delivery) -> Delivery:
        if self.held is None or sent.version % 2 == 0 or self.held.version < sent.version - 1:  # the last: a restart
            copies = {name: tensor.clone() for name, tensor in sent.weights.items()}
            self.held = replace(sent, weights=copies)
        return replace(self.held, version=sent.version)


class ScaleTypeMismatch(Fault):
    name = "scale-type-mismatch"
    detail = "the trainer quantises with power-of-2 scales, the engine with FP32 ones"

    def trainer(self, experiment: "Experiment") -> "Experiment":
        return experiment.override({"recipe.scaling.scale": "pow2", "faults": ()})


FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        WrongTemperature, TemperatureForgotten, TopPUnnormalised, RawLogprobs, LogprobsDivided, LogprobsShifted,
        NaNLogprobs, LogprobsMissing, ScalesDropped, ScalesStaleGrowth, ScalesFromDummy, LayerNotRefitted,
        OneVersionBehind, UnitScaleLargeK, StalePrefixCache, FP8NotInstalled, IdentityScale, WeightScalesStale,
        ZeroBlock, ScaleTypeMismatch,
    )
}  # fmt: skip


class Faults(Fault):
    """The faults of a run, one after the other at each hook."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.all = [FAULTS[name]() for name in names]

    @property
    def verified(self) -> bool:
        return not any(fault.unverified for fault in self.all)

    def active(self) -> dict[str, Active]:
        return {f"fault.{fault.name}": Active(state="fault", detail=fault.detail) for fault in self.all}

    def events(self) -> list[str]:
        return [f"fault on purpose: {fault.name}, {fault.detail}" for fault in self.all]

    def policy(self, policy: Policy) -> Policy:
        for fault in self.all:
            policy = fault.policy(policy)
        return policy

    def request(self, request: Request) -> Request:
        for fault in self.all:
            request = fault.request(request)
        return request

    def trainer(self, experiment: "Experiment") -> "Experiment":
        for fault in self.all:
            experiment = fault.trainer(experiment)
        return experiment

    def engine(self, engine: LocalEngine) -> LocalEngine:
        for fault in self.all:
            engine = fault.engine(engine)
        return engine

    def delivery(self, sent: Delivery) -> Delivery:
        for fault in self.all:
            sent = fault.delivery(sent)
        return sent

    def rollouts(self, rollouts: Rollouts, engine: Engine) -> Rollouts:
        for fault in self.all:
            rollouts = fault.rollouts(rollouts, engine)
        return rollouts

    def logprobs(self, rollouts: Rollouts, p_BR: Tensor) -> Rollouts:
        for fault in self.all:
            rollouts = fault.logprobs(rollouts, p_BR)
        return rollouts
