"""LoRA: small trained adapters beside the linear layers of a base that is frozen.

    y_TN = linear(x_TK) + alpha / r · (x_TK A_rK^T) B_Nr^T        A uniform in ±1/sqrt(K), B = 0

T tokens, K input and N output features, r the rank. `linear` is the base layer in the Recipe's precision, BF16 or FP8;
A and B compute in BF16 and have FP32 masters, like all weights that are trained. Since B starts at 0, the policy of
step 0 is the base, bit for bit. Only A and B have gradients and optimizer state:

    dB_Nr = alpha / r · dy^T (x A^T)       dA_rK = alpha / r · (dy B)^T x
    dx_TK = dgrad(dy) + alpha / r · (dy B) A          through the base, in the Recipe's precision

so the base has no wgrad, and embeddings, norms and lm_head stay as they were loaded.

Why this matters for FP8: rollouts of a policy that is trained as a whole need its weights quantised anew after every
step, and updates smaller than half an FP8 step never arrive (`codes_changed`). A frozen base is quantised once. Its
codes are the same on both sides for ever, what moves is BF16, and a refit sends r (K + N) numbers a layer instead of
K N. Activations are still quantised: an engine in FP8 beside a trainer in BF16 differs as before.

The sum is what is computed on both sides. Adding B A into the base's weights instead would give other bits, and in FP8
need quantising anew: `merged` is for a policy that leaves the lab.

Names: `….q_proj.lora_A.weight` [r, K] and `….lora_B.weight` [N, r] beside `….q_proj.weight`; those of PEFT, which has
`base_model.model.` before them.

Sources: LoRA (arXiv 2106.09685); QLoRA (2305.14314) for the frozen quantised base; PEFT for initialisation and names.
Left out: dropout, rank-stabilised scale, adapters of embeddings and lm_head.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from labkit.config import Lora
from labkit.fp8 import Float8Linear
from labkit.models.decoder import Decoder


class LoRALinear(Float8Linear):
    """A linear layer, its parameters frozen, with an adapter beside it."""

    def __init__(self, layer: Float8Linear, settings: Lora, generator: torch.Generator) -> None:
        with torch.device("meta"):  # parameters of its own would be thrown away at once
            super().__init__(layer.in_features, layer.out_features, layer.bias is not None, layer.precision)
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = settings.alpha / settings.rank
        dtype, bound = layer.weight.dtype, layer.in_features**-0.5
        start = torch.empty(settings.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Linear(layer.in_features, settings.rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(settings.rank, layer.out_features, bias=False, dtype=dtype)
        with torch.no_grad():
            self.lora_A.weight.copy_(start)
            self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapted(x)

    def adapted(self, x: Tensor) -> Tensor:
        """The adapter's part of the output."""
        return self.lora_B(self.lora_A(x)) * self.scale


def attach(model: Decoder, settings: Lora, seed: int = 0) -> Decoder:
    """The same model with its weights frozen and adapters beside the target layers; unchanged with rank 0."""
    if not settings.rank:
        return model
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for _, weight_name, layer in list(model.linears()):
        parent, _, name = weight_name.removesuffix(".weight").rpartition(".")
        if name in settings.targets:
            setattr(model.get_submodule(parent), name, LoRALinear(layer, settings, generator))
    return model


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if is_adapter(name)}


def base(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if not is_adapter(name)}


def only_adapters(names: Iterable[str]) -> bool:
    """Whether a refit brings nothing else: the base it goes with is there already."""
    return all(map(is_adapter, names))


def merged(weights: Mapping[str, Tensor], settings: Lora) -> dict[str, Tensor]:
    """The weights of one model without adapters: W + alpha / r · B A, summed in FP32, in the type of W."""
    whole = base(weights)
    for name in whole:
        layer = name.removesuffix(".weight")
        if (a := weights.get(f"{layer}.lora_A.weight")) is not None:
            update = weights[f"{layer}.lora_B.weight"].float() @ a.float() * (settings.alpha / settings.rank)
            whole[name] = (whole[name].float() + update).to(whole[name].dtype)
    return whole
