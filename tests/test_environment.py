import os
import subprocess
import sys

import pytest

from labkit import environment

NAMES = (*environment.SLEEPING_THREADS, *environment.BATCH_INVARIANT_KERNELS)


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(environment, "_ours", {})


def test_a_worker_gets_sleeping_threads_and_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    two = environment.for_worker(same_kernels=True, threads=2)
    assert (two["OMP_WAIT_POLICY"], two["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")
    assert (two["OMP_NUM_THREADS"], two["HF_HUB_OFFLINE"]) == ("2", "1")
    assert environment.for_worker(same_kernels=True, threads=None)["OMP_NUM_THREADS"] == "7"


def test_kernels_are_batch_invariant_where_both_sides_should_agree_to_the_bit() -> None:
    assert environment.for_worker(True, None)["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert environment.for_worker(False, None)["ONEDNN_MAX_CPU_ISA"] == "ALL"


def test_what_labkit_set_for_itself_does_not_bind_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment.prepare()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert environment.for_worker(False, None)["ONEDNN_MAX_CPU_ISA"] == "ALL"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert environment.for_worker(True, None)["ONEDNN_MAX_CPU_ISA"] == "AVX2", "the user's wins"


def test_importing_labkit_first_prepares_and_a_users_setting_stays() -> None:
    code = "import labkit, os; print(os.environ['OMP_WAIT_POLICY'], os.environ['ONEDNN_MAX_CPU_ISA'])"
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    run = lambda env: subprocess.check_output([sys.executable, "-c", code], env=env, text=True).split()  # noqa: E731
    assert run(clean) == ["PASSIVE", "AVX512_CORE_BF16"]
    assert run({**clean, "ONEDNN_MAX_CPU_ISA": "ALL"}) == ["PASSIVE", "ALL"]
