"""The gated feed-forward block (SwiGLU): y = down_proj(silu(gate_proj(x)) * up_proj(x)), x and y [..., hidden].

Of a dense layer it is the whole MLP, of a mixture of experts (`labkit.models.moe`) one expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.fp8 import Float8Linear


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Float8Linear(hidden_size, intermediate_size, dtype=dtype)
        self.up_proj = Float8Linear(hidden_size, intermediate_size, dtype=dtype)
        self.down_proj = Float8Linear(intermediate_size, hidden_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
