"""FP32 master weights and AdamW over them; the model that computes is their BF16 copy. Frozen parameters have none.

    per micro-batch     master.grad += float(model.grad)        gradients arrive in BF16, are summed in FP32
    per optimizer step  clip(master.grad), AdamW(master), model = bf16(master)

Without FP32 masters a step of 1e-4 of a weight's size would vanish in BF16's 8 bits of significand, and in FP8's 4
all the more. Weight decay applies to matrices only.

Learning rate:  warm-up  lr * (u + 1) / warmup  over the first `warmup` updates, then constant or linear to 0.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from labkit.config import GRPO


class MasterWeights:
    def __init__(self, model: nn.Module, settings: "GRPO", total_updates: int) -> None:
        self.model, self.settings, self.total_updates = model, settings, total_updates
        self.parameters = {name: p.detach().float().clone() for name, p in _trained(model)}
        self.updates = 0
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
        self._publish()

    def learning_rate(self) -> float:
        warmup, lr = self.settings.warmup_steps, self.settings.lr
        if self.updates < warmup:
            return lr * (self.updates + 1) / warmup
        if self.settings.lr_decay == "linear":
            return lr * (self.total_updates - self.updates) / max(1, self.total_updates - warmup)
        return lr

    @torch.no_grad()
    def accumulate(self) -> None:
        """Move the model's gradients into the FP32 sums."""
        for name, parameter in _trained(self.model):
            if parameter.grad is None:
                continue
            master = self.parameters[name]
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self) -> tuple[float, str]:
        """Clip, update, publish: the gradient norm before clipping, and "".

        With a NaN or inf in the gradient nothing is updated; then the second is the name of the first such parameter.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.max_grad_norm)
        culprit = ""
        if not norm.isfinite():
            grads = ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
            culprit = next((name for name, grad in grads if not grad.isfinite().all()), "all parameters together")
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self._publish()
        self.skip()
        return float(norm), culprit

    def skip(self) -> None:
        """Drop the gradients; the schedule goes on, so that it ends where the Experiment says."""
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in _trained(self.model):
            parameter.copy_(self.parameters[name])

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = state["updates"]
        self._publish()


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
