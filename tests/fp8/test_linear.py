import copy
import pickle

import pytest
import torch
from torch.nn import functional as F

from labkit.config.recipe import Recipe, Rollout, Scaling, Train
from labkit.fp8.linear import Float8Linear, LinearFormat
from labkit.fp8.quantization import quantize

E2E = LinearFormat(fprop=True, dgrad=True, wgrad=True)
ROLLOUT = LinearFormat(fprop=True)
T, K, N = 150, 200, 170  # all ragged

FORMATS = {
    "block": E2E,
    "block fp32": LinearFormat(True, True, True, scale="fp32"),
    "block vllm": LinearFormat(True, True, True, scale="fp32", formula="vllm"),
    "block deepgemm": LinearFormat(True, True, True, formula="deepgemm"),
    "block e5m2 gradients": LinearFormat(True, True, True, grad_fmt="e5m2"),
    "tensor": LinearFormat(True, True, True, granularity="tensor"),
    "tensor fp32": LinearFormat(True, True, True, granularity="tensor", scale="fp32"),
    "row": LinearFormat(True, True, True, granularity="row"),
    "row fp32": LinearFormat(True, True, True, granularity="row", scale="fp32"),
    "mx": LinearFormat(True, True, True, granularity="mx"),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(precision: LinearFormat, k: int = K, n: int = N, bias: bool = False) -> Float8Linear:
    linear = Float8Linear(k, n, bias=bias, precision=precision)
    with torch.no_grad():
        linear.weight.copy_(random(n, k, seed=1) * k**-0.5)
        if bias:
            linear.bias.copy_(random(n, seed=2))
    return linear


def run(linear: Float8Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": linear.weight.grad}


def reference(linear: Float8Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three GEMM equations in double precision, each operand quantised along its contraction."""
    p = linear.precision
    w = linear.weight.detach()

    def q(tensor: torch.Tensor, along: int) -> torch.Tensor:
        size = {"block": 128, "row": tensor.shape[along], "mx": 32, "tensor": 0}[p.granularity]
        tile = (size, 1) if along == 0 else (1, size)
        if tensor is w and p.granularity == "block":
            tile = (128, 128)
        fmt = p.grad_fmt if tensor is dy else p.fmt
        return quantize(tensor, fmt, tile if size else None, p.scale, p.formula).dequantize().double()

    y = q(x, along=1) @ q(w, along=1).T
    dx = q(dy, along=1) @ q(w, along=0)
    dw = q(dy, along=0).T @ q(x, along=0)
    return {"y": y, "dx": dx, "dw": dw}


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal up to one bfloat16 rounding of the result and the order of a float32 sum."""
    assert found.dtype == torch.bfloat16
    tolerance = 2**-8 * exact.abs() + 1e-5 * exact.abs().max()
    assert bool(((found.double() - exact).abs() <= tolerance).all())


@pytest.mark.parametrize("name", FORMATS)
def test_output_and_gradients_are_the_three_equations(name):
    linear, x, dy = layer(FORMATS[name]), random(T, K, seed=3), random(T, N, seed=4)
    found, exact = run(linear, x, dy), reference(linear, x, dy)
    for which in ("y", "dx", "dw"):
        assert_rounded(found[which], exact[which])


@pytest.mark.parametrize("only", ["fprop", "dgrad", "wgrad"])
def test_each_gemm_has_its_own_switch(only):
    x, dy = random(T, K, seed=3), random(T, N, seed=4)
    mixed = run(layer(LinearFormat(**{only: True})), x, dy)
    high = run(layer(LinearFormat.off()), x, dy)
    full = run(layer(E2E), x, dy)
    for gemm, which in {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}.items():
        assert torch.equal(mixed[which], (full if gemm == only else high)[which])
        assert not torch.equal(full[which], high[which])


@pytest.mark.parametrize("bias", [False, True])
def test_off_is_exactly_the_ordinary_linear(bias):
    linear, x = layer(LinearFormat.off(), bias=bias), random(T, K, seed=3)
    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_bias_is_added_and_gets_its_gradient(scale):
    precision = LinearFormat(True, True, True, scale=scale)
    linear, x, dy = layer(precision, bias=True), random(T, K, seed=3), random(T, N, seed=4)
    plain = layer(precision)(x)
    y = linear(x)
    y.backward(dy)
    assert (y - (plain.float() + linear.bias)).abs().max() <= 2**-7 * y.abs().max()
    assert torch.allclose(linear.bias.grad.float(), dy.float().sum(0), rtol=2**-7, atol=0.05)


def test_three_dimensional_input_is_its_flattened_rows():
    linear, x, dy = layer(E2E), random(3, 50, K, seed=3), random(3, 50, N, seed=4)
    folded = run(linear, x, dy)
    linear.weight.grad = None
    flat = run(linear, x.view(T, K), dy.view(T, N))
    assert folded["y"].shape == (3, 50, N)
    assert folded["dx"].shape == x.shape
    for which, tensor in flat.items():
        assert torch.equal(folded[which].reshape(tensor.shape), tensor)


def test_ragged_width_equals_zero_padding():
    """K = 576 (SmolLM2) is not a multiple of 128."""
    linear, wide = layer(E2E, k=576), layer(E2E, k=640)
    with torch.no_grad():
        wide.weight.copy_(F.pad(linear.weight, (0, 64)))
    x, dy = random(T, 576, seed=3), random(T, N, seed=4)
    found, padded = run(linear, x, dy), run(wide, F.pad(x, (0, 64)), dy)
    for which in ("y", "dx", "dw"):
        expected = padded[which][:, :576] if which != "y" else padded[which]
        assert torch.allclose(found[which].float(), expected.float(), rtol=2**-7, atol=1e-5)


def test_error_of_one_gaussian_linear():
    linear, x = layer(ROLLOUT, k=1024, n=256), random(256, 1024, seed=3)
    exact = x.double() @ linear.weight.double().T
    error = (linear(x).double() - exact).norm() / exact.norm()
    assert 0.035 < error < 0.040


@pytest.mark.parametrize("granularity", ["block", "row", "mx"])
def test_a_token_alone_has_the_bits_it_has_in_the_batch(granularity):
    """What makes rollout (one token at a time) and training (whole sequences) agree exactly."""
    linear = layer(LinearFormat(fprop=True, granularity=granularity), k=128, n=384)
    x = random(64, 128, seed=3)
    with torch.no_grad():
        together = linear(x)
        alone = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(together, alone)


def test_inference_without_autograd_gives_the_same_bits():
    for precision in (E2E, LinearFormat(dgrad=True), FORMATS["tensor fp32"]):
        linear, x = layer(precision, bias=True), random(T, K, seed=3)
        with torch.no_grad():
            inference = linear(x)
        assert not inference.requires_grad
        assert torch.equal(inference, linear(x))


def test_float32_layers_stay_float32():
    linear = Float8Linear(K, N, precision=E2E, dtype=torch.float32)
    found = run(linear, random(T, K, seed=3, dtype=torch.float32), random(T, N, seed=4, dtype=torch.float32))
    assert all(tensor.dtype == torch.float32 for tensor in found.values())


def change_by_optimizer(linear: Float8Linear) -> None:
    linear.weight.grad = torch.ones_like(linear.weight)
    torch.optim.AdamW(linear.parameters(), lr=0.1).step()


def change_by_copy(linear: Float8Linear) -> None:
    with torch.no_grad():
        linear.weight.copy_(random(N, K, seed=9))


def change_by_state_dict(linear: Float8Linear) -> None:
    linear.load_state_dict({"weight": random(N, K, seed=9)})


def change_by_new_data(linear: Float8Linear) -> None:
    linear.weight.data = random(N, K, seed=9)


def change_by_new_parameter(linear: Float8Linear) -> None:
    linear.weight = torch.nn.Parameter(random(N, K, seed=9))


def change_by_requantize(linear: Float8Linear) -> None:
    linear.weight.data.copy_(random(N, K, seed=9))  # invisible to torch's version counter
    linear.requantize()


CHANGES = [
    change_by_optimizer,
    change_by_copy,
    change_by_state_dict,
    change_by_new_data,
    change_by_new_parameter,
    change_by_requantize,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_weight_never_meets_stale_codes(change):
    linear, x, dy = layer(E2E), random(T, K, seed=3), random(T, N, seed=4)
    before = run(linear, x, dy)
    change(linear)
    linear.weight.grad = None
    after = run(linear, x, dy)
    fresh = Float8Linear(K, N, precision=E2E)
    with torch.no_grad():
        fresh.weight.copy_(linear.weight)
    expected = run(fresh, x, dy)
    assert not torch.equal(before["y"], after["y"])
    for which, tensor in expected.items():
        assert torch.equal(after[which], tensor)
    assert torch.equal(linear.operand(), fresh.operand())


def test_copies_and_pickles_keep_no_cache():
    linear, x = layer(LinearFormat(fprop=True, scale="fp32")), random(T, K, seed=3)
    y = linear(x)
    for copied in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(copied(x), y)
        while copied.weight._version <= linear.weight._version:  # reach the version the cache was made at
            with torch.no_grad():
                copied.weight.add_(random(N, K, seed=6))
            plain = layer(copied.precision)
            with torch.no_grad():
                plain.weight.copy_(copied.weight)
            assert torch.equal(copied(x), plain(x))


def test_a_changed_precision_is_noticed():
    linear, x = layer(ROLLOUT), random(T, K, seed=3)
    linear(x)
    linear.precision = FORMATS["block e5m2 gradients"]
    assert torch.equal(linear(x), layer(ROLLOUT)(x))
    linear.precision = LinearFormat(fprop=True, fmt="e5m2")
    assert torch.equal(linear(x), layer(linear.precision)(x))


def test_the_weight_is_quantised_once():
    linear, x = layer(E2E), random(T, K, seed=3)
    linear(x)
    operands = linear._operands
    linear(x)
    assert linear._operands is operands
    assert operands.fprop is operands.dgrad


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_the_operand_is_the_quantised_weight(scale):
    linear = layer(LinearFormat(fprop=True, scale=scale))
    expected = quantize(linear.weight, "e4m3", (128, 128), scale).dequantize(linear.operand().dtype)
    assert torch.equal(linear.operand(), expected)
    linear.precision = LinearFormat.off()
    assert torch.equal(linear.operand(), linear.weight)


def test_format_mistakes_raise_with_the_way_out():
    with pytest.raises(ValueError, match="block, tensor, row, mx"):
        LinearFormat(granularity="channel")
    with pytest.raises(ValueError, match="set scale to pow2"):
        LinearFormat(granularity="mx", scale="fp32")
    with pytest.raises(ValueError, match='"rollout" or "train"'):
        LinearFormat.from_recipe(None, side="inference")


def test_formats_of_a_recipe_by_side():
    recipe = Recipe(
        rollout=Rollout(linears=True),
        train=Train(wgrad=True),
        scaling=Scaling(grad_format="e5m2", granularity="row", scale="fp32", formula="vllm"),
    )
    shared = {"grad_fmt": "e5m2", "granularity": "row", "scale": "fp32", "formula": "vllm"}
    assert LinearFormat.from_recipe(recipe, "rollout") == LinearFormat(fprop=True, **shared)
    assert LinearFormat.from_recipe(recipe, "train") == LinearFormat(wgrad=True, **shared)
    assert LinearFormat.from_recipe(Recipe(), "train").inactive
