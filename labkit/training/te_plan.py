"""What a Recipe is in Transformer Engine's terms: pure data, so that it can be checked where there is no GPU.

    granularity   Transformer Engine     operands                                  scales
    block         Float8BlockScaling     x, dy 1 x 128; w 128 x 128                power of 2, or FP32
    tensor        Float8CurrentScaling   one scale a tensor, from its own amax     FP32, or power of 2
    mx            MXFP8BlockScaling      1 x 32                                    E8M0

    grad_format   E4M3 -> Format.E4M3, E5M2 -> Format.HYBRID
    GEMMs         all three in FP8, or fprop alone: backward_override "high_precision" keeps the unquantised operands

Which scales a recipe uses is decided by class attributes that Transformer Engine reads from the environment when it is
imported; arguments of the same names are taken in silence and change nothing. So the plan has the environment, and
`labkit.training.te` sets the attributes of the recipe itself and reads them back.

Sources: transformer_engine 2.20.2, common/recipe and pytorch/module/linear.py. Left out: delayed scaling, whose state
belongs to no Recipe here, and NVFP4.
"""

from dataclasses import dataclass, field
from typing import Literal

from labkit.config import Recipe

Kind = Literal["Float8BlockScaling", "Float8CurrentScaling", "MXFP8BlockScaling"]
KINDS: dict[str, Kind] = {
    "block": "Float8BlockScaling",
    "tensor": "Float8CurrentScaling",
    "mx": "MXFP8BlockScaling",
}


@dataclass(frozen=True)
class RecipePlan:
    kind: Kind
    fp8_format: Literal["E4M3", "HYBRID"]
    power_2_scale: bool
    backward_override: Literal["high_precision"] | None
    alignment: int  # of tokens and features: 16, or 32 for mx
    environment: dict[str, str] = field(compare=False)  # before Transformer Engine is imported

    def short_str(self) -> str:
        scales = "power-of-2 scales" if self.power_2_scale else "FP32 scales"
        return f"{self.kind}, {self.fp8_format}, {scales}" + (", BF16 backward" if self.backward_override else "")


def recipe_plan(recipe: Recipe) -> RecipePlan | None:
    """None: nothing is FP8 in training. A Recipe that Transformer Engine can't carry out was refused as a setting."""
    train, scaling = recipe.train, recipe.scaling
    if not train.fprop:
        return None
    pow2 = scaling.scale == "pow2"
    environment = {
        "block": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0" if pow2 else "1"},
        "tensor": {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1" if pow2 else "0"},
        "mx": {},
    }[scaling.granularity]
    return RecipePlan(
        kind=KINDS[scaling.granularity],
        fp8_format="HYBRID" if scaling.grad_format == "e5m2" else "E4M3",
        power_2_scale=pow2,
        backward_override=None if train.dgrad else "high_precision",
        alignment=32 if scaling.granularity == "mx" else 16,
        environment=environment,
    )
