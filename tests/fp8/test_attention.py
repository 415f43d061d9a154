import pytest
import torch

from labkit.fp8.attention import P_SCALE, fp8_attention, math_attention
from labkit.fp8.emulation import to_grid
from labkit.fp8.formats import E4M3

B, H, HKV, D = 2, 6, 2, 64
HIDDEN = -1e30


def qkv(queries: int = 40, keys: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, queries, D), (B, HKV, keys, D), (B, HKV, keys, D)]
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return q, k, v


def causal_bias(queries: int, keys: int) -> torch.Tensor:
    visible = torch.ones(queries, keys).tril(keys - queries).bool()
    bias = torch.zeros(B, 1, queries, keys).masked_fill(~visible, HIDDEN)
    bias[1, :, :, 0] = HIDDEN  # left padding of the second sequence ...
    bias[1, :, 0, 0] = 0.0  # ... whose first query still sees something
    return bias


def reference(q, k, v, bias, sm_scale):
    """Float64 attention with keys and values repeated for every query head."""
    q, k, v = q.double(), *(t.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return (q @ k.mT * sm_scale + bias.double()).softmax(-1) @ v


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("queries", [1, 7, 40])
def test_math_attention_equals_attention_with_repeated_heads(queries):
    q, k, v = qkv(queries)
    bias = causal_bias(queries, 40)
    exact = reference(q, k, v, bias, D**-0.5)
    found = math_attention(q, k, v, bias, sm_scale=D**-0.5)
    assert found.dtype == torch.bfloat16
    assert found.shape == q.shape
    assert relative_error(found, exact) < 0.006
    assert torch.allclose(found.double(), exact, atol=0.03)


def test_bias_over_keys_only_is_shared_by_all_queries():
    q, k, v = qkv()
    bias = torch.zeros(B, 1, 1, 40)
    bias[:, :, :, 30:] = HIDDEN
    found = math_attention(q, k, v, bias, sm_scale=D**-0.5)
    assert torch.equal(found, math_attention(q, k, v, bias.expand(B, 1, 40, 40), sm_scale=D**-0.5))
    assert torch.allclose(found, math_attention(q, k[:, :, :30], v[:, :, :30], bias[..., :30], sm_scale=D**-0.5))


def test_scales_of_a_cache_enter_as_two_scalars():
    q, k, v = qkv()
    bias = causal_bias(40, 40)
    k_grid, v_grid = to_grid(k, 0.25), to_grid(v, 0.5)
    found = math_attention(q, k_grid, v_grid, bias, sm_scale=D**-0.5, k_scale=0.25, v_scale=0.5)
    assert torch.equal(found, math_attention(q, k_grid * 0.25, v_grid * 0.5, bias, sm_scale=D**-0.5))


def test_math_attention_has_the_gradients_of_the_reference():
    tensors = [t.float().requires_grad_() for t in qkv()]
    bias = causal_bias(40, 40)
    math_attention(*tensors, bias, sm_scale=D**-0.5).square().sum().backward()
    found = [t.grad.clone() for t in tensors]
    for t in tensors:
        t.grad = None
    reference(*tensors, bias, D**-0.5).square().sum().backward()
    for gradient, t in zip(found, tensors, strict=True):
        assert relative_error(gradient, t.grad.double()) < 1e-4


@pytest.mark.parametrize("queries", [1, 40])
def test_fp8_attention_error(queries):
    """Rounding Q, K and V to E4M3 costs about 4 %, rounding P a little more."""
    q, k, v = qkv(queries, seed=1)
    bias = torch.zeros(B, 1, queries, 40)
    scales = [float(t.abs().max()) / 448 for t in (q, k, v)]
    grids = [to_grid(t, scale) for t, scale in zip((q, k, v), scales, strict=True)]
    found = fp8_attention(*grids, bias, sm_scale=D**-0.5, q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])
    assert found.dtype == torch.bfloat16
    assert found.shape == q.shape
    assert 0.03 < relative_error(found, reference(q, k, v, bias, D**-0.5)) < 0.06


def test_fp8_attention_equals_its_equations():
    q, k, v = (to_grid(t, 0.01) for t in qkv())
    bias = causal_bias(40, 40)
    found = fp8_attention(q, k, v, bias, sm_scale=D**-0.5, q_scale=0.01, k_scale=0.01, v_scale=0.01)
    k, v = (t.double().repeat_interleave(H // HKV, 1) for t in (k, v))
    scores = q.double() @ k.mT * (D**-0.5 * 1e-4) + bias.double()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    coded = (weights * 256).float().to(E4M3.dtype).double()
    expected = coded @ v * 0.01 / 256 / weights.sum(-1, keepdim=True)
    assert relative_error(found, expected) < 0.003  # bfloat16 output, and ties that float32 scores break otherwise


def test_small_probabilities_survive_because_of_the_offset():
    """512 keys at 2^-12 of the largest: unscaled E4M3 flushes all of them, together 1/9 of the mass."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, 513, 1, dtype=torch.bfloat16)
    v = torch.ones(1, 1, 513, 1, dtype=torch.bfloat16)
    v[:, :, 0] = 0.0
    bias = torch.full((1, 1, 1, 513), -12 * torch.log(torch.tensor(2.0)).item())
    bias[..., 0] = 0.0
    found = fp8_attention(q, k, v, bias, sm_scale=1.0, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    assert found.item() == pytest.approx(1 / 9, rel=0.01)
    probabilities = bias.exp()
    assert to_grid(probabilities, 1.0)[..., 1:].count_nonzero() == 0
    assert to_grid(probabilities, P_SCALE)[..., 1:].count_nonzero() == 512


def test_heads_that_do_not_divide_are_refused():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="multiple of Hkv"):
        math_attention(q[:, :5], k, v, torch.zeros(B, 1, 1, 40), sm_scale=1.0)


def test_an_operand_that_is_left_out_is_not_rounded():
    """With nothing quantised the FP8 kernel is attention up to BF16 rounding of P~ and of the output."""
    q, k, v = qkv(seed=1)
    bias = causal_bias(40, 40)
    exact = reference(q, k, v, bias, D**-0.5)
    ones = {"sm_scale": D**-0.5, "q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}
    found = fp8_attention(q, k, v, bias, **ones, quantize_p=False)
    assert relative_error(found, exact) < 0.004
    only_p = fp8_attention(q, k, v, bias, **ones)
    assert 0.01 < relative_error(only_p, exact) < 0.03
    q_scale = float(q.abs().max()) / 448
    only_q = fp8_attention(
        to_grid(q, q_scale), k, v, bias, **{**ones, "q_scale": q_scale}, quantize_p=False
    )  # fmt: skip
    assert 0.01 < relative_error(only_q, exact) < 0.04


def test_fp8_attention_keeps_float32():
    grids = [to_grid(t.float(), 0.01) for t in qkv()]
    bias = causal_bias(40, 40)
    scales = {"sm_scale": D**-0.5, "q_scale": 0.01, "k_scale": 0.01, "v_scale": 0.01}
    found = fp8_attention(*grids, bias, **scales)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), fp8_attention(*(t.bfloat16() for t in grids), bias, **scales))
