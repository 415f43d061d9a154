import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.runs.csv import write_csv
from labkit.runs.process import Run
from labkit.runs.record import StepRecord

Make = Callable[..., Run]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_step_and_every_number_of_every_run(finished_run: Make, tmp_path: Path) -> None:
    runs = [finished_run("bf16"), finished_run("fp8-e2e", seed=3)]
    rows = read(write_csv(tmp_path / "runs.csv", runs))
    assert len(rows) == 12
    assert [row["run"] for row in rows] == [runs[0].id] * 6 + [runs[1].id] * 6
    assert (rows[8]["recipe"], rows[8]["seed"], rows[8]["step"]) == ("fp8-e2e", "3", "2")
    for run, mine in zip(runs, (rows[:6], rows[6:]), strict=True):
        for record, row in zip(run.records(), mine, strict=True):
            for name, value in record.metrics.items():
                assert row[name] == "" if value is None else float(row[name]) == value
            for kind, count in record.tokens.items():
                assert int(row[f"tokens_{kind}"]) == count
            for phase, seconds in record.timings.items():
                assert float(row[f"seconds_{phase}"]) == seconds
            assert row["active_rollout.linears"] == "emulated"


def test_a_float_keeps_all_its_digits_and_what_is_no_number_stays_so(
    finished_run: Make, tmp_path: Path, record: Callable[..., StepRecord]
) -> None:
    run = finished_run(records=1)
    metrics = {"ess": math.nan, "chi2_seq": math.inf, "entropy": 0.1 + 0.2, "lr": None}
    run.directory.append_record(record(1, metrics=metrics, events=("update skipped", 'a "b"; c,\nd')))
    row = read(write_csv(tmp_path / "runs.csv", [run]))[1]
    assert (row["ess"], row["chi2_seq"], row["lr"]) == ("nan", "inf", "")
    assert row["entropy"] == "0.30000000000000004"
    assert row["events"] == 'update skipped; a "b"; c,\nd'
    assert row["heldout_accuracy"] == "", "only step 0 has it"


def test_scales_have_a_column_a_layer(finished_run: Make, tmp_path: Path, record: Callable[..., StepRecord]) -> None:
    run = finished_run(records=1)
    run.directory.append_record(record(1, kv_scales={"q": [0.5, 0.25], "k": [1.0, 2.0], "v": [3.0, 4.0]}))
    rows = read(write_csv(tmp_path / "runs.csv", [run]))
    assert [rows[1][name] for name in ("scale_q_0", "scale_q_1", "scale_v_1")] == ["0.5", "0.25", "4.0"]
    assert rows[0]["scale_q_0"] == ""


def test_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one run"):
        write_csv(tmp_path / "runs.csv", [])
