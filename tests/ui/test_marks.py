"""Marks of switches: where they stand, and which of them have a label."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from labkit.runs.record import StepRecord
from labkit.ui.marks import NEAR, Mark, labelled, marks, marks_of

RUN: Any = SimpleNamespace(id="run")


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        weight_version=step,
        time=float(step),
        elapsed=30.0 * step,
        metrics={},
        timings={},
        tokens={"generated": 300} if step else {},
        active={},
        engine={},
    )


def switch(step: int) -> Any:
    return SimpleNamespace(step=step, changes={"train.fprop": (False, True)})


def texts(*marks: tuple[float, str, int], extent: float) -> list[str]:
    return [text for _, _, text in labelled([(RUN, Mark(x, label, more, "")) for x, label, more in marks], extent)]


def test_marks_say_what_changed_and_stand_at_the_first_step_of_the_new_recipe() -> None:
    records = [record(step) for step in range(5)]
    both = {"rollout.kv_cache": (False, True), "recalibration.margin": (1.0, 1.5)}
    switches = [SimpleNamespace(step=3, changes=both), SimpleNamespace(step=9, changes={"train.fprop": (True, False)})]
    fork, first, coming = marks(records, switches, "tokens", parent=("abc", 1))
    assert (fork.x, fork.label, fork.more) == (300, "fork", 0)
    assert (first.x, first.label, first.more) == (900, "kv_cache on", 1)
    assert first.text == "step 3: rollout.kv_cache off → on, recalibration.margin 1.0 → 1.5"
    assert (coming.x, coming.label, coming.more) == (1200, "fprop off", 0)


def test_a_fork_beside_its_parent_has_only_its_own_marks() -> None:
    records = [record(step) for step in range(9)]
    parent: Any = SimpleNamespace(id="a", records=records, switches=[switch(2), switch(6)], parent=None)
    fork: Any = SimpleNamespace(id="b", records=records, switches=[switch(2), switch(7)], parent=("a", 4))
    assert [(run.id, mark.x) for run, mark in marks_of([parent, fork], "step")] == [
        ("a", 2),
        ("a", 6),
        ("b", 4),
        ("b", 7),
    ]
    assert [mark.x for _, mark in marks_of([fork], "step")] == [2, 4, 7]


def test_marks_that_are_near_share_the_label_of_the_first_which_counts_what_changed() -> None:
    near = [(8.0, "wgrad on", 0), (6.0, "linears on", 0), (7.0, "kv_cache on", 2)]
    assert texts(*near, extent=10) == ["linears on", "kv_cache on +2", "wgrad on"]
    assert texts(*near, extent=60) == ["linears on +4", "", ""]
    assert texts(*near, (40.0, "fork", 0), extent=60) == ["linears on +4", "", "", "fork"]
    assert texts((0.0, "linears on", 0), (0.0, "fprop on", 0), extent=0) == ["linears on +1", ""]
    assert texts((60.0, "policy first-step-only", 11), extent=60) == ["policy first-st… +11"]
    assert texts(extent=60) == []


@given(st.lists(st.floats(0, 100), max_size=30))
def test_no_two_labels_are_near_and_every_mark_is_counted_once(xs: list[float]) -> None:
    found = labelled([(RUN, Mark(x, "on", 0, "")) for x in xs], 100.0)
    assert [mark.x for _, mark, _ in found] == sorted(xs)
    at = [mark.x for _, mark, text in found if text]
    assert all(after > before + NEAR * 100 for before, after in pairwise(at))
    assert sum(int(text.partition("+")[2] or 0) + 1 for _, _, text in found if text) == len(xs)
