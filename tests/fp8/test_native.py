import subprocess
import sys

import pytest
import torch

from labkit.fp8 import native

ONE_CALL = """
import torch
from labkit.fp8 import native
print(native.available())
print(native.fake_quantize(torch.ones(2, 128), "e4m3", (1, 128), "pow2", "te", torch.float32).sum().item())
"""


@pytest.fixture
def fresh_library(monkeypatch):
    monkeypatch.delenv("LABKIT_NATIVE", raising=False)
    native._library.cache_clear()
    yield
    native._library.cache_clear()


def test_environment_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("LABKIT_NATIVE", "0")
    assert native.available() == (False, "turned off by LABKIT_NATIVE=0")


def test_without_a_compiler_the_reason_names_the_way_out(monkeypatch, fresh_library):
    monkeypatch.setenv("CC", "no-such-compiler")
    usable, reason = native.available()
    assert not usable
    assert "no-such-compiler" in reason
    assert "set CC" in reason


def test_a_failing_compiler_is_reported_and_not_fatal(monkeypatch, fresh_library):
    monkeypatch.setenv("CC", "false")
    usable, reason = native.available()
    assert not usable
    assert "could not compile" in reason


def test_an_unusable_cache_is_reported_and_not_fatal(monkeypatch, tmp_path, fresh_library):
    if not native.available()[0]:
        pytest.skip(native.available()[1])
    native._library.cache_clear()
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("LABKIT_CACHE", str(blocker))
    usable, reason = native.available()
    assert not usable
    assert "stored or loaded" in reason


def test_processes_starting_together_share_one_library(monkeypatch, tmp_path):
    if not native.available()[0]:
        pytest.skip(native.available()[1])
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path))
    workers = [subprocess.Popen([sys.executable, "-c", ONE_CALL], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for worker in workers:
        output = worker.communicate(timeout=120)[0]
        assert worker.returncode == 0
        assert "True" in output
        assert "256.0" in output
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".so"]


def test_flags_keep_the_rounding():
    assert "-ffp-contract=off" in native.FLAGS
    assert not any("fast-math" in flag for flag in native.FLAGS)


def test_calls_from_several_threads_are_independent():
    if not native.available()[0]:
        pytest.skip(native.available()[1])
    from concurrent.futures import ThreadPoolExecutor

    inputs = [torch.randn(256, 512, generator=torch.Generator().manual_seed(i)) for i in range(8)]

    def call(x: torch.Tensor) -> torch.Tensor:
        return native.fake_quantize(x, "e4m3", (1, 128), "pow2", "te", torch.float32)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, inputs))
    assert all(torch.equal(result, call(x)) for result, x in zip(results, inputs, strict=True))
