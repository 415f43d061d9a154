"""Prove a refit: what the engine computes with afterwards is read back and compared with what was sent.

Silent refit failures are common and expensive: calibrated scales that never arrive and default to 1.0, experts that
load with an identity scale, weights one version behind. So after every refit, bit for bit,

* the weight version and the whole set of Q/K/V scales must equal what was sent;
* every BF16 weight must equal the trainer's BF16 copy;
* every weight that the Recipe makes FP8 must equal that copy quantised by the Recipe's own rule. An engine that left
  such a weight in BF16 fails here too.
"""

import re
from collections.abc import Iterator, Mapping
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


def verify(engine: Engine, recipe: Recipe, sent: Delivery) -> None:
    state = engine.state()
    if state.weight_version != sent.version:
        raise RefitError(f"the engine says weight version {state.weight_version}, the trainer sent {sent.version}")
    if state.kv_scales != sent.scales:
        raise RefitError(f"the engine holds scales {state.kv_scales}, the trainer sent {sent.scales}")
    held = dict(engine.read_back())
    for name, expected, how in _expected(recipe, sent.weights):
        if name not in held:
            raise RefitError(f"{name} is not in the engine")
        if not _same_bits(held[name], expected):
            raise RefitError(f"{name} in the engine differs from the trainer's BF16 copy{how}")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal a NaN equals itself: diverged weights are not the refit's fault."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _expected(recipe: Recipe, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, str]]:
    """(name, value, how it was made) of every weight the engine should compute with."""
    fmt = LinearFormat.from_recipe(recipe, side="rollout")
    layers = {name: int(match[1]) for name in weights if (match := _LINEAR.fullmatch(name))}
    num_layers = max(layers.values()) + 1
    quantised = {name for name, layer in layers.items() if fmt.fprop and recipe.covers(layer, num_layers)}
    if fmt.fprop and recipe.covers(None, num_layers):
        quantised.add(_HEAD)
        if _HEAD not in weights:  # tied: the head is FP8, the embedding it shares its values with is not
            yield _HEAD, fmt.weight_operand(weights[_EMBEDDING]), ", quantised"
    for name, weight in weights.items():
        if name in quantised:
            yield name, fmt.weight_operand(weight), ", quantised"
        else:
            yield name, weight, ""
