"""The layout is the architecture: imports run one way, heavy packages stay behind one file each."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "labkit"

# room -> rooms it may import. A room is a folder of labkit, or a file where a room has a light part.
ALLOWED = {
    "config": set(),
    "tasks": {"config"},
    "fp8": {"config"},
    "models": {"config", "fp8", "tasks"},
    "rollout": {"config", "fp8", "models", "runs.record", "hardware.packages"},
    "training": {"config", "fp8", "models", "runs.record"},
    "rl": {"config", "fp8", "models", "tasks", "rollout", "training", "runs.record", "runs.metrics"},
    "analysis": {"config", "fp8", "models", "tasks", "rollout", "training", "rl", "runs", "hardware.packages"},
    "runs": {"config", "tasks", "environment", "hardware"},
    "runs.worker": {"config", "environment", "rl", "rollout", "cluster"},
    "runs.checkpoint": {"config"},
    "sweeps": {"config", "runs", "hardware", "environment", "cluster"},
    "ui": {"config", "runs", "hardware", "sweeps"},
    "explorer": {"fp8", "ui.theme"},
    "hardware": {"config"},
    "cluster": {"config", "fp8", "models", "rollout", "training", "runs", "hardware", "environment"},
    "cli": {
        *("config", "analysis", "classroom", "demo", "gallery", "hardware", "models", "runs", "sweeps", "tasks"),
        "terminal",
    },
}
LIGHT = [
    "config",
    "hardware",
    "sweeps",
    "ui",
    "gallery.py",
    "terminal.py",
    "runs/alarms",
    "runs/metrics.py",
    "runs/record.py",
    "runs/store.py",
    "runs/process.py",
    "runs/compare.py",
    "runs/report.py",
]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    dotted = ".".join(parts)
    return dotted if dotted in ALLOWED else parts[0]


def module_files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if len(path.relative_to(ROOT).parts) > 1)


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    room = room_of(path)
    allowed = ALLOWED[room] | {room, room.split(".")[0]}
    for name in imports(path):
        if not name.startswith("labkit.") or name == "labkit.__version__":
            continue
        target = name.removeprefix("labkit.")
        names = {target, target.split(".")[0], ".".join(target.split(".")[:2])}
        assert names & allowed, f"{path.relative_to(ROOT)} imports {name}: {room} may import {sorted(allowed)}"


@pytest.mark.parametrize("where", LIGHT)
def test_the_light_part_names_no_heavy_package(where: str) -> None:
    target = ROOT / where
    for path in sorted(target.rglob("*.py")) if target.is_dir() else [target]:
        for name in imports(path):
            assert name.split(".")[0] not in {"torch", "vllm", "ray", "transformer_engine"}, f"{path}: {name}"


@pytest.mark.parametrize(
    "package", ["vllm", "ray", "transformer_engine", "reasoning_gym", "math_verify", "datasets", "gguf"]
)
def test_an_optional_or_heavy_package_is_imported_in_one_file(package: str) -> None:
    users = [path for path in ROOT.rglob("*.py") if any(n.split(".")[0] == package for n in imports(path))]
    rooms = {path.parent if path.parent.name == package else path for path in users}  # a file, or a folder of its name
    assert len(rooms) <= 1, f"{package} is imported in {[str(path) for path in users]}"


@pytest.mark.parametrize("module", ["labkit", "labkit.config", "labkit.runs", "labkit.cli"])
def test_the_light_part_starts_without_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, f"{module} imports torch"


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {str(path): n for path, n in lengths.items() if n > 400} == {}
