"""Sizes as they are published."""

import pytest

from labkit.hardware.shapes import SHAPES, shape_named


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("smollm2-135m", 0.135, 23040),
        ("qwen3-0.6b", 0.596, 114688),
        ("qwen3-1.7b", 1.720, 114688),
        ("qwen3-8b", 8.191, 147456),
        ("llama-3.1-8b", 8.030, 131072),
    ],
)
def test_parameters_and_cache_match_the_published_models(name: str, billions: float, kv_bytes: int) -> None:
    shape = shape_named(name)
    assert shape.params / 1e9 == pytest.approx(billions, abs=6e-4)
    assert 2 * shape.kv_elements == kv_bytes


def test_the_tiny_shape_is_the_shipped_policy() -> None:
    assert SHAPES["tiny"].params == 4 * (2 * 128 * 32 * 6 + 3 * 128 * 384) + 2 * 128 * 32


def test_a_wrong_name_gets_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        shape_named("llama-3-8b")
