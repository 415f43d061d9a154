import subprocess
import sys
import time
from pathlib import Path

from labkit.hardware.checkup import checkup
from labkit.runs.process import Run
from labkit.ui import machine


def test_the_panel_says_what_the_doctor_says_and_how_its_kernel_is(tmp_path: Path) -> None:
    kernel, *others = machine.checks(tmp_path)
    assert kernel.name == "this kernel"
    assert [check.name for check in others] == [check.name for check in checkup(tmp_path)]


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
