"""The packages of a GPU node, in an order in which they install: which commands, and why not yet.

    1  a torch for CPUs goes, because its version would satisfy vLLM, which brings the CUDA build
    2  vLLM, with its torch for CUDA 13
    3  what building needs: wheel, ninja, cuDNN's C++ frontend
    4  Transformer Engine, whose extension is compiled against the torch that is there. So no build isolation (it would
       fetch another torch), and this must be a command of its own
    5  a look at what it can do

Building takes a C++ compiler and the headers of CUDA, cuDNN and NCCL, but no nvcc. If there is a CUDA toolkit, only its
headers are searched, and cuDNN's and NCCL's, which came with torch, are named through CPLUS_INCLUDE_PATH; without one
the headers that came with torch serve for all.

`look` reads the machine; `steps` and `obstacles` are data that follow from what it found. Sources: setup.py and
build_tools of the transformer-engine-torch 2.20.2 sdist; NeMo RL's Dockerfile. Not run on a GPU node yet.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from labkit.hardware import packages

VLLM = "0.32.0"
TRANSFORMER_ENGINE = "2.20.2"
DRIVER = 580  # the first that runs CUDA 13


@dataclass(frozen=True)
class Node:
    """What matters of a machine."""

    python: str
    site: Path  # site-packages
    torch: str | None  # its version
    torch_cuda: str | None  # "13.0"; None for a CPU build or no torch
    driver: str | None  # "580.82.07"
    toolkit: Path | None  # a CUDA toolkit with headers
    compiler: str | None


@dataclass(frozen=True)
class Step:
    name: str
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """As a line for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join([*variables, *(shlex.quote(word) for word in self.command)])


def look() -> Node:
    cxx = os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    return Node(
        python=sys.executable,
        site=Path(sysconfig.get_path("purelib")),
        torch=packages.installed("torch"),
        torch_cuda=packages.torch_cuda(),
        driver=_driver(),
        toolkit=_toolkit(),
        compiler=cxx,
    )


def _toolkit() -> Path | None:
    nvcc = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), Path(nvcc).resolve().parent.parent if nvcc else None, "/usr/local/cuda"]
    homes = [Path(place) for place in places if place]
    return next((home for home in homes if (home / "include" / "cuda_runtime.h").is_file()), None)


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^\d+\.[\d.]+", done.stdout, re.MULTILINE)
    return found[0] if found and not done.returncode else None


def obstacles(node: Node, vllm: bool = True) -> list[str]:
    """Why the commands would fail here, each with the way out."""
    found = []
    if node.driver is None:
        found.append("no NVIDIA driver answers (nvidia-smi): run this on the GPU node, or add --print-only")
    elif _cuda(node, vllm) >= 13 and int(node.driver.partition(".")[0]) < DRIVER:
        found.append(f"driver {node.driver} is too old for CUDA 13: update it to {DRIVER} or newer")
    if vllm and node.torch_cuda and not node.torch_cuda.startswith("13."):
        found.append(
            f"torch is built for CUDA {node.torch_cuda}, vLLM {VLLM} for CUDA 13: use a fresh environment, "
            "or add --without-vllm"
        )
    if not vllm and not node.torch_cuda:
        found.append("no torch with CUDA to build against: drop --without-vllm, or install one (pytorch.org)")
    if node.compiler is None:
        found.append("no C++ compiler: conda install cxx-compiler, or apt install g++")
    return found


def steps(node: Node, vllm: bool = True) -> list[Step]:
    pip = (node.python, "-m", "pip", "install")
    todo = []
    if vllm and node.torch and not node.torch_cuda:
        todo.append(Step("remove the torch for CPUs", (node.python, "-m", "pip", "uninstall", "-y", "torch")))
    if vllm:
        todo.append(Step("vLLM", (*pip, f"vllm=={VLLM}")))
    tools = ("setuptools>=78.1.1,<81", "wheel", "ninja", "packaging", "nvidia-cudnn-frontend>=1.29")
    core = f"transformer-engine[pytorch,core-cu{_cuda(node, vllm)}]=={TRANSFORMER_ENGINE}"
    return [
        *todo,
        Step("build tools", (*pip, *tools)),
        Step("Transformer Engine", (*pip, "--no-build-isolation", core), _build_environment(node)),
        Step("check", (node.python, "-c", _CHECK)),
    ]


_CHECK = (
    "import transformer_engine.pytorch as te; "
    "print('FP8', te.is_fp8_available(return_reason=True), "
    "'block scaling', te.is_fp8_block_scaling_available(return_reason=True), "
    "'MXFP8', te.is_mxfp8_available(return_reason=True))"
)


def _cuda(node: Node, vllm: bool) -> int:
    """The major version of CUDA that torch will have when Transformer Engine is built."""
    return int((node.torch_cuda or "13").partition(".")[0]) if not vllm else 13


def _build_environment(node: Node) -> tuple[tuple[str, str], ...]:
    nvidia = node.site / "nvidia"
    cudnn, nccl = nvidia / "cudnn", nvidia / "nccl"
    variables = {
        "CUDNN_PATH": str(cudnn),
        "CUDNN_HOME": str(cudnn),
        "LD_LIBRARY_PATH": _joined(cudnn / "lib", os.environ.get("LD_LIBRARY_PATH")),
        "NVTE_WITH_NCCL_EP": "0",  # wants NCCL headers newer than torch's
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # there is no wheel for this torch to look for
        "MAX_JOBS": "4",  # each compiler takes some GB
    }
    if node.toolkit:
        headers = _joined(cudnn / "include", nccl / "include", node.toolkit / "include" / "cccl")
        variables |= {"CUDA_HOME": str(node.toolkit), "CPLUS_INCLUDE_PATH": headers}
    else:
        variables["NVTE_BUILD_USE_NVIDIA_WHEELS"] = "1"
    if node.compiler:
        variables["CXX"] = node.compiler
    return tuple(variables.items())


def _joined(*places: Path | str | None) -> str:
    return os.pathsep.join(str(place) for place in places if place)
