"""What the curves say, as text below them: the newest values, the switches in full, what a modelled throughput assumes.

Nothing is to be had by hovering alone.
"""

import html
import math
from collections.abc import Sequence

from labkit.runs.record import StepRecord
from labkit.ui import modelled, theme
from labkit.ui.marks import marks_of
from labkit.ui.series import value_of
from labkit.ui.traces import RunView, Settings

_MODELLED = "tokens/s/GPU, modelled"
_LATEST = (  # heading, metric, format
    *(("step", "", ""), ("held-out", "heldout_accuracy", ".3f"), ("rollout", "accuracy", ".3f")),
    *(("tokens/s", "throughput", ",.0f"), ("TMPE − 1", "tmpe", ".2g"), ("KL", "gen_kl_error", ".2g")),
    *(("ESS", "ess", ".4f"), ("kept", "kept_share", ".4f"), ("entropy", "entropy", ".3f")),
    ("length", "response_length", ".1f"),
)


def below(views: Sequence[RunView], settings: Settings) -> str:
    return _latest(views, settings) + _list_of_marks(views, settings) + _notes(views, settings)


def _latest(views: Sequence[RunView], settings: Settings) -> str:
    """The newest value of every curve."""
    if not views:
        return ""
    headings = [_MODELLED if settings.device and metric == "throughput" else name for name, metric, _ in _LATEST]
    head = "".join(f"<th scope='col'>{heading}</th>" for heading in headings)
    rows = []
    for view in views:
        cells = [
            format(modelled.now(view, settings.device).end_to_end, form)
            if settings.device and metric == "throughput"
            else _newest(view.records, metric, form)
            for _, metric, form in _LATEST
        ]
        label = f"<th scope='row'><b style='color:{view.colour}'>▬</b> {html.escape(view.label)}</th>"
        rows.append(f"<tr>{label}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return (
        f"<div style='overflow-x:auto'><table class='labkit-latest'><caption>latest values</caption>"
        f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{_STYLE}"
    )


def _newest(records: Sequence[StepRecord], metric: str, form: str) -> str:
    if not metric:
        return str(records[-1].step) if records else "–"
    values = (value for record in reversed(records) if (value := value_of(record, metric)) is not None)
    return format(next(values, math.nan), form).replace("nan", "–")


def _list_of_marks(views: Sequence[RunView], settings: Settings) -> str:
    return _lines([f"{view.label}: {mark.text}" for view, mark in marks_of(views, settings.x)])


def _notes(views: Sequence[RunView], settings: Settings) -> str:
    """What the modelled numbers are for, and what the device has no FP8 for."""
    if not settings.device:
        return ""
    lacking = [f"{view.label}: {note}" for view in views for note in modelled.now(view, settings.device).notes]
    return _lines([modelled.assumed(settings.device), *lacking])


def _lines(texts: Sequence[str]) -> str:
    lines = [html.escape(text) for text in texts]
    return f"<div style='color:{theme.TEXT};line-height:1.5'>{'<br>'.join(lines)}</div>" if lines else ""


_STYLE = f"""<style>
.labkit-latest {{ color: {theme.TEXT}; font-size: {theme.SIZE}px; border-collapse: collapse;
  line-height: 1.35; }}
.labkit-latest caption {{ text-align: left; }}
.labkit-latest th, .labkit-latest td {{ padding: 1px 9px 1px 0; text-align: right; font-weight: normal; }}
.labkit-latest th[scope=row] {{ text-align: left; }}
</style>"""
