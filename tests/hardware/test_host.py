import psutil

from labkit.config import preset
from labkit.hardware import host


def test_cores_and_memory_are_what_psutil_sees_or_less() -> None:
    assert 1 <= host.cores() <= (psutil.cpu_count() or 1)
    free, total = host.memory()
    assert 0 < free <= total <= psutil.virtual_memory().total / 2**30


def test_a_run_of_the_tiny_policy_takes_what_was_measured() -> None:
    assert host.RUN_MEMORY <= host.run_memory(preset("bf16")) < host.RUN_MEMORY + 0.05
