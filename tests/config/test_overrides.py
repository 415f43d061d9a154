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
        "task_options.source=dataset:",
        "task_options.map={a: }",
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
        "task_options.source": "dataset:",
        "task_options.map": {"a": None},
    }


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["grpo.lr"], "grpo.lr: write an override as key=value"),
        (["=3"], "=3: write an override as key=value"),
        (["seed=1", "seed=2"], "seed: given twice"),
        (["grpo.betas=[0.9"], "the value of grpo.betas, line 1"),
        (["task_options={[a]: 1}"], "the value of task_options, line 1, column 2: a list or a map can't be the name"),
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


@pytest.mark.parametrize("assignment", ["seed=010", "seed=1_0", "seed=0x10", "steps=1:30", "grpo.lr=1_0.5"])
def test_numbers_that_yaml_1_1_would_reinterpret_are_refused(assignment):
    key = assignment.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{key}: must be a number"):
        apply(Experiment(), [assignment])
