"""A session over real runs of the tiny policy, each with the worker process that it has."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment, preset
from labkit.runs.process import Run
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory, RunError
from labkit.ui import theme
from labkit.ui.session import MOST, Answer, Session

SMALL: dict[str, Any] = {
    **{"steps": 400, "eval_every": 400, "eval_prompts": 4, "threads": 1, "sampling.max_new_tokens": 4},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 4, "checkpoint_every": 2},
}
SECONDS = 60


def small(name: str = "fp8-rollout", **changes: Any) -> Experiment:
    return preset(name).override(SMALL | changes)


def until(session: Session, condition: Callable[[], Any], seconds: float = SECONDS) -> list[Answer]:
    """Poll, as the painter does, until the condition holds. Returns the answers that came."""
    answers, deadline = [], time.monotonic() + seconds
    while True:
        answers += session.poll()
        if condition():
            return answers
        assert time.monotonic() < deadline, f"state {session.state}, {session.active}"
        time.sleep(0.02)


def finished(root: Path, name: str) -> RunDirectory:
    directory = RunDirectory.create(small().override({"name": name}), root)
    directory.write_state(RunState("stopped"))
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for run in Run.all(tmp_path):
        run.kill()


def test_a_run_from_start_to_stop(root: Path) -> None:
    session = Session(root)
    assert (session.state, session.views(), session.active) == ("idle", [], None)
    view = session.start(small())
    assert session.state == "starting"
    assert session.busy
    assert view.records == ()
    with pytest.raises(RunError, match="stop it first, then start another"):
        session.start(small("bf16"))
    until(session, lambda: session.views()[0].step >= 1)
    assert session.state == "running"

    session.pause()
    assert session.state == "pausing"
    assert session.waiting
    until(session, lambda: session.state == "paused")
    assert not session.waiting
    steps = len(session.views()[0].records)
    time.sleep(0.3)
    session.poll()
    assert len(session.views()[0].records) == steps

    session.resume()
    assert session.state == "resuming"
    until(session, lambda: session.state == "running" and session.views()[0].step > steps)

    session.stop()
    assert session.state == "stopping"
    until(session, lambda: not session.busy)
    assert session.state == "stopped"
    last = session.views()[0]
    assert [record.step for record in last.records] == list(range(last.step + 1))
    assert last.checkpoints[-1] == last.step  # a stop leaves one

    session.go_on()
    until(session, lambda: session.views()[0].step > last.step)
    session.stop()
    session.stop()  # the second press kills, unless the first was quick enough
    until(session, lambda: not session.busy)
    assert session.state in ("failed", "stopped")


def test_of_switches_in_a_hurry_the_first_and_the_latest_are_carried_out(root: Path) -> None:
    session = Session(root)
    session.start(small())
    until(session, lambda: session.views()[0].step >= 1)
    base = session.active.recipe  # type: ignore[union-attr]
    margins = [base.override({"rollout.kv_cache": True, "recalibration.margin": 1 + i / 10}) for i in range(1, 6)]
    said = [session.switch(recipe) for recipe in margins]
    assert all(text.startswith("asked: rollout.kv_cache off → on") for text in said)
    assert session.pending == margins[-1]
    answers = until(session, lambda: session.pending is None)
    assert [answer.accepted for answer in answers] == [True, True]
    assert "recalibration.margin 1.1 → 1.5" in answers[1].text
    assert "switched at step" in answers[1].text
    view = session.active
    assert view is not None
    assert view.recipe == margins[-1]
    assert len(view.switches) == 2
    assert session.switch(margins[-1]) == "nothing to change"
    until(session, lambda: session.views()[0].records[-1].recipe_version == 2)


def test_a_switch_that_cannot_be_is_refused_with_the_reason_and_changes_nothing(root: Path) -> None:
    session = Session(root)
    session.start(small())
    until(session, lambda: session.views()[0].step >= 1)
    before = session.views()[0].recipe
    session.switch(before.override({"keep_bf16.first_layers": 99}))
    answers = until(session, lambda: session.pending is None)
    assert [answer.accepted for answer in answers] == [False]
    assert answers[0].text.startswith("refused: ")
    assert answers[0].recipe == before
    assert session.views()[0].switches == ()


def test_what_was_asked_for_during_a_pause_comes_after_it_or_not_at_all(root: Path) -> None:
    session = Session(root)
    session.start(small())
    until(session, lambda: session.views()[0].step >= 1)
    session.pause()
    until(session, lambda: session.state == "paused")
    recipe = session.views()[0].recipe.override({"train.fprop": True})
    assert session.switch(recipe).endswith("after the pause")
    session.stop()
    answers = until(session, lambda: not session.busy)
    assert [answer.accepted for answer in answers] in ([False], [False, False])
    assert session.pending is None
    assert session.views()[0].switches == ()


def test_of_what_is_set_during_a_pause_only_the_last_reaches_the_run(root: Path) -> None:
    session = Session(root)
    session.start(small())
    until(session, lambda: session.active.step >= 1)
    session.pause()
    until(session, lambda: session.state == "paused")
    start = session.active.recipe
    for linears in (False, True, False):
        session.switch(start.override({"rollout.linears": linears, "train.fprop": linears}))
    assert session.pending is not None
    session.resume()
    answers = until(session, lambda: session.active.switches)
    assert [answer.accepted for answer in answers] == [True]
    (switch,) = session.active.switches
    assert switch.recipe.rollout.linears is False


def test_a_fork_stands_beside_its_parent_and_a_new_session_finds_both(root: Path) -> None:
    session = Session(root)
    parent = session.start(small())
    until(session, lambda: len(session.views()[0].checkpoints) >= 1)
    with pytest.raises(RunError, match="stop it first, then fork"):
        session.fork(parent.id, parent.recipe)
    session.stop()
    until(session, lambda: not session.busy)
    step = session.views()[0].checkpoints[0]
    other = parent.recipe.override({"rollout.kv_cache": True})
    fork = session.fork(parent.id, other, step, steps=step + 3)
    assert fork.parent == (parent.id, step)
    assert fork.label == f"{other.name} from step {step}"
    assert [record.step for record in fork.records] == list(range(step + 1))
    assert (fork.colour, fork.dash) == theme.style(1)
    until(session, lambda: session.state == "done")
    assert session.active is not None
    assert session.active.step == step + 3

    later = Session(root)
    assert [view.id for view in later.attach()] == [parent.id, fork.id]
    assert [len(view.records) for view in later.views()] == [len(view.records) for view in session.views()]
    assert later.active is not None
    assert later.active.id == fork.id
    assert later.state == "done"


def test_another_session_takes_over_a_run_that_lives(root: Path) -> None:
    first = Session(root)
    view = first.start(small())
    until(first, lambda: first.views()[0].step >= 1)
    second = Session(root)
    assert [opened.id for opened in second.attach(newest=0)] == [view.id]
    assert second.busy
    assert second.views()[0].step >= 1
    second.stop()
    until(first, lambda: not first.busy)
    assert first.state == "stopped"


def test_six_runs_are_told_apart_and_the_oldest_makes_room(root: Path) -> None:
    ids = [finished(root, f"run {i}").id for i in range(MOST + 2)]
    session = Session(root)
    assert len(session.attach()) == MOST
    assert len({(view.colour, view.dash) for view in session.views()}) == MOST
    shown = [view.id for view in session.views()]
    hidden = next(run_id for run_id in ids if run_id not in shown)
    session.open(hidden)
    assert [view.id for view in session.views()] == [*shown[1:], hidden]
    assert len({(view.colour, view.dash) for view in session.views()}) == MOST
    session.close(hidden)
    assert [view.id for view in session.views()] == shown[1:]
    with pytest.raises(RunError, match="open it first"):
        session.show(hidden, False)


def test_one_that_cannot_be_read_does_not_hide_the_others(root: Path) -> None:
    broken, fine = finished(root, "broken"), finished(root, "fine")
    (broken.path / "experiment.yaml").write_text("steps: nonsense\n")
    session = Session(root)
    assert [view.id for view in session.attach()] == [fine.id]


def test_equal_names_get_numbers_and_a_view_stays_the_same_object_until_something_changes(root: Path) -> None:
    for _ in range(2):
        finished(root, "twin")
    session = Session(root)
    session.attach()
    assert [view.label for view in session.views()] == ["twin", "twin · 2"]
    before = session.views()
    session.poll()
    assert all(now is then for now, then in zip(session.views(), before, strict=True))
    session.show(before[0].id, False)
    session.poll()
    assert [view.visible for view in session.views()] == [False, True]


def test_clicks_from_many_threads_start_one_run(root: Path) -> None:
    session = Session(root)
    refused = []

    def click() -> None:
        try:
            session.start(small())
        except RunError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=click) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 4
    assert len(Run.all(root)) == 1


def test_driving_before_there_is_a_run_says_so(root: Path) -> None:
    session = Session(root)
    for action in (session.pause, session.resume, session.stop, session.go_on):
        with pytest.raises(RunError, match="start one first"):
            action()
