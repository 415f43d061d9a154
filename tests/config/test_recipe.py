import pytest

from labkit.config import ConfigError, Correction, Recalibration, Recipe, Rollout, Scaling
from labkit.config.presets import RECIPES


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rollout(attention=True), "attention: needs kv_cache"),
        (lambda: Scaling(granularity="mx", scale="fp32"), "scale: mx has power-of-2 scales by definition"),
        (lambda: Scaling(format="e4m4"), "format: must be 'e4m3' or 'e5m2', got 'e4m4'"),
        (lambda: Recalibration(policy="every-k-steps", every=0), "every: must be greater than or equal to 1"),
        (lambda: Recalibration(policy="unit", every=4), "every: belongs to policy every-k-steps, not unit"),
        (lambda: Recalibration(percentile=0), "percentile: must be greater than 0"),
        (lambda: Recalibration(percentile=100.1), "percentile: must be less than or equal to 100"),
        (lambda: Recalibration(margin=0.001), "margin: must be greater than or equal to 0.01"),
        (lambda: Recalibration(margin=101), "margin: must be less than or equal to 100"),
        (
            lambda: Recipe(recalibration={"policy": "unit"}),
            "recalibration.policy: unit has no effect while rollout.kv_cache is off; turn that on, or set this back",
        ),
        (
            lambda: Recipe(rollout={"linears": True}, scaling={"kv_format": "e5m2"}),
            "scaling.kv_format: e5m2 has no effect while rollout.kv_cache is off",
        ),
        (
            lambda: RECIPES["fp8-rollout-kv-unit"].override({"rollout": {"kv_cache": False, "attention": False}}),
            "recalibration.policy: unit has no effect while rollout.kv_cache is off",
        ),
        (
            lambda: Recipe(keep_bf16={"first_layers": -1}),
            "keep_bf16.first_layers: must be greater than or equal",
        ),
        (
            lambda: Recipe(keep_bf16={"last_layers": True}),
            "keep_bf16.last_layers: must be a number, got True",
        ),
        (lambda: Recipe(name=""), "name: "),
    ],
)
def test_impossible_settings_name_the_key_and_the_way_out(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value).startswith(message)
    assert len(caught.value.problems) == 1


def test_recipes_are_values():
    first = Recipe(rollout=Rollout(linears=True))
    second = Recipe(rollout={"linears": True})
    assert first == second
    assert len({first, second, Recipe()}) == 2
    with pytest.raises(ConfigError, match=r"immutable; make a changed copy with \.override"):
        first.name = "other"


def test_diff_is_by_dotted_key_and_leaves_out_the_name():
    assert RECIPES["fp8-rollout"].diff(RECIPES["fp8-rollout-tis"]) == {
        "correction.name": ("none", "tis"),
        "correction.weight": ("none", "token"),
        "correction.cap": (None, 2.0),
    }
    assert Recipe(name="a").diff(Recipe(name="b")) == {}


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (Recipe(), "bf16"),
        (Recipe(correction=Correction(name="tis")), "bf16 tis2"),
        (
            Recipe(
                rollout={"linears": True, "kv_cache": True},
                train={"fprop": True, "dgrad": True, "wgrad": True},
                correction={"name": "tis"},
            ),
            "r:lin+kv t:fprop+dgrad+wgrad e4m3/block/pow2 tis2",
        ),
        (
            Recipe(
                rollout={"kv_cache": True, "attention": True},
                scaling={"kv_format": "e5m2"},
                recalibration={"policy": "every-k-steps", "every": 4, "margin": 0.5},
                keep_bf16={"lm_head": False, "last_layers": 2},
                correction={"name": "icepop"},
            ),
            "r:kv+attn e4m3/block/pow2 kv:e5m2 scales:every-4-stepsx0.5 bf16:last2 +lm_head icepop0.5..5",
        ),
        (
            Recipe(train={"wgrad": True}, scaling={"grad_format": "e5m2", "formula": "vllm"}),
            "t:wgrad e4m3/block/pow2/vllm grad:e5m2",
        ),
    ],
)
def test_short_str(recipe, text):
    assert recipe.short_str() == text


def test_covers_keeps_the_lm_head_and_the_outer_layers():
    recipe = Recipe(keep_bf16={"first_layers": 1, "last_layers": 2})
    assert [recipe.covers(layer, 5) for layer in range(5)] == [False, True, True, False, False]
    assert not recipe.covers(None, 5)
    assert Recipe(keep_bf16={"lm_head": False}).covers(None, 5)


def test_bounds_follow_when_the_correction_is_overridden():
    recipe = Recipe(correction={"name": "tis", "cap": 3.0})
    changed = recipe.override({"correction.name": "icepop"})
    assert changed.correction == Correction(name="icepop")
    assert recipe.override({"correction.name": "tis"}).correction.cap == 3.0
    with pytest.raises(ConfigError, match=r"^correction\.cap: belongs to"):
        recipe.override({"correction.name": "icepop", "correction.cap": 2.0})


def test_every_follows_when_the_policy_is_overridden():
    recipe = Recipe(rollout={"kv_cache": True}, recalibration={"policy": "every-k-steps", "every": 4})
    assert recipe.override({"recalibration.policy": "unit"}).recalibration == Recalibration(policy="unit")


def test_a_changed_preset_is_marked():
    recipe = RECIPES["fp8-e2e"]
    assert recipe.override({"train.wgrad": False}).name == "fp8-e2e*"
    assert recipe.override({"train.wgrad": False}).override({"train.dgrad": False}).name == "fp8-e2e*"
    assert recipe.override({"train.wgrad": True}).name == "fp8-e2e"
    assert recipe.override({"train.wgrad": False, "name": "mine"}).name == "mine"


def test_yaml_round_trip():
    for recipe in RECIPES.values():
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe


def test_the_cache_is_switched_off_together_with_what_belongs_to_it():
    without = {"rollout": {"kv_cache": False, "attention": False}, "recalibration.policy": "every-step"}
    assert not RECIPES["fp8-rollout-kv-unit"].override(without).diff(RECIPES["fp8-rollout-tis"])
