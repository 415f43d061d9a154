"""Prove a refit: what the engine computes with afterwards is read back and compared with what was sent.

Silent refit failures are common and expensive: calibrated scales that never arrive and default to 1.0, experts that
load with an identity scale, weights one version behind. So after every refit, bit for bit,

* the weight version and the whole set of Q/K/V scales must equal what was sent;
* every BF16 weight must equal the trainer's BF16 copy, and so must a tied lm_head where the engine says what it
  multiplies with: some engines keep a packed copy of their own, which a refit can miss;
* every weight that the Recipe makes FP8 must equal that copy quantised by the Recipe's own rule. An engine that left
  such a weight in BF16 fails here too.

Values are compared, so +0 and -0 are one: no matrix product tells them apart, and some engines can only be read by
multiplying with them.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.config import Recipe
from labkit.fp8 import KVScales, LinearFormat
from labkit.rollout.engine import Engine

_LINEAR = re.compile(r"model\.layers\.(\d+)\..*_proj\.weight")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Delivery:
    """What the trainer sends to the engine."""

    weights: Mapping[str, Tensor]  # BF16, Hugging Face names
    scales: KVScales | None
    version: int


class RefitError(RuntimeError):
    """The engine does not hold what the trainer sent."""


def check_complete(
    own: Mapping[str, Tensor], recipe: Recipe, num_layers: int, weights: Mapping[str, Tensor], scales: KVScales | None
) -> None:
    """Everything that can be wrong with a refit, for an engine that has not changed anything yet.

    `own` are the engine's weights or placeholders of their shape. An engine that measures scales itself takes none.
    """
    if own.keys() != weights.keys():
        odd = sorted(own.keys() ^ weights.keys())
        raise ValueError(f"refit with an incomplete or foreign set of weights: {', '.join(odd[:3])}")
    for name, tensor in own.items():
        if weights[name].shape != tensor.shape:
            shape, needed = tuple(weights[name].shape), tuple(tensor.shape)
            raise ValueError(f"refit with a foreign set of weights: {name} is {shape}, not {needed}")
    if recipe.rollout.kv_cache and recipe.recalibration.policy != "engine":
        if scales is None:
            raise ValueError("the KV cache is FP8, but the refit brought no Q/K/V scales")
        scales.validate(num_layers)
    elif scales is not None:
        raise ValueError("the refit brought Q/K/V scales for an engine that takes none")


def fp8_weights(recipe: Recipe, names: Iterable[str]) -> set[str]:
    """Those of a model's weights that the Recipe makes FP8 in the rollout; lm_head also where it is tied."""
    layers = {name: int(match[1]) for name in names if (match := _LINEAR.fullmatch(name))}
    if not recipe.rollout.linears:
        return set()
    num_layers = max(layers.values()) + 1
    covered = {name for name, layer in layers.items() if recipe.covers(layer, num_layers)}
    return covered | ({_HEAD} if recipe.covers(None, num_layers) else set())


def share_changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Share of the values that differ; NaN when there is nothing to compare."""
    changed = sum(int((tensor != after[name]).sum()) for name, tensor in before.items())
    total = sum(tensor.numel() for tensor in before.values())
    return changed / total if total else math.nan


def verify(engine: Engine, recipe: Recipe, sent: Delivery) -> None:
    state = engine.state()
    if state.weight_version != sent.version:
        raise RefitError(f"the engine says weight version {state.weight_version}, the trainer sent {sent.version}")
    if state.kv_scales != sent.scales:
        raise RefitError(f"the engine holds scales {state.kv_scales}, the trainer sent {sent.scales}")
    held = dict(engine.read_back())
    for name, expected, how in _expected(recipe, sent.weights, reported=held.keys()):
        if name not in held:
            raise RefitError(f"{name} is not in the engine")
        if not _same(held[name], expected):
            raise RefitError(f"{name} in the engine differs from the trainer's BF16 copy{how}")


def _same(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal a NaN equals itself: diverged weights are not the refit's fault."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _expected(
    recipe: Recipe, weights: Mapping[str, Tensor], reported: Collection[str]
) -> Iterator[tuple[str, Tensor, str]]:
    """(name, value, how it was made) of every weight the engine should compute with."""
    fmt = LinearFormat.from_recipe(recipe, side="rollout")
    quantised = fp8_weights(recipe, weights)
    if _HEAD in quantised:
        if _HEAD not in weights:  # tied: the head is FP8, the embedding it shares its values with is not
            yield _HEAD, fmt.weight_operand(weights[_EMBEDDING]), ", quantised"
    elif _HEAD not in weights and _HEAD in reported:
        yield _HEAD, weights[_EMBEDDING], " of the embedding it is tied to"
    for name, weight in weights.items():
        if name in quantised:
            yield name, fmt.weight_operand(weight), ", quantised"
        else:
            yield name, weight, ""
