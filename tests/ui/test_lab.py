"""The panel without a browser: its buttons pressed in the kernel, real runs behind them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pytest

from labkit.config import ConfigError, preset
from labkit.runs.process import Run
from labkit.ui import lab as module
from labkit.ui.lab import Lab, open_lab
from labkit.ui.statusline import remaining, split
from tests.ui.conftest import small, until


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if module._current:
        module._current.close()
    for run in Run.all(tmp_path):
        run.kill()


def test_reset_brings_back_what_the_panel_began_with(root: Path) -> None:
    lab = Lab(small(), root)
    before = lab.experiment
    lab.switch(preset("fp8-e2e-kv").recipe)
    lab.settings.set(small(seed=7))
    assert lab.experiment != before
    lab.b_reset.click()
    assert lab.experiment == before
    assert lab.recipe == small().recipe


def test_the_panel_is_driven_by_its_widgets(root: Path) -> None:
    lab = Lab(small(), root)
    assert (lab.status.state, lab.b_run.disabled, lab.b_pause.disabled, lab.b_stop.disabled) == (
        "idle",
        False,
        True,
        True,
    )
    lab.b_run.click()
    assert lab.status.state == "starting"
    assert lab.b_run.disabled
    assert not lab.b_stop.disabled
    until(lambda: lab.status.state == "running" and lab.status.step >= 2)
    assert lab.status.detail.startswith(f"step {lab.status.step} of 400")

    lab.controls._fields["rollout.kv_cache"].value = True
    assert lab.status.news == "asked: rollout.kv_cache off → on, from the next step on"
    until(lambda: "switched at step" in lab.status.news)
    assert lab.runs[0].recipe.rollout.kv_cache
    assert lab.recipe.rollout.kv_cache
    until(lambda: "emulated" in lab.controls._badges["rollout.kv_cache"].value)

    lab.controls._fields["keep_bf16.first_layers"].value = 99
    until(lambda: lab.status.news.startswith("refused: "))
    until(lambda: lab.controls.recipe == lab.runs[0].recipe)  # what is shown is what runs
    assert lab.controls._fields["keep_bf16.first_layers"].value == 0

    lab.b_pause.click()
    assert lab.status.state in ("pausing", "paused")
    until(lambda: lab.status.state == "paused")
    assert lab.b_pause.description == "Resume"
    lab.b_pause.click()
    until(lambda: lab.status.state == "running")

    until(lambda: lab.runs[0].checkpoints)
    lab.b_stop.click()
    assert lab.status.state in ("stopping", "stopped")
    until(lambda: lab.status.state == "stopped" and not lab.chips.fork.disabled)
    assert lab.b_stop.disabled
    assert not lab.b_run.disabled
    assert lab.b_stop.description == "Stop"

    lab.controls._fields["rollout.kv_cache"].value = False  # nothing runs: it counts from the next start on
    assert "asked" not in lab.status.news
    lab.chips.fork.click()
    until(lambda: len(lab.runs) == 2 and lab.status.state == "running")
    assert lab.runs[1].parent
    assert lab.runs[1].parent[0] == lab.runs[0].id
    until(lambda: lab.chips.chosen.value == lab.runs[1].id)
    until(lambda: lab._charts, 60)
    until(lambda: lab.runs[1].step > lab.runs[1].parent[1] + 1)
    assert {trace.name for trace in lab._charts.figure.data if trace.name} >= {view.label for view in lab.runs}  # type: ignore[union-attr]

    lab.chips._checks[0].value = False
    until(lambda: not lab.runs[0].visible)
    lab.stop()
    assert lab.wait(30).name == "stopped"


def test_a_run_that_goes_on_does_so_under_its_own_recipe_and_the_panel_shows_it(root: Path) -> None:
    lab = Lab(small(), root)
    lab.run()
    until(lambda: lab.status.step >= 1)
    lab.stop()
    until(lambda: lab.status.state == "stopped" and not lab.chips.go_on.disabled)
    lab.controls._fields["train.fprop"].value = True
    assert lab.recipe.train.fprop
    lab.chips.go_on.click()
    assert not lab.recipe.train.fprop
    until(lambda: lab.status.state == "running")


def test_a_new_panel_closes_the_one_before_and_shows_its_runs(root: Path) -> None:
    first = Lab(small(), root)
    first.run()
    until(lambda: first.status.step >= 1)
    inside = [first.status, first.hint, first.b_run, first.controls.widget]
    known = [(view.id, view.label, view.colour) for view in first.runs]
    second = Lab(small(seed=3), root)
    assert all(widget.comm is None for widget in inside)
    assert "This panel is closed" in first.widget.children[0].value
    assert [(view.id, view.label, view.colour) for view in second.runs] == known, "names and colours stay with runs"
    assert second.status.state == "running"
    assert second.status.news.startswith("attached to")
    assert second.experiment is not None
    assert second.experiment.seed == 0
    second.stop()
    second.wait(30)
    third = Lab(small(seed=3), root)
    assert [view.id for view in third.runs] == [view.id for view in second.runs]
    assert third.experiment is not None
    assert third.experiment.seed == 3


def test_open_lab_shows_what_another_process_left(root: Path) -> None:
    run = Run.start(small(steps=3), root)
    run.wait(60)
    lab = open_lab(root)
    assert [view.id for view in lab.runs] == [run.id]
    assert (lab.status.state, lab.status.step, lab.status.news) == ("done", 3, "the newest 1 run opened")


def test_a_run_that_failed_says_why_and_shows_its_log(root: Path) -> None:
    lab = Lab(small(), root)
    lab.run()
    until(lambda: lab.status.step >= 1)
    lab.runs[0].run.kill()
    until(lambda: lab.status.state == "failed (killed)")
    until(lambda: lab.trouble.layout.display == "")
    assert not lab.b_run.disabled


def test_what_cannot_be_done_is_said_and_raises_nothing(root: Path) -> None:
    lab = Lab(small(), root)
    lab.pause()
    assert lab.status.news == "there is no run yet: start one first"
    with pytest.raises(ValueError, match="call run"):
        lab.wait()
    with pytest.raises(ConfigError, match="fp8-rollout"):
        Lab("fp8-rolout", root)
    assert not lab._closed.is_set()  # a typing error must not cost the panel that is there


def test_the_default_experiment_has_checkpoints_to_fork_from(root: Path) -> None:
    lab = Lab("fp8-e2e", root)
    assert lab.experiment is not None
    assert lab.experiment.checkpoint_every == 10
    assert lab.recipe.name == "fp8-e2e"


def test_every_button_has_a_name_and_a_tooltip(root: Path) -> None:
    lab = Lab(small(), root)

    def buttons(widget: widgets.Widget) -> Iterator[widgets.Button]:
        if isinstance(widget, widgets.Button):
            yield widget
        for child in getattr(widget, "children", ()):
            yield from buttons(child)

    found = list(buttons(lab.widget))
    assert len(found) >= 8
    assert all(button.description and button.tooltip for button in found if button not in lab.tabs)


def test_time_left_and_the_split_of_a_step() -> None:
    from types import SimpleNamespace as Step

    steps: Any = [
        Step(step=i, elapsed=2.0 * i, tokens={"generated": 1}, timings={"generate": 1.0, "update": 0.5, "refit": 0.5})
        for i in range(5)
    ]
    assert remaining(steps, 64) == "2:00 left"
    assert remaining(steps[:1], 64) == remaining(steps, 4) == ""
    text = split(steps)
    assert "2.00 s a step" in text
    assert "generate 50%" in text
    assert "update 25%" in text
    assert "rest 25%" in text
    assert "evaluate" not in text
    assert split([]) == ""


def test_importing_the_panel_brings_neither_torch_nor_the_figure() -> None:
    heavy = "('torch', 'vllm', 'ray', 'labkit.ui.charts')"
    code = f"import sys, labkit.ui.lab; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
