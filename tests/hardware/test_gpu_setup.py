import dataclasses
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli.app import app
from labkit.hardware.gpu_setup import TRANSFORMER_ENGINE, VLLM, Node, Step, look, obstacles, steps

SITE = Path("/env/lib/python3.12/site-packages")
FRESH = Node("/env/bin/python", SITE, None, None, "580.82.07", Path("/usr/local/cuda"), "g++")


def changed(**what: object) -> Node:
    return dataclasses.replace(FRESH, **what)  # type: ignore[arg-type]


def named(found: list[Step], name: str) -> Step:
    return next(step for step in found if step.name == name)


def test_vllm_comes_first_and_transformer_engine_is_built_against_its_torch() -> None:
    found = steps(FRESH)
    assert [step.name for step in found] == ["vLLM", "build tools", "Transformer Engine", "check"]
    assert found[0].command == ("/env/bin/python", "-m", "pip", "install", "vllm==0.32.0")
    assert named(found, "Transformer Engine").command[3:] == (
        "install",
        "--no-build-isolation",
        "transformer-engine[pytorch,core-cu13]==2.20.2",
    )


def test_the_pins_are_those_of_the_project() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert extras["vllm"] == [f"vllm=={VLLM}"]
    assert extras["te"] == [f"transformer-engine[core-cu13]=={TRANSFORMER_ENGINE}"]


def test_a_torch_for_cpus_goes_first() -> None:
    cpu = steps(changed(torch="2.13.0+cpu"))
    assert cpu[0].command == ("/env/bin/python", "-m", "pip", "uninstall", "-y", "torch")
    assert steps(changed(torch="2.13.0", torch_cuda="13.0"))[0].name == "vLLM"


def test_with_a_toolkit_the_headers_of_torchs_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    environment = dict(named(steps(FRESH), "Transformer Engine").environment)
    nvidia = f"{SITE}/nvidia"
    assert environment == {
        "CUDA_HOME": "/usr/local/cuda",
        "CUDNN_PATH": f"{nvidia}/cudnn",
        "CUDNN_HOME": f"{nvidia}/cudnn",
        "CPLUS_INCLUDE_PATH": f"{nvidia}/cudnn/include:{nvidia}/nccl/include:/usr/local/cuda/include/cccl",
        "LD_LIBRARY_PATH": f"{nvidia}/cudnn/lib",
        "NVTE_WITH_NCCL_EP": "0",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "MAX_JOBS": "4",
        "CXX": "g++",
    }


def test_without_a_toolkit_all_headers_come_from_torchs_libraries() -> None:
    environment = dict(named(steps(changed(toolkit=None)), "Transformer Engine").environment)
    assert environment["NVTE_BUILD_USE_NVIDIA_WHEELS"] == "1"
    assert not {"CUDA_HOME", "CPLUS_INCLUDE_PATH"} & environment.keys()


def test_without_vllm_the_torch_that_is_there_decides() -> None:
    found = steps(changed(torch="2.11.0", torch_cuda="12.9"), vllm=False)
    assert [step.name for step in found] == ["build tools", "Transformer Engine", "check"]
    assert found[1].command[-1] == "transformer-engine[pytorch,core-cu12]==2.20.2"


@pytest.mark.parametrize(
    ("node", "vllm", "line"),
    [
        (FRESH, True, ""),
        (changed(driver=None), True, "no NVIDIA driver answers (nvidia-smi): run this on the GPU node"),
        (changed(driver="575.51.03"), True, "driver 575.51.03 is too old for CUDA 13: update it to 580"),
        (changed(driver="575.51.03", torch="2.11.0", torch_cuda="12.9"), False, ""),
        (changed(torch="2.11.0", torch_cuda="12.9"), True, "torch is built for CUDA 12.9, vLLM 0.32.0 for CUDA 13"),
        (changed(torch="2.13.0+cpu"), False, "no torch with CUDA to build against: drop --without-vllm"),
        (changed(compiler=None), True, "no C++ compiler: conda install cxx-compiler"),
    ],
)
def test_what_stands_in_the_way_is_said_with_the_way_out(node: Node, vllm: bool, line: str) -> None:
    found = obstacles(node, vllm)
    assert [one[: len(line)] for one in found] == ([line] if line else [])


def test_a_step_is_a_line_for_a_shell() -> None:
    step = Step("x", ("pip", "install", "setuptools>=78"), (("PLACE", "a b"),))
    assert str(step) == "PLACE='a b' pip install 'setuptools>=78'"


@pytest.mark.skipif(look().driver is not None, reason="this machine has an NVIDIA driver")
def test_the_command_prints_for_another_machine_and_refuses_to_run_here() -> None:
    printed = CliRunner().invoke(app, ["gpu-setup", "--print-only"])
    assert printed.exit_code == 0
    assert f"pip install vllm=={VLLM}" in printed.stdout
    assert f"'transformer-engine[pytorch,core-cu13]=={TRANSFORMER_ENGINE}'" in printed.stdout
    for arguments in (["gpu-setup"], ["gpu-setup", "--run"]):
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, ValueError)
        assert "no NVIDIA driver answers" in str(refused.exception)


def test_run_carries_out_one_step_after_the_other_and_stops_at_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = f"import os; open({str(tmp_path / 'ran')!r}, 'a').write(os.environ['NAME'])"
    todo = [
        Step("first", (sys.executable, "-c", write), (("NAME", "1"),)),
        Step("second", (sys.executable, "-c", write + "; raise SystemExit(3)"), (("NAME", "2"),)),
        Step("third", (sys.executable, "-c", write), (("NAME", "3"),)),
    ]
    monkeypatch.setattr("labkit.hardware.gpu_setup.obstacles", lambda node, vllm: [])
    monkeypatch.setattr("labkit.hardware.gpu_setup.steps", lambda node, vllm: todo)
    ended = CliRunner().invoke(app, ["gpu-setup", "--run"])
    assert str(ended.exception) == "second: exit code 3; what went wrong is said above"
    assert (tmp_path / "ran").read_text() == "12"
