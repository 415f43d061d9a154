"""Runs whose task, correction, scaling rule and engine are the user's: one file, executed by the worker alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.config import RECIPES, ConfigError, Experiment, Recipe, own, yaml_io
from labkit.runs.compare import compare
from labkit.runs.process import Run
from labkit.runs.store import RunDirectory, RunError
from labkit.sweeps import Plan, Sweep
from labkit.ui.session import Session

LIMIT = 120.0
MINE = """
import pathlib, os
with open(pathlib.Path(__file__).with_name("ran"), "a") as file:
    print(os.getpid(), file=file)

import torch
from labkit.rollout import LocalEngine
from labkit.tasks import Arithmetic


class Short(Arithmetic):
    name = "short"


def weight(delta, mask):
    return delta.exp().clamp(max=2)


def clipping(amax, fp8_max):
    return 0.8 * amax / fp8_max


class Noisy(LocalEngine):
    def __init__(self, policy, experiment, on_microstep):
        super().__init__(policy.config, experiment.recipe, policy.tokenizer.pad_id, on_microstep)
"""
EVERYTHING = {
    "task": "mine.py:Short",
    "engine": "mine.py:Noisy",
    "recipe.correction": "mine.py:weight",
    "recipe.scaling.formula": "mine.py:clipping",
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own.forget()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    for run in Run.all(tmp_path / "runs"):
        run.kill()


def executions(mine: Path) -> list[str]:
    ran = mine.with_name("ran")
    return ran.read_text().split() if ran.exists() else []


def test_a_run_of_ones_own_parts_and_what_is_kept_of_them(small: Experiment, mine: Path, runs: Path) -> None:
    unified = small.override({"recipe": RECIPES["fp8-e2e"], "steps": 2})
    run = Run.start(unified.override(EVERYTHING), runs)
    assert executions(mine) in ([], [str(run.status.pid)])  # not by the process that starts it
    assert run.wait(LIMIT).name == "done", run.log()
    (worker,) = executions(mine)  # once for all four
    assert worker == str(run.status.pid)
    assert {reference for _, reference in own.used(run.experiment)} == {
        f"{mine}:{name}" for name in ("Short", "Noisy", "weight", "clipping")
    }
    (copy,) = (run.path / "own").iterdir()
    assert copy.read_text() == MINE
    last = run.records()[-1]
    assert last.metrics["token_mult_prob_error"] == 1  # the same rule on both sides
    assert "mine.py:clipping, torch quantiser" in last.active["rollout.linears"]["detail"]
    assert last.active["train.attention"]["detail"] == "math: the rollout's is up to mine.py:Noisy"


def test_a_run_is_not_resumed_with_a_file_that_has_changed(small: Experiment, mine: Path, runs: Path) -> None:
    run = Run.start(small.override({"recipe.correction": "mine.py:weight"}), runs)
    while not run.records():
        assert run.alive, run.log()
    run.stop()
    assert run.wait(LIMIT).name == "stopped", run.log()
    mine.write_text(MINE.replace("max=2", "max=3"))
    with pytest.raises(RunError, match=r"mine.py has changed since .* put its copy .*/own/mine-.*\.py back"):
        run.resume_from_checkpoint()
    mine.unlink()
    with pytest.raises(ConfigError, match="there is no file"):
        run.resume_from_checkpoint()
    shutil.copy(next((run.path / "own").iterdir()), mine)
    run.resume_from_checkpoint()
    assert run.wait(LIMIT).name == "done", run.log()


def test_a_switch_takes_a_file_up_and_refuses_one_that_has_changed(small: Experiment, mine: Path, runs: Path) -> None:
    run = Run.start(small.override({"steps": 10_000, "eval_every": 10_000}), runs)
    while not run.records():
        assert run.alive, run.log()
    plain = run.recipe
    with pytest.raises(ConfigError, match="defines no lost at its top level"):
        run.switch(plain.override({"correction": "mine.py:lost"}))
    for change in ("mine.py:weight", "none"):
        count = len(run.switches())
        run.switch(plain.override({"correction": change}))
        while len(run.switches()) == count:
            assert run.alive, run.log()
    assert run.switches()[0].recipe.correction.weight == f"{mine}:weight"
    assert [copy.read_text() for copy in (run.path / "own").iterdir()] == [MINE]
    mine.write_text(MINE + "\n# changed\n")
    run.switch(plain.override({"correction": "mine.py:weight"}))
    while not (refused := [event for event in run.events() if event["event"] == "refused"]):
        assert run.alive, run.log()
    assert "mine.py has changed since" in refused[0]["reason"]


def test_an_error_in_the_users_code_ends_the_run_with_its_line(small: Experiment, mine: Path, runs: Path) -> None:
    mine.write_text("def weight(delta, mask):\n    return delta + int('two')\n")
    run = Run.start(small.override({"recipe.correction": "mine.py:weight"}), runs)
    assert run.wait(LIMIT).name == "failed"
    assert run.status.reason == "ValueError: invalid literal for int() with base 10: 'two' (mine.py, line 2)"


def test_what_cannot_be_found_makes_no_run(small: Experiment, mine: Path, runs: Path) -> None:
    for key, value in EVERYTHING.items():
        with pytest.raises(ConfigError, match="defines no lost"):
            Run.start(small.override({key: value.partition(":")[0] + ":lost"}), runs)
    assert not runs.exists()


def test_what_came_from_elsewhere_is_looked_at_without_being_executed(
    small: Experiment, mine: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read, shown, listed, compared, opened in a panel or as a sweep: nobody's file runs by that."""
    experiment = small.override(EVERYTHING)
    directory = RunDirectory.create(Run.check(experiment), runs, "theirs")
    monkeypatch.setenv("LABKIT_RUNS", str(runs))
    for command in (["list"], ["show", "theirs"], ["compare", "theirs"], ["corrections", "tis"]):
        assert CliRunner().invoke(app, command).exit_code == 0, command
    run = Run.open("theirs", runs)
    assert run.alarms() == []
    compare([run]).table()
    session = Session(runs)
    assert [view.label for view in session.attach()] == [experiment.name]
    session.poll()
    plan = Plan(experiment=experiment, axes={"recipe.correction": ("none", "mine.py:weight")}, seeds=(0,))
    assert [cell.id for cell in plan.cells()] == ["correction-none-s0", "correction-mine.py-weight-s0"]
    sweep = Sweep.open(Sweep.create(plan, runs).path)
    assert sweep.results().table() is not None
    yaml = directory.path / "experiment.yaml"
    assert Experiment.from_yaml(yaml).recipe.short_str().endswith("mine.py:weight")
    assert executions(mine) == []

    mine.unlink()  # and it stays readable without the file
    assert CliRunner().invoke(app, ["show", "theirs"]).exit_code == 0
    assert yaml_io.load(yaml)["task"] == f"{mine}:Short"
    assert Run.open("theirs", runs).recipe == Recipe(**yaml_io.load(yaml)["recipe"])
