"""RouteLog: the experts that each token of a generation went to, written down as it goes on.

    prefill   N prompts, each the first columns of all the rows of its group
    decode    one column, of the rows that are still in the cache

A Routing (`labkit.models.moe`) that changes nothing. What padding was routed to is -1 at the end, and so is what a
finished row went on computing until it was dropped.
"""

import torch
from torch import Tensor

from labkit.models.moe import MoEConfig


class RouteLog:
    def __init__(self, config: MoEConfig, group_B: Tensor, prompt_width: int, num_columns: int) -> None:
        """`group_B`: the prompt of each row."""
        shape = len(group_B), num_columns, len(config.layers), config.experts_per_token
        self._table_BTLK = torch.full(shape, -1, dtype=config.index_dtype)
        self._rows, self._from, self._end = torch.arange(len(group_B)), group_B, prompt_width

    def decoding(self, rows: Tensor, column: int) -> None:
        """From now on the passes compute this column of these rows."""
        self._rows, self._from, self._end = rows, torch.arange(len(rows)), column + 1

    def __call__(self, index: int, logits: Tensor, own_NTK: Tensor) -> Tensor:
        columns = slice(self._end - own_NTK.shape[1], self._end)
        self._table_BTLK[self._rows, columns, index] = own_NTK[self._from].to(self._table_BTLK)
        return own_NTK

    def table(self, starts_B: Tensor, ends_B: Tensor) -> Tensor:
        """[B, T, L, k]; real tokens were computed in the columns from start to end."""
        columns_T = torch.arange(self._table_BTLK.shape[1])
        real_BT = (columns_T >= starts_B[:, None]) & (columns_T < ends_B[:, None])
        return self._table_BTLK.masked_fill(~real_BT[..., None, None], -1)
