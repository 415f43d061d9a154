"""Mismatch: where it sits among the tokens that were kept, by probability and by length of the answer; of a model with
experts, what their routers disagree about.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import ipywidgets as widgets

from labkit.ui import theme
from labkit.ui.tabs.page import esc, note, number, page, table
from labkit.ui.tabs.plot import Axis, Plot, svg
from labkit.ui.tabs.routing import routing
from labkit.ui.tabs.samples import Answer, Token, answers, sampled_steps
from labkit.ui.tabs.view import OpenRun, put, state_of, tools

BINS = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)  # of the engine's probability
_MOST = 2500  # points in the picture; the table counts all
_KEPT, _REJECTED = theme.COLOURS[0], theme.COLOURS[1]


class Mismatch:
    title = "Mismatch"

    def __init__(self) -> None:
        self.steps = widgets.Dropdown(
            options=[("newest step", 1), ("last 5 steps", 5), ("last 10 steps", 10)], value=5, description="Tokens of",
            layout={"width": "230px"}, style={"description_width": "auto"},
        )  # fmt: skip
        self.body = widgets.HTML()
        self.widget = widgets.VBox([tools(self.steps), self.body])
        self._shown: object = None

    def update(self, views: Sequence[OpenRun], selected: OpenRun | None) -> None:
        state = state_of(selected), self.steps.value
        if state != self._shown:
            self._shown = state
            put(self.body, self._content(selected))

    def _content(self, selected: OpenRun | None) -> str:
        if selected is None:
            return page(note("No run is selected."))
        steps = sampled_steps(selected)[-self.steps.value :]
        found = [answer for step in steps for answer in answers(selected, step)]
        tokens = [token for answer in found for token in answer.tokens]
        if not tokens:
            return page(note(f"No tokens of {esc(selected.label)} were kept yet."), routing(selected))
        known = [token for token in tokens if math.isfinite(token.delta)]
        exact = sum(token.delta == 0 for token in known)
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        head = f"<h4>{esc(selected.label)}, {which}: {len(tokens):,} tokens of {len(found)} answers</h4>"
        if exact == len(tokens):
            exactly = note("Engine and trainer agree exactly on every one of them: there is no mismatch.")
            return page(head, exactly, routing(selected))
        parts = [
            svg([_by_probability(known), _by_length(found, known)], "The two plots that the tables give in numbers")
        ]
        parts.append(note(_reading(tokens, known, exact, any(token.weight == 0 for token in tokens))))
        return page(head, *parts, _table(known), routing(selected))


def _by_probability(tokens: Sequence[Token]) -> Plot:
    drawn = tokens[:: math.ceil(len(tokens) / _MOST)]
    kept = [(math.exp(token.g), token.size) for token in drawn if token.weight]
    rejected = [(math.exp(token.g), token.size) for token in drawn if not token.weight]
    sizes = [size for _, size in kept + rejected]
    low = max((size for size in sizes), default=1.0) * 1e-6  # below it, nothing is to be seen
    y = Axis.around([size for size in sizes if size >= low], "|Δ|, nats", log=True)
    plot = Plot("Every token: |Δ| against its probability", Axis(0.0, 1.0, "engine's probability of the token"), y)
    plot.dots(kept, _KEPT, opacity=0.9)
    plot.crosses(rejected, _REJECTED)
    return plot


def _by_length(found: Sequence[Answer], tokens: Sequence[Token]) -> Plot:
    sound = [answer for answer in found if math.isfinite(answer.sum_delta)]
    sums = [answer.sum_delta for answer in sound]
    spread = math.sqrt(sum(token.delta**2 for token in tokens) / len(tokens)) if tokens else 0.0
    longest = max((len(answer.tokens) for answer in sound), default=1)
    walk = [(float(n), spread * math.sqrt(n)) for n in range(0, longest + 1)]
    ends = [walk[-1][1], -walk[-1][1]]
    x = Axis.around([longest], "tokens in the answer", least=(0.0,))
    plot = Plot("Every answer: ΣΔ against its length", x, Axis.around(sums + ends, "ΣΔ, nats"))
    for sign in (1, -1):
        plot.line([(n, sign * size) for n, size in walk], theme.TEXT, "dash", width=1.5)
    plot.dots([(len(a.tokens), a.sum_delta) for a in sound if not a.rejected], _KEPT, size=7, opacity=0.9)
    plot.crosses([(len(a.tokens), a.sum_delta) for a in sound if a.rejected], _REJECTED)
    return plot


def _reading(tokens: Sequence[Token], known: Sequence[Token], exact: int, rejected: bool) -> str:
    words = [f"{exact:,} tokens agree exactly and have no place on the logarithmic axis."] if exact else []
    if lost := len(tokens) - len(known):
        words.append(f"<b>{lost:,} tokens have no number on one side.</b>")
    words.append("Blue dots are kept" + (", red crosses rejected by the correction." if rejected else "."))
    words.append("Dashed: ± RMS(Δ)·√length, where ΣΔ would be if the tokens erred independently.")
    return " ".join(words)


def _table(tokens: Sequence[Token]) -> str:
    total = sum(token.size for token in tokens) or 1.0
    rows = []
    for low, high in pairwise(BINS):
        sizes = [t.size for t in tokens if low <= math.exp(t.g) < high or (high == 1.0 and math.exp(t.g) >= 1.0)]
        if sizes:
            mean = number(sum(sizes) / len(sizes), ".2g")
            share = f"{sum(sizes) / total:.0%}"
            rows.append([f"{low:g} to {high:g}", f"{len(sizes):,}", mean, number(max(sizes), ".2g"), share])
    head = ["engine's probability", "tokens", "mean |Δ|", "largest |Δ|", "of all |Δ|"]
    return table(head, rows, caption="Which tokens make the mismatch")
