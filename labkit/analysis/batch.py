"""Batch: one batch of rollouts with all that is needed to compute its log-probs again, in one file.

    rollouts      tokens and g, as the engine drew and reported them
    p_BR          the trainer's log-probs of them before the update, [B, R] FP32 nats
    weights       the trainer's BF16 copy, from which trainer and engine quantise: the masters aren't needed
    sampled_with  the BF16 weights the engine held, where they are not the trainer's (staleness, faults); else None
    scales        the engine's Q/K/V scales while it sampled; None for a BF16 cache

`collect` gets the batch that a run would train on next; nothing is trained. A file is one .safetensors with the
Experiment as YAML in its metadata; the model's own folder (config, tokenizer) is found by Experiment.model.
"""

import dataclasses
import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit import models
from labkit.config import Experiment, preset
from labkit.fp8 import KVScales
from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.rl.batching import plan
from labkit.rl.loop import Loop
from labkit.rl.measure import Stopwatch

if TYPE_CHECKING:
    from labkit.runs import Run

SCHEMA = 1
_KIND = "labkit-batch"
_ROLLOUT_TENSORS = ("tokens_BT", "starts_B", "lengths_B", "logprobs_BR", "finished_B")
_ROUTES = "routes_BTLK"  # of a mixture of experts; what is replayed of them follows from the recipe
_ROLLOUT_NUMBERS = ("prompt_width", "weight_version", "scale_version")


@dataclass(frozen=True)
class Batch:
    experiment: Experiment
    version: int  # of the trainer's weights
    weights: dict[str, Tensor]
    sampled_with: dict[str, Tensor] | None
    scales: KVScales | None
    rollouts: Rollouts
    rewards_B: Tensor
    advantages_B: Tensor
    p_BR: Tensor

    def __repr__(self) -> str:
        return (
            f"Batch({self.experiment.name!r}, {len(self.rollouts)} responses, {self.rollouts.num_tokens} tokens, "
            f"weights of version {self.version})"
        )

    @cached_property
    def policy(self) -> Policy:
        """The policy with the trainer's weights."""
        return dataclasses.replace(models.load(self.experiment.model), weights=self.weights)

    @property
    def engine_weights(self) -> dict[str, Tensor]:
        return self.weights if self.sampled_with is None else self.sampled_with

    def micro_batches(self) -> tuple[list[Tensor], list[Tensor]]:
        """The trainer's own, as (with a gradient, only scored); see `labkit.rl.batching`."""
        settings, correction = self.experiment.grpo, self.experiment.recipe.correction
        pulled = bool(settings.kl_coef or correction.anchor)
        mini_batches = plan((self.advantages_B != 0) | pulled, self.rollouts.lengths_B, settings)
        carrying = [rows for mini_batch in mini_batches for rows in mini_batch.carrying]
        return carrying, [rows for mini_batch in mini_batches for rows in mini_batch.idle]

    def save(self, path: str | PathLike[str]) -> None:
        rollouts = {name: getattr(self.rollouts, name) for name in (*_ROLLOUT_TENSORS, _ROUTES)}
        tensors = {f"rollouts.{name}": tensor for name, tensor in rollouts.items() if tensor is not None}
        tensors |= {"rewards_B": self.rewards_B, "advantages_B": self.advantages_B, "p_BR": self.p_BR}
        tensors |= {f"weights.{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"sampled_with.{name}": tensor for name, tensor in (self.sampled_with or {}).items()}
        numbers = {
            "version": self.version,
            "scales": self.scales and dataclasses.asdict(self.scales),
            **{name: getattr(self.rollouts, name) for name in _ROLLOUT_NUMBERS},
        }
        metadata = {
            "kind": _KIND, "schema": str(SCHEMA), "experiment": self.experiment.to_yaml(),
            "numbers": json.dumps(numbers),
        }  # fmt: skip
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
        except SafetensorError as error:
            raise OSError(errno.EIO, f"the batch can't be written ({error})", str(path)) from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Batch":
        """Raises ValueError for a file that is no batch, or one of a newer labkit; OSError if it isn't there."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                _check_kind(path, metadata)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read as a batch ({error}): save it anew with Batch.save") from None
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no batch", str(path)) from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read as a batch ({error}): give a file that Batch.save wrote") from None
        numbers: dict[str, Any] = json.loads(metadata["numbers"])
        rollouts = {name: tensors[f"rollouts.{name}"] for name in _ROLLOUT_TENSORS}
        rollouts[_ROUTES] = tensors.get(f"rollouts.{_ROUTES}")
        return cls(
            experiment=Experiment.from_yaml(metadata["experiment"]),
            version=numbers["version"],
            weights=_under("weights.", tensors),
            sampled_with=_under("sampled_with.", tensors) or None,
            scales=_scales(numbers["scales"]),
            rollouts=Rollouts(**rollouts, **{name: numbers[name] for name in _ROLLOUT_NUMBERS}),
            rewards_B=tensors["rewards_B"],
            advantages_B=tensors["advantages_B"],
            p_BR=tensors["p_BR"],
        )


def _check_kind(path: str | PathLike[str], metadata: dict[str, str]) -> None:
    if metadata.get("kind") != _KIND or "schema" not in metadata:
        raise ValueError(f"{path} is no stored batch: make one with labkit.collect(...).save(path)")
    if int(metadata["schema"]) > SCHEMA:
        raise ValueError(f"{path} was written by a newer labkit: update labkit to open it")
    if not {"experiment", "numbers"} <= metadata.keys():
        raise ValueError(f"{path} has lost its experiment or its numbers: save it anew with Batch.save")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _scales(numbers: dict[str, Any] | None) -> KVScales | None:
    if numbers is None:
        return None
    q, k, v = (tuple(numbers[name]) for name in "qkv")
    return KVScales(numbers["version"], q, k, v)


def collect(source: "str | Experiment | Run") -> Batch:
    """The next batch of a preset (by its name), an Experiment, or a Run as its last checkpoint left it.

    Raises ValueError for an experiment on a GPU: what is computed from a batch is the CPU's arithmetic.
    """
    if isinstance(source, str):
        source = preset(source)
    device = source.device if isinstance(source, Experiment) else source.experiment.device
    if device != "cpu":
        raise ValueError(
            f"device: what-ifs and attributions are computed on a CPU, and a {device} rounds differently; "
            "collect the experiment with device=cpu and trainer=local"
        )
    if isinstance(source, Experiment):
        return _next_batch(Loop(source))
    from labkit.runs import checkpoint

    path = checkpoint.latest(source.directory)
    if path is None:
        raise ValueError(
            f"run {source.id} has no checkpoint yet: wait for one (checkpoint_every), or collect its experiment"
        )
    _, state = checkpoint.load(path, source.experiment)
    loop = Loop(source.experiment)
    loop.load_state_dict(state)
    return _next_batch(loop)


def _next_batch(loop: Loop) -> Batch:
    sampled = loop.sample(Stopwatch())
    assert loop.refits.arrived is not None
    weights, engine_weights = _copied(loop.trainer.weights()), _copied(loop.refits.arrived.weights)
    same = all(torch.equal(tensor, engine_weights[name]) for name, tensor in weights.items())
    return Batch(
        experiment=loop.experiment,
        version=loop.version,
        weights=weights,
        sampled_with=None if same else engine_weights,
        scales=loop.engine.state().kv_scales,
        rollouts=dataclasses.replace(sampled.rollouts, replay_BTLK=None),
        rewards_B=sampled.scored.rewards_B,
        advantages_B=sampled.advantages_B,
        p_BR=sampled.p_BR,
    )


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}
