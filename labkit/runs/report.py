"""Figures of runs: plotly, from step records alone.

`curves(runs)` is the six-panel picture: accuracy, TMPE, generation KL, throughput, effective sample size
and where a step's time goes. `figure(runs, metrics=[...])` draws a panel for each name, which may be a
panel of the six or any metric of the records. `write_html(path, runs)` writes a page that needs no
network.

Runs with the same recipe (seeds of one arm) share a colour and a dash pattern, so that colour is never
the only channel; the palette is Okabe and Ito's, made for colour-blind readers. TMPE is drawn as TMPE − 1
on a logarithmic axis. Zero has no place on one: exact agreement is drawn in a band of its own at the
bottom, labelled "exact (0)".
"""

import difflib
import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from labkit.runs.compare import EMULATED, Recorded, compare, is_emulated, labels, step_seconds, train_steps
from labkit.runs.record import StepRecord

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
PHASES = ("generate", "reward", "logprobs", "update", "recalibrate", "refit", "verify")
_FILLS = (
    *[("#08306b", ""), ("#deebf7", "/"), ("#2171b5", ""), ("#6baed6", "x")],
    *[("#fdae6b", ""), ("#a63603", "\\"), ("#d9d9d9", ".")],
)  # (colour, pattern) of the phases
_GREY = "#666666"


@dataclass(frozen=True)
class Panel:
    """One chart over steps, its unit in its title. `value` is drawn strong, `faint` thin behind it."""

    title: str
    value: Callable[[StepRecord], float]
    faint: Callable[[StepRecord], float] | None = None
    logarithmic: bool = False
    top: float | None = None  # the value can't be higher
    bottom: float | None = None  # the axis begins here, whatever the values
    speed: bool = False


def _metric(name: str) -> Callable[[StepRecord], float]:
    return lambda record: record.metric(name)


def _tokens_per_second(record: StepRecord) -> float:
    seconds = step_seconds(record)
    tokens = record.tokens.get("prompt", 0) + record.tokens.get("generated", 0)
    return tokens / seconds if tokens and seconds else math.nan


PANELS = {
    "accuracy": Panel(
        "Accuracy ↑ held-out (bold), rollout (faint)",
        _metric("heldout_accuracy"),
        _metric("accuracy"),
        top=1.0,
        bottom=0.0,
    ),
    "tmpe": Panel(
        "Train-rollout mismatch ↓ TMPE − 1",
        lambda record: record.metric("token_mult_prob_error") - 1.0,
        logarithmic=True,
    ),
    "gen_kl": Panel("Generation KL (k3) ↓ nats per token", _metric("gen_kl_error"), logarithmic=True),
    "throughput": Panel("Throughput, end-to-end ↑ tokens/s", _tokens_per_second, bottom=0.0, speed=True),
    "ess": Panel("Effective sample size ↑ share of tokens", _metric("ess"), top=1.0),
}
SIX = ("accuracy", "tmpe", "gen_kl", "throughput", "ess", "time")


@dataclass(frozen=True)
class _Line:
    """A run and how it is drawn. `first` of its arm carries the legend entry."""

    run: Recorded
    records: list[StepRecord]
    arm: str
    first: bool
    colour: str
    dash: str


def curves(runs: Sequence[Recorded]) -> go.Figure:
    """The six-panel picture of one or several runs."""
    return figure(runs, metrics=SIX)


def figure(runs: Sequence[Recorded], metrics: Sequence[str] = ("accuracy", "tmpe")) -> go.Figure:
    """A panel per name: accuracy, tmpe, gen_kl, throughput, ess, time, or any metric of the records."""
    lines = _lines(runs)
    panels = [_panel(name, lines) for name in metrics]
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    titles = [_title(panel, lines) for panel in panels]
    fig = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.34 / rows, horizontal_spacing=0.13)
    for index, panel in enumerate(panels):
        row, column = index // columns + 1, index % columns + 1
        if panel is None:
            _draw_time(fig, lines, row, column)
        else:
            _draw(fig, panel, lines, row, column, legend=panel is next(p for p in panels if p))
    style(fig, rows)
    return fig


def write_html(
    path: str | Path, runs: Sequence[Recorded], title: str = "labkit runs", notes: Sequence[str] = ()
) -> Path:
    """A page with the curves, the comparison and `notes`, plotly.js included: it opens without a network."""
    plot = curves(runs).to_html(
        full_html=False, include_plotlyjs=True, config={"responsive": True, "displaylogo": False}
    )
    comparison = compare(runs)
    head = "".join(f"<th scope='col'>{html.escape(label)}</th>" for label in comparison.labels)
    body = "".join(
        f"<tr><th scope='row'>{html.escape(name)}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        for name, cells in comparison.rows()
    )
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    page = _PAGE.format(title=html.escape(title), notes=paragraphs, plot=plot, head=head, body=body)
    path = Path(path)
    path.write_text(page, encoding="utf-8")
    return path


def _lines(runs: Sequence[Recorded]) -> list[_Line]:
    if not runs:
        raise ValueError("nothing to draw: give at least one run")
    arms = _arms(runs)
    order = list(dict.fromkeys(arms))
    return [
        _Line(
            run,
            run.records(),
            arm,
            first=arm not in arms[:index],
            colour=OKABE_ITO[order.index(arm) % len(OKABE_ITO)],
            dash=DASHES[order.index(arm) % len(DASHES)],
        )
        for index, (run, arm) in enumerate(zip(runs, arms, strict=True))
    ]


def _arms(runs: Sequence[Recorded]) -> list[str]:
    """The recipe's name where runs differ in nothing but the seed; otherwise a name for each run."""
    kinds: dict[str, set[str]] = {}
    for run in runs:
        e = run.experiment
        kinds.setdefault(e.recipe.name, set()).add(e.override({"seed": 0, "name": "arm"}).to_yaml())
    same = all(len(kind) == 1 for kind in kinds.values())
    return [run.experiment.recipe.name for run in runs] if same else labels(runs)


def _panel(name: str, lines: Sequence[_Line]) -> Panel | None:
    """The panel of that name; None is the one that is not over steps (time)."""
    if name == "time":
        return None
    if name in PANELS:
        return PANELS[name]
    known = {key for line in lines for record in line.records for key in record.metrics}
    if name not in known:
        names = [*SIX, *sorted(known)]
        near = difflib.get_close_matches(name, names, n=3) or names
        raise ValueError(f"no metric {name!r} in these runs: try {', '.join(near)}")
    return Panel(name, _metric(name))


def _title(panel: Panel | None, lines: Sequence[_Line]) -> str:
    speed = panel is None or panel.speed
    title = "Where a step's time goes ↓ seconds per step" if panel is None else panel.title
    if speed and any(is_emulated(line.records) for line in lines):
        title += f"<br><span style='font-size:12px'>FP8 {EMULATED}</span>"
    return title


def _draw(fig: go.Figure, panel: Panel, lines: Sequence[_Line], row: int, column: int, legend: bool) -> None:
    values = [[panel.value(record) for record in line.records] for line in lines]
    floor = floor_of(values) if panel.logarithmic else 0.0
    for line, series in zip(lines, values, strict=True):
        if panel.faint:
            faint = [panel.faint(record) for record in line.records]
            _add_line(fig, line, faint, row, column, width=1.2, opacity=0.45, name=f"{line.arm}, rollout")
        drawn = [max(value, floor) if panel.logarithmic else value for value in series]
        _add_line(fig, line, drawn, row, column, width=2.5, opacity=1.0, name=line.arm, true=series, legend=legend)
    if panel.logarithmic:
        logarithmic_axis(fig, floor, values, row, column)
    else:
        fig.update_yaxes(range=linear_range(panel, values), row=row, col=column)
    fig.update_xaxes(title={"text": "step", "standoff": 2, "font_size": 13}, rangemode="tozero", row=row, col=column)


def _add_line(
    fig: go.Figure,
    line: _Line,
    values: Sequence[float],
    row: int,
    column: int,
    *,
    width: float,
    opacity: float,
    name: str,
    true: Sequence[float] | None = None,
    legend: bool = False,
) -> None:
    points = [
        (record.step, value, exact)
        for record, value, exact in zip(line.records, values, true or values, strict=True)
        if math.isfinite(value)
    ]
    fig.add_trace(
        go.Scatter(
            x=[step for step, _, _ in points],
            y=[value for _, value, _ in points],
            customdata=[exact for _, _, exact in points],
            mode="lines+markers" if len(points) < 12 else "lines",
            line={"color": line.colour, "dash": line.dash if opacity == 1.0 else "solid", "width": width},
            marker={"size": 7},
            opacity=opacity,
            name=name,
            legendgroup=line.arm,
            showlegend=legend and line.first,
            hovertemplate=f"{html.escape(name)} · seed {line.run.experiment.seed}<br>"
            "step %{x}: %{customdata:.5g}<extra></extra>",
        ),
        row=row,
        col=column,
    )


def linear_range(panel: Panel, values: Sequence[Sequence[float]]) -> list[float] | None:
    """The axis of a panel with a known end, a little margin beyond it; None lets plotly choose."""
    if panel.top is None and panel.bottom is None:
        return None
    flat = [value for series in values for value in series if math.isfinite(value)]
    top = panel.top if panel.top is not None else max(flat, default=1.0)
    bottom = panel.bottom if panel.bottom is not None else min([*flat, top - 0.01])
    margin = 0.04 * (top - bottom)
    return [bottom - margin, top + margin]


def floor_of(values: Sequence[Sequence[float]]) -> float:
    """Where zero is drawn: a decade below the smallest positive value."""
    positive = [value for series in values for value in series if math.isfinite(value) and value > 0]
    return 10.0 ** (math.floor(math.log10(min(positive))) - 1) if positive else 1e-6


def logarithmic_axis(fig: go.Figure, floor: float, values: Sequence[Sequence[float]], row: int, column: int) -> None:
    """Decades as ticks; what is exactly 0 was drawn at `floor` and gets a band of its own."""
    flat = [value for series in values for value in series if math.isfinite(value)]
    low = round(math.log10(floor))
    high = max(low + 3, math.ceil(math.log10(max([*flat, floor]))))
    decades = range(low + 1, high + 1, max(1, (high - low) // 6))
    ticks, texts = [10.0**decade for decade in decades], [f"10<sup>{decade}</sup>" for decade in decades]
    bottom = low + 0.6
    if any(value <= 0 for value in flat):
        fig.add_hrect(
            10 ** (low - 0.4),
            10 ** (low + 0.4),
            fillcolor=_GREY,
            opacity=0.15,
            line_width=0,
            row=row,
            col=column,
        )
        ticks, texts, bottom = [floor, *ticks], ["exact (0)", *texts], low - 0.4
    fig.update_yaxes(type="log", tickvals=ticks, ticktext=texts, range=[bottom, high + 0.1], row=row, col=column)


def _draw_time(fig: go.Figure, lines: Sequence[_Line], row: int, column: int) -> None:
    """Mean seconds per train step and phase; a bar per arm."""
    arms: dict[str, list[StepRecord]] = {}
    for line in lines:
        arms.setdefault(line.arm, []).extend(train_steps(line.records))
    seconds = {
        phase: [_mean([record.timings.get(phase, 0.0) for record in records]) for records in arms.values()]
        for phase in PHASES
    }
    for phase in (phase for phase in PHASES if any(seconds[phase])):
        fill, pattern = _FILLS[PHASES.index(phase)]
        fig.add_trace(
            go.Bar(
                y=[arm.replace(" · ", "<br>") for arm in arms],
                x=seconds[phase],
                orientation="h",
                name=phase,
                legend="legend2",
                marker={
                    "color": fill,
                    "pattern": {"shape": pattern, "fgcolor": _GREY, "size": 6},
                    "line": {"color": "white", "width": 1},
                },
                hovertemplate=f"%{{y}}<br>{phase}: %{{x:.3g}} s<extra></extra>",
            ),
            row=row,
            col=column,
        )
    fig.update_layout(barmode="stack")
    fig.update_yaxes(autorange="reversed", row=row, col=column)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def style(fig: go.Figure, rows: int) -> None:
    """What all figures share: transparent, legible type, legends above and below the plot."""
    axis = {"gridcolor": "rgba(128,128,128,.25)", "zeroline": False, "automargin": True}
    fig.update_xaxes(**axis)
    fig.update_yaxes(**axis)
    fig.update_annotations(font_size=15, yshift=4)
    plot, above, below = 300 * rows, 90, 100  # pixels
    legend: dict[str, Any] = {"orientation": "h", "x": 0, "xanchor": "left", "traceorder": "normal"}
    fig.update_layout(
        autosize=True,
        height=plot + above + below,
        margin={"l": 20, "r": 20, "t": above, "b": below},
        font={"size": 14, "color": "#333333"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend=legend | {"y": 1 + 50 / plot, "yanchor": "bottom", "font": {"size": 15}},
        legend2=legend | {"y": -60 / plot, "yanchor": "top", "x": 1, "xanchor": "right", "font": {"size": 12}},
        hovermode="closest",
        uirevision="keep",
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1400px;
  margin: 1.5rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-size: 15px; }}
th, td {{ padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
th[scope=row] {{ text-align: left; font-weight: normal; }}
.scroll {{ overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
{notes}
{plot}
<h2>Compared</h2>
<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>
</body></html>
"""
