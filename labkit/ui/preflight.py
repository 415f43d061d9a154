"""preflight(): what this machine offers, and which workers are still running on it, each with a button to end it.

A table that says everything in words, beside the marks; nothing runs in the background until a button is pressed.
"""

import html
import threading
import time
from pathlib import Path

import ipywidgets as widgets

from labkit.hardware.check import Check
from labkit.ui.machine import Worker, checks, workers
from labkit.ui.theme import SIZE, SMALL, TEXT

_PATIENCE = 30.0  # seconds that a stopping worker is watched; one step of a large model may take longer


def preflight(root: str | Path | None = None) -> "Preflight":
    """Look at this machine before starting runs. `root`: where they would go, if not where they usually do."""
    return Preflight(root)


class Preflight(widgets.VBox):
    """The table, the workers found, and a button to look again."""

    def __init__(self, root: str | Path | None = None) -> None:
        self._root = root
        self._asked: set[Worker] = set()
        self._lock = threading.RLock()
        self.table = widgets.HTML()
        self.list = widgets.VBox()
        self.said = widgets.HTML()
        self.again = widgets.Button(description="Look again", icon="refresh", tooltip="Look at the machine again")
        self.again.on_click(lambda _: self.look())
        super().__init__([self.table, self.list, self.again, self.said])
        self.look()

    def look(self) -> None:
        """Bring the table and the list of workers up to date."""
        with self._lock:
            self.table.value = table(checks(self._root))
            self._list()

    def _list(self) -> None:
        found = workers()
        self._asked &= set(found)
        head = f"<b>{len(found)} workers are running</b>" if len(found) != 1 else "<b>1 worker is running</b>"
        text = f"{head}{'. A worker outlives its notebook; end the ones that nobody watches.' if found else ''}"
        self.list.children = [widgets.HTML(_page(text)), *(self._row(worker) for worker in found)]

    def _row(self, worker: Worker) -> widgets.HBox:
        asked = worker in self._asked
        button = widgets.Button(
            description="Kill" if asked else "End",
            tooltip=f"{'Kill' if asked else 'End'} {worker.path.name}",
            icon="stop",
            layout={"width": "80px", "flex": "none"},
        )
        button.on_click(lambda _: self._end(worker))
        text = f"<b>{html.escape(worker.path.name)}</b>, {html.escape(worker.label)}"
        label = widgets.HTML(f"<div title='{html.escape(str(worker.path))}'>{_page(text)}</div>")
        return widgets.HBox([button, label], layout={"flex_flow": "row wrap", "align_items": "center"})

    def _end(self, worker: Worker) -> None:
        """The first press asks it to stop with a checkpoint, the second kills it."""
        with self._lock:
            kill = worker in self._asked
            self._asked.add(worker)
        try:
            worker.end(kill)
        except (ValueError, OSError) as error:
            self._say(f"{worker.path.name}: {error}")
            return
        self._say(f"{worker.path.name} is {'killed' if kill else 'stopping; press again to kill it'}")
        with self._lock:
            self._list()
        threading.Thread(target=self._watch, args=(worker,), daemon=True).start()

    def _watch(self, worker: Worker) -> None:
        deadline = time.monotonic() + _PATIENCE
        while worker.alive and time.monotonic() < deadline:
            time.sleep(0.2)
        if not worker.alive:
            self._say(f"{worker.path.name} has ended")
        self.look()

    def _say(self, text: str) -> None:
        self.said.value = f"<div role='status' aria-live='polite'>{_page(html.escape(text))}</div>"


def table(found: list[Check]) -> str:
    rows = []
    for check in found:
        advice = f"<br><span style='font-size:{SMALL}px'>{html.escape(check.advice)}</span>" if check.advice else ""
        cells = (f"<b>{check.mark}</b>", f"{html.escape(check.found)}{advice}")
        name = f"<th scope='row'>{html.escape(check.name)}</th>"
        rows.append(f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th scope='col'>{title}</th>" for title in ("what", "state", "found"))
    return (
        f"{_STYLE}<table class='labkit-preflight'><caption>This machine</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _page(text: str) -> str:
    return f"<span style='font-size:{SIZE}px;line-height:1.4;color:var(--jp-ui-font-color1,{TEXT})'>{text}</span>"


_STYLE = f"""<style>
.labkit-preflight {{ font-size: {SIZE}px; line-height: 1.4; border-collapse: collapse;
  color: var(--jp-ui-font-color1, {TEXT}); }}
.labkit-preflight caption {{ text-align: left; font-weight: bold; }}
.labkit-preflight th, .labkit-preflight td {{ text-align: left; vertical-align: top; padding: 2px 14px 2px 0;
  font-weight: normal; }}
.labkit-preflight td:nth-child(2) {{ white-space: nowrap; }}
</style>"""
