import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from labkit.hardware import host, machine
from labkit.hardware.checkup import checkup

H100 = "NVIDIA H100 80GB HBM3, 81559, 9.0, 570.124.06"


@pytest.mark.parametrize(
    ("line", "state", "words"),
    [
        (
            H100,
            "ok",
            "80 GiB, compute capability 9.0, driver 570.124.06: FP8 tensor cores, scales per",
        ),
        ("NVIDIA B200, 183359, 10.0, 570.0", "ok", "128-blocks, MX blocks; torch has CUDA 13.0"),
        ("NVIDIA L4, 23034, 8.9, 570.0", "ok", "scales per tensor and row; torch"),
        ("NVIDIA A100-SXM4-80GB, 81920, 8.0, 570.0", "note", "no FP8 tensor cores"),
    ],
)
def test_what_a_gpu_means_for_fp8(line: str, state: str, words: str) -> None:
    check = machine.gpu(line, "13.0")
    assert (check.state, words in check.found) == (state, True), check


def test_a_gpu_that_torch_cannot_use_is_no_good() -> None:
    check = machine.gpu(H100, None)
    assert check.state == "note"
    assert "without CUDA" in check.advice


def test_a_broken_nvidia_smi_is_said_and_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'could not talk to the driver'\nexit 9\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (check,) = [check for check in checkup(tmp_path) if check.name == "GPU"]
    assert (check.state, "could not talk to the driver" in check.found) == ("note", True)
    command.write_text(f"#!/bin/sh\necho '{H100}'\necho '{H100}'\n")
    assert [check.name for check in checkup(tmp_path)].count("GPU") == 2


def test_memory_says_what_a_run_takes_and_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((0.4, "problem"), (1.5, "note"), (8, "ok")):
        memory = type("Memory", (), {"total": 8 * 2**30, "available": int(free * 2**30)})
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        check = machine.memory()
        assert check.state == state
        assert "a run of the tiny policy takes up to 1.5 GiB" in check.found


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_number", lambda path: 2 * 2**30 if path.endswith("max") else 2**30)
    assert "of 2.0 GiB free" in machine.memory().found


def test_a_folder_that_is_not_there_yet_is_fine_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.disk(tmp_path / "a" / "b").state == "ok"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10 * 2**20}))
    assert machine.disk(tmp_path).state == "problem"


def test_all_is_said_without_torch_and_in_little_time(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from labkit.hardware.checkup import checkup; found = checkup(pathlib.Path('runs'));"
        "print(*(check.name for check in found), sep=','); sys.exit(bool({'torch', 'datasets'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == (
        "packages,CPU cores,memory,disk,FP8 on the CPU,GPU,vLLM,Transformer Engine,Ray,tasks,"
        "models in the cache,data sets in the cache"
    )
