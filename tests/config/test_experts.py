import pytest

from labkit.config import ConfigError, Experiment, preset
from labkit.config.experts import check_dense


@pytest.mark.parametrize(
    ("model", "changes", "line"),
    [
        ("tiny", {"recipe.router.replay": "r3"}, "recipe.router.replay: r3 has nothing to act on: tiny has no experts"),
        ("smollm2", {"recipe.router.dtype": "fp32"}, "recipe.router.dtype: fp32 has nothing to act on: smollm2 has no"),
        ("tiny", {"grpo.aux_loss_coef": 0.01}, "grpo.aux_loss_coef: 0.01 has nothing to act on: tiny has no experts"),
        ("tiny-moe", {"recipe.router.replay": "r4"}, "recipe.router.replay: must be 'off', 'r2' or 'r3'"),
        (
            "tiny-moe",
            {"recipe.router.replay": "r3", "engine": "vllm"},
            "recipe.router.replay: the routes that vllm takes don't come back with its rollouts; choose r2 or off",
        ),
        ("tiny-moe", {"task": "sums"}, "task: sums is written in letters or lines, which the tiny-moe model can't"),
    ],
)
def test_what_needs_experts_is_refused_without_them(model: str, changes: dict, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preset("bf16", model, **changes)
    assert caught.value.problems[0].startswith(line)


def test_a_folder_is_judged_once_it_was_read() -> None:
    experiment = Experiment(model="a/folder", task="arithmetic", recipe={"router": {"replay": "r2"}})
    with pytest.raises(
        ConfigError, match=r"^recipe\.router\.replay: r2 has nothing.*set it to off, or take .* tiny-moe"
    ):
        check_dense(experiment)
    check_dense(experiment.override({"recipe.router.replay": "off"}))


def test_a_mixture_of_experts_has_the_settings() -> None:
    experiment = preset("fp8-rollout", "tiny-moe", **{"recipe.router.replay": "r3", "recipe.router.dtype": "fp32"})
    assert experiment.task == "arithmetic"
    assert experiment.recipe.short_str() == "r:lin e4m3/block/pow2 router:fp32 replay:r3"
    assert preset("bf16", "tiny-moe").recipe.short_str() == "bf16"
