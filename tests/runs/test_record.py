import json
import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from labkit.runs.record import SCHEMA, NewerSchemaError, StepRecord

Make = Callable[..., StepRecord]


def test_a_record_survives_its_line(record: Make) -> None:
    written = record(3, kv_scales={"q": [0.5], "k": [0.25], "v": [1.0]}, events=("update skipped: x",))
    assert StepRecord.from_json(written.to_json()) == written


def test_floats_survive_bit_for_bit(record: Make) -> None:
    value = 0.1 + 0.2
    assert StepRecord.from_json(record(1, metrics={"loss": value}).to_json()).metrics["loss"] == value


def test_missing_nan_and_infinite_stay_apart_in_valid_json(record: Make) -> None:
    metrics = {"missing": None, "nan": math.nan, "up": math.inf, "down": -math.inf}
    line = record(1, metrics=metrics).to_json()
    assert json.loads(line)["metrics"] == {"missing": None, "nan": "nan", "up": "inf", "down": "-inf"}
    read = StepRecord.from_json(line).metrics
    assert read["missing"] is None
    assert read["nan"] is not None
    assert math.isnan(read["nan"])
    assert (read["up"], read["down"]) == (math.inf, -math.inf)


def test_samples_stay_out_of_the_line(record: Make) -> None:
    assert record(1).samples
    assert "samples" not in json.loads(record(1).to_json())


def test_a_newer_schema_is_refused(record: Make) -> None:
    content = json.loads(record(1).to_json()) | {"schema": SCHEMA + 1}
    with pytest.raises(NewerSchemaError, match="update labkit"):
        StepRecord.from_json(json.dumps(content))


@pytest.mark.parametrize(("line", "message"), [("{", "not JSON"), ("[1]", "list"), ('{"schema": 1}', "step")])
def test_what_is_no_record_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepRecord.from_json(line)


def test_a_metric_not_measured_reads_as_nan(record: Make) -> None:
    assert math.isnan(record(1).metric("heldout_accuracy"))
    assert math.isnan(record(1).metric("unknown"))


def test_watching_a_run_imports_no_torch() -> None:
    code = (
        "import sys, labkit.cli, labkit.demo, labkit.runs.store, labkit.runs.process, labkit.runs.compare, "
        "labkit.runs.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
