"""Real JupyterLab, started as `labkit lab` does it, and a page of it in Chromium that a test drives as a person would:
by roles and accessible names, by keys, by what is drawn. Only cells are run, and the kernel restarted, by JupyterLab's
own commands."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Browser, Locator, Page

from labkit import classroom

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
PATIENCE = 60_000  # ms; two busy cores share JupyterLab, Chromium, a kernel and a worker
_TOKEN = "browser-tests"
_CURVES = """() => Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')]
    .filter(plot => plot.offsetParent && plot._fullData).flatMap(plot => plot._fullData)
    .filter(trace => trace.visible === true && trace.name && trace.x?.length > 1)
    .sort((a, b) => a.x.length - b.x.length)
    .map(trace => [trace.name, [trace.x.length, trace.x.at(-1)]]))"""
_MARKS = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(plot => plot._fullLayout)
    .flatMap(plot => plot._fullLayout.shapes).filter(shape => shape.type === 'line').map(shape => shape.label?.text)"""
# Pixels of the first chart's plot area that are out of the notebook's view, the top of the panel being at its top.
_OUT_OF_SIGHT = """() => {
    const panel = [...document.querySelectorAll('.lk-lab')].find(panel => panel.checkVisibility());
    panel.scrollIntoView();
    const view = panel.closest('.jp-WindowedPanel-outer').getBoundingClientRect();
    const plot = panel.querySelector('.js-plotly-plot');
    const svg = plot.querySelector('.main-svg').getBoundingClientRect();
    const { xaxis, yaxis } = plot._fullLayout;
    const left = svg.left + xaxis._offset, top = svg.top + yaxis._offset;
    return Math.max(0, view.left - left, view.top - top,
        left + xaxis._length - view.right, top + yaxis._length - view.bottom);
}"""
_OVERLAPS = """selector => {
    const texts = [...document.querySelectorAll(selector)].filter(text => text.textContent.trim())
        .map(text => [text.textContent, text.getBoundingClientRect()]);
    return texts.flatMap(([first, a], index) => texts.slice(index + 1)
        .filter(([, b]) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
        .map(([second]) => [first, second]));
}"""
_FOCUSED = """() => {
    const focus = document.activeElement;
    return (focus.closest('label')?.innerText || focus.innerText || focus.title || '').trim();
}"""
_CLICKED = """(control, words) => new Promise(resolve => {
    const start = performance.now();
    const look = () => {
        const said = [...document.querySelectorAll('[role=status]')].map(line => line.textContent).join(' | ');
        const passed = performance.now() - start;
        if (said.includes(words) || passed > 30000) resolve(passed); else setTimeout(look, 2);
    };
    control.click();
    look();
})"""
# Contrast as WCAG 2 defines it.
_ILLEGIBLE = """least => {
    const parse = colour => (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255)
        .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = element => {
        for (let e = element; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if ((colour[3] ?? 1) > 0.5) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const element of document.querySelectorAll('.jp-OutputArea-output *')) {
        const own = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join('');
        if (!/\\w/.test(own) || !element.checkVisibility() || element.tagName === 'STYLE') continue;
        if (element.closest(':disabled, option, .modebar, .jp-RenderedText')) continue;
        const style = getComputedStyle(element);
        const front = parse(element instanceof SVGElement ? style.fill : style.color);
        const [high, low] = [light(front), light(behind(element))].sort((a, b) => b - a);
        if ((high + 0.05) / (low + 0.05) < least) found.push(own);
    }
    return [...new Set(found)];
}"""
_KERNEL = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel"


class Server:
    """One JupyterLab server on a folder of its own, and the runs that its notebooks make."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "notebooks"
        self.folder.mkdir()
        self.runs = folder / "runs"
        self.data = folder / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = classroom.command(self.folder, self.port, browser=False)
        command += [f"--IdentityProvider.token={_TOKEN}", "--LabApp.expose_app_in_browser=True"]
        environment = classroom.environment(folder / "config")
        environment |= {"LABKIT_RUNS": str(self.runs), "JUPYTER_DATA_DIR": str(self.data)}
        environment |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "IPYTHONDIR": str(folder / "ipython")}
        environment |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "OMP_NUM_THREADS": "1"}
        self.log = folder / "jupyter.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE / 1000
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.ask("status")
                return
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-2000:]}")

    def ask(self, what: str, method: str = "GET") -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/api/{what}", method=method)
        request.add_header("Authorization", f"token {_TOKEN}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")

    def url(self, notebook: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?reset&token={_TOKEN}"

    def add_kernel(self, name: str, packages: Path) -> None:
        """A kernel of this environment in which the packages of that folder take the place of those installed."""
        folder = self.data / "kernels" / name
        folder.mkdir(parents=True)
        path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH")]))
        arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": arguments, "display_name": name, "language": "python", "env": {"PYTHONPATH": path}}
        (folder / "kernel.json").write_text(json.dumps(spec))

    def write(self, name: str, *cells: str, kernel: str = "python3") -> str:
        """A notebook with these code cells."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": kernel, "display_name": kernel, "language": "python"}
        nbformat.write(notebook, self.folder / name)
        return name

    def end_kernels(self) -> None:
        for session in self.ask("sessions"):
            self.ask(f"sessions/{session['id']}", "DELETE")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class LabPage:
    """A page with one notebook open."""

    def __init__(self, browser: Browser, server: Server, width: int = 1400, height: int = 1000) -> None:
        self.server = server
        self._context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.elsewhere: list[str] = []  # requests to other machines
        self.errors: list[str] = []  # what JavaScript did not catch
        self.page.on("request", lambda request: self._note(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: dialog.accept())

    def _note(self, url: str) -> None:
        if url.startswith(("http", "ws")) and f"127.0.0.1:{self.server.port}" not in url:
            self.elsewhere.append(url)

    def open(self, notebook: str) -> None:
        self.page.goto(self.server.url(notebook), wait_until="domcontentloaded")
        self._ready()

    def reload(self) -> None:
        """As the browser's button does."""
        self.page.reload(wait_until="domcontentloaded")
        self._ready()

    def _ready(self) -> None:
        self.page.wait_for_function(
            f"() => window.jupyterapp && {_KERNEL}?.connectionStatus === 'connected' && {_KERNEL}.status === 'idle'"
        )

    def execute(self, command: str, **arguments: Any) -> None:
        """One of JupyterLab's commands, without waiting for its end."""
        self.page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args) }", [command, arguments])

    def run_all(self) -> None:
        self.execute("notebook:run-all-cells")

    def write_cell(self, source: str) -> None:
        """Put this into the selected cell."""
        cell = "window.jupyterapp.shell.currentWidget.content.activeCell"
        self.page.evaluate(f"source => {{ {cell}.model.sharedModel.setSource(source) }}", source)

    def save(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    def restart_kernel(self) -> None:
        self.page.evaluate(f"async () => {{ await {_KERNEL}.restart() }}")
        self._ready()

    def theme(self, name: str) -> None:
        self.page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", f"JupyterLab {name}"
        )
        self.page.wait_for_function(
            "light => document.body.dataset.jpThemeLight === light", arg=str(name == "Light").lower()
        )

    def control(self, role: Any, name: str) -> Locator:
        """What is drawn under a cell with this role and accessible name, icons in front of it aside."""
        words = re.compile(rf"^[^\w(]*{re.escape(name)}$")
        return self.page.locator(".jp-OutputArea").get_by_role(role, name=words).locator("visible=true").first

    def button(self, name: str) -> Locator:
        return self.control("button", name)

    def checkbox(self, name: str) -> Locator:
        return self.control("checkbox", name)

    def press(self, name: str) -> None:
        self.button(name).click()

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        """The first true value of a condition, looked at ten times a second."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds} s for {what}; the page says: {self.status()}")
            self.page.wait_for_timeout(100)
        return value

    def status(self) -> str:
        """What a screen reader would be told: the texts of all status lines."""
        return " | ".join(self.page.get_by_role("status").locator("visible=true").all_inner_texts())

    def says(self, words: str, seconds: float = 60) -> None:
        self.until(lambda: words in self.status(), f"the status {words!r}", seconds)

    def curves(self) -> dict[str, tuple[int, int]]:
        """The runs that are drawn: the points of the longest curve of each, and its last step."""
        return {name: (count, step) for name, (count, step) in self.page.evaluate(_CURVES).items()}

    def points(self) -> int:
        return max((count for count, _ in self.curves().values()), default=0)

    def clicked(self, control: Locator, words: str) -> float:
        """Milliseconds from a click to the first status line with these words, measured inside the page."""
        return control.evaluate(_CLICKED, words)

    def tab_to(self, name: str, most: int = 80) -> None:
        """Move the focus by the Tab key alone until it is on the control of that name."""
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if self.focus().endswith(name):
                return
        raise AssertionError(f"the Tab key does not come to {name!r}, but last to {self.focus()!r}")

    def focus(self) -> str:
        """The name of the control that has the focus."""
        return self.page.evaluate(_FOCUSED)

    def marks(self) -> set[str]:
        """The labels of the vertical lines in the curves."""
        return {label for label in self.page.evaluate(_MARKS) if label}

    def overflow(self) -> int:
        """Pixels by which what is under the cells is wider than the room it has."""
        return self.page.evaluate("""() => Math.max(0, ...[...document.querySelectorAll('.jp-OutputArea-output')]
            .map(output => output.scrollWidth - output.clientWidth))""")

    def out_of_sight(self) -> float:
        """Pixels of the first chart that one does not see who has scrolled to the top of the panel."""
        return self.page.evaluate(_OUT_OF_SIGHT)

    def overlaps(self, selector: str) -> list[list[str]]:
        """Pairs of texts in the curves that lie on each other."""
        return self.page.evaluate(_OVERLAPS, f".js-plotly-plot {selector}")

    def illegible(self, least: float = 3.0) -> list[str]:
        """Texts of the panel whose contrast to what is behind them is too low; disabled controls are left out."""
        return self.page.evaluate(_ILLEGIBLE, least)

    def screenshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=path, animations="disabled")

    def close(self) -> None:
        self._context.close()


@contextlib.contextmanager
def opened(browser: Browser, server: Server, notebook: str, **size: int) -> Iterator[LabPage]:
    page = LabPage(browser, server, **size)
    try:
        page.open(notebook)
        yield page
    finally:
        page.close()
