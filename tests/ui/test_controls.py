import html
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from local_hub import cache_layout

from labkit.config import CORRECTIONS, RECIPES, Correction, Experiment, Filter, Recipe, Scaling, preset
from labkit.config.locations import TINY_FOLDER
from labkit.ui.controls import COMPONENTS, ExperimentControls, RecipeControls, reasons
from labkit.ui.fields import HintLine, badge, heading
from labkit.ui.hints import HINTS


def inside(widget: widgets.Widget) -> Iterator[widgets.Widget]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from inside(child)


def control(panel: Any, key: str) -> Any:
    """The one on screen whose focus brings up the hint of the key."""
    found = [w for w in inside(panel.widget) if panel.hint.prefix + key in getattr(w, "_dom_classes", ())]
    assert len(found) == 1, f"{len(found)} controls for {key}"
    return found[0]


def texts(panel: Any) -> str:
    return " ".join(w.value for w in inside(panel.widget) if isinstance(w, widgets.HTML))


@pytest.mark.parametrize("name", RECIPES)
def test_every_preset_is_shown_as_it_is(name: str) -> None:
    panel = RecipeControls(RECIPES["bf16"])
    control(panel, "preset").value = name
    assert panel.recipe == RECIPES[name]
    for key in COMPONENTS:
        group, switch = key.split(".")
        assert control(panel, key).value is getattr(getattr(RECIPES[name], group), switch)
    assert control(panel, "correction.name").value == RECIPES[name].correction.name


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_can_be_chosen_and_shows_its_bounds(name: str) -> None:
    panel = RecipeControls(RECIPES["fp8-rollout"])
    control(panel, "correction.project").value = name.partition("/")[0] if "/" in name else "methods"
    control(panel, "correction.name").value = name
    assert panel.recipe.correction == Correction(name=name)
    for bound, value in Correction(name=name).bounds.items():
        assert control(panel, f"correction.{bound}").value == value
    assert html.escape(CORRECTIONS[name].text) in texts(panel)


def test_looking_around_in_a_project_changes_nothing() -> None:
    panel = RecipeControls(RECIPES["fp8-rollout-tis"])
    told: list[Recipe] = []
    panel.observe(told.append)
    control(panel, "correction.project").value = "verl"
    assert panel.recipe == RECIPES["fp8-rollout-tis"]
    assert told == []
    names = control(panel, "correction.name")
    assert names.value == ""
    assert names.options[0] == ("choose …  (now tis2)", "")
    names.value = "verl/decoupled_token_is"
    assert [recipe.correction.name for recipe in told] == ["verl/decoupled_token_is"]
    assert "" not in [value for _, value in names.options]


def test_a_bound_is_changed_and_an_impossible_one_goes_back_with_the_reason() -> None:
    panel = RecipeControls(RECIPES["fp8-rollout-tis"])
    cap = control(panel, "correction.cap")
    cap.value = 3.5
    assert panel.recipe.correction == Correction(name="tis", cap=3.5)
    cap.value = 0.5
    assert cap.value == 3.5
    assert panel.recipe.correction.cap == 3.5
    assert panel.hint.text.startswith("correction.cap: 0.5 would weight even a perfect match below 1")
    cap.value = 4
    assert panel.hint.problem == ""
    assert panel.hint.text == HINTS["correction.cap"]


def test_a_correction_composed_by_hand_stays_until_another_is_chosen() -> None:
    mine = Correction(weight="token", cap=2.0, filters=(Filter(statistic="k3", high=0.1),))
    panel = RecipeControls(Recipe(correction=mine))
    assert panel.recipe.correction == mine
    assert control(panel, "correction.name").options[0][0] == "choose …  (now token..2+k3..0.1)"
    assert "composed by hand" in texts(panel)
    control(panel, "rollout.linears").value = True
    assert panel.recipe.correction == mine


def test_a_weight_of_ones_own_is_typed_under_yours_and_gives_way_to_a_named_correction() -> None:
    panel = RecipeControls(RECIPES["fp8-rollout"])
    control(panel, "correction.project").value = "yours"
    assert panel.recipe == RECIPES["fp8-rollout"]
    control(panel, "correction.weight").value = "mine"
    assert panel.hint.problem.startswith("correction.name: no correction 'mine'")
    control(panel, "correction.project").value = "yours"
    control(panel, "correction.weight").value = "my/mine.py:weight"
    assert panel.recipe.correction == Correction(weight="my/mine.py:weight")
    assert "composed by hand: mine.py:weight" in texts(panel)
    panel.set(panel.recipe)
    assert control(panel, "correction.project").value == "yours"
    assert control(panel, "correction.weight").value == "my/mine.py:weight"
    control(panel, "correction.project").value = "methods"
    assert panel.recipe.correction.weight == "my/mine.py:weight"
    control(panel, "correction.name").value = "tis"
    assert panel.recipe.correction == Correction(name="tis")


def test_a_rule_and_an_engine_of_ones_own_are_typed() -> None:
    recipe, rest = RecipeControls(RECIPES["fp8-rollout"]), ExperimentControls(Experiment())
    control(recipe, "scaling.formula").value = "mine.py:my_scale"
    assert recipe.recipe.scaling.formula == "mine.py:my_scale"
    control(recipe, "scaling.formula").value = "mine"
    assert recipe.hint.problem.startswith("scaling.formula: must be 'te', 'deepgemm', 'vllm', or your own as")
    assert control(recipe, "scaling.formula").value == "mine.py:my_scale"
    control(rest, "engine").value = "mine.py:MyEngine"
    control(rest, "task").value = "mine.py:MyTask"
    experiment = rest.experiment(Recipe())
    assert experiment is not None
    assert (experiment.engine, experiment.task) == ("mine.py:MyEngine", "mine.py:MyTask")
    control(rest, "engine").value = "mine"
    assert rest.experiment(Recipe()) is None
    assert rest.problem.startswith("engine: must be 'local', 'vllm', or your own")


def test_a_switch_that_another_one_rules_out_is_disabled_with_the_reason() -> None:
    panel = RecipeControls(RECIPES["fp8-rollout"])
    attention, cache = control(panel, "rollout.attention"), control(panel, "rollout.kv_cache")
    dependent = ["scaling.kv_format", "recalibration.policy", "recalibration.margin"]
    assert attention.disabled
    assert all(control(panel, key).disabled for key in dependent)
    assert "needs KV cache" in texts(panel)
    cache.value = True
    assert not attention.disabled
    assert not any(control(panel, key).disabled for key in dependent)
    assert "needs KV cache" not in texts(panel)

    attention.value = True
    control(panel, "recalibration.policy").value = "every-k-steps"
    control(panel, "recalibration.every").value = 4
    control(panel, "scaling.kv_format").value = "e5m2"
    assert panel.recipe.recalibration.every == 4
    cache.value = False
    assert (attention.value, attention.disabled) == (False, True)
    assert panel.recipe == RECIPES["fp8-rollout"]
    assert control(panel, "recalibration.policy").value == "every-step"


def test_the_number_of_steps_belongs_to_its_policy() -> None:
    panel = RecipeControls(RECIPES["fp8-rollout-kv"])
    policy, every = control(panel, "recalibration.policy"), control(panel, "recalibration.every")
    assert every.disabled
    assert "every: for every-k-steps" in texts(panel)
    policy.value = "every-k-steps"
    assert not every.disabled
    every.value = 5
    policy.value = "unit"
    assert (every.value, every.disabled) == (1, True)
    assert panel.recipe == RECIPES["fp8-rollout-kv-unit"]


def test_mx_has_its_own_scales() -> None:
    panel = RecipeControls(RECIPES["fp8-e2e-fp32-scales"])
    control(panel, "scaling.granularity").value = "mx"
    assert panel.recipe.scaling == Scaling(granularity="mx")
    assert control(panel, "scaling.scale").disabled
    assert "mx scales are pow2" in texts(panel)


@pytest.mark.parametrize(
    ("start", "key", "value", "name"),
    [
        ("bf16", "rollout.linears", True, "fp8-rollout"),
        ("fp8-e2e", "train.wgrad", False, "fp8-e2e*"),
        ("bf16", "rollout.kv_cache", True, "fp8-rollout*"),  # never bf16*, with FP8 in it
        ("fp8-rollout", "rollout.linears", False, "bf16"),
        ("fp8-rollout-tis", "rollout.linears", False, "bf16*"),
        ("fp8-rollout-kv", "rollout.attention", False, "fp8-rollout-kv*"),
    ],
)
def test_a_changed_recipe_is_named_after_what_it_is(start: str, key: str, value: bool, name: str) -> None:
    panel = RecipeControls(RECIPES[start])
    control(panel, key).value = value
    assert panel.recipe.name == name
    label, _ = next(
        option for option in control(panel, "preset").options if option[1] == control(panel, "preset").value
    )
    assert label == (f"{name} (changed)" if name.endswith("*") else name)
    control(panel, key).value = not value
    assert panel.recipe == RECIPES[start]


def test_a_name_of_ones_own_stays() -> None:
    panel = RecipeControls(Recipe(name="my-arm"))
    control(panel, "rollout.kv_cache").value = True
    assert panel.recipe.name == "my-arm*"


def test_observers_are_told_once_for_a_change_of_the_users_and_not_for_set() -> None:
    panel = RecipeControls(RECIPES["fp8-rollout-kv"])
    told: list[Recipe] = []
    panel.observe(told.append)
    control(panel, "rollout.kv_cache").value = False  # four settings change
    assert told == [RECIPES["fp8-rollout-tis"]]
    panel.set(RECIPES["fp8-e2e"])
    assert panel.recipe == RECIPES["fp8-e2e"]
    assert len(told) == 1
    control(panel, "preset").value = "bf16"
    assert told[1:] == [RECIPES["bf16"]]


def test_set_keeps_what_has_no_control() -> None:
    recipe = RECIPES["fp8-rollout-kv"].override({"recalibration.percentile": 99})
    panel = RecipeControls(RECIPES["bf16"])
    panel.set(recipe)
    assert panel.recipe == recipe
    control(panel, "recalibration.margin").value = 2.0
    assert panel.recipe.recalibration.percentile == 99


KEYS = [*COMPONENTS, "keep_bf16.lm_head", "keep_bf16.first_layers", "scaling.format", "scaling.kv_format",
        "scaling.granularity", "scaling.scale", "recalibration.policy", "recalibration.every", "recalibration.margin",
        "correction.project", "correction.name", "preset"]  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 10)), max_size=12))
@settings(max_examples=20, deadline=None)
def test_whatever_is_pressed_the_recipe_is_what_the_controls_show(presses: list[tuple[str, int]]) -> None:
    panel = RecipeControls(RECIPES["bf16"])
    for key, pick in presses:
        widget = control(panel, key)
        if widget.disabled:
            continue
        if hasattr(widget, "options"):
            option = widget.options[pick % len(widget.options)]
            widget.value = option if isinstance(option, str) else option[1]
        elif isinstance(widget.value, bool):
            widget.value = bool(pick % 2)
        else:
            widget.value = pick - 2
        shown = panel.recipe
        assert Recipe.from_yaml(shown.to_yaml()) == shown
        for name in COMPONENTS:
            group, switch = name.split(".")
            assert control(panel, name).value is getattr(getattr(shown, group), switch)
        assert control(panel, "recalibration.policy").value == shown.recalibration.policy
        assert control(panel, "recalibration.margin").value == shown.recalibration.margin
        assert {k for k in reasons(shown) if not control(panel, k).disabled} == set()


def test_changes_from_many_threads_are_all_carried_out() -> None:
    panel = RecipeControls(RECIPES["bf16"])
    told: list[Recipe] = []
    panel.observe(told.append)
    fields = [control(panel, key) for key in ("rollout.linears", "train.fprop", "train.dgrad", "train.wgrad")]
    threads = [threading.Thread(target=setattr, args=(field, "value", True)) for field in fields]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(told) == 4
    assert panel.recipe.train == RECIPES["fp8-e2e"].train
    assert panel.recipe.rollout == RECIPES["fp8-e2e"].rollout


def test_badges_say_what_the_run_is_and_not_what_was_wished() -> None:
    panel = RecipeControls(RECIPES["fp8-e2e"])
    panel.badges({
        "rollout.linears": {"state": "fp8", "detail": "22 of 23 layers"},
        "rollout.kv_cache": {"state": "bf16", "detail": ""},
        "train.fprop": {"state": "emulated", "detail": "22 of 23 layers, <x>"},
        "fault.zero-block": {"state": "fault", "detail": ""},
    })  # fmt: skip
    shown = texts(panel)
    assert shown.count("lk-badge") == 3
    assert "lk-badge native" in shown
    assert "lk-badge emulated" in shown
    assert "lk-badge bf16" in shown
    assert "&lt;x&gt;" in shown
    panel.badges({})
    assert "lk-badge" not in texts(panel)


def test_what_the_machine_lacks_is_disabled_with_its_reason() -> None:
    panel = RecipeControls(RECIPES["bf16"], unavailable={"train.fprop": "needs SM 8.9"})
    assert control(panel, "train.fprop").disabled
    assert "needs SM 8.9" in texts(panel)
    assert not control(panel, "train.dgrad").disabled


def test_every_control_has_its_hint_and_every_hint_its_control() -> None:
    hint = HintLine()
    panels = [RecipeControls(RECIPES["bf16"], hint), ExperimentControls(Experiment(), hint)]
    prefix = hint.prefix
    # Bounds are on screen only with a correction that has them, the weight only for one of the user's own.
    followed = {name.removeprefix(prefix) for panel in panels for w in inside(panel.widget)
                for name in getattr(w, "_dom_classes", ()) if name.startswith(prefix)}  # fmt: skip
    assert followed | {f"correction.{name}" for name in ("weight", "floor", "cap", "low", "high")} == set(HINTS)
    assert hint not in list(inside(panels[0].widget))


@pytest.mark.parametrize(("key", "hint"), HINTS.items())
def test_hints_fit_their_line(key: str, hint: str) -> None:
    assert 30 < len(hint) <= 110
    assert hint.endswith(".")


def test_the_hint_follows_what_was_touched() -> None:
    panel = RecipeControls(RECIPES["bf16"])
    assert panel.hint.text == "BF16 everywhere: the control that belongs in every plot. Keep a bf16 run in the plot."
    control(panel, "rollout.linears").value = True
    assert panel.hint.text == HINTS["rollout.linears"]
    control(panel, "correction.name").value = "icepop"
    assert panel.hint.text.startswith("r, tokens outside the window dropped (Ant Ring 2025)")


def test_texts_of_a_user_are_escaped() -> None:
    assert "<script>" not in heading("<script>") + badge({"state": "fp8", "detail": "<script>"})


# ---- the rest of an Experiment


def test_an_experiment_comes_back_with_the_recipe() -> None:
    experiment = preset("bf16", steps=7, seed=3, **{"grpo.lr": 2e-4, "grpo.betas": (0.8, 0.9)})
    controls = ExperimentControls(experiment)
    assert controls.experiment(experiment.recipe) == experiment
    changed = controls.experiment(RECIPES["fp8-e2e"])
    assert changed == experiment.override({"recipe": RECIPES["fp8-e2e"]})
    assert changed is not None
    assert changed.name == "fp8-e2e-tiny-s3"
    controls.set(preset("bf16", seed=5))
    assert control(controls, "seed").value == 5


def test_numbers_are_taken_over() -> None:
    controls = ExperimentControls(preset("bf16"))
    for key, value in {"steps": 9, "seed": 2, "grpo.lr": 1e-4, "grpo.group_size": 4, "checkpoint_every": 3}.items():
        control(controls, key).value = value
    assert controls.experiment(RECIPES["bf16"]) == preset(
        "bf16", steps=9, seed=2, checkpoint_every=3, **{"grpo.lr": 1e-4, "grpo.group_size": 4}
    )


def test_what_is_wrong_is_said_and_stays_as_typed() -> None:
    controls = ExperimentControls(preset("bf16"))
    group = control(controls, "grpo.group_size")
    group.value = 1
    assert controls.experiment(RECIPES["bf16"]) is None
    assert group.value == 1
    assert controls.problem.startswith("grpo.group_size: a group of one is its own mean")
    assert controls.problem in texts(controls)
    control(controls, "steps").value = 5
    assert controls.experiment(RECIPES["bf16"]) is None
    group.value = 4
    assert controls.problem == ""
    assert controls.experiment(RECIPES["bf16"]) == preset("bf16", steps=5, **{"grpo.group_size": 4})


def test_a_model_brings_its_defaults_and_takes_them_away() -> None:
    controls = ExperimentControls(preset("bf16"))
    control(controls, "model").value = "smollm2"
    assert controls.experiment(RECIPES["bf16"]) == preset("bf16", "smollm2")
    assert control(controls, "task").value == "sums"
    control(controls, "model").value = "tiny"
    assert controls.experiment(RECIPES["bf16"]) == preset("bf16")


def test_a_model_by_path_waits_for_its_task() -> None:
    controls = ExperimentControls(preset("bf16"))
    control(controls, "model").value = "zzz"
    assert controls.problem.startswith("model: there is no model 'zzz'")
    folder = str(TINY_FOLDER)
    control(controls, "model").value = folder
    assert controls.experiment(RECIPES["bf16"]) is None
    assert controls.problem.startswith(f"task: model {folder} has none of its own")
    assert control(controls, "model").value == folder
    control(controls, "task").value = "sums"
    experiment = controls.experiment(RECIPES["bf16"])
    assert experiment is not None
    assert (experiment.model, experiment.task) == (folder, "sums")


def test_a_model_of_the_hub_is_typed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    controls = ExperimentControls(preset("bf16"))
    control(controls, "model").value = "Qwen/Qwen3-0.6B"
    assert controls.problem.startswith("model: there is no folder Qwen/Qwen3-0.6B, and the Hugging Face cache")
    assert controls.problem.endswith("run `labkit fetch Qwen/Qwen3-0.6B` once")
    cache_layout(TINY_FOLDER, "Qwen/Qwen3-0.6B", tmp_path)
    control(controls, "task").value = "gsm8k"
    experiment = controls.experiment(RECIPES["bf16"])
    assert experiment is not None
    assert (experiment.model, experiment.task, experiment.name) == ("Qwen/Qwen3-0.6B", "gsm8k", "bf16-Qwen3-0.6B-s0")


def test_a_recipe_that_the_rest_rules_out_is_said_too() -> None:
    controls = ExperimentControls(preset("fp8-rollout-kv", faults=("scales-dropped",)))
    assert controls.experiment(RECIPES["bf16"]) is None
    assert "scales-dropped can't show while recipe.rollout.kv_cache is False" in controls.problem
