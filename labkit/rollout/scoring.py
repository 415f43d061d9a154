"""Log-probabilities of responses that are already there, in one pass over prompt and response (teacher forcing).

    hidden = model(tokens[:, : T - 1], attention)        T = P + the longest response of the pass
    g_t    = log softmax(logits(hidden[:, P - 1 + t]))[token_t]

Tokens stay in the columns of `Rollouts`, and the attention adds over the same columns as it did while decoding: keys
that a query can't see yet add an exact 0. So with kernels whose bits don't depend on the batch, g is that of decoding
to the bit. Sequences go in order of their length, ROWS at a time, so that little padding is computed.

g [B, R] FP32 in nats, 0 off the mask. No gradient. The rollouts and g are on the CPU, the model where it is.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.models.decoder import Attention, Decoder
from labkit.models.logprobs import token_logprobs
from labkit.models.rollouts import Rollouts

if TYPE_CHECKING:
    from labkit.config import Sampling

ROWS = 32

AttentionFor = Callable[[Tensor, int], Attention]
"""(starts [b], number of columns) -> the attention over that many columns, from empty."""


def _nothing() -> None:
    pass


@torch.no_grad()
def teacher_forced(
    model: Decoder,
    rollouts: Rollouts,
    sampling: "Sampling",
    attention: AttentionFor,
    on_microstep: Callable[[], None] = _nothing,
) -> Tensor:
    P, mask_BR, device = rollouts.prompt_width, rollouts.mask_BR, model.device
    logprobs_BR = torch.zeros(mask_BR.shape)
    for rows in rollouts.lengths_B.argsort(stable=True).split(ROWS):
        longest = int(rollouts.lengths_B[rows].max())
        T = P + longest - 1
        starts_b, tokens_bT = rollouts.starts_B[rows].to(device), rollouts.tokens_BT[rows, : T + 1].to(device)
        positions_bT = (torch.arange(T, device=device) - starts_b[:, None]).clamp(min=0)
        hidden_bTD = model(tokens_bT[:, :-1], positions_bT, attention(starts_b, T))
        mask_br = mask_BR[rows, :longest].to(device)
        logits_nV = model.logits(hidden_bTD[:, P - 1 :][mask_br])
        logprobs_br = logits_nV.new_zeros(mask_br.shape)
        logprobs_br[mask_br] = token_logprobs(logits_nV, tokens_bT[:, P:][mask_br], sampling)[0]
        logprobs_BR[rows, :longest] = logprobs_br.cpu()
        on_microstep()
    return logprobs_BR
