import pytest

from labkit.config import ConfigError, Recipe
from labkit.config.locations import TINY_FOLDER
from labkit.config.presets import DESCRIPTIONS, MODEL_DEFAULTS, RECIPES, preset, recipe


def test_every_recipe_goes_by_its_name_and_has_a_one_line_description():
    assert list(RECIPES) == list(DESCRIPTIONS)
    for name, one in RECIPES.items():
        assert one.name == name
        assert DESCRIPTIONS[name]
        assert "\n" not in DESCRIPTIONS[name]


def test_no_two_recipes_are_the_same():
    assert len({one.override({"name": "same"}) for one in RECIPES.values()}) == len(RECIPES)
    assert not Recipe().diff(RECIPES["bf16"])


def test_the_end_to_end_recipe():
    end_to_end = recipe("fp8-e2e-kv")
    assert all(on for _, on in end_to_end.rollout)
    assert all(on for _, on in end_to_end.train)
    assert (end_to_end.correction.name, end_to_end.correction.cap) == ("tis", 2.0)
    assert end_to_end.recalibration.policy == "every-step"


def test_an_unknown_recipe_has_a_suggestion():
    with pytest.raises(ConfigError, match=r"no preset 'fp8-e2ekv'; did you mean fp8-e2e-kv"):
        recipe("fp8-e2ekv")
    with pytest.raises(ConfigError, match="choose one of bf16, fp8-rollout"):
        recipe("zzz")


def test_a_model_brings_its_defaults_and_overrides_win():
    experiment = preset("fp8-e2e", "smollm2", seed=2, steps=3, grpo={"lr": 1e-5})
    assert experiment.name == "fp8-e2e-smollm2-s2"
    assert (experiment.grpo.prompts_per_step, experiment.grpo.lr, experiment.steps) == (8, 1e-5, 3)
    assert experiment.trainer_attention == MODEL_DEFAULTS["smollm2"]["trainer_attention"] == "sdpa"
    assert experiment.task == "sums"


def test_a_model_folder_needs_a_task():
    assert preset("bf16", "./folder", task="dataset:questions.jsonl").model == "./folder"
    with pytest.raises(ConfigError, match=r"^task: model .* has none of its own"):
        preset("bf16", str(TINY_FOLDER))


def test_a_model_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match=r"^model: must be a name or the path of a folder, got \{'a': 1\}"):
        preset("bf16", {"a": 1})
