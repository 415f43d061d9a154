import pytest

from labkit.config import ConfigError, Experiment
from labkit.config.overrides import apply, parse_assignments


def test_values_are_yaml():
    assignments = [
        "recipe.rollout.kv_cache=true",
        "grpo.lr=1e-4",
        "model=smollm2",
        "task=dataset:data/a=b.jsonl",
        "grpo.betas=[0.9, 0.99]",
        "grpo.dual_clip=null",
        "name=",
        "task_options.template=#{prompt}",
    ]
    assert parse_assignments(assignments) == {
        "recipe.rollout.kv_cache": True,
        "grpo.lr": 1e-4,
        "model": "smollm2",
        "task": "dataset:data/a=b.jsonl",
        "grpo.betas": [0.9, 0.99],
        "grpo.dual_clip": None,
        "name": "",
        "task_options.template": "#{prompt}",
    }


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["grpo.lr"], "grpo.lr: write an override as key=value"),
        (["=3"], "=3: write an override as key=value"),
        (["seed=1", "seed=2"], "seed: given twice"),
        (["grpo.betas=[0.9"], "the value of grpo.betas, line 1"),
    ],
)
def test_bad_assignments(assignments, message):
    with pytest.raises(ConfigError) as caught:
        parse_assignments(assignments)
    assert str(caught.value).startswith(message)


def test_apply():
    experiment = apply(Experiment(), ["recipe.rollout.kv_cache=true", "recipe.correction.name=none", "seed=3"])
    assert experiment.recipe.rollout.kv_cache
    assert (experiment.recipe.correction.name, experiment.seed) == ("none", 3)
    with pytest.raises(ConfigError, match=r"^grpo\.lrr: no such setting; did you mean grpo\.lr"):
        apply(experiment, ["grpo.lrr=1e-3"])
