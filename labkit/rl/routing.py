"""Router replay, and how far the routers of engine and trainer agree.

    replay    scoring (p)               update (c)                              the engine's routes R, the trainer's S
    off       own choice S              own choice
    r2        own choice S              S, as it was scored
    r3        R                         R

A route is a set of k experts; one flip is a pair (token, layer with experts) for which the two sides took other sets.
Only pairs that both sides computed count: prompts and responses without padding and without the last token. With r2
the ratio of the update no longer jumps when a router changes its mind between two updates on one batch; only r3 does
something about the mismatch. Where the engine has no route (-1) the trainer's own router decides.

    router_flip_rate       of what was taken            0 under r3
    router_flip_rate_own   of what the trainer would choose by itself, which replay overrules

Sources: R3 (arXiv 2510.11370), which reports flips in about 10 % of the routers of Qwen3-30B-A3B and 94 % of its tokens
with one at least; R2 is verl's and miles' name for the replay of the training side.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.models.routing import followed

if TYPE_CHECKING:
    from labkit.config import Recipe
    from labkit.models.moe import MoEConfig
    from labkit.models.rollouts import Rollouts


def for_scoring(rollouts: "Rollouts", recipe: "Recipe") -> "Rollouts":
    """The rollouts with what the trainer replays when it computes p."""
    return replace(rollouts, replay_BTLK=rollouts.routes_BTLK if recipe.router.replay == "r3" else None)


def for_update(rollouts: "Rollouts", recipe: "Recipe", own_BTLK: Tensor | None) -> "Rollouts":
    """And when it computes c; `own_BTLK` is what its routers chose while it scored."""
    return replace(rollouts, replay_BTLK=own_BTLK) if recipe.router.replay == "r2" else rollouts


def router_metrics(rollouts: "Rollouts", own_BTLK: Tensor | None, moe: "MoEConfig | None") -> dict[str, float]:
    """Nothing for a dense model."""
    engine_BTLK, replay_BTLK = rollouts.routes_BTLK, rollouts.replay_BTLK
    if moe is None or own_BTLK is None:
        return {}
    computed_BT = (own_BTLK >= 0).all(-1).all(-1)
    own_NLK = own_BTLK[computed_BT]
    metrics = {"expert_load_max": _busiest(own_NLK, moe.num_experts)}
    if engine_BTLK is None:
        return metrics
    engine_NLK = engine_BTLK[computed_BT]
    known_NL = (engine_NLK >= 0).all(-1)
    own_flips_NL = (engine_NLK != own_NLK).any(-1) & known_NL
    taken_NLK = own_NLK if replay_BTLK is None else followed(replay_BTLK[computed_BT], own_NLK)
    flips_NL = (engine_NLK != taken_NLK).any(-1) & known_NL
    metrics |= {
        "router_flip_rate": _share(flips_NL, known_NL),
        "router_flip_rate_own": _share(own_flips_NL, known_NL),
        "router_flip_tokens": _share(own_flips_NL.any(-1), known_NL.any(-1)),
        "router_routes_missing": 1 - _share(known_NL, torch.ones_like(known_NL)),
    }
    return metrics | _by_layer(own_flips_NL, known_NL, moe.layers)


def _by_layer(flips_NL: Tensor, known_NL: Tensor, layers: Sequence[int]) -> dict[str, float]:
    """Under the number that the layer has in the model, where dense layers count too."""
    return {
        f"router_flip_rate_layer_{layer}": _share(flips_NL[:, index], known_NL[:, index])
        for index, layer in enumerate(layers)
    }


def _busiest(routes_NLK: Tensor, num_experts: int) -> float:
    """Tokens of each layer's busiest expert over the mean, mean over the layers."""
    loads_LE = torch.stack([layer.flatten().long().bincount(minlength=num_experts) for layer in routes_NLK.unbind(1)])
    return float((loads_LE.amax(-1) * num_experts / loads_LE.sum(-1)).mean())


def _share(which: Tensor, of: Tensor) -> float:
    return float(which.sum() / of.sum())
