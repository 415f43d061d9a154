"""The decode kernel beside the emulated attention. Without a GPU Triton interprets it, and compiles it for one."""

import os
import subprocess
import sys

import pytest
import torch

from labkit.fp8 import decode_kernel, fp8_attention, get_format, to_grid
from labkit.fp8.scaled_mm import Choice, Machine

needs_triton = pytest.mark.skipif(not decode_kernel.available()[0], reason=decode_kernel.available()[1])
SCALES = {"k_scale": 0.01, "v_scale": 0.02}
SHAPES = [(3, 9, 3, 150, 64), (2, 4, 4, 64, 32), (2, 32, 1, 70, 48)]  # B, H, G, T, d


def test_the_kernel_serves_gpus_that_have_fp8() -> None:
    assert decode_kernel.choose(Machine("cpu")) == Choice(reason="no FP8 attention kernel on a cpu")
    ampere = decode_kernel.choose(Machine("cuda", (8, 0), (13, 0)))
    assert ampere == Choice(reason="compute capability 8.0 has no FP8")
    hopper = decode_kernel.choose(Machine("cuda", (9, 0), (13, 0)))
    assert hopper == (Choice("Triton") if decode_kernel.available()[0] else Choice(reason=decode_kernel.available()[1]))


def both(
    shape: tuple[int, ...], fmt: str, q_scale: float | None, quantize_p: bool, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected)"""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is defined
    from labkit.fp8.triton_attention import decode_attention

    B, H, G, T, d = shape
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*size, d, generator=random).bfloat16() for size in [(B, H, 1), (B, G, T), (B, G, T)])
    starts, end = torch.tensor([0, 5, 33][:B]), T - 7
    k, v = to_grid(k, SCALES["k_scale"], fmt), to_grid(v, SCALES["v_scale"], fmt)
    q = q if q_scale is None else to_grid(q, q_scale, fmt)
    bias = torch.where(torch.arange(end) >= starts[:, None], 0.0, -1e30)[:, None, None]
    expected = fp8_attention(
        q, k[:, :, :end], v[:, :, :end], bias,
        sm_scale=d**-0.5, q_scale=q_scale or 1.0, fmt=fmt, quantize_p=quantize_p, **SCALES,
    )  # fmt: skip
    k8, v8 = (x.to(get_format(fmt).dtype).to(device) for x in (k, v))
    found = decode_attention(
        q.to(device, dtype), k8, v8, starts.to(device), end,
        sm_scale=d**-0.5, q_scale=q_scale, quantize_p=quantize_p, **SCALES,
    )  # fmt: skip
    return found.cpu().float(), expected.float()


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU tests it better")
@pytest.mark.parametrize("q_scale", [None, 0.03])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_computes_the_emulated_attention(shape: tuple[int, ...], fmt: str, q_scale: float | None) -> None:
    # float32, because the interpreter has no products of bfloat16
    found, expected = both(shape, fmt, q_scale, quantize_p=False, dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=4e-3)
    # the interpreter's cast to FP8 loses the carry of a rounded mantissa, so P is only roughly right
    found, expected = both(shape, fmt, q_scale, quantize_p=True, dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from labkit.fp8.triton_attention import _kernel
for fp8, quantize in [("fp8e4nv", True), ("fp8e5", False)]:
    constants = dict(GROUP=3, ROWS=16, DIM=64, KEYS=64, QUANTIZE_Q=quantize, QUANTIZE_P=quantize, P_FACTOR=256.0)
    types = ["*bf16", f"*{fp8}", f"*{fp8}", "*i64", "*bf16", "fp32", "fp32", *["i32"] * 5, *["constexpr"] * 7]
    signature = dict(zip(_kernel.arg_names, types, strict=True))
    compiled = triton.compile(ASTSource(_kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    print(len(compiled.asm["cubin"]) > 0)
"""


@needs_triton
def test_the_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("quantize_p", [False, True])
@pytest.mark.parametrize("q_scale", [None, 0.03])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_on_a_gpu(shape: tuple[int, ...], fmt: str, q_scale: float | None, quantize_p: bool) -> None:
    found, expected = both(shape, fmt, q_scale, quantize_p, torch.bfloat16, "cuda")
    # a score that differs in its last bit can round one P to the neighbouring FP8 value
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-2 if quantize_p else 4e-3)
