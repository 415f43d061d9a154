"""What runs as FP8 where, and what is said of the rest."""

import pytest

from labkit.config import RECIPES
from labkit.hardware.devices import device_named
from labkit.hardware.native import Native, native
from labkit.hardware.shapes import shape_named


def on(recipe: str, shape: str, device: str) -> Native:
    return native(RECIPES[recipe], shape_named(shape), device_named(device))


def test_hopper_has_all_of_fp8_e2e_kv() -> None:
    got = on("fp8-e2e-kv", "llama-3.1-8b", "h100")
    assert (got.linears, got.kv_cache, got.attention) == (True, True, True)
    assert got.gemms == {"fprop": True, "dgrad": True, "wgrad": True}
    assert got.notes == ()


def test_a_note_for_every_part_that_is_charged_as_bf16() -> None:
    got = on("fp8-e2e-kv", "llama-3.1-8b", "a100")
    assert not any((got.linears, got.kv_cache, got.attention, *got.gemms.values()))
    assert [note.split(":")[0] for note in got.notes] == [
        "rollout.linears, train.fprop, train.dgrad, train.wgrad",
        "rollout.kv_cache, rollout.attention",
    ]
    assert all("A100" in note and "BF16" in note for note in got.notes)


def test_ada_has_per_tensor_scales_and_an_fp8_cache_without_fp8_attention() -> None:
    assert on("fp8-e2e-tensor", "llama-3.1-8b", "l40s").notes == ()
    got = on("fp8-rollout-kv", "llama-3.1-8b", "l40s")
    assert (got.linears, got.kv_cache, got.attention) == (False, True, False)


def test_blackwell_generates_with_block_scales_but_trains_with_mx() -> None:
    got = on("fp8-e2e", "llama-3.1-8b", "b200")
    assert got.linears
    assert not any(got.gemms.values())
    assert "block kernel on B200" in got.notes[0]


@pytest.mark.parametrize(("recipe", "notes"), [("fp8-rollout", 1), ("fp8-e2e-tensor", 0)])
def test_blocks_need_widths_of_128(recipe: str, notes: int) -> None:
    got = on(recipe, "smollm2-135m", "h100")
    assert len(got.notes) == notes
    assert not notes or "widths of SmolLM2-135M" in got.notes[0]


def test_what_is_not_asked_for_is_not_mentioned() -> None:
    assert on("bf16", "llama-3.1-8b", "a100").notes == ()
