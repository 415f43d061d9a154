"""Adapters by hand: the sum, its gradients, and a start that changes nothing."""

import pytest
import torch

from labkit import models
from labkit.config import Lora
from labkit.fp8 import Float8Linear, LinearFormat
from labkit.models.decoder import Decoder
from labkit.models.lora import LoRALinear, adapters, attach, base

FP8 = LinearFormat(fprop=True, dgrad=True)


def adapted(precision: LinearFormat, dtype: torch.dtype) -> LoRALinear:
    torch.manual_seed(0)
    layer = Float8Linear(48, 32, precision=precision, dtype=dtype).requires_grad_(False)
    linear = LoRALinear(layer, Lora(rank=4, alpha=8), torch.Generator().manual_seed(0))
    linear.lora_B.weight.data.normal_()
    return linear


@pytest.mark.parametrize("precision", [LinearFormat.off(), FP8], ids=["bf16", "fp8"])
def test_output_and_gradients_are_the_equations_of_the_module(precision: LinearFormat) -> None:
    linear = adapted(precision, torch.float32)
    A, B = linear.lora_A.weight, linear.lora_B.weight
    x, dy = torch.randn(5, 48, requires_grad=True), torch.randn(5, 32)
    plain = Float8Linear(48, 32, precision=precision, dtype=torch.float32).requires_grad_(False)
    plain.weight.copy_(linear.weight)
    x_plain = x.detach().requires_grad_()
    y_plain = plain(x_plain)
    y_plain.backward(dy)
    y = linear(x)
    y.backward(dy)
    torch.testing.assert_close(y, y_plain + 2 * x @ A.T @ B.T)
    torch.testing.assert_close(B.grad, 2 * dy.T @ (x @ A.T))
    torch.testing.assert_close(A.grad, 2 * (dy @ B).T @ x)
    torch.testing.assert_close(x.grad, x_plain.grad + 2 * dy @ B @ A)
    assert linear.weight.grad is None


def test_a_fresh_adapter_changes_no_bit_and_starts_from_its_seed() -> None:
    policy = models.load("tiny", torch.bfloat16)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q

    def logits(model: Decoder) -> torch.Tensor:
        return model.logits(model(torch.arange(8)[None], torch.arange(8)[None], attend))

    before = logits(policy.decoder())
    one, same, other = (attach(policy.decoder(), Lora(rank=8), seed) for seed in (0, 0, 1))
    assert torch.equal(logits(one), before)
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    weight = one.weights()[name]
    assert torch.equal(weight, same.weights()[name])
    assert not torch.equal(weight, other.weights()[name])
    bound = weight.shape[1] ** -0.5
    assert 0.9 * bound < weight.abs().max() <= 1.01 * bound
    assert one.weights().keys() - policy.weights.keys() == adapters(one.weights()).keys()
    assert base(one.weights()).keys() == policy.weights.keys()


def test_only_the_targets_are_adapted_and_only_adapters_are_trained() -> None:
    model = attach(models.load("tiny").decoder(), Lora(rank=2, targets=("q_proj", "down_proj")))
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {
        f"model.layers.{layer}.{module}.lora_{letter}.weight"
        for layer in range(4)
        for module in ("self_attn.q_proj", "mlp.down_proj")
        for letter in "AB"
    }
    untouched = models.load("tiny").decoder()
    assert attach(untouched, Lora()) is untouched
    assert all(parameter.requires_grad for parameter in untouched.parameters())
