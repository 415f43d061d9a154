"""Which operands of the attention are FP8, layer by layer, and what their scales clip."""

import dataclasses

import pytest
import torch

from labkit.config import Recipe
from labkit.fp8 import KVScales, fp8_attention, math_attention, to_grid
from labkit.models.attention import causal_bias
from labkit.models.decoder import DecoderConfig
from labkit.rollout.kv_cache import KVCache, KVPrecision

B, H, G, T, D = 2, 4, 2, 6, 32
CONFIG = DecoderConfig(
    vocab_size=8, hidden_size=H * D, intermediate_size=64, num_layers=2, num_heads=H, num_kv_heads=G, head_dim=D
)
STARTS = torch.tensor([0, 2])
SCALES = KVScales(0, (0.01, 0.02), (0.0125, 0.03), (0.011, 0.04))
SM_SCALE = D**-0.5


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, heads, T, D, generator=generator).bfloat16() for heads in (H, G, G))  # type: ignore[return-value]


def attend(parts: str, layer: int = 0) -> torch.Tensor:
    precision = KVPrecision("e4m3", SCALES, (frozenset(parts),) * 2)
    return KVCache(CONFIG, STARTS, T, precision).attend(layer, *qkv())


def expected(q: bool, k: bool, v: bool, p: bool) -> torch.Tensor:
    """Of layer 0, from the two kernels."""
    bias = causal_bias(STARTS, T, T)
    scales = {name: getattr(SCALES, name)[0] if on else 1.0 for name, on in (("q", q), ("k", k), ("v", v))}
    grids = [
        to_grid(x, scales[name]) if on else x for x, name, on in zip(qkv(), "qkv", (q, k, v), strict=True)
    ]  # fmt: skip
    if not (q or p):
        return math_attention(*grids, bias, sm_scale=SM_SCALE, k_scale=scales["k"], v_scale=scales["v"])
    return fp8_attention(
        *grids, bias, sm_scale=SM_SCALE, q_scale=scales["q"], k_scale=scales["k"], v_scale=scales["v"], quantize_p=p
    )


@pytest.mark.parametrize("parts", ["", "k", "v", "kv", "q", "p", "qp", "kp", "qkvp"])
def test_every_choice_of_parts_is_computed_by_the_kernel_it_needs(parts: str) -> None:
    assert torch.equal(attend(parts), expected(*(part in parts for part in "qkvp")))


def test_parts_change_what_they_name_and_nothing_else() -> None:
    plain = attend("")
    assert all(not torch.equal(attend(part), plain) for part in "qkvp")
    one_layer = KVPrecision("e4m3", SCALES, (frozenset("k"), frozenset()))
    cache = KVCache(CONFIG, STARTS, T, one_layer)
    assert torch.equal(cache.attend(0, *qkv()), attend("k", layer=0))
    assert torch.equal(cache.attend(1, *qkv()), attend("", layer=1))


@pytest.mark.parametrize(
    ("rollout", "parts"),
    [({}, ""), ({"kv_cache": True}, "kv"), ({"kv_cache": True, "attention": True}, "qkvp")],
)
def test_a_recipe_names_its_parts(rollout: dict, parts: str) -> None:
    precision = KVPrecision.from_recipe(Recipe(rollout=rollout), num_layers=2)
    assert precision.parts == (frozenset(parts),) * 2
    assert precision.scale(0, "k") is None  # no scales yet
    held = dataclasses.replace(precision, scales=SCALES)
    assert held.scale(1, "k") == (0.03 if "k" in parts else None)
    assert held.quantizes_p(1) == ("p" in parts)


def test_saturation_counts_what_the_scale_clips_without_the_padding() -> None:
    """Two sequences, the second with two columns of padding: 10 real columns of G * D = 64 elements."""
    scales = KVScales(0, (1.0, 1.0), (0.5, 0.5), (1.0, 1.0))
    cache = KVCache(CONFIG, STARTS, T, KVPrecision("e4m3", scales, (frozenset("kv"),) * 2))
    q, k, v = (torch.zeros(x.shape, dtype=x.dtype) for x in qkv())
    k[0, 0, 0, :3] = 300.0  # above 0.5 * 448
    k[0, 0, 1, 0] = 224.0  # the largest value that fits
    k[1, 0, 0, :] = 1e4  # padding
    cache.attend(0, q, k, v)
    assert cache.saturation.shares() == {"k": 3 / 640, "v": 0.0}
    cache.attend(1, q, k, v)
    assert cache.saturation.shares() == {"k": 6 / 1280, "v": 0.0}


def test_a_bf16_cache_counts_nothing() -> None:
    cache = KVCache(CONFIG, STARTS, T, KVPrecision())
    cache.attend(0, *qkv())
    assert cache.saturation.shares() == {}


def test_a_float32_cache_keeps_float32() -> None:
    q, k, v = (x.float() for x in qkv())
    precision = KVPrecision("e4m3", SCALES, (frozenset("qkvp"),) * 2)
    found = KVCache(CONFIG, STARTS, T, precision, dtype=torch.float32).attend(0, q, k, v)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), attend("qkvp"))  # the kernel is FP32 up to its last rounding


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("parts", ["kv", "qkvp"])
def test_a_packed_cache_holds_a_byte_an_element_and_the_same_numbers(parts: str, fmt: str) -> None:
    precision = KVPrecision(fmt, SCALES, (frozenset(parts), frozenset()))
    q, k, v = qkv()
    packed, wide = (KVCache(CONFIG, STARTS, T, precision, packed=packed) for packed in (True, False))
    assert [keys.dtype for keys in packed.keys] == [torch.uint8, torch.bfloat16]  # the second layer is BF16
    for cache in (packed, wide):
        cache.attend(0, q[:, :, :-1], k[:, :, :-1], v[:, :, :-1])
        cache.advance(T - 1)
    newest = q[:, :, -1:], k[:, :, -1:], v[:, :, -1:]
    rows = torch.tensor([1, 0])
    assert torch.equal(packed.attend(0, *newest), wide.attend(0, *newest))
    swapped = [x[rows] for x in newest]
    assert torch.equal(packed.rows(rows).attend(0, *swapped), wide.rows(rows).attend(0, *swapped))
    assert packed.saturation.shares() == wide.saturation.shares()
