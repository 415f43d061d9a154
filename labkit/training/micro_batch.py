"""The trainer's input for a few sequences: which tokens go in, how they attend, which outputs predict responses.

Input columns are 0 .. P + len - 2 of each sequence (the last token predicts nothing). The hidden state at column
P - 1 + t predicts response token t. Packed, only real tokens are computed: [1, N]; padded, all: [b, T].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models.attention import PackedAttention, PaddedAttention
from labkit.models.decoder import Attention
from labkit.models.rollouts import Rollouts


@dataclass(frozen=True)
class MicroBatch:
    tokens: Tensor  # [1, N] or [b, T]
    positions: Tensor  # same shape
    attention: Attention
    predicting_n: Tensor  # index into the flattened positions: those that predict a response token
    targets_n: Tensor  # the response tokens
    place_n: tuple[Tensor, Tensor]  # (row in the micro-batch, response column) of each
    shape: tuple[int, int]  # (b, R)
    real_bT: Tensor  # where the tokens are
    replay: Tensor | None  # [..., L, k] in the layout of `tokens`: the experts to take

    def scatter(self, values_n: Tensor) -> Tensor:
        """Per-token values back into [b, R], 0 elsewhere."""
        return values_n.new_zeros(self.shape).index_put(self.place_n, values_n)

    @property
    def real(self) -> Tensor:
        """True where `tokens` holds a token, in its layout."""
        packed = self.tokens.shape != self.real_bT.shape
        return torch.ones_like(self.tokens, dtype=torch.bool) if packed else self.real_bT

    def unpack(self, routes: Tensor) -> Tensor:
        """What every token was routed to, from the layout of `tokens` back into [b, T, L, k]; -1 on padding."""
        unpacked = routes.new_full((*self.real_bT.shape, *routes.shape[2:]), -1)
        unpacked[self.real_bT] = routes[self.real]
        return unpacked


def build(
    rollouts: Rollouts, rows: Tensor, device: torch.device, *, packing: bool, kernel: str, whole: bool = False
) -> MicroBatch:
    """On the trainer's device. `whole` feeds the last token too: calibration wants every key and value there can be."""
    P, R = rollouts.prompt_width, rollouts.logprobs_BR.shape[1]
    T = P + int(rollouts.lengths_B[rows].max()) - (0 if whole else 1)
    lengths_b, starts_b = rollouts.lengths_B[rows].to(device), rollouts.starts_B[rows].to(device)
    columns_T = torch.arange(T, device=device)
    end_b1 = (P + lengths_b - (0 if whole else 1))[:, None]
    real_bT = (columns_T >= starts_b[:, None]) & (columns_T < end_b1)
    all_tokens_bT = rollouts.tokens_BT[rows].to(device)
    tokens_bT = all_tokens_bT[:, :T]
    positions_bT = (columns_T - starts_b[:, None]).clamp(min=0)
    predicts_bT = real_bT & (columns_T >= P - 1) & (columns_T < (P + lengths_b - 1)[:, None])

    replay = None if rollouts.replay_BTLK is None else rollouts.replay_BTLK[rows, :T].to(device)
    if packing:
        row_N, column_N = real_bT.nonzero(as_tuple=True)
        attention: Attention = PackedAttention(row_N, column_N, starts_b, T, kernel)
        tokens, positions = tokens_bT[real_bT][None], positions_bT[real_bT][None]
        predicting_n = predicts_bT[real_bT].nonzero()[:, 0]
        replay = None if replay is None else replay[real_bT][None]
    else:
        attention = PaddedAttention(starts_b, T, kernel)
        tokens, positions = tokens_bT, positions_bT
        predicting_n = predicts_bT.flatten().nonzero()[:, 0]

    row_n, column_n = predicts_bT.nonzero(as_tuple=True)
    targets_n = all_tokens_bT[row_n, column_n + 1]
    return MicroBatch(
        tokens,
        positions,
        attention,
        predicting_n,
        targets_n,
        (row_n, column_n - (P - 1)),
        (len(rows), R),
        real_bT,
        replay,
    )
