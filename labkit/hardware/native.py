"""Native: which parts of a recipe a device and a shape have FP8 kernels for. The rest costs what BF16 does."""

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.config.recipe import Recipe
from labkit.hardware.devices import Device
from labkit.hardware.shapes import Shape

_BLOCK = 128  # block kernels need widths that are a multiple of it


@dataclass(frozen=True)
class Native:
    """`gemms` has fprop, dgrad and wgrad. `notes` says what the recipe asks for and does not get."""

    linears: bool
    kv_cache: bool
    attention: bool
    gemms: Mapping[str, bool]
    notes: tuple[str, ...]


def native(recipe: Recipe, shape: Shape, device: Device) -> Native:
    granularity = recipe.scaling.granularity
    fits = granularity != "block" or all(width % _BLOCK == 0 for width in shape.inputs)
    rollout, train = fits and granularity in device.rollout, fits and granularity in device.train
    no_gemm = f"{granularity} kernel on {device.label}" if fits else f"block kernel for the widths of {shape.label}"
    no_kernel = f"kernel on {device.label}"
    parts = [
        ("rollout.linears", recipe.rollout.linears, rollout, no_gemm),
        ("rollout.kv_cache", recipe.rollout.kv_cache, device.fp8 is not None, no_kernel),
        ("rollout.attention", recipe.rollout.attention, device.fp8_attention, no_kernel),
        *((f"train.{name}", on, train, no_gemm) for name, on in recipe.train),
    ]
    has = {name: asked and there for name, asked, there, _ in parts}
    lacking: dict[str, list[str]] = {}
    for name, asked, there, lacks in parts:
        if asked and not there:
            lacking.setdefault(lacks, []).append(name)
    return Native(
        linears=has["rollout.linears"],
        kv_cache=has["rollout.kv_cache"],
        attention=has["rollout.attention"],
        gemms={name: has[f"train.{name}"] for name, _ in recipe.train},
        notes=tuple(f"{', '.join(names)}: no native FP8 {lacks}, charged as BF16" for lacks, names in lacking.items()),
    )
