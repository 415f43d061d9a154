import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labkit.runs.process import Run
from labkit.ui import machine

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
    (check,) = [check for check in machine.checks(tmp_path) if check.name == "GPU"]
    assert (check.state, "could not talk to the driver" in check.found) == ("note", True)
    command.write_text(f"#!/bin/sh\necho '{H100}'\necho '{H100}'\n")
    assert [check.name for check in machine.checks(tmp_path)].count("GPU") == 2


def test_the_cuda_version_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert machine._torch_cuda() == torch.version.cuda


def test_all_is_said_without_torch_and_quickly(tmp_path: Path) -> None:
    code = (
        "import sys; from labkit.ui import machine; names = [c.name for c in machine.checks()];"
        "print(*names, sep=','); sys.exit('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip().startswith("this kernel,packages,CPU cores,memory,disk,FP8 on the CPU,GPU")


def test_memory_says_what_a_run_takes_and_whether_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((0.4, "problem"), (1.5, "note"), (8, "ok")):
        memory = type("Memory", (), {"total": 8 * 2**30, "available": int(free * 2**30)})
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        check = machine._memory()
        assert check.state == state
        assert "a run of the tiny policy takes up to 1 GiB" in check.found


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_number", lambda path: 2 * 2**30 if path.endswith("max") else 2**30)
    assert "of 2.0 GiB free" in machine._memory().found


def test_a_folder_that_is_not_there_yet_is_fine_and_a_full_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine._disk(tmp_path / "a" / "b").state == "ok"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10 * 2**20}))
    assert machine._disk(tmp_path).state == "problem"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = machine._version
    monkeypatch.setattr(machine, "_version", lambda name: None if name == "anywidget" else known(name))
    check = machine._packages()
    assert (check.state, "missing: anywidget" in check.advice) == ("problem", True)


def orphan(root: Path) -> Run:
    """A run whose starter has ended."""
    code = (
        "import labkit as lk; run = lk.Run.start(lk.preset('bf16', steps=10_000, eval_prompts=8, threads=1,"
        f" **{{'grpo.prompts_per_step': 4, 'grpo.group_size': 4}}), {str(root)!r}); print(run.id)"
    )
    return Run.open(subprocess.check_output([sys.executable, "-c", code], text=True).strip(), root)


def test_an_orphan_is_found_told_apart_and_ended(tmp_path: Path) -> None:
    run = orphan(tmp_path)
    try:
        (worker,) = [worker for worker in machine.workers() if worker.path == run.path]
        assert worker.owner == "gone"
        assert worker.alive
        assert f"process {worker.pid}" in worker.label
        assert "whoever started it has ended" in worker.label
        worker.end()
        deadline = time.monotonic() + 30
        while worker.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run.status.name == "stopped"
        assert worker.path not in [other.path for other in machine.workers()]
        worker.end()  # a second press when it has just ended
    finally:
        run.kill()


def test_a_worker_whose_folder_is_gone_can_still_be_ended(tmp_path: Path) -> None:
    run = orphan(tmp_path)
    (worker,) = [worker for worker in machine.workers() if worker.path == run.path]
    run.path.rename(tmp_path / "elsewhere")
    worker.end(kill=True)
    deadline = time.monotonic() + 10
    while worker.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.alive
