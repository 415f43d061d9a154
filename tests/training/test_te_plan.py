import pytest

from labkit.config import Recipe
from labkit.training.te_plan import RecipePlan, recipe_plan

ALL = {"fprop": True, "dgrad": True, "wgrad": True}


def plan(scaling: dict[str, str] | None = None, train: dict[str, bool] | None = None) -> RecipePlan:
    made = recipe_plan(Recipe(train=train or ALL, scaling=scaling or {}))
    assert made is not None
    return made


def test_a_recipe_without_fp8_training_has_no_plan() -> None:
    assert recipe_plan(Recipe(rollout={"linears": True})) is None


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({}, RecipePlan("Float8BlockScaling", "E4M3", True, None, 16, {})),
        ({"scale": "fp32"}, RecipePlan("Float8BlockScaling", "E4M3", False, None, 16, {})),
        ({"grad_format": "e5m2"}, RecipePlan("Float8BlockScaling", "HYBRID", True, None, 16, {})),
        ({"granularity": "tensor"}, RecipePlan("Float8CurrentScaling", "E4M3", True, None, 16, {})),
        (
            {"granularity": "tensor", "scale": "fp32", "grad_format": "e5m2"},
            RecipePlan("Float8CurrentScaling", "HYBRID", False, None, 16, {}),
        ),
        ({"granularity": "mx"}, RecipePlan("MXFP8BlockScaling", "E4M3", True, None, 32, {})),
    ],
)
def test_every_scaling_has_its_recipe(scaling: dict[str, str], expected: RecipePlan) -> None:
    assert plan(scaling) == expected


def test_fprop_alone_leaves_the_backward_pass_in_high_precision() -> None:
    alone = plan(train={"fprop": True})
    assert alone.backward_override == "high_precision"
    assert alone.short_str() == "Float8BlockScaling, E4M3, power-of-2 scales, BF16 backward"


@pytest.mark.parametrize(
    ("scaling", "environment"),
    [
        ({}, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}),
        ({"scale": "fp32"}, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}),
        ({"granularity": "tensor"}, {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}),
        ({"granularity": "tensor", "scale": "fp32"}, {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "0"}),
        ({"granularity": "mx"}, {}),
    ],
)
def test_the_environment_chooses_the_same_scales(scaling: dict[str, str], environment: dict[str, str]) -> None:
    assert plan(scaling).environment == environment
