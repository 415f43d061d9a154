"""What a trainer is, whoever implements it.

It owns the FP32 master weights and the BF16 copy made from them, computes log-probabilities and updates through
one and the same FP8 forward, and calibrates the Q/K/V scales of the engine's FP8 KV cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from labkit.fp8 import KVScales
from labkit.models.rollouts import Rollouts
from labkit.runs.record import Active

if TYPE_CHECKING:
    from labkit.config import Experiment

Rows = Tensor
"""Indices of one micro-batch's sequences in the rollout batch, int64."""

LossFn = Callable[[Rows, Tensor], Tensor]
"""(rows, current log-probs c [len(rows), R]) -> scalar. Losses of micro-batches add up to the mini-batch's."""


@dataclass(frozen=True)
class Update:
    """One optimizer step."""

    learning_rate: float
    grad_norm: float  # before clipping
    skipped: str = ""  # why no step was taken; "" = it was


class Trainer(Protocol):
    def logprobs(self, rollouts: Rollouts, micro_batches: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """p and entropy, both [B, R] FP32 nats, 0 off the mask; the weights as they are, no gradient."""

    def routes(self) -> Tensor | None:
        """What the routers would have chosen in the last `logprobs`, as in `Rollouts`; None without experts."""

    def reference_logprobs(self, rollouts: Rollouts, micro_batches: Sequence[Rows]) -> Tensor:
        """The same under the frozen initial policy, which goes by its own routers."""

    def shadow_logprobs(self, rollouts: Rollouts, micro_batches: Sequence[Rows]) -> Tensor:
        """p as the same weights would give it without any quantisation."""

    def update(self, rollouts: Rollouts, micro_batches: Sequence[Rows], loss: LossFn) -> Update:
        """Accumulate the micro-batches' gradients and take one optimizer step."""

    def calibrate(self, rollouts: Rollouts, micro_batches: Sequence[Rows], version: int) -> KVScales:
        """Scales from what q, k and v are on these sequences with the weights as they are now."""

    def switch(self, experiment: "Experiment") -> None:
        """Go on in the precision of another Recipe. Weights, optimizer and schedule stay."""

    def weights(self) -> dict[str, Tensor]:
        """The BF16 copy under Hugging Face names: what the engine is refitted from."""

    def active(self) -> dict[str, Active]: ...

    def state_dict(self) -> dict[str, Any]:
        """Tensors by reference. "updates", an int, grows with every optimizer step: it tells whether they moved."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
