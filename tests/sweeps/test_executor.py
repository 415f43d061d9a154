import pytest

from labkit.config import preset
from labkit.hardware import host
from labkit.sweeps.executor import LocalProcesses


def capacity(monkeypatch: pytest.MonkeyPatch, cores: int, free: float, threads: int, parallel: int | None) -> str:
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(host, "memory", lambda: (free, free))
    return LocalProcesses(parallel).capacity([preset("bf16", threads=threads)]).why


def test_the_least_of_cores_memory_and_what_was_asked_decides_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capacity(monkeypatch, 8, 20, 1, None).startswith("8 at once: 8 cores, 1 thread a cell")
    assert capacity(monkeypatch, 8, 20, 3, None).startswith("2 at once: 8 cores, 3 threads a cell")
    assert capacity(monkeypatch, 8, 5, 1, None).startswith("3 at once: 5.0 GiB free, up to 1.5 GiB a cell")
    assert capacity(monkeypatch, 8, 20, 1, 4).startswith("4 at once: 4 asked for (8 cores")
    assert capacity(monkeypatch, 2, 20, 1, 4).startswith("2 at once: 2 cores")
    assert capacity(monkeypatch, 1, 0.5, 2, None).startswith("1 at once")


def test_no_cell_at_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="parallel must be at least 1"):
        LocalProcesses(0)
