from pathlib import Path

import pytest

from labkit.config import ConfigError, Experiment
from labkit.config.presets import RECIPES, preset
from labkit.config.yaml_io import dump, parse


@pytest.mark.parametrize("name", RECIPES)
def test_round_trip(name):
    experiment = preset(name, "smollm2", task_options={}, **{"grpo.dual_clip": 3, "grpo.lr": 1e-7})
    text = experiment.to_yaml()
    assert Experiment.from_yaml(text) == experiment
    assert Experiment.from_yaml(text).to_yaml() == text
    assert "!!" not in text


def test_round_trip_of_texts_that_look_like_something_else():
    options = {
        "a": "1e-4",
        "b": "yes",
        "c": "null",
        "d": "",
        "e": "0x1f",
        "f": [1, 2.0, None, True],
        "g": {"h": "1.5"},
    }
    experiment = Experiment(name="2024-01-01", task_options=options)
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment
    assert experiment.task_options == options


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5e-4", 1.5e-4),
        ("1E4", 1e4),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("+3e+2", 300.0),
        ("12", 12),
        ("0", 0),
        ("-3", -3),
        ("010", "010"),
        ("1_0", "1_0"),
        ("1:30", "1:30"),
        ("0x1f", "0x1f"),
        ("1_0.5", "1_0.5"),
        ("1:30.5", "1:30.5"),
        ("e4", "e4"),
        ("4e", "4e"),
    ],
)
def test_numbers(text, value):
    parsed = parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_tuples_are_written_on_one_line():
    assert dump({"betas": (0.9, 0.95), "x": 1e-5}) == "betas: [0.9, 0.95]\nx: 1.0e-05\n"


def test_text_that_yaml_1_1_takes_for_a_number_is_quoted():
    assert dump({"a": "010", "b": "1:30", "c": "1_0", "d": "7"}) == "a: '010'\nb: '1:30'\nc: '1_0'\nd: '7'\n"


def test_from_a_file(tmp_path):
    path = tmp_path / "experiment.yaml"
    path.write_text("grpo:\n  lr: 1e-4\nrecipe: {rollout: {linears: yes}}\n", encoding="utf-8")
    for source in (path, str(path)):
        experiment = Experiment.from_yaml(source)
        assert (experiment.grpo.lr, experiment.recipe.rollout.linears) == (1e-4, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "YAML: is empty"),
        ("- a\n- b\n", "YAML: holds list"),
        ("just words", "YAML: holds str 'just words'"),
        ("steps: 3\nsteps: 4\n", "YAML, line 2, column 1: steps is given twice"),
        ("steps: [3\nseed: 1\n", "YAML, line 2, column"),
        ("steps: !!python/object:os.system 3\n", "YAML, line 1, column 8: could not determine a constructor"),
        ("task_options:\n  ? [a]\n  : 1\n", "YAML, line 2, column 5: a list or a map can't be the name before a colon"),
        ("3: 4\n", "YAML: 3 is no name of a setting"),
        ("step: 3\n", "step: no such setting; did you mean steps?"),
        ("missing.yaml", "missing.yaml: can't be read: No such file or directory"),
    ],
)
def test_bad_yaml(text, message):
    with pytest.raises(ConfigError) as caught:
        Experiment.from_yaml(text)
    assert str(caught.value).startswith(message)


def test_a_path_that_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        Experiment.from_yaml(Path(tmp_path))
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        Experiment.from_yaml(tmp_path / "x.yaml")
