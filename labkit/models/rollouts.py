"""A batch of prompts and their sampled responses: what the engine hands to the trainer.

    column      0 ........ start ........ P-1 | P ................ P+len-1 ........ P+R-1
    tokens      PAD  PAD   first prompt token | first response token  last one   PAD  PAD
    logprobs                                  | g_0 ............... g_len-1       0    0

Prompts are padded on the left, so that every response starts at column P; both sides of a run keep this layout,
so a softmax over the keys adds the same numbers in the same places. B sequences, R response columns, T = P + R.
The sequence ends with its stop token, which was sampled and therefore counts.

Routes are experts by number, of the L layers that have some, k for a token: [B, T, L, k], -1 where there is none. The
last token of a response has none: nothing was computed from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rollouts:
    tokens_BT: Tensor  # int64
    starts_B: Tensor  # int64: column of the first prompt token
    lengths_B: Tensor  # int64: response tokens, stop token included
    logprobs_BR: Tensor  # float32: g, nats
    finished_B: Tensor  # bool: ended by a stop token rather than by the length limit
    prompt_width: int  # P
    weight_version: int  # of the weights that sampled it
    scale_version: int  # of the Q/K/V scales
    routes_BTLK: Tensor | None = None  # the engine's, where they were asked for
    replay_BTLK: Tensor | None = None  # those that the trainer takes instead of its own choice

    @property
    def mask_BR(self) -> Tensor:
        """True on sampled response tokens."""
        R = self.logprobs_BR.shape[1]
        return torch.arange(R, device=self.lengths_B.device) < self.lengths_B[:, None]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    def response(self, row: int) -> list[int]:
        P = self.prompt_width
        return self.tokens_BT[row, P : P + int(self.lengths_B[row])].tolist()
