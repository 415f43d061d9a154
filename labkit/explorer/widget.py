"""What the explorers share: controls above, one picture, one sentence that reads it. ipywidgets is imported here alone.

A slider's callback computes and draws at once, in tens of milliseconds. Callbacks may come on any thread, so one lock
orders them. Controls never move: the picture has a fixed shape and the sentence a minimum height.
"""

from __future__ import annotations

import html
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ipywidgets as widgets
import torch
import traitlets

Control: TypeAlias = Any  # an ipywidgets.ValueWidget: the package has no types
_WIDE = widgets.Layout(width="395px", margin="2px 10px 2px 0")
_NARROW = widgets.Layout(width="auto", max_width="330px", margin="2px 10px 2px 0")
_STYLE = {"description_width": "130px"}


@dataclass(frozen=True)
class View:
    """What an explorer shows for one setting: SVG, a sentence on what it means, the numbers behind both."""

    picture: str
    reading: str
    numbers: Mapping[str, Any]


class Explorer(ABC):
    """Controls, a picture and a sentence. Subclasses say which controls, and what they show."""

    title = ""

    def __init__(self, **settings: Any) -> None:
        self._lock = threading.RLock()
        self._quiet = False
        self.controls: dict[str, Control] = self.make_controls()
        self._labels = {name: getattr(control, "description", "") for name, control in self.controls.items()}
        self._defaults = self.settings
        self._reset = widgets.Button(description="Reset", tooltip="Back to the first setting", layout={"width": "80px"})
        self._reset.on_click(lambda _: self.set(**self._defaults))
        self._picture, self._reading = widgets.HTML(), widgets.HTML()
        self.view = View("", "", {})
        self.seconds = 0.0
        for control in self.controls.values():
            control.observe(self._changed, "value")
        heading = widgets.HTML(f'<b style="font-size:17px">{html.escape(self.title)}</b>')
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        ticks = [control for control in self.controls.values() if isinstance(control, widgets.Checkbox)]
        others = [control for control in self.controls.values() if control not in ticks]
        self.widget = widgets.VBox(
            [
                widgets.HBox([heading, self._reset], layout=widgets.Layout(justify_content="space-between")),
                widgets.HBox(ticks, layout=row),
                widgets.HBox(others, layout=row),
                self._picture,
                self._reading,
            ],
            layout=widgets.Layout(max_width="1100px"),
        )
        self.set(**settings)

    @abstractmethod
    def make_controls(self) -> dict[str, Control]:
        """The controls by the name of their setting, in the order in which they stand."""

    @abstractmethod
    def show(self, *args: Any, **settings: Any) -> View:
        """Compute and draw."""

    @property
    def settings(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    @property
    def numbers(self) -> Mapping[str, Any]:
        """What the picture shows, as numbers."""
        return self.view.numbers

    def set(self, **settings: Any) -> None:
        """Move controls by name, all at once. Raises ValueError for a name or value that isn't there."""
        with self._lock:
            unknown = sorted(settings.keys() - self.controls.keys())
            if unknown:
                raise ValueError(
                    f"{type(self).__name__} has no {', '.join(unknown)}: it has {', '.join(self.controls)}"
                )
            self._quiet = True
            try:
                for name, value in settings.items():
                    self._move(name, value)
            finally:
                self._quiet = False
            self._recompute()

    def enable(self, name: str, on: bool, reason: str) -> None:
        """Turn a slider or list on or off; while it is off, the reason stands in its label's place."""
        control = self.controls[name]
        control.disabled = not on
        control.description = self._labels[name] if on else reason

    def _move(self, name: str, value: Any) -> None:
        control = self.controls[name]
        before = control.value
        try:
            control.value = value
        except traitlets.TraitError as error:
            raise ValueError(f"{name} can't be {value!r}: choose {_choices(control)}") from error
        if control.value != value:
            control.value = before
            raise ValueError(f"{name} can't be {value!r}: choose {_choices(control)}")

    def _changed(self, _: Any) -> None:
        with self._lock:
            if not self._quiet:
                self._recompute()

    @torch.no_grad()
    def _recompute(self) -> None:
        start = time.perf_counter()
        self.view = self.show(**self.settings)
        self._picture.value = self.view.picture
        self._reading.value = (
            '<div role="status" aria-live="polite" style="font-size:16px;line-height:1.45;min-height:4.4em">'
            f"{html.escape(_unbroken(self.view.reading))}</div>"
        )
        self.seconds = time.perf_counter() - start

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.widget._repr_mimebundle_(**kwargs)


def _unbroken(words: str) -> str:
    """Keep "2.65 %" and "1 × 128" on one line."""
    return words.replace(" × ", "\u00a0×\u00a0").replace(" %", "\u00a0%")


def _choices(control: Control) -> str:
    if isinstance(control, widgets.Dropdown):
        return "one of " + ", ".join(repr(value) for _, value in control._options_full)
    if isinstance(control, widgets.Checkbox):
        return "True or False"
    return f"a number from {control.min:g} to {control.max:g}"


def choice(label: str, options: Sequence[Any], value: Any) -> Control:
    """A drop-down list of values, or of (words, value)."""
    return widgets.Dropdown(description=label, options=options, value=value, layout=_WIDE, style=_STYLE)


def tick(label: str, value: bool) -> Control:
    return widgets.Checkbox(description=label, value=value, indent=False, layout=_NARROW)


def slider(label: str, value: float, low: float, high: float, step: float = 0.1) -> Control:
    kind = widgets.IntSlider if isinstance(step, int) else widgets.FloatSlider
    return kind(description=label, value=value, min=low, max=high, step=step, layout=_WIDE, style=_STYLE)


class LogNumber(widgets.HBox):
    """A slider over orders of magnitude with a field beside it, for values between its positions.

    (A FloatLogSlider's browser side moves every value to the nearest position, also one that code has set.)
    """

    value = traitlets.Float()

    def __init__(self, label: str, value: float, low: float, high: float, per_decade: int) -> None:
        self.min, self.max, self.per_decade = low, high, per_decade
        self._slider = widgets.IntSlider(
            description=label,
            min=self._place(low),
            max=self._place(high),
            value=self._place(value),
            readout=False,
            layout=widgets.Layout(width="290px"),
            style=_STYLE,
        )
        self._field = widgets.BoundedFloatText(
            value=value, min=low, max=high, tooltip=f"{label}, typed", layout=widgets.Layout(width="95px")
        )
        super().__init__([self._slider, self._field], layout=_WIDE)
        self.value = value
        self._slider.observe(self._slid, "value")
        self._field.observe(lambda change: self.set_trait("value", change["new"]), "value")

    def _place(self, value: float) -> int:
        return round(math.log10(value) * self.per_decade)

    def _slid(self, change: Any) -> None:
        if change["new"] != self._place(self.value):  # else it follows a value from elsewhere
            self.value = min(max(float(f"{10 ** (change['new'] / self.per_decade):.3g}"), self.min), self.max)

    @traitlets.validate("value")
    def _within(self, proposal: Any) -> float:
        return min(max(proposal["value"], self.min), self.max)

    @traitlets.observe("value")
    def _follow(self, change: Any) -> None:
        self._field.value = change["new"]
        self._slider.value = self._place(change["new"])


def log_slider(label: str, value: float, low: float, high: float, per_decade: int = 20) -> Control:
    return LogNumber(label, value, low, high, per_decade)
