"""Scales: of Q, K and V by layer as they were recalibrated, the largest value they hold, and what they clipped."""

import math
from collections.abc import Sequence

from labkit.runs.metrics import describe
from labkit.runs.record import StepRecord
from labkit.ui import theme
from labkit.ui.series import decimate, points
from labkit.ui.tabs.page import esc, note, number, page, table
from labkit.ui.tabs.plot import WIDTH, Axis, Plot, mark_switches, svg, swatch
from labkit.ui.tabs.view import OpenRun, TextTab, state_of

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_POINTS = 100  # of a line: the plots are small, and a model may have many layers
_NAMED = 6  # layers with a colour and a name; others stay grey
_HEAD = ("layer", "q scale", "k scale", "v scale", "q up to", "k up to", "v up to", "k since the first step")
Curve = list[tuple[float, float]]
Looks = dict[int, tuple[str, str]]


class Scales(TextTab):
    title = "Scales"

    def state(self, views: Sequence[OpenRun], selected: OpenRun | None) -> object:
        return state_of(selected)

    def content(self, views: Sequence[OpenRun], selected: OpenRun | None) -> str:
        return _content(selected)


def _content(selected: OpenRun | None) -> str:
    if selected is None:
        return page(note("No run is selected."))
    scaled = [record for record in selected.records if record.kv_scales]
    if not scaled:
        return page(note(f"{esc(selected.label)} has a BF16 KV cache, which has no scales. Tick KV cache to see them."))
    newest = scaled[-1]
    head = f"<h4>{esc(selected.label)}, up to step {newest.step}</h4>"
    return page(
        head,
        note(_versions(selected, newest)),
        _history(selected, scaled),
        _clipped(selected),
        _table(selected, scaled),
    )


def _versions(view: OpenRun, record: StepRecord) -> str:
    weights, scales = record.engine["weight_version"], record.engine["scale_version"]
    policy = view.recipe.recalibration.policy
    late = ""
    if scales != weights and policy in ("every-step", "engine"):  # the other policies mean it
        late = f": <b>⚠ the scales are {weights - scales} updates behind</b>"
    return (
        f"Step {record.step} sampled with weights of version {weights} and scales of version {scales} "
        f"(recalibration: {policy}){late}."
    )


def _history(view: OpenRun, scaled: Sequence[StepRecord]) -> str:
    latest = scaled[-1].kv_scales or {}
    plots = []
    for part in ("q", "k", "v"):
        curves = [_curve(scaled, part, layer) for layer in range(len(latest.get(part, ())))]
        every = [value for curve in curves for _, value in curve]
        steps = Axis(float(scaled[0].step), float(max(scaled[-1].step, scaled[0].step + 1)), "step")
        wide = bool(every) and max(every) > 8 * min(every)
        plot = Plot(
            f"Scale of {part.upper()} by layer",
            steps,
            Axis.around(every, "scale", log=wide),
            width=WIDTH // 3,
            height=230,
        )
        _draw(plot, curves, _looks(scaled[-1]))
        mark_switches(plot, view)
        plots.append(plot)
    return svg(plots, "Scales of Q, K and V over the steps; the newest are in the table below")


def _curve(scaled: Sequence[StepRecord], part: str, layer: int) -> Curve:
    found = [(float(record.step), record.kv_scales[part][layer]) for record in scaled if record.kv_scales]
    return found[:: math.ceil(len(found) / _POINTS)] + found[-1:]


def _looks(record: StepRecord) -> Looks:
    """Colour and dash of the layers that have their own: those with the largest keys."""
    scales = (record.kv_scales or {})["k"]
    order = sorted(range(len(scales)), key=lambda layer: -scales[layer])
    return {layer: theme.style(index) for index, layer in enumerate(sorted(order[:_NAMED]))}


def _draw(plot: Plot, curves: Sequence[Curve], looks: Looks) -> None:
    """A layer's name stands at the end of its line where there is room."""
    for layer in sorted(range(len(curves)), key=lambda layer: layer in looks):
        colour, dash = looks.get(layer, (theme.TEXT, "solid"))
        named = layer in looks
        plot.line(curves[layer], colour, dash, 2.2 if named else 1, 1.0 if named else 0.5)
    taken: list[float] = []
    for layer in looks:
        x, y = curves[layer][-1]
        if all(abs(plot.at(x, y)[1] - other) > theme.SMALL for other in taken):
            taken.append(plot.at(x, y)[1])
            plot.words(x, y, f" L{layer}")


def _clipped(view: OpenRun) -> str:
    """Shares of 1e-9 and of nothing look alike, so zero is drawn at the foot of the axis."""
    curves = {part: points(view.records, f"kv_saturation_{part}") for part in ("k", "v")}
    curves = {part: decimate(x, y, 300) for part, (x, y) in curves.items() if len(x)}
    if not curves:
        return ""
    values = [float(value) for _, y in curves.values() for value in y]
    low, last = 1e-7, max(float(x[-1]) for x, _ in curves.values())
    _, healthy = describe("kv_saturation_k").healthy or (0.0, low)
    y_axis = Axis.around([*values, healthy, low], "share clipped", log=True)
    plot = Plot(
        "Saturation: cached values that the scale clipped", Axis(0.0, last, "step"), y_axis, width=WIDTH, height=220
    )
    plot.across(healthy, f"healthy below {healthy:g}")
    for index, (x, y) in enumerate(curves.values()):
        colour, dash = theme.style(index)
        plot.line([(float(a), max(float(b), low)) for a, b in zip(x, y, strict=True)], colour, dash)
    mark_switches(plot, view)
    names = ", ".join(
        f"{part.upper()} {style} {number(float(y[-1]), '.2g')}"
        for (part, (_, y)), style in zip(curves.items(), ("blue, solid:", "red, dashed:"), strict=False)
    )
    return svg([plot], "Saturation over the steps") + note(f"In the newest step: {names}. Zero is drawn at the foot.")


def _table(view: OpenRun, scaled: Sequence[StepRecord]) -> str:
    first, last = scaled[0].kv_scales or {}, scaled[-1].kv_scales or {}
    fmt = view.recipe.scaling.kv_format
    rows, looks = [], _looks(scaled[-1])
    for layer in range(len(last["k"])):
        scales = [last[part][layer] for part in ("q", "k", "v")]
        change = f"×{last['k'][layer] / first['k'][layer]:.2f}"
        largest = [number(scale * FP8_MAX[fmt], ".3g") for scale in scales]
        line = swatch(*looks[layer]) if layer in looks else ""
        rows.append([f"{layer} {line}", *(number(scale, ".3g") for scale in scales), *largest, change])
    caption = f"Step {scaled[-1].step}: scales, and the largest value that {fmt.upper()} holds with them"
    return table(_HEAD, rows, caption=caption)
