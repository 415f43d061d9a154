"""FP8 matrix kernels: which serves where, their layouts, and their numbers (tensor and row run on a CPU as well)."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from labkit.fp8 import scaled_mm
from labkit.fp8.linear import Float8Linear, LinearFormat
from labkit.fp8.quantization import Quantized, quantize
from labkit.fp8.scaled_mm import Choice, Choices, Machine, choose

HOPPER, BLACKWELL, ADA = (Machine("cuda", capability, (13, 0)) for capability in [(9, 0), (10, 0), (8, 9)])
T, K, N = 20, 256, 384


def all_on(**settings: str) -> LinearFormat:
    return LinearFormat(fprop=True, dgrad=True, wgrad=True, **settings)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# ---- the decision


@pytest.mark.parametrize(
    ("granularity", "where", "reason"),
    [
        ("block", HOPPER, ""),
        ("tensor", HOPPER, ""),
        ("row", HOPPER, ""),
        ("mx", HOPPER, "no mx kernel for compute capability 9.0"),
        ("mx", BLACKWELL, ""),
        ("block", BLACKWELL, "no block kernel for compute capability 10.0"),
        ("tensor", ADA, ""),
        ("block", ADA, "no block kernel for compute capability 8.9"),
        ("tensor", Machine("cuda", (8, 0), (13, 0)), "no tensor kernel for compute capability 8.0"),
        ("block", Machine("cuda", (9, 0), (12, 6)), "block kernels need CUDA 12.9, this torch has 12.6"),
        ("tensor", Machine("cpu"), "no FP8 matrix kernels on a cpu"),
    ],
)
def test_the_kernel_follows_from_the_machine_and_the_format(granularity: str, where: Machine, reason: str) -> None:
    choice = Choice(reason=reason) if reason else Choice(kernel=f"scaled_mm {granularity}")
    assert choose(all_on(granularity=granularity), K, N, torch.bfloat16, where) == Choices(choice, choice, choice)


def test_what_a_kernel_does_not_take_is_emulated() -> None:
    odd = choose(all_on(), 200, N, torch.bfloat16, HOPPER)
    assert odd.fprop == Choice(reason="200 x 384 is not a multiple of 16")
    assert choose(all_on(granularity="mx"), 48, N, torch.bfloat16, BLACKWELL).wgrad.reason.endswith("of 32")
    assert choose(all_on(), K, N, torch.float32, HOPPER).fprop.reason.startswith("FP8 kernels return BF16")
    both = choose(all_on(fmt="e5m2", grad_fmt="e5m2"), K, N, torch.bfloat16, HOPPER)
    assert both.wgrad == Choice(reason="tensor cores don't multiply E5M2 by E5M2")
    hybrid = choose(all_on(grad_fmt="e5m2"), K, N, torch.bfloat16, HOPPER)
    assert hybrid.wgrad == Choice(kernel="scaled_mm block")
    row = choose(all_on(fmt="e5m2", granularity="row"), K, N, torch.bfloat16, HOPPER)
    assert row.dgrad.reason == "the row-wise kernel takes its second operand in E4M3 only"


def test_a_gemm_that_is_off_has_neither_kernel_nor_reason() -> None:
    fprop, dgrad, wgrad = choose(LinearFormat(fprop=True), K, N, torch.bfloat16, HOPPER)
    assert (fprop.kernel, dgrad, wgrad) == ("scaled_mm block", Choice(), Choice())


# ---- the numbers, on any CPU: it has tensor-wise and row-wise kernels too


class OnKernels(Float8Linear):
    """A layer that uses FP8 kernels wherever it is."""

    def kernels(self) -> Choices:
        return choose(self.precision, self.in_features, self.out_features, torch.bfloat16, HOPPER)


def outputs(layer: Float8Linear, device: str = "cpu") -> list[torch.Tensor]:
    with torch.no_grad():
        layer.weight.copy_(random(N, K, seed=1) * K**-0.5)
        if layer.bias is not None:
            layer.bias.copy_(random(N, seed=4))
    layer = layer.to(device)
    x = random(2, T // 2, K, seed=2).to(device).requires_grad_()
    y = layer(x)
    y.backward(random(2, T // 2, N, seed=3).to(device))
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach().cpu(), x.grad.cpu(), layer.weight.grad.cpu()]


def assert_same_sums(found: list[torch.Tensor], expected: list[torch.Tensor], rtol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=2**-7, atol=rtol * float(other.abs().max()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad_fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_kernels_compute_what_is_emulated(granularity: str, scale: str, grad_fmt: str, bias: bool) -> None:
    p = all_on(granularity=granularity, scale=scale, grad_fmt=grad_fmt)
    found, expected = (outputs(kind(K, N, bias=bias, precision=p)) for kind in (OnKernels, Float8Linear))
    assert_same_sums(found, expected, rtol=1e-3)


@pytest.mark.parametrize("scale", ["pow2", "fp32"])
def test_a_layer_says_what_it_holds_as_codes(scale: str) -> None:
    p = all_on(granularity="row", scale=scale)
    layer = OnKernels(K, N, precision=p)
    held = layer.operand()
    assert held.dtype == (torch.bfloat16 if scale == "pow2" else torch.float32)
    assert torch.equal(held, p.weight_operand(layer.weight))


# ---- the layouts of those that need a GPU


def accepted_by_torch(a: Quantized, b: Quantized, granularity: str, monkeypatch: pytest.MonkeyPatch) -> torch.Size:
    """Asks torch's own rules about shapes and strides, which it applies to tensors without data as well."""
    real = F.scaled_mm

    def without_data(*arguments: object, **named: object) -> torch.Tensor:
        def empty(x: object) -> object:
            if isinstance(x, torch.Tensor):
                return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return x

        return real(*map(empty, arguments), **named)  # type: ignore[arg-type]

    monkeypatch.setattr(scaled_mm.F, "scaled_mm", without_data)
    return scaled_mm.matmul(a, b, granularity, torch.bfloat16).shape


@pytest.mark.parametrize("k", [128, 256, 1152])
@pytest.mark.parametrize("granularity", ["block", "mx"])
def test_torch_takes_the_layouts(granularity: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = (1, 32) if granularity == "mx" else (1, 128)
    activation, weight = quantize(random(T, k), tile=tile), random(N, k)
    as_weight = scaled_mm.weight_operand(weight, all_on(granularity=granularity), "fprop")
    assert accepted_by_torch(activation, as_weight, granularity, monkeypatch) == (T, N)
    assert accepted_by_torch(activation, quantize(weight, tile=tile), granularity, monkeypatch) == (T, N)


def test_block_scales_lie_where_the_kernel_reads_them() -> None:
    x = quantize(random(T, 200), tile=(1, 128), scale="fp32")
    scales = scaled_mm.scale_operand(x, ScalingType.BlockWise1x128)
    assert (scales.shape, scales.stride()) == ((T, 2), (1, T))
    assert torch.equal(scales, x.scales)
    w = quantize(random(300, 700), tile=(128, 128), scale="fp32")
    grid = scaled_mm.scale_operand(w, ScalingType.BlockWise128x128, right=True)
    assert (grid.shape, grid.stride()) == ((8, 3), (1, 8))  # 700 channels are 6 blocks, rounded up to 8
    assert torch.equal(grid[:6], w.scales.T)
    assert bool((grid[6:] == 1).all())


def test_a_single_column_of_scales_keeps_the_stride_that_is_asked_for() -> None:
    x = quantize(random(48, 16), tile=(1, 128))
    assert scaled_mm.scale_operand(x, ScalingType.BlockWise1x128).stride() == (1, 48)


def test_mx_scales_are_swizzled_as_cublas_documents_it() -> None:
    scales = torch.exp2(torch.arange(130 * 6).view(130, 6).remainder(97).float() - 40)
    flat = scaled_mm.swizzled(scales).float()
    assert flat.numel() == 256 * 8
    for row, column in [(0, 0), (1, 0), (31, 3), (32, 0), (127, 3), (0, 4), (129, 5), (128, 0)]:
        tile = row // 128 * 2 + column // 4
        inside = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert flat[tile * 512 + inside] == scales[row, column]


def test_a_transpose_holds_the_same_numbers() -> None:
    q = quantize(random(48, 200), tile=(128, 1), scale="fp32")
    turned = scaled_mm.transposed(q)
    assert turned.tile == (1, 128)
    assert turned.codes.is_contiguous()
    assert torch.equal(turned.dequantize(), q.dequantize().T)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("granularity", ["block", "tensor", "row", "mx"])
def test_tensor_cores_compute_what_is_emulated(granularity: str, scale: str) -> None:
    if granularity == "mx" and scale == "fp32":
        pytest.skip("mx scales are powers of 2")
    p = all_on(granularity=granularity, scale=scale)
    layer = Float8Linear(K, N, precision=p).cuda()
    if reason := layer.kernels().fprop.reason:
        pytest.skip(reason)
    # Hopper's tensor cores keep fewer bits while they add 32 products; the codes are the same
    assert_same_sums(outputs(layer, "cuda"), outputs(Float8Linear(K, N, precision=p)), rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (128, 1), (1, 32), None])
def test_quantisation_gives_the_same_bits_on_a_gpu(tile: tuple[int, int] | None) -> None:
    x = random(150, 300)
    here, there = quantize(x, tile=tile), quantize(x.cuda(), tile=tile)
    assert torch.equal(here.codes, there.codes.cpu())
    assert torch.equal(here.scales, there.scales.cpu())
