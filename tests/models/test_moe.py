"""The routed MLP against its equations, token by token, and what its bits may not depend on."""

import pytest
import torch
from torch.nn import functional as F

from labkit.config import Recipe
from labkit.fp8 import LinearFormat
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.moe import MoEConfig, SparseMoE, balance_loss, set_router, top_k

MOE = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=128, layers=(1, 2))
DENSE_FIRST = DecoderConfig(
    vocab_size=32, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
    rope_theta=1000.0, qk_norm=True, max_positions=64, moe=MOE,
)  # fmt: skip
FP8 = LinearFormat(fprop=True, dgrad=True, wgrad=True)


def block(dtype: torch.dtype, precision: LinearFormat | None = None, norm: bool = True, k: int = 2) -> SparseMoE:
    torch.manual_seed(0)
    made = SparseMoE(MoEConfig(8, k, 128, (1,), norm), 128, 1, dtype)
    for expert in made.experts:
        for linear in expert.children():
            linear.precision = precision or LinearFormat.off()
    return made


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_block_is_its_equations(norm: bool, k: int) -> None:
    moe, x = block(torch.float32, norm=norm, k=k), torch.randn(3, 7, 128)
    expected = torch.empty_like(x)
    for place in [(b, t) for b in range(3) for t in range(7)]:
        token = x[place]
        share = (moe.gate.weight @ token).softmax(-1)
        chosen = share.topk(k).indices
        weight = share[chosen] / share[chosen].sum() if norm else share[chosen]
        outputs = [moe.experts[int(expert)](token) for expert in chosen]
        expected[place] = sum(w * y for w, y in zip(weight, outputs, strict=True))
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_the_dense_sum() -> None:
    """Against all experts on all tokens, with weight 0 where they were not chosen."""
    moe, x = block(torch.float32), torch.randn(40, 128)
    moe(x).square().sum().backward()
    routed = {name: p.grad.clone() for name, p in moe.named_parameters()}
    moe.zero_grad()
    logits = F.linear(x, moe.gate.weight)
    chosen = top_k(logits.detach(), 2)
    weights = torch.zeros_like(logits).scatter(-1, chosen, logits.gather(-1, chosen).softmax(-1))
    sum(weights[:, e, None] * expert(x) for e, expert in enumerate(moe.experts)).square().sum().backward()
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(routed[name], parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("fp32", [False, True])
def test_a_token_has_the_same_bits_whoever_shares_the_pass(precision: LinearFormat | None, fp32: bool) -> None:
    moe = block(torch.bfloat16, precision)
    moe.gate.in_fp32 = fp32
    x = torch.randn(200, 128).bfloat16()
    with torch.no_grad():
        together = moe(x)
        for size in (1, 2, 3, 5, 17, 64):  # an expert then has anything from one row on
            for start in range(0, 200 - size, 37):
                assert torch.equal(moe(x[start : start + size]), together[start : start + size]), (size, start)


def test_of_equal_logits_the_lower_expert_is_taken_and_sets_are_ascending() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [5.0, 0.0, 9.0, 1.0]])
    assert top_k(logits, 2).tolist() == [[1, 2], [0, 2]]
    assert top_k(logits, 1).tolist() == [[1], [2]]


def test_the_router_is_rounded_to_bf16_or_not_and_is_never_fp8() -> None:
    model = Decoder(DENSE_FIRST)
    gate, x = model.model.layers[1].mlp.gate, torch.randn(50, 128).bfloat16()
    exact = x.double() @ gate.weight.double().T
    assert torch.equal(gate(x), exact.bfloat16().float())
    set_router(model, Recipe(router={"dtype": "fp32"}))
    assert torch.equal(gate(x), exact.float())
    assert not any("mlp.gate." in name for _, name, _ in model.linears())
    assert sum("experts" in name for _, name, _ in model.linears()) == 2 * 8 * 3


def test_experts_are_quantised_one_by_one() -> None:
    """An expert of large weights leaves the codes and scales of the others alone."""
    model = Decoder(DENSE_FIRST)
    experts = model.model.layers[2].mlp.experts
    for _, _, linear in model.linears():
        linear.precision = LinearFormat(fprop=True)
    before = [expert.up_proj.operand().clone() for expert in experts]
    with torch.no_grad():
        experts[3].up_proj.weight.mul_(64)
    for number, expert in enumerate(experts):
        assert torch.equal(expert.up_proj.operand(), before[number] * (64 if number == 3 else 1))


def test_an_expert_without_tokens_has_no_gradient_and_the_others_have() -> None:
    moe = block(torch.float32)
    moe(torch.randn(1, 128)).sum().backward()
    assert sum(expert.up_proj.weight.grad is not None for expert in moe.experts) == 2


def test_balance_is_one_when_even_and_the_number_of_experts_at_worst() -> None:
    every = torch.arange(8)[:, None].expand(8, 8)
    assert balance_loss(torch.zeros(8, 8), every).item() == pytest.approx(1.0)
    first = torch.full((16, 8), -30.0)
    first[:, 0] = 30.0
    assert balance_loss(first, torch.zeros(16, 1, dtype=torch.int64)).item() == pytest.approx(8.0)
    logits = torch.randn(30, 8, requires_grad=True)
    balance_loss(logits, top_k(logits.detach(), 2)).backward()
    assert logits.grad.abs().sum() > 0


def test_impossible_numbers_of_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="can't go to 3 of 2 experts"):
        MoEConfig(2, 3, 128, (0,))
