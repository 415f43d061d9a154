"""When the Q/K/V scales of the engine's FP8 KV cache and attention are computed anew.

    scale = margin * amax / max(fmt)      per layer and tensor; `labkit.fp8.AmaxObserver` has the details

An FP8 checkpoint is calibrated once. A policy under training has no such checkpoint: it changes every step. So NeMo
RL recalibrates at the end of each train step, on the batch just trained and with the UPDATED weights, and sends
the scales with the weights. Before step 1 there is no trained batch: the first prompts stand in.

    every-step     after every train step (NeMo RL)
    every-k-steps  after step k, 2k, ...
    first-step     after step 1 only: what staleness costs
    unit           never; every scale is 1.0: what an engine uses when nobody sends scales
    engine         the engine measures its own first forward after each refit (verl's way)

The version of a scale set is the weight version it was computed with, so staleness can be seen in every record.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.fp8 import KVScales

if TYPE_CHECKING:
    from labkit.config import Recipe

Calibrate = Callable[[], KVScales]


def initial_scales(recipe: "Recipe", num_layers: int, calibrate_on_prompts: Calibrate) -> KVScales | None:
    """Scales for weight version 0. None: the KV cache is BF16, or the engine calibrates itself."""
    policy = recipe.recalibration.policy
    if not recipe.rollout.kv_cache or policy == "engine":
        return None
    return KVScales.unit(num_layers, version=0) if policy == "unit" else calibrate_on_prompts()


def next_scales(recipe: "Recipe", held: KVScales | None, step: int, calibrate: Calibrate) -> KVScales | None:
    """Scales to send with the weights after `step` (counted from 1): fresh ones when due, else those held."""
    policy, every = recipe.recalibration.policy, recipe.recalibration.every
    due = {
        "every-step": True,
        "every-k-steps": step % every == 0,
        "first-step": step == 1,
        "unit": False,
        "engine": False,
    }[policy]
    return calibrate() if recipe.rollout.kv_cache and due else held
