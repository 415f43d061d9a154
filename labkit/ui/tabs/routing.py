"""Routing flips: by layer over the steps, of a run whose model has experts; part of the tab Mismatch."""

import math
import re
from collections.abc import Sequence

from labkit.runs.record import StepRecord
from labkit.ui import theme
from labkit.ui.series import decimate, points
from labkit.ui.tabs.page import note, number, table
from labkit.ui.tabs.plot import WIDTH, Axis, Plot, mark_switches, svg, swatch
from labkit.ui.tabs.view import OpenRun

_LAYER = re.compile(r"router_flip_rate_layer_(\d+)")
_NAMED = 6  # layers with a colour and a name: those with the most flips; others stay grey
_RECENT = 10  # steps of the means in the table
_POINTS = 100  # of a line
Curves = dict[int, list[tuple[float, float]]]  # by layer


def routing(view: OpenRun) -> str:
    """ "" where no step has measured any."""
    measured = [record for record in view.records if "router_flip_rate" in record.metrics]
    if not measured:
        return ""
    curves = _curves(measured)
    looks = _looks(curves)
    return "".join(
        [
            "<h4>Routing: tokens that engine and trainer would send to other experts</h4>",
            note(_reading(measured[-1])),
            _history(view, curves, looks),
            _table(curves, looks),
        ]
    )


def _curves(measured: Sequence[StepRecord]) -> Curves:
    layers = sorted(int(match[1]) for name in measured[-1].metrics if (match := _LAYER.fullmatch(name)))
    found = {}
    for layer in layers:
        x, y = decimate(*points(measured, f"router_flip_rate_layer_{layer}"), _POINTS)
        found[layer] = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
    return found


def _looks(curves: Curves) -> dict[int, tuple[str, str]]:
    most = sorted(curves, key=lambda layer: -_mean(curves[layer]))[:_NAMED]
    return {layer: theme.style(index) for index, layer in enumerate(sorted(most))}


def _reading(newest: StepRecord) -> str:
    taken, own = newest.metric("router_flip_rate"), newest.metric("router_flip_rate_own")
    text = (
        f"Step {newest.step}: {own:.2%} of the pairs of token and layer, {newest.metric('router_flip_tokens'):.1%} of "
        f"the tokens in one layer at least. The busiest expert has {newest.metric('expert_load_max'):.2f} times the "
        "mean load."
    )
    if taken != own:
        text += f" Router replay overrules the trainer's choice: {taken:.2%} are left."
    if missing := newest.metric("router_routes_missing"):
        text += f" <b>⚠ {missing:.1%} of the engine's routes are missing</b>; there the trainer's own router decides."
    return text


def _history(view: OpenRun, curves: Curves, looks: dict[int, tuple[str, str]]) -> str:
    every = [y for curve in curves.values() for _, y in curve]
    first, last = (end(x for curve in curves.values() for x, _ in curve) for end in (min, max))
    steps = Axis(first, max(last, first + 1), "step")
    plot = Plot("Flips by layer", steps, Axis.around(every, "share", least=(0.0,)), width=WIDTH, height=230)
    for layer in sorted(curves, key=lambda layer: layer in looks):
        colour, dash = looks.get(layer, (theme.TEXT, "solid"))
        plot.line(curves[layer], colour, dash, 2.2 if layer in looks else 1, 1.0 if layer in looks else 0.5)
    mark_switches(plot, view)
    return svg([plot], "Routing flips of each layer over the steps; the newest are in the table below")


def _table(curves: Curves, looks: dict[int, tuple[str, str]]) -> str:
    rows = []
    for layer, curve in curves.items():
        line = swatch(*looks[layer]) if layer in looks else ""
        values = (curve[-1][1], _mean(curve[-_RECENT:]), max(y for _, y in curve))
        rows.append([f"{layer} {line}", *(number(100 * value, ".2f") for value in values)])
    return table(("layer", "newest step, %", f"last {_RECENT} points, %", "most, %"), rows, caption="Flips by layer")


def _mean(curve: Sequence[tuple[float, float]]) -> float:
    return math.fsum(y for _, y in curve) / len(curve)
