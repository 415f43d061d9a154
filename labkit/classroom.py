"""`labkit lab`: JupyterLab on the notebooks, set up so that a room full of people can start at once.

It listens on this machine alone, behind a token, asks no other machine for anything (no news, no look for updates, no
extension catalogue), and opens the first notebook. Its settings are defaults of its own, in a folder of their own: they
are there for this server only, and whatever a user has set in JupyterLab wins. Notebooks and shell share their runs:
those of the folder in which the command was given.
"""

import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from labkit.config.locations import cache_folder
from labkit.runs.store import runs_root

FIRST = "00_start_here.ipynb"
PACKAGES = ("jupyterlab", "ipykernel", "ipywidgets", "plotly", "anywidget")
INSTALL = "pip install -c requirements/cpu.lock -e '.[lab]'"

SETTINGS = {
    # The question about news covers a corner of the page.
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    # Cells that are out of sight stay drawn: a figure that is drawn anew while it changes flickers.
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    # What a refreshed page brings back is what was saved, so save often.
    "@jupyterlab/docmanager-extension:plugin": {"autosaveInterval": 15},
}


def notebooks_folder(folder: str | Path | None = None) -> Path:
    """The folder given, or the one with the notebooks: here, in ./notebooks, or beside the package's sources."""
    here = Path.cwd()
    candidates = [Path(folder)] if folder else [here, here / "notebooks", Path(__file__).parents[1] / "notebooks"]
    for candidate in candidates:
        if (candidate / FIRST).is_file() or (folder and candidate.is_dir()):
            return candidate.resolve()
    if folder:
        raise ValueError(f"there is no folder {folder}; give the one with the notebooks")
    raise ValueError(f"no notebooks here or in ./notebooks: give their folder, the one with {FIRST} in it")


def missing() -> list[str]:
    """What JupyterLab and the panel need and this environment lacks."""
    absent = []
    for package in PACKAGES:
        try:
            version(package)
        except PackageNotFoundError:
            absent.append(package)
    return absent


def environment(settings: Path) -> dict[str, str]:
    """This process's environment, with the settings written to a folder that JupyterLab looks in, and the runs."""
    folder = settings / "labconfig"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "default_setting_overrides.json").write_text(json.dumps(SETTINGS))
    path = os.pathsep.join(filter(None, [str(settings), os.environ.get("JUPYTER_CONFIG_PATH")]))
    return {**os.environ, "JUPYTER_CONFIG_PATH": path, "LABKIT_RUNS": str(runs_root().absolute())}


def command(folder: Path, port: int | None = None, browser: bool = True) -> list[str]:
    """What starts the server. Without a port it takes the first free one from 8888 on."""
    first = f"/tree/{FIRST}" if (folder / FIRST).is_file() else ""
    options = [
        f"--ServerApp.root_dir={folder}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.open_browser={browser}",
        f"--LabApp.default_url=/lab{first}",
        "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]
    if port is not None:
        options += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if os.geteuid() == 0:  # in a container; JupyterLab would refuse, for fear of being reached from outside
        options.append("--ServerApp.allow_root=True")
    return [sys.executable, "-m", "jupyterlab", *options]


def start(folder: str | Path | None = None, port: int | None = None, browser: bool = True) -> None:
    """Become the JupyterLab server: this does not return. Ctrl-C asks whether to end it; runs go on regardless."""
    if absent := missing():
        raise ValueError(f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed: {INSTALL}")
    arguments = command(notebooks_folder(folder), port, browser)
    os.execve(arguments[0], arguments, environment(cache_folder() / "jupyterlab"))
