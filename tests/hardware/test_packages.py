from importlib.metadata import version
from pathlib import Path

import pytest

from labkit.config import ConfigError, Experiment
from labkit.hardware import packages
from labkit.runs.process import Run


def test_the_embedded_experiment_lacks_nothing() -> None:
    assert packages.unavailable(Experiment()) == []


def test_what_is_there_is_named_with_its_version() -> None:
    assert packages.installed("torch") == version("torch")
    assert packages.installed("labkit-that-nobody-wrote") is None


@pytest.mark.skipif(packages.cuda()[0], reason="this machine has CUDA")
def test_a_run_that_lacks_something_is_refused_before_its_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device: not available here: .*CUDA"):
        Run.start(Experiment(device="cuda"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_the_cuda_version_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert packages.torch_cuda() == torch.version.cuda
