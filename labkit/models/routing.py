"""What happened in the routers of one forward pass, and what they are told to do: a Routing for training.

    routes = Routes(replay)                   replay [..., L, k], or None: every router chooses itself
    model(tokens, positions, attention, routes)
    routes.own()                              [..., L, k]: what each router would have chosen
    routes.balance(counting)                  the auxiliary loss, mean over the layers

Leading dimensions are those of the tokens; L counts the layers with experts only, in their order, so a dense layer
takes no place. A replayed -1 is a missing route, for which the layer's own choice stands in.
"""

import torch
from torch import Tensor

from labkit.models.moe import balance_loss


class Routes:
    def __init__(self, replay: Tensor | None = None) -> None:
        self.replay = replay
        self._logits: list[Tensor] = []
        self._own: list[Tensor] = []
        self._taken: list[Tensor] = []

    def __call__(self, index: int, logits: Tensor, own: Tensor) -> Tensor:
        assert index == len(self._own), "layers come in their order, each once"
        taken = own if self.replay is None else followed(self.replay[..., index, :], own)
        self._logits.append(logits)
        self._own.append(own)
        self._taken.append(taken)
        return taken

    def own(self) -> Tensor:
        return torch.stack(self._own, dim=-2)

    def balance(self, counting: Tensor | None = None) -> Tensor:
        """`counting`: True where a token is no padding, in the shape of the tokens; None: everywhere."""
        layers = [
            balance_loss(logits.flatten(0, -2), taken.flatten(0, -2))
            if counting is None
            else balance_loss(logits[counting], taken[counting])
            for logits, taken in zip(self._logits, self._taken, strict=True)
        ]
        return torch.stack(layers).mean()


def followed(replay: Tensor, own: Tensor) -> Tensor:
    """The replayed experts; where there are none (-1), the own ones."""
    replay = replay.to(own)
    return torch.where((replay < 0).any(-1, keepdim=True), own, replay)
