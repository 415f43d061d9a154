import pickle

import pytest

from labkit.config import GRPO, ConfigError, Experiment, Recipe, Sampling
from labkit.config.locations import TINY_FOLDER
from labkit.config.presets import preset


def problems(**data):
    with pytest.raises(ConfigError) as caught:
        Experiment(**data)
    return list(caught.value.problems)


def test_name_and_task_are_filled_in():
    experiment = Experiment()
    assert (experiment.name, experiment.task) == ("custom-tiny-s0", "arithmetic")
    assert Experiment(model="smollm2").task == "sums"
    assert Experiment(model="models/Qwen3-0.6B", task="sums", seed=3).name == "custom-Qwen3-0.6B-s3"


def test_name_and_task_follow_what_they_came_from():
    experiment = preset("bf16", task_options={"min_operators": 2})
    moved = experiment.override({"model": "smollm2", "seed": 2})
    assert (moved.name, moved.task, moved.task_options) == ("bf16-smollm2-s2", "sums", {})
    named = experiment.override({"name": "mine"}).override({"seed": 2})
    assert (named.name, named.task_options) == ("mine", {"min_operators": 2})


def test_task_options_by_dotted_key_add_and_as_a_dict_replace():
    experiment = Experiment(task_options={"min_operators": 2})
    added = experiment.override({"task_options.max_operators": 4})
    assert added.task_options == {"min_operators": 2, "max_operators": 4}
    assert added.override({"task_options": {}}).task_options == {}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"recipe": {"rollout": {"kvcache": True}}},
            "recipe.rollout.kvcache: no such setting; did you mean recipe.rollout.kv",
        ),
        ({"lr": 1e-4}, "lr: no such setting; did you mean grpo.lr?"),
        ({"kvcache": True}, "kvcache: no such setting; did you mean recipe.rollout.kv_cache?"),
        ({"zzz": 1}, "zzz: no such setting; choose one of name, recipe, model,"),
        ({"recipe": "fp8-e2e"}, "recipe: is a group of settings (name, rollout,"),
        ({"recipe": {"rollout": {"attention": True}}}, "recipe.rollout.attention: needs kv_cache"),
        ({"grpo": {"group_size": 1}}, "grpo.group_size: a group of one is its own mean"),
        (
            {"grpo": {"group_size": 1, "baseline": "leave-one-out"}},
            "grpo.group_size: leave-one-out has no other",
        ),
        (
            {"grpo": {"minibatches": 3}},
            "grpo.minibatches: 3 does not divide prompts_per_step 16; choose one of 1, 2, 4, 8, 16",
        ),
        ({"grpo": {"dual_clip": 1.0}}, "grpo.dual_clip: must be greater than 1, got 1.0"),
        ({"grpo": {"clip_high": -0.1}}, "grpo.clip_high: must be greater than or equal to 0, got -0.1"),
        ({"grpo": {"clip_high": 1e300}}, "grpo.clip_high: must be less than or equal to 10, got 1e+300"),
        ({"grpo": {"weight_decay": 1.5}}, "grpo.weight_decay: must be less than or equal to 1, got 1.5"),
        ({"grpo": {"prompts_per_step": 10**9}}, "grpo.prompts_per_step: must be less than or equal to 100000"),
        ({"grpo": {"group_size": 10**9}}, "grpo.group_size: must be less than or equal to 100000"),
        ({"grpo": {"micro_batch": 10**9}}, "grpo.micro_batch: must be less than or equal to 100000"),
        ({"steps": 10**9}, "steps: must be less than or equal to 1000000"),
        ({"eval_prompts": 10**9}, "eval_prompts: must be less than or equal to 100000"),
        ({"grpo": {"clip_low": 1.2}}, "grpo.clip_low: must be less than or equal to 1"),
        ({"grpo": {"lr": float("inf")}}, "grpo.lr: must be a finite number, got inf"),
        (
            {"grpo": {"lr": "fast"}},
            "grpo.lr: must be a number, written like 10, 0.5 or 1e-4 without quotes, got 'fast'",
        ),
        ({"grpo": {"lr": 15}}, "grpo.lr: must be less than or equal to 1, got 15"),
        ({"grpo": {"betas": [0.9, 1.0]}}, "grpo.betas.1: must be less than 1, got 1.0"),
        ({"grpo": {"betas": [0.9]}}, "grpo.betas.1: Field required"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: must be greater than or equal to 0.0001, got 0"),
        ({"sampling": {"temperature": 1e-30}}, "sampling.temperature: must be greater than or equal to 0.0001"),
        ({"sampling": {"top_p": 1e-9}}, "sampling.top_p: must be greater than or equal to 0.000001, got 1e-09"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p: must be less than or equal to 1"),
        ({"sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens: must be greater than or equal to 1"),
        ({"model": " "}, "model: must have at least 1 character, got ' '"),
        ({"steps": 0}, "steps: must be greater than or equal to 1, got 0"),
        ({"steps": True}, "steps: must be a number, got True"),
        ({"steps": 1.5}, "steps: must be a valid integer, got 1.5"),
        ({"seed": "1_0"}, "seed: must be a number, written like 10, 0.5 or 1e-4 without quotes, got '1_0'"),
        ({"seed": -1}, "seed: must be greater than or equal to 0"),
        ({"eval_every": 0}, "eval_every: must be greater than or equal to 1"),
        ({"name": 7}, "name: must be a valid string (in YAML put it in quotes), got 7"),
        ({"engine": "sglang"}, "engine: must be 'local', 'vllm', or your own as path/to/file.py:NAME"),
        ({"model": "zzz"}, "model: there is no model 'zzz'"),
        ({"model": "./my/folder"}, "model: there is no model './my/folder'"),
        ({"task": "arithmetics"}, "task: no task 'arithmetics'; did you mean arithmetic?"),
        ({"task": "countdown"}, "task: no task 'countdown'; choose one of arithmetic, sums, gsm8k,"),
        ({"task": "gsm8k"}, "task: gsm8k is written in letters or lines, which the tiny model can't read"),
        (
            {"task": "reasoning_gym:chain_sum"},
            "task: no task 'reasoning_gym:chain_sum'; did you mean reasoning-gym?",
        ),
        ({"task": "dataset:"}, "task: dataset needs a name: write dataset:NAME"),
        ({"task": "sums"}, "task: sums is written in letters or lines, which the tiny model can't read"),
        ({"task_options": {"x": object()}}, "task_options.x: must be text, a number, true/false"),
        (
            {"task_options": {"x": [1, {"y": float("nan")}]}},
            "task_options.x.1.y: must be a finite number, got nan",
        ),
    ],
)
def test_bad_settings(data, line):
    found = problems(**data)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_a_model_that_is_there_lacks_a_task_and_one_that_is_not_is_itself_what_is_wrong():
    choose = "has none of its own; choose one of arithmetic, sums"
    assert problems(model=str(TINY_FOLDER))[0].startswith(f"task: model {TINY_FOLDER} {choose}")
    assert problems(model="smolm2")[0].endswith("; did you mean smollm2?")
    assert Experiment(model="on/the/cluster", task="sums").model == "on/the/cluster", "a run of it is refused elsewhere"


def test_every_problem_has_its_line():
    found = problems(grpo={"lr": -1, "group": 4}, recipe={"train": {"fprop": "fp8"}}, steps=0)
    assert [line.split(":")[0] for line in found] == ["recipe.train.fprop", "grpo.lr", "grpo.group", "steps"]


def test_override_checks_and_leaves_the_original():
    experiment = Experiment()
    changed = experiment.override({"recipe.rollout.kv_cache": True, "grpo": {"lr": 1e-5}, "sampling.top_k": 4})
    assert changed.recipe.rollout.kv_cache
    assert (changed.grpo.lr, changed.grpo.group_size, changed.sampling.top_k) == (1e-5, 8, 4)
    assert experiment == Experiment()
    with pytest.raises(ConfigError, match=r"^recipe\.rollout\.attention: needs kv_cache"):
        experiment.override({"recipe.rollout.attention": True})
    with pytest.raises(ConfigError, match=r"^rollout: no such setting; did you mean recipe\.rollout\?"):
        experiment.override({"rollout.kv_cache": True})
    with pytest.raises(ConfigError, match="keep one of the two"):
        experiment.override({"grpo": {"lr": 1e-5}, "grpo.lr": 1e-4})
    with pytest.raises(ConfigError, match=r"^steps: must be a valid integer"):
        experiment.override({"steps.many": 3})
    with pytest.raises(ConfigError, match=r"^steps: must be greater"):
        experiment.model_copy(update={"steps": 0})


def test_an_error_under_a_preset_recipe_keeps_its_whole_key():
    with pytest.raises(ConfigError, match=r"^recipe\.rollout\.attention: needs kv_cache"):
        preset("fp8-e2e-kv").override({"recipe.rollout.kv_cache": False})


def test_diff_spans_the_groups():
    one, two = preset("bf16"), preset("fp8-rollout", seed=1, **{"grpo.lr": 1e-5})
    assert one.diff(two) == {
        "recipe.rollout.linears": (False, True),
        "grpo.lr": (1.5e-4, 1e-5),
        "seed": (0, 1),
    }


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    experiment = Experiment(seed=numpy.int64(3), grpo={"lr": numpy.float64(1e-5)})
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment


def test_pickles():
    experiment = preset("fp8-e2e-kv", seed=5)
    assert pickle.loads(pickle.dumps(experiment)) == experiment
    with pytest.raises(ConfigError) as caught:
        Recipe(rollout={"x": 1}, trains={})
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_groups_report_from_their_own_root():
    with pytest.raises(ConfigError, match=r"^learning_rate: no such setting"):
        GRPO(learning_rate=1)
    with pytest.raises(ConfigError, match=r"^temprature: no such setting; did you mean temperature\?"):
        Sampling(temprature=1)
