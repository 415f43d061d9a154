"""Curves of a sweep: for each arm the mean over its seeds, with a band of one standard deviation to either side.

On logarithmic axes mean and deviation are those of the logarithms. Zero is drawn in a band of its own ("exact (0)"),
as in the figures of runs. A step counts where every seed of the arm has measured it.
"""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from labkit.runs.report import DASHES, OKABE_ITO, PANELS, Panel, floor_of, linear_range, logarithmic_axis, style
from labkit.sweeps.results import Arm, Results

SHOWN = ("accuracy", "tmpe", "gen_kl", "ess")
_TEXT = "#808080"  # reads on white and on black
Array = NDArray[np.float64]


def figure(results: Results) -> go.Figure:
    """Raises ValueError while no cell is done."""
    arms = [arm for arm in results.arms.values() if arm.runs]
    if not arms:
        raise ValueError("nothing to draw: no cell of the sweep is done")
    panels = [PANELS[name] for name in SHOWN]
    rows = math.ceil(len(panels) / 2)
    titles = [panel.title.replace(" held-out (bold), rollout (faint)", " held-out") for panel in panels]
    fig = make_subplots(rows, 2, subplot_titles=titles, vertical_spacing=0.3 / rows, horizontal_spacing=0.13)
    for index, panel in enumerate(panels):
        _draw(fig, panel, arms, list(results.arms), index // 2 + 1, index % 2 + 1)
    style(fig, rows)
    fig.update_layout(font_color=_TEXT, margin_b=50, height=fig.layout.height - 50)
    return fig


def band(rows: Sequence[tuple[Array, Array]], log: bool, floor: float) -> tuple[Array, Array, Array, Array]:
    """(steps, mean, low, high) over the seeds."""
    steps = rows[0][0]
    for other, _ in rows[1:]:
        steps = np.intersect1d(steps, other)
    values = np.stack([y[np.isin(x, steps)] for x, y in rows])
    if log:
        values = np.log(np.maximum(values, floor))
    mean = values.mean(axis=0)
    std = values.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros_like(mean)
    ends = mean, mean - std, mean + std
    found = [np.maximum(np.exp(end), floor) for end in ends] if log else list(ends)
    return steps, found[0], found[1], found[2]


def _draw(fig: go.Figure, panel: Panel, arms: Sequence[Arm], order: Sequence[str], row: int, column: int) -> None:
    points = {arm.name: [_points(panel, records) for records in arm.records.values()] for arm in arms}
    values = [y.tolist() for seeds in points.values() for _, y in seeds]
    floor = floor_of(values) if panel.logarithmic else 0.0
    for arm in arms:
        steps, mean, low, high = band(points[arm.name], panel.logarithmic, floor)
        place = order.index(arm.name)
        colour, dash = OKABE_ITO[place % 6], DASHES[place % 6]
        name = f"{arm.name} (n = {len(arm.runs)})"
        common = {"legendgroup": arm.name, "x": steps}
        if len(arm.runs) > 1:
            outline = {"x": np.concatenate([steps, steps[::-1]]), "y": np.concatenate([low, high[::-1]])}
            look = {"mode": "lines", "line_width": 0, "fill": "toself", "fillcolor": colour, "opacity": 0.18}
            fig.add_trace(
                go.Scatter({**common, **outline}, **look, hoverinfo="skip", showlegend=False), row=row, col=column
            )
        fig.add_trace(
            go.Scatter(
                common,
                y=mean,
                mode="lines+markers" if len(steps) < 12 else "lines",
                line={"color": colour, "dash": dash, "width": 2.5},
                name=name,
                showlegend=panel is PANELS[SHOWN[0]],
                hovertemplate=f"{name}<br>step %{{x}}: %{{y:.4g}}<extra></extra>",
            ),
            row=row,
            col=column,
        )
    if panel.logarithmic:
        logarithmic_axis(fig, floor, values, row, column)
    else:
        fig.update_yaxes(range=linear_range(panel, values), row=row, col=column)
    fig.update_xaxes(title={"text": "step", "standoff": 2, "font_size": 13}, rangemode="tozero", row=row, col=column)


def _points(panel: Panel, records: Sequence) -> tuple[Array, Array]:
    found = [(record.step, value) for record in records if math.isfinite(value := panel.value(record))]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
