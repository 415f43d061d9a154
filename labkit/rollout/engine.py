"""What a rollout engine is, whoever implements it.

An engine holds its own copy of the policy, in the precision the Recipe asks for. It samples from it, and between
train steps it is *refitted*: new BF16 weights, which it quantises itself, and new Q/K/V scales. What it then
really holds can be read back, because a refit that silently drops a scale is the commonest failure of this field.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from labkit.fp8 import KVScales
from labkit.models.rollouts import Rollouts
from labkit.runs.record import Active

if TYPE_CHECKING:
    from labkit.config import Sampling


@dataclass(frozen=True)
class Request:
    """How to sample: one prompt, `samples_per_prompt` responses."""

    sampling: "Sampling"
    max_new_tokens: int
    stop_ids: frozenset[int]
    samples_per_prompt: int = 1
    routes: bool = False  # whether the experts that each token went to come back with the rollouts


@dataclass(frozen=True)
class EngineState:
    """What is in the engine now, read from the engine itself."""

    weight_version: int
    kv_scales: KVScales | None  # None: the KV cache is BF16


class Engine(Protocol):
    saturation: dict[str, float]
    """ "k" and "v": share of the elements that the last generation wrote to an FP8 cache and their scale clipped."""

    codes_changed: float
    """Share of the FP8 weight values that the last refit changed; NaN without FP8 weights and on the first refit."""

    def generate(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> Rollouts:
        """Sample. Rows of one prompt are adjacent: row = prompt * samples_per_prompt + sample."""

    def score(self, rollouts: Rollouts, sampling: "Sampling") -> Tensor:
        """g [B, R] of given responses, teacher-forced through the engine's own numerics; 0 off the mask."""

    def refit(self, weights: Mapping[str, Tensor], kv_scales: KVScales | None, version: int) -> None:
        """Take new weights and scales and forget every cached key and value. All or nothing.

        Of a policy with adapters (`labkit.models.lora`) those are enough, once all weights have come.
        """

    def keep_scales(self, measured: KVScales) -> None:
        """Go on with scales that the engine itself measured before, for the weights it has."""

    def state(self) -> EngineState: ...

    def read_back(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight the engine computes with, under its Hugging Face name; FP8 ones dequantised."""

    def active(self) -> dict[str, Active]:
        """component -> {"state": fp8 | emulated | bf16, "detail": how}, as it really runs."""

    def close(self) -> None:
        """Give back what it holds; it is not used afterwards."""


class Pending(Protocol):
    """A generation that was begun."""

    def result(self) -> tuple[Rollouts, float]:
        """Wait for it: the rollouts, the seconds they took; the generator is then where `generate` leaves it."""

    def drop(self) -> None:
        """End it, nobody wants its rollouts."""


@runtime_checkable
class Overlapping(Protocol):
    """An engine that can sample while its caller does something else."""

    def begin(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> Pending:
        """`generate`, begun: returns at once. Nothing else is asked of the engine before result() or drop()."""
