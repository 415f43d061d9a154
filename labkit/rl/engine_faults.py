"""Faults in how the engine holds what arrived: weights without their scale or with an old one, a quantiser that
divides by zero, FP8 that was never installed, a cache that outlives a refit, keys beyond the format's range.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from labkit.fp8 import KVScales, LinearFormat
from labkit.fp8.linear import Float8Linear
from labkit.fp8.quantization import Quantized, quantize, to_tiles
from labkit.models.policy import Policy
from labkit.rl.fault import Fault
from labkit.rollout import LocalEngine
from labkit.rollout.kv_cache import KVCache

LARGE_K = 2.0**8


class UnitScaleLargeK(Fault):
    """Scores are unchanged, (2^n k) (2^-n q) = k q, and powers of two cost no bit: the function stays the same."""

    name = "unit-scale-large-k"
    detail = f"keys {LARGE_K:g} times as large and queries as much smaller, as in models without QK-norm"

    def policy(self, policy: Policy) -> Policy:
        part = "norm" if policy.config.qk_norm else "proj"
        gains = {f".k_{part}.": LARGE_K, f".q_{part}.": 1 / LARGE_K}
        weights = {
            name: tensor * next((gain for key, gain in gains.items() if key in name), 1.0)
            for name, tensor in policy.weights.items()
        }
        return replace(policy, weights=weights)


class StalePrefixCache(Fault):
    name = "stale-prefix-cache"
    detail = "the keys and values of prompts come from the first weights: no refit flushes them"

    def engine(self, engine: LocalEngine) -> LocalEngine:
        stale = _StalePrefixEngine(
            engine.config, engine.recipe, engine.pad_id, engine.on_microstep, lora=engine.lora
        )  # fmt: skip
        stale.model = engine.model  # as other faults may have left it
        return stale


class _StalePrefixEngine(LocalEngine):
    """All but the last token of a prompt are looked up in a cache, filled by an engine that is refitted only once."""

    first: LocalEngine | None = None

    def refit(self, weights: Mapping[str, Tensor], kv_scales: KVScales | None, version: int) -> None:
        if self.first is None:
            self.first = LocalEngine(self.config, self.recipe, self.pad_id, lora=self.lora)
            self.first.model = copy.deepcopy(self.model)
            self.first.refit(weights, kv_scales, version)
        super().refit(weights, kv_scales, version)

    def _prefill(self, tokens_NP: Tensor, starts_N: Tensor, num_columns: int) -> tuple[KVCache, Tensor]:
        assert self.first is not None
        cache, _ = self.first._prefill(tokens_NP[:, :-1], starts_N, num_columns)
        cache.precision = self.kv_precision
        return cache, self._decode(tokens_NP[:, -1], cache)


class FP8NotInstalled(Fault):
    name = "fp8-not-installed"
    detail = "the engine's linears silently stay in BF16"
    unverified = True

    def engine(self, engine: LocalEngine) -> LocalEngine:
        for linear in _fp8_linears(engine):
            linear.precision = LinearFormat.off()
        return engine


def _fp8_linears(engine: LocalEngine, which: str = "") -> Iterator[Float8Linear]:
    for _, name, linear in engine.model.linears():
        if linear.precision.fprop and which in name:
            yield linear


@dataclass(frozen=True)
class _Altered(LinearFormat):
    """A format whose quantised weight is tampered with before it is multiplied."""

    tamper: Callable[[Quantized, Tensor], Quantized] = field(default=lambda quantized, weight: quantized)

    @classmethod
    def of(cls, fmt: LinearFormat, tamper: Callable[[Quantized, Tensor], Quantized]) -> "_Altered":
        return cls(**vars(fmt), tamper=tamper)

    def weight_operand(self, weight: Tensor) -> Tensor:
        tile = self.tiles(1, weight.shape[1], weight.shape[0]).w
        quantized = quantize(weight.detach(), self.fmt, tile, self.scale, self.formula)
        dtype = weight.dtype if self.scale == "pow2" else torch.float32
        return self.tamper(quantized, weight).dequantize(dtype)


class IdentityScale(Fault):
    name = "identity-scale"
    detail = "one down_proj multiplies with its FP8 codes as if their scale were 1"
    unverified = True

    def engine(self, engine: LocalEngine) -> LocalEngine:
        linear = next(_fp8_linears(engine, "down_proj"))
        linear.precision = _Altered.of(linear.precision, self._without_scale)
        return engine

    @staticmethod
    def _without_scale(quantized: Quantized, weight: Tensor) -> Quantized:
        return replace(quantized, scales=torch.ones_like(quantized.scales))


class WeightScalesStale(Fault):
    name = "weight-scales-stale"
    detail = "new FP8 weights are used with the scales of the first load"
    unverified = True

    def engine(self, engine: LocalEngine) -> LocalEngine:
        for linear in _fp8_linears(engine):
            linear.precision = _Altered.of(linear.precision, _FirstScales())
        return engine


class _FirstScales:
    def __init__(self) -> None:
        self.first: Tensor | None = None

    def __call__(self, quantized: Quantized, weight: Tensor) -> Quantized:
        if self.first is None:
            self.first = quantized.scales
        return replace(quantized, scales=self.first)


class ZeroBlock(Fault):
    name = "zero-block"
    detail = "a block of zeros in one up_proj, and a quantiser that divides by its amax"
    unverified = True

    def policy(self, policy: Policy) -> Policy:
        name = f"model.layers.{policy.config.num_layers // 2}.mlp.up_proj.weight"
        pruned = policy.weights[name].clone()
        pruned[:128, :128] = 0.0
        return replace(policy, weights={**policy.weights, name: pruned})

    def engine(self, engine: LocalEngine) -> LocalEngine:
        for linear in _fp8_linears(engine):
            linear.precision = _Altered.of(linear.precision, self._unguarded)
        return engine

    @staticmethod
    def _unguarded(quantized: Quantized, weight: Tensor) -> Quantized:
        amax = to_tiles(weight, quantized.tile).abs().amax(dim=(1, 3))
        return replace(quantized, scales=quantized.scales.where(amax > 0, torch.nan))
