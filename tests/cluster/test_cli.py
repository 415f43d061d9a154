from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.config import Experiment
from labkit.runs.process import Run


@pytest.mark.parametrize(("given", "placement"), [([], "colocated"), (["cluster.placement=separate"], "separate")])
def test_an_address_on_the_command_line_chooses_ray(
    given: list[str], placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Experiment] = []
    monkeypatch.setattr(Run, "start", started.append)
    monkeypatch.setattr("labkit.cli.running.follow", lambda run, detach: None)
    CliRunner().invoke(app, ["run", "fp8-e2e", *given, "--ray-address", "head:6379"], catch_exceptions=False)
    (experiment,) = started
    assert (experiment.cluster.placement, experiment.cluster.address) == (placement, "head:6379")
