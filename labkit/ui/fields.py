"""What controls are made of: the hint line, headings, rows, badges. Everything has its fixed place and height, so that
nothing moves under the cursor when a text changes.

The hint line follows the keyboard focus inside the browser, without a round trip: a control carries its key as a CSS
class, and the line shows the hint of the control that has the focus. Sizes are for a projector: 14 px.

JupyterLab takes plain keys from a select or a checkbox as its own in command mode: arrows move to another cell, "dd"
deletes one. So whatever is inside `.lk-panel` keeps the keys that come without Ctrl or Cmd.
"""

import html
from collections.abc import Mapping
from typing import Any, get_args
from uuid import uuid4

import anywidget
import ipywidgets as widgets
import traitlets

from labkit.config.settings import Settings
from labkit.runs.record import Active
from labkit.ui.hints import HINTS
from labkit.ui.theme import SIZE, TEXT

WIDTH = 320  # px of the column of controls

# The theme's own greys where there are some: a plain #7a7a7a is dim on a projected dark page. The arrow of a select of
# ipywidgets is black, so it has its own.
_ARROW = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 12 8'%3E"
    "%3Cpath d='M1 1l5 5 5-5' fill='none' stroke='%23888' stroke-width='2'/%3E%3C/svg%3E"
)
_CSS = (
    """
.lk-panel { --jp-widgets-font-size: SIZE; --jp-widgets-inline-height: 26px; --jp-widgets-margin: 1px; padding: 0 2px; }
.lk-panel, .lk-panel .widget-box { overflow: hidden; box-sizing: border-box; }
.lk-panel .widget-label { text-align: left; color: var(--jp-ui-font-color1); }
.lk-panel .widget-html-content { font-size: SIZE; line-height: 26px; white-space: nowrap; overflow: hidden; }
.lk-panel select, .lk-panel input:not([type=checkbox]) { color: var(--jp-ui-font-color1); text-overflow: ellipsis; }
.lk-panel select option { color: black; background: white; }
.lk-panel select { padding: 0 18px 0 5px; background: url("ARROW") no-repeat right 4px center / 11px; }
.lk-panel .widget-checkbox label { display: flex; align-items: center; height: 26px; line-height: 26px; }
.lk-panel input[type=checkbox] { width: 16px; height: 16px; margin: 0 6px 0 2px; flex: none; }
.lk-panel :is(select, input):focus-visible { outline: 2px solid #0072b2; outline-offset: -1px; }
.lk-switch { display: grid; grid-template-columns: 96px 112px 82px; }
.lk-head { display: flex; justify-content: space-between; border-bottom: 1px solid rgba(128,128,128,.35); }
.lk-head b { color: var(--jp-ui-font-color1); }
.lk-note { color: var(--jp-ui-font-color2, TEXT); overflow: hidden; text-overflow: ellipsis; }
.lk-badge { display: block; text-align: center; line-height: 18px; margin-top: 3px; font-size: 13px;
  border: 1px solid; border-radius: 9px; color: var(--jp-ui-font-color2, TEXT); }
.lk-badge.emulated { border: 2px dashed #e69f00; line-height: 16px; color: var(--jp-ui-font-color1); }
.lk-badge.native { border: 2px solid #009e73; line-height: 16px; color: var(--jp-ui-font-color1); }
.lk-line { font-size: SIZE; line-height: 20px; overflow: hidden; color: var(--jp-ui-font-color1);
  border-top: 1px solid rgba(128,128,128,.35); padding-top: 3px; }
.lk-panel .lk-line { height: 84px; }
.lk-line.lk-problem::before, .lk-problem .lk-note::before { content: "\\26a0\\00a0"; }
.lk-lines .widget-html-content { white-space: normal; line-height: 20px; }
.lk-problem .widget-html-content { overflow-y: auto; }
.lk-problem .lk-note { color: var(--jp-ui-font-color1); }
""".replace("TEXT", TEXT)
    .replace("SIZE", f"{SIZE}px")
    .replace("ARROW", _ARROW)
)

_JS = """
function render({ model, el }) {
  const line = document.createElement("div");
  line.className = "lk-line";
  line.setAttribute("role", "status");
  line.setAttribute("aria-live", "polite");
  el.append(line);
  const prefix = model.get("prefix");
  let key = model.get("key");
  const draw = () => {
    const problem = model.get("problem");
    const text = problem || model.get("hints")[key] || "";
    line.classList.toggle("lk-problem", problem !== "");
    if (line.textContent !== text) line.textContent = line.title = text;
  };
  const focused = (event) => {
    const control = event.target.closest(`[class*="${prefix}"]`);
    if (!control) return;
    key = [...control.classList].find((name) => name.startsWith(prefix)).slice(prefix.length);
    draw();
  };
  const pressed = (event) => {
    if (!event.target.closest(".lk-panel")) return;
    event.target.toggleAttribute("data-lm-suppress-shortcuts", !event.ctrlKey && !event.metaKey);
  };
  const touched = () => { key = model.get("key"); draw(); };
  model.on("change:key", touched);
  model.on("change:problem change:hints", draw);
  document.addEventListener("focusin", focused);
  window.addEventListener("keydown", pressed, true);
  draw();
  return () => {
    document.removeEventListener("focusin", focused);
    window.removeEventListener("keydown", pressed, true);
  };
}
export default { render };
"""


class HintLine(anywidget.AnyWidget):
    """Shows the hint of the control that was focused or touched last; a problem takes its place while there is one."""

    _esm = _JS
    _css = _CSS
    prefix = traitlets.Unicode().tag(sync=True)
    key = traitlets.Unicode().tag(sync=True)
    problem = traitlets.Unicode().tag(sync=True)
    hints = traitlets.Dict().tag(sync=True)

    def __init__(self) -> None:
        super().__init__(prefix=f"lk-{uuid4().hex[:8]}-", key="preset", hints=dict(HINTS))

    def follow(self, key: str, widget: widgets.DOMWidget) -> None:
        """From now on the focus in this widget, or in what is inside it, brings the hint of the key up."""
        widget.add_class(self.prefix + key)

    def say(self, key: str, text: str) -> None:
        """Another hint for a key, such as the description of the preset chosen."""
        self.hints = {**self.hints, key: text}

    @property
    def text(self) -> str:
        return self.problem or self.hints.get(self.key, "")


def heading(title: str, note: str = "") -> str:
    name = f'<b role="heading" aria-level="3">{html.escape(title)}</b>'
    return f'<div class="lk-head">{name}<span class="lk-note">{html.escape(note)}</span></div>'


def note(text: str) -> str:
    return f'<div class="lk-note" title="{html.escape(text)}">{html.escape(text)}</div>'


_WORDS = {"fp8": "native", "emulated": "emulated", "bf16": "BF16"}


def badge(active: Active | None) -> str:
    """What a component really runs as. A dashed line is emulated, a bold one native."""
    if active is None:
        return ""
    word = _WORDS.get(active["state"], active["state"])
    detail = html.escape(f"{word}: {active['detail']}" if active["detail"] else word)
    return f'<span class="lk-badge {word.lower()}" title="{detail}">{html.escape(word)}</span>'


def html_box(width: str = "100%", value: str = "", height: str = "26px") -> widgets.HTML:
    return widgets.HTML(value, layout=widgets.Layout(width=width, height=height, flex="none"))


def row(*children: widgets.Widget) -> widgets.HBox:
    layout = widgets.Layout(
        width="100%", height="28px", flex="none", flex_flow="row nowrap", align_items="center", grid_gap="0 8px"
    )
    return widgets.HBox(children, layout=layout)


def column(*children: widgets.Widget, width: str = f"{WIDTH}px") -> widgets.VBox:
    box = widgets.VBox(children, layout=widgets.Layout(width=width, flex="none"))
    box.add_class("lk-panel")
    return box


def literals(group: type[Settings], field: str) -> list[str]:
    """The values that a setting of words can have."""
    return list(get_args(group.model_fields[field].annotation))


def checkbox(label: str, width: str = "96px") -> widgets.Checkbox:
    return widgets.Checkbox(description=label, indent=False, layout=widgets.Layout(width=width, flex="none"))


def choice(label: str, options: Any, width: str = "50%", label_width: str = "64px") -> widgets.Dropdown:
    return widgets.Dropdown(options=options, description=label, **_look(width, label_width))


def number(
    label: str, whole: bool = False, width: str = "50%", label_width: str = "64px", least: int = 0
) -> widgets.DOMWidget:
    """A number that counts once it is entered, not at every key."""
    look = _look(width, label_width)
    if whole:
        return widgets.BoundedIntText(min=least, max=2**32 - 1, description=label, **look)
    return widgets.FloatText(description=label, step=None, **look)


def text(label: str, options: tuple[str, ...], width: str = "50%", label_width: str = "64px") -> widgets.Combobox:
    look = _look(width, label_width)
    return widgets.Combobox(options=options, ensure_option=False, continuous_update=False, description=label, **look)


def _look(width: str, label_width: str) -> Mapping[str, Any]:
    # min_width: a flex item would not shrink below the 300 px that ipywidgets gives its inputs.
    layout = widgets.Layout(width=width, min_width="0", flex="none" if width.endswith("px") else "1 1 0")
    return {"layout": layout, "style": {"description_width": label_width}}
