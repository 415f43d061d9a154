"""References to the user's own code: their form, what is looked at without executing it, and what executes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit.config import ConfigError, Correction, Experiment, Recipe, export, own, preset, words

MINE = """
import math
from os import path as paths
ratio, other = 1.0, 2.0
try:
    import torch
except ImportError:
    pass

def my_weight(delta, mask):
    return delta.exp()

class Engine:
    def inner(self):
        pass
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    own.forget()
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with an entry point of each kind; it says when it is executed."""
    folder = tmp_path / "site"
    (folder / "theirs_lab").mkdir(parents=True)
    ran = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\n"
    (folder / "theirs_lab" / "__init__.py").write_text(ran)
    (folder / "theirs_lab" / "inside.py").write_text(f"{ran}def theirs(*args, **options): return 'made'\n")
    (folder / "theirs-1.dist-info").mkdir()
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    points = "".join(f"[labkit.{kind}s]\ntheirs-{kind} = theirs_lab.inside:theirs\n" for kind in own.KINDS)
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)
    return tmp_path


@pytest.mark.parametrize("text", ["mine.py:Task", "~/a b/mine.py:f_1", "/x/mine.py:Übung", "package.module:NAME"])
def test_references(text: str) -> None:
    assert own.is_reference(text)


@pytest.mark.parametrize("text", ["mine.py", "mine.py:", "mine:NAME", "dataset:x", "reasoning-gym:chain_sum", "a.b:1x"])
def test_what_is_no_reference(text: str) -> None:
    assert not own.is_reference(text)


def test_a_family_of_tasks_is_never_the_users_own() -> None:
    assert not own.KINDS["task"].owns("dataset:rows.py:Name")
    assert own.KINDS["task"].owns("rows.py:Name")
    assert not own.KINDS["engine"].owns("vllm")


EVERYTHING = {
    "task": "mine.py:T",
    "engine": "mine.py:E",
    "recipe.scaling.formula": "mine.py:s",
    "recipe.correction": "mine.py:w",
}


def test_an_experiment_takes_references_and_lists_them() -> None:
    experiment = preset("fp8-rollout", **EVERYTHING)
    assert dict(own.used(experiment)) == {
        "task": "mine.py:T", "engine": "mine.py:E", "scaling": "mine.py:s", "correction": "mine.py:w"
    }  # fmt: skip
    rows = preset("bf16", task="dataset:x.jsonl", task_options={"reward": "mine.py:r"})
    assert list(own.used(rows)) == [("reward", "mine.py:r")]
    assert list(own.used(preset("fp8-rollout-tis"))) == []
    assert Experiment.from_yaml(experiment.to_yaml()) == experiment


def test_texts_for_people_leave_the_folders_out() -> None:
    recipe = Recipe().override({"correction": "/home/me/mine.py:w", "rollout.linears": True})
    recipe = recipe.override({"scaling.formula": "/home/me/mine.py:s", "correction.cap": 2})
    assert recipe.short_str() == "r:lin e4m3/block/pow2/mine.py:s mine.py:w..2"
    assert words.said("/home/me/mine.py:w") == "mine.py:w"


def test_a_weight_in_place_of_a_corrections_name() -> None:
    expected = Correction(weight="mine.py:w", cap=2.0)
    assert expected.name == "custom"
    assert Correction(name="mine.py:w", cap=2.0) == expected
    assert preset("fp8-rollout-tis", **{"recipe.correction": "mine.py:w"}).recipe.correction == Correction(
        weight="mine.py:w"
    )
    assert preset("fp8-rollout", **{"recipe.correction.name": "mine.py:w", "recipe.correction.cap": 2.0}).recipe == (
        preset("fp8-rollout", **{"recipe.correction": expected}).recipe
    )
    with pytest.raises(ConfigError, match="another one is given; set name to custom"):
        Correction(name="mine.py:w", weight="token")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "theirs"}, "engine: must be 'local', 'vllm', or your own as path/to/file.py:NAME"),
        ({"recipe.scaling.formula": "mine.py"}, "recipe.scaling.formula: must be 'te', 'deepgemm', 'vllm', or your"),
        ({"recipe.correction": "mine"}, "recipe.correction.name: no correction 'mine'"),
        ({"recipe.correction.weight": "mine.py:w"}, "recipe.correction.weight: is not what none has; set name to"),
        ({"engine": "vllm", "recipe.scaling.formula": "mine.py:s"}, "recipe.scaling.formula: vllm has rules of its"),
        (
            {"trainer": "te", "device": "cuda", "recipe.scaling.formula": "mine.py:s"},
            "recipe.scaling.formula: te has rules of its own for scales and doesn't take yours; choose te, deepgemm",
        ),
        ({"engine": "mine.py:E", "faults": ("zero-block",)}, "engine: faults are built into local, not mine.py:E"),
    ],
)
def test_what_an_experiment_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        preset("fp8-rollout", **changes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["my_weight", "Engine", "ratio", "other", "math", "paths", "torch"])
def test_a_name_at_the_top_level_is_found(mine: Path, name: str) -> None:
    assert own.check("correction", f"{mine}:{name}") == mine


def test_what_isnt_there_is_said_with_what_is(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"defines no inner at its top level; it has Engine, math, my_weight, other"):
        own.check("engine", f"{mine}:inner")
    with pytest.raises(ConfigError, match=r"engine: there is no file .*none.py; write path/to/file.py:NAME"):
        own.check("engine", f"{mine.parent / 'none.py'}:E")
    mine.write_text("x = 1\ndef broken(:\n")
    with pytest.raises(ConfigError, match=r"mine.py, line 2 is not Python: SyntaxError"):
        own.check("engine", f"{mine}:broken")
    with pytest.raises(ConfigError, match="no module nowhere is installed here"):
        own.check("engine", "nowhere.inside:E")
    with pytest.raises(ConfigError, match=r"no module json.nowhere is installed here"):
        own.check("engine", "json.nowhere:E")
    assert own.check("engine", "json.decoder:JSONDecoder").name == "decoder.py"


def test_a_path_is_seen_from_where_it_is_written(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    assert own.check("correction", "mine.py:my_weight") == mine
    assert own.absolute("mine.py:my_weight") == f"{mine}:my_weight"
    recipe = own.checked_recipe(Recipe(name="named", correction=Correction(weight="mine.py:my_weight")))
    assert (recipe.name, recipe.correction.weight) == ("named", f"{mine}:my_weight")


def test_a_file_is_executed_when_it_is_loaded_and_once(mine: Path) -> None:
    mine.write_text("import pathlib\nran = pathlib.Path(__file__).with_name('ran')\nran.open('a').write('x')\nE = dict")
    own.check("engine", f"{mine}:E")
    assert not mine.with_name("ran").exists()
    assert own.load("engine", f"{mine}:E") is dict
    mine.write_text(mine.read_text().replace("E = dict", "E = list"))
    assert own.load("engine", f"{mine}:E") is dict
    assert mine.with_name("ran").read_text() == "x"
    own.forget()
    assert own.load("engine", f"{mine}:E") is list


def test_an_error_of_the_users_names_its_line(mine: Path) -> None:
    mine.write_text("def f():\n    return 1\n\n1 / 0\n")
    with pytest.raises(ConfigError, match=r"mine.py:f can't be loaded: ZeroDivisionError: .* \(mine.py, line 4"):
        own.load("engine", f"{mine}:f")
    mine.write_text("E = 3\n")
    with pytest.raises(ConfigError, match=r"engine: mine.py:E is of type int; name a function or a class"):
        own.load("engine", f"{mine}:E")


def test_two_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    own.forget()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f(): return {folder!r}\n")
    assert [own.load("engine", f"{tmp_path / folder}/mine.py:f")() for folder in ("a", "b")] == ["a", "b"]


def test_entry_points_are_names_like_the_built_in_ones(package: Path) -> None:
    assert own.options("engine") == ("local", "vllm", "theirs-engine")
    experiment = preset(
        "fp8-rollout",
        task="theirs-task",
        engine="theirs-engine",
        **{"recipe.correction": "theirs-correction", "recipe.scaling.formula": "theirs-scaling"},
    )
    assert dict(own.used(experiment)) == {
        kind: f"theirs-{kind}" for kind in ("engine", "task", "correction", "scaling")
    }
    for kind, reference in own.used(experiment):
        assert own.check(kind, reference).name == "inside.py"
    assert own.check("engine", "theirs_lab.inside:theirs").name == "inside.py"
    assert not (package / "ran").exists()  # neither the module nor the package around it
    assert own.load("engine", "theirs-engine")() == "made"
    assert own.load("engine", "theirs_lab.inside:theirs")() == "made"
    assert (package / "ran").read_text() == "theirs_lab theirs_lab.inside "


@pytest.mark.parametrize("framework", [export.nemo_rl, export.verl, export.trl])
def test_an_export_says_what_stays_behind(framework: Callable[[Experiment], export.Exported]) -> None:
    experiment = preset("fp8-rollout", **{key: f"/home/me/{value}" for key, value in EVERYTHING.items()})
    exported = framework(experiment)
    notes = " ".join(exported.notes)
    assert "/home/me" not in exported.text + notes
    assert "task: mine.py:T is yours" in notes
    assert "engine: mine.py:E is yours and stays behind" in notes
    assert "correction: mine.py:w has no counterpart" in notes
    assert "no weight of your own" in notes
    assert "other than mine.py:s" in notes
