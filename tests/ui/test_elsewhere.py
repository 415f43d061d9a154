"""Runs that come and go in the runs folder while a panel is open: the shell, another notebook, rm."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.runs.process import Run
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory
from labkit.ui import lab as module
from labkit.ui.lab import Lab, open_lab
from labkit.ui.session import MOST, Session
from tests.ui.conftest import SMALL, small, until


def noticed(session: Session) -> list[str]:
    """The labels of what comes in at the next look."""
    return until(lambda: [view.label for view in session.notice()], 5)


def finished(root: Path, name: str) -> RunDirectory:
    directory = RunDirectory.create(small(name=name), root)
    directory.write_state(RunState("stopped"))
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    if module._current:
        module._current.close()
    for run in Run.all(tmp_path):
        run.kill()


def test_a_run_of_the_shell_is_shown_and_driven_only_when_it_is_attached_to(root: Path) -> None:
    lab = Lab(small(), root)
    settings = [f"{key}={value}" for key, value in {**SMALL, "name": "shell"}.items()]
    command = [sys.executable, "-m", "labkit.cli", "run", "fp8-rollout", *settings]
    with subprocess.Popen(command, env={**os.environ, "LABKIT_RUNS": str(root)}, stdout=subprocess.DEVNULL):
        view = until(lambda: next(iter(lab.runs), None))
        assert time.time() - (view.path / "experiment.yaml").stat().st_mtime < 5
        until(lambda: lab.runs[0].step >= 2 and lab.chips.chosen.value == view.id)
        assert lab.status.news == "started elsewhere: shell (to drive it: lk.open_lab())"
        assert lab.chips._chips[0].layout.display == ""
        assert lab.chips._checks[0].value
        assert (lab.status.state, lab.b_run.disabled, lab.b_stop.disabled) == ("idle", False, True)
        lab.controls._fields["rollout.kv_cache"].value = True
        assert not lab.session.pending, "a switch is for the next start here"

        lab = open_lab(root)
        assert lab.status.state == "running"
        lab.stop()
        assert lab.wait(30).name == "stopped"
        assert not lab.runs[0].switches


def test_guests_take_free_places_and_those_of_guests_that_have_ended(root: Path) -> None:
    session = Session(root)
    session.attach()
    own = [session.open(finished(root, f"own {i}").id).label for i in range(MOST - 1)]
    first = finished(root, "first")
    assert noticed(session) == ["first"]
    assert session.active is None, "nothing to drive"
    finished(root, "second")
    assert noticed(session) == ["second"]
    assert [view.label for view in session.views()] == [*own, "second"]
    session.attach(newest=0)  # from now on they are the panel's own
    waiting = finished(root, "waiting")
    time.sleep(2.1)
    assert session.notice() == []
    session.close(session.views()[0].id)
    assert noticed(session) == ["waiting"]
    assert [view.label for view in session.views()] == [*own[1:], "second", "waiting"]
    session.close(waiting.id)
    time.sleep(2.1)
    assert session.notice() == [], "what was removed stays away"
    assert first.path.is_dir()


def test_a_run_is_not_shown_before_it_is_made_nor_one_that_cannot_be_read(root: Path) -> None:
    session = Session(root / "later")  # a folder that isn't there yet
    session.attach()
    (root / "later").mkdir()
    (root / "later" / "demo.html").touch()
    broken = finished(root / "later", "broken")
    (broken.path / "experiment.yaml").write_text("steps: nonsense\n")
    fork = RunDirectory.create(small(name="fork"), root / "later")  # whose checkpoint is still being copied
    time.sleep(2.1)
    assert session.notice() == []
    fork.write_state(RunState("starting"))
    assert noticed(session) == ["fork"]


def test_runs_that_are_deleted_elsewhere_vanish_without_an_error(root: Path) -> None:
    directories = [finished(root, name) for name in ("kept", "going", "gone")]
    lab = open_lab(root)
    assert lab.session.active
    assert lab.session.active.label == "gone"
    said = set()
    lab.status.observe(lambda change: said.add(change["new"]), "news")
    until(lambda: lab._charts)
    (directories[1].path / "state.json").unlink()  # rm -r has just begun
    until(lambda: [view.label for view in lab.runs] == ["kept", "gone"], 5)
    shutil.rmtree(directories[2].path)
    until(lambda: [view.label for view in lab.runs] == ["kept"], 5)
    until(lambda: [chip.layout.display for chip in lab.chips._chips] == ["", *["none"] * (MOST - 1)], 5)
    assert lab.session.active.label == "kept"
    shutil.rmtree(root)
    until(lambda: lab.status.state == "idle", 5)
    time.sleep(0.5)
    assert not said
