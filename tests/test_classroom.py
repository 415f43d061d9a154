import json
import os
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from labkit import classroom

ROOT = Path(__file__).parents[1]


def test_the_notebooks_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert classroom.notebooks_folder() == ROOT / "notebooks"
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / classroom.FIRST).touch()
    assert classroom.notebooks_folder() == tmp_path / "notebooks", "those at hand come first"
    monkeypatch.chdir(tmp_path / "notebooks")
    assert classroom.notebooks_folder() == tmp_path / "notebooks"
    (tmp_path / "mine").mkdir()
    assert classroom.notebooks_folder(tmp_path / "mine") == tmp_path / "mine", "a given folder need not have ours"
    with pytest.raises(ValueError, match="there is no folder"):
        classroom.notebooks_folder(tmp_path / "absent")


def test_without_notebooks_it_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(classroom, "FIRST", "no_such_notebook.ipynb")
    with pytest.raises(ValueError, match=r"give their folder, the one with no_such_notebook\.ipynb"):
        classroom.notebooks_folder()


def test_the_server_listens_here_alone_and_asks_nobody_for_news() -> None:
    command = classroom.command(ROOT / "notebooks", port=8901, browser=False)
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "--ServerApp.port=8901" in command
    assert "--ServerApp.open_browser=False" in command
    assert "--LabApp.default_url=/lab/tree/00_start_here.ipynb" in command
    assert "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate" in command
    assert not any("token" in word or "password" in word for word in command), "JupyterLab makes a token of its own"
    assert "--ServerApp.open_browser=True" in classroom.command(ROOT / "notebooks")


def test_shell_and_notebooks_share_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_RUNS", raising=False)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/theirs")
    environment = classroom.environment(tmp_path / "settings")
    assert environment["LABKIT_RUNS"] == str(tmp_path / "runs")
    assert environment["JUPYTER_CONFIG_PATH"] == f"{tmp_path / 'settings'}{os.pathsep}/theirs"
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "elsewhere"))
    assert classroom.environment(tmp_path / "settings")["LABKIT_RUNS"] == str(tmp_path / "elsewhere")


def test_every_setting_is_one_that_jupyterlab_has() -> None:
    """JupyterLab drops unknown settings without a word."""
    jupyterlab = pytest.importorskip("jupyterlab")
    schemas = Path(jupyterlab.__file__).parent / "schemas"
    for name, values in classroom.SETTINGS.items():
        package, _, plugin = name.partition(":")
        schema = json.loads((schemas / package / f"{plugin}.json").read_text())
        assert values.keys() <= schema["properties"].keys()


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(classroom, "version", absent)
    with pytest.raises(ValueError, match=r"jupyterlab, .*anywidget are not installed: pip install .*\[lab\]"):
        classroom.start(ROOT / "notebooks")


def test_it_starts(tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab")
    code = f"from labkit import classroom; classroom.start({str(ROOT / 'notebooks')!r}, browser=False)"
    environment = {**os.environ, "LABKIT_CACHE": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as server:
        try:
            found: list[Path] = []
            deadline = time.monotonic() + 60
            while not found and server.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
                found = list((tmp_path / "runtime").glob("jpserver-*.json"))
            said = json.loads(found[0].read_text())
            assert said["hostname"] == "127.0.0.1"
            assert said["root_dir"] == str(ROOT / "notebooks")
            assert len(said["token"]) >= 32
            settings = f"{said['url']}lab/api/settings/@jupyterlab/apputils-extension:notification"
            request = urllib.request.Request(settings, headers={"Authorization": f"token {said['token']}"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                schema = json.loads(answer.read())["schema"]
            assert schema["properties"]["fetchNews"]["default"] == "false"
        finally:
            server.terminate()
