"""A mixture of experts in the place of a layer's MLP (Qwen3-MoE): each token goes through k of E small MLPs.

    s_NE = x_ND R_ED^T                     router logits, never quantised (`mlp.gate.weight`)
    T_n  = the k experts with the largest s_n          of equal logits the expert with the lower number
    w_nj = exp(s_nj) / sum over i in T_n of exp(s_ni)  for j in T_n     (norm_topk_prob)
           exp(s_nj) / sum over all i of exp(s_ni)                      (without)
    y_n  = sum over j in T_n of w_nj MLP_j(x_n)        `mlp.experts.j.{gate,up,down}_proj.weight`

N tokens (leading dimensions flattened), D hidden, E experts, k of them for a token.

The choice T_n is the one place of a decoder that is not continuous: where two logits lie close, a rounding sends the
token to another expert, and what was a difference in the last bit becomes another function. That is a routing flip,
and why engine and trainer of a mixture of experts disagree more than those of a dense model. Against it:

    router in FP32     x and R as they are, s not rounded to BF16 afterwards: fewer ties, the same on both sides
    router replay      T_n is not chosen but given: R2 replays, in the update, what the trainer chose when it scored the
                       rollouts; R3 what the engine chose when it sampled them, in scoring and update. w is always
                       computed from the logits at hand over the given experts, so gradients still reach the router.

A Routing stands between choice and use: it is called with each layer's logits and own choice, and answers with the
experts to take. It may note them down (`labkit.rollout.routes`) or replace them (`labkit.training.routed`).

Loads that differ between experts cost time on a GPU, and an expert without tokens learns nothing. The auxiliary loss
of GShard and Switch pulls them together:

    balance = E sum_j f_j P_j      f_j  share of the N k choices that fell on j (no gradient)
                                   P_j  mean over tokens of softmax(s_n)_j            1 when even, E at worst

Bits: the logits are summed in FP64 before they are rounded, so that they don't depend on how many tokens share the
pass. Experts run on their own tokens only, with the linear layers of `labkit.fp8`, in which a row doesn't depend on its
neighbours. The k outputs of a token are added in FP32, in the order of their experts.

Sources: Qwen3-MoE (transformers modeling_qwen3_moe.py); GShard (arXiv 2006.16668), Switch (2101.03961) for the loss;
R3, rollout routing replay (2510.11370). Left out: shared experts, expert bias, capacity limits (no token is dropped).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from labkit.models.mlp import MLP

if TYPE_CHECKING:
    from labkit.config import Recipe

Routing = Callable[[int, Tensor, Tensor], Tensor]
"""(place among the layers with experts, logits [..., E], their top k [..., k] ascending) -> experts to take [..., k]"""


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]  # with experts, ascending; the others have a dense MLP
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"a token can't go to {self.experts_per_token} of {self.num_experts} experts")

    @property
    def index_dtype(self) -> torch.dtype:
        """Holds the number of any expert, and -1 for none."""
        return torch.int8 if self.num_experts <= 128 else torch.int16


class Router(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        self.in_fp32 = False  # else the logits are rounded to the type of the model, as in transformers

    def forward(self, x: Tensor) -> Tensor:
        """FP32 logits [..., E]."""
        logits = x.double() @ self.weight.double().T
        return logits.float() if self.in_fp32 else logits.to(x.dtype).float()


class SparseMoE(nn.Module):
    def __init__(self, config: MoEConfig, hidden_size: int, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.index = config.layers.index(layer)  # among the layers with experts: where routes are kept
        self.gate = Router(hidden_size, config.num_experts, dtype)
        self.experts = nn.ModuleList(
            MLP(hidden_size, config.intermediate_size, dtype) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        logits = self.gate(x)
        experts = top_k(logits.detach(), self.config.experts_per_token)
        if routing is not None:
            experts = routing(self.index, logits, experts)
        return self._mix(x, experts, self._weights(logits, experts))

    def _weights(self, logits: Tensor, experts: Tensor) -> Tensor:
        if self.config.norm_topk_prob:
            return logits.gather(-1, experts).softmax(-1)
        return logits.softmax(-1).gather(-1, experts)

    def _mix(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert, one run of rows for each; then back in the order of the tokens."""
        k = experts.shape[-1]
        slots = experts.flatten()
        by_expert = slots.argsort(stable=True)
        loads = slots.bincount(minlength=len(self.experts)).tolist()
        rows = x.flatten(0, -2).repeat_interleave(k, dim=0)[by_expert].split(loads)
        outputs = torch.cat([expert(run) for expert, run in zip(self.experts, rows, strict=True) if len(run)])
        outputs = outputs[by_expert.argsort()].view(*experts.shape, -1)
        return (outputs.float() * weights[..., None]).sum(-2).to(x.dtype)


def top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest of each row, as ascending numbers of experts, so that equal choices look alike."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values


def balance_loss(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """`balance` above, for the experts that were taken."""
    E = logits_NE.shape[-1]
    shares_E = experts_NK.flatten().bincount(minlength=E) / experts_NK.numel()
    return E * (shares_E * logits_NE.softmax(-1).mean(0)).sum()


def set_router(model: nn.Module, recipe: "Recipe") -> None:
    """The routers of a model in the type that the Recipe names."""
    for module in model.modules():
        if isinstance(module, Router):
            module.in_fp32 = recipe.router.dtype == "fp32"
