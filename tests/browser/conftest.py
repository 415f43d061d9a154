"""One JupyterLab server and one Chromium for all browser tests; each test has pages of its own and leaves no run.

Without Chromium or Playwright every test here is skipped and says which of them is missing. `LABKIT_PICTURES=docs`
renews the pictures of the documentation; otherwise screenshots go to pytest's temporary folder.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from labkit.runs.process import Run

if TYPE_CHECKING:
    from driver import LabPage, Server
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def chromium() -> "Iterator[Browser]":
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[test]'")
    from driver import ARGUMENTS, CHROMIUM

    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def one_server(chromium: "Browser", tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Server]":
    from driver import Server

    server = Server(tmp_path_factory.mktemp("lab"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def ipykernel_6(one_server: "Server", tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a kernel with the last ipykernel before 7, which serves a click on another thread than 7 does."""
    folder, name = tmp_path_factory.mktemp("ipykernel-6"), "ipykernel-6"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--retries", "1", "--timeout", "15"]
    command += ["--target", str(folder), "ipykernel==6.31.0", "nest-asyncio==1.6.0"]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        why = installed.stderr.strip().splitlines() or ["pip says nothing"]
        pytest.skip(f"ipykernel 6.31 can't be installed: {why[-1]}")
    one_server.add_kernel(name, folder)
    return name


@pytest.fixture
def server(one_server: "Server") -> "Iterator[Server]":
    """The server, from which the kernels and runs of a test are gone when it ends."""
    yield one_server
    one_server.end_kernels()
    for run in Run.all(one_server.runs):
        with contextlib.suppress(ValueError, OSError):
            run.kill()
    shutil.rmtree(one_server.runs, ignore_errors=True)


@pytest.fixture
def open_page(chromium: "Browser", server: "Server") -> "Iterator[Callable[..., LabPage]]":
    """Opens a notebook in a page; keywords: width and height."""
    from driver import LabPage

    pages = []

    def open_page(notebook: str, **size: int) -> LabPage:
        page = LabPage(chromium, server, **size)
        pages.append(page)
        page.open(notebook)
        return page

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    return Path(os.environ.get("LABKIT_PICTURES") or tmp_path)
