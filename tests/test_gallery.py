"""The gallery: what it says can be looked up, and what it runs differs in the fault alone."""

from pathlib import Path

import pytest

from labkit import gallery
from labkit.config import ConfigError, Experiment
from labkit.config.faults import CASES
from labkit.rl.loop import Loop
from labkit.runs.alarms import RULES, alarms
from labkit.runs.metrics import METRICS

NAMES = list(CASES)
SMALL = {"steps": 2, "grpo.prompts_per_step": 4, "grpo.group_size": 4, "eval_prompts": 8}


def test_there_are_some_thirty_with_everything_said() -> None:
    assert len(NAMES) >= 25
    for case in gallery.faults():
        assert all([case.wrong, case.reported, case.cure]), case.name


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_is_there(name: str) -> None:
    assert CASES[name].finding


@pytest.mark.parametrize("name", NAMES)
def test_what_to_look_at_is_in_a_record_and_its_alarm_exists(name: str) -> None:
    case = CASES[name]
    assert case.look_at or name == "zero-block"  # which has no record: the run ends in its first step
    assert set(case.look_at) <= METRICS.keys()
    assert not case.alarm or case.alarm in RULES


@pytest.mark.parametrize("name", NAMES)
def test_the_two_arms_differ_in_the_fault_alone(name: str) -> None:
    control, faulty = gallery.experiments(name, seed=7)
    case = CASES[name]
    different = control.diff(faulty).keys()
    if case.injected:
        assert different == {"faults"}
        assert faulty.faults == (name,)
    else:
        groups = {key for changed in case.changes for key in different if key.startswith(changed)}
        assert different == groups != set()
    assert control.faults == ()
    assert control.seed == faulty.seed == 7
    assert (control.name, faulty.name) == (f"{name}-control", name)
    assert Experiment.from_yaml(faulty.to_yaml()) == faulty


def test_overrides_reach_both_arms_and_win() -> None:
    control, faulty = gallery.experiments("nan-logprobs", steps=3, **{"grpo.lr": 1e-5})
    assert control.steps == faulty.steps == 3
    assert control.grpo.lr == faulty.grpo.lr == 1e-5


def test_a_wrong_name_is_corrected() -> None:
    with pytest.raises(ConfigError, match="did you mean zero-block"):
        gallery.experiments("zero-blok")
    with pytest.raises(ConfigError, match="did you mean zero-block"):
        gallery.text("zero-blok")


def test_table_and_text_tell_of_every_fault() -> None:
    assert gallery.table().row_count == len(NAMES)
    for name in NAMES:
        text = gallery.text(name)
        assert text.startswith(name)
        assert CASES[name].wrong[:20] in text
        assert max(map(len, text.splitlines())) <= 110


def test_both_arms_run_as_runs(tmp_path: Path) -> None:
    control, faulty = gallery.run("nan-logprobs", tmp_path, **SMALL)
    for run in (control, faulty):
        assert run.wait(timeout=300).name == "done", run.log()
    assert {control.path.parent, faulty.path.parent} == {tmp_path}
    assert all(not key.startswith("fault.") for record in control.records() for key in record.active)
    for record in faulty.records():
        assert record.active["fault.nan-logprobs"]["state"] == "fault"
    assert control.records()[-1].metrics["nan_count"] == 0
    assert faulty.records()[-1].metrics["nan_count"] > 0
    assert "nan-tokens" in {alarm.name for alarm in alarms(faulty.records(), faulty.experiment)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.alarm])
def test_the_alarm_is_raised_by_the_fault_and_not_by_its_control(name: str) -> None:
    control, faulty = (
        {alarm.name for alarm in alarms(list(Loop(experiment).steps()), experiment)}
        for experiment in gallery.experiments(name)
    )
    assert CASES[name].alarm in faulty
    assert CASES[name].alarm not in control
