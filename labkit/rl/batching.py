"""How one rollout batch is cut into optimizer updates and micro-batches.

    rollout batch  = prompts_per_step x group_size sequences
    mini-batch     = the sequences of prompts_per_step / minibatches prompts: one optimizer update
    micro-batch    = up to `micro_batch` sequences of about equal length: one forward and backward

Sequences without advantage carry no policy gradient (a group that is all right or all wrong); they are scored for
the mismatch metrics but skipped in the backward pass, unless a pull to another policy gives them one. Scoring uses
the very micro-batches of the update: a per-tensor activation scale depends on what shares the micro-batch, and p must
see what c will see.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from labkit.config import GRPO


@dataclass(frozen=True)
class MiniBatch:
    rows: Tensor  # every sequence: the normaliser of the loss counts them all
    carrying: list[Tensor]  # micro-batches with a gradient
    idle: list[Tensor]  # micro-batches that are only scored

    @property
    def micro_batches(self) -> list[Tensor]:
        return [*self.carrying, *self.idle]


def plan(carries_B: Tensor, lengths_B: Tensor, settings: "GRPO") -> list[MiniBatch]:
    """`carries_B` is True where a sequence has a gradient."""
    batch = []
    for rows in torch.arange(len(lengths_B)).chunk(settings.minibatches):
        carries = carries_B[rows]
        batch.append(
            MiniBatch(
                rows,
                _by_length(rows[carries], lengths_B, settings.micro_batch),
                _by_length(rows[~carries], lengths_B, settings.micro_batch),
            )
        )
    return batch


def _by_length(rows: Tensor, lengths_B: Tensor, size: int) -> list[Tensor]:
    if not len(rows):
        return []
    return list(rows[lengths_B[rows].argsort(stable=True)].split(size))
