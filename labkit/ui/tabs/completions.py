"""Completions: what the policy wrote in a step, token by token, coloured by how far engine and trainer are apart.

The slider scrubs through the steps; while "newest" is ticked it follows the run. Colours come with an underline that
grows, and the worst tokens stand in a table, so neither colour nor hovering is needed.
"""

import math
from collections.abc import Sequence

import ipywidgets as widgets

from labkit.ui import theme
from labkit.ui.tabs.page import esc, note, number, page, table
from labkit.ui.tabs.samples import Answer, Token, answers, sampled_steps
from labkit.ui.tabs.view import OpenRun, put, state_of, tools

LEVELS = (0.01, 0.05, 0.2, math.log(2))  # nats; at ln 2 one side has twice the other's probability
_ORDERS = {
    "worst token first": lambda answer: -answer.worst,
    "lowest reward first": lambda answer: answer.reward,
    "as sampled": lambda answer: 0,
}
_WORST = 6  # tokens in the table
_ORANGE, _RED, _PINK, _BLUE = (theme.COLOURS[index] for index in (4, 1, 3, 5))
_STYLE = f"""<style>
.lk-answer {{ border-left: 3px solid {theme.GRID}; padding: 1px 0 3px 10px; margin: 0 0 9px; }}
.lk-answer .lk-out {{ font-family: var(--jp-code-font-family, monospace); font-size: {theme.SIZE + 1}px;
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; }}
.lk-tab mark {{ color: var(--jp-ui-font-color1, {theme.TEXT}); background: none; padding: 1px 0; }}
.lk-tab .lk-d1 {{ background: {theme.translucent(_ORANGE, 0.22)}; border-bottom: 1px solid {_ORANGE}; }}
.lk-tab .lk-d2 {{ background: {theme.translucent(_ORANGE, 0.45)}; border-bottom: 2px solid {_ORANGE}; }}
.lk-tab .lk-d3 {{ background: {_ORANGE}; color: black; border-bottom: 3px solid {_RED}; }}
.lk-tab .lk-d4 {{ background: {_RED}; color: black; font-weight: bold; border-bottom: 4px double black; }}
.lk-tab .lk-nan {{ background: {_PINK}; color: black; font-weight: bold; border: 2px solid black; }}
.lk-tab .lk-no {{ outline: 2px dashed {_BLUE}; outline-offset: 1px; }}
</style>"""


class Completions:
    title = "Completions"

    def __init__(self) -> None:
        style = {"description_width": "auto"}
        self.step = widgets.IntSlider(
            value=1, min=1, max=1, description="Step", layout={"width": "290px"}, style=style, disabled=True
        )
        self.newest = widgets.Checkbox(value=True, description="newest", indent=False, layout={"width": "90px"})
        self.order = widgets.Dropdown(
            options=list(_ORDERS), description="Order", layout={"width": "220px"}, style=style
        )
        self.count = widgets.Dropdown(
            options=[("4", 4), ("8", 8), ("all", None)], description="Answers", layout={"width": "140px"}, style=style
        )
        self.body = widgets.HTML()
        self.widget = widgets.VBox([tools(self.step, self.newest, self.order, self.count), self.body])
        self._placed: tuple[str, int] = ("", 1)  # run and step that the slider was put at
        self._shown: object = None

    def update(self, views: Sequence[OpenRun], selected: OpenRun | None) -> None:
        steps = sampled_steps(selected) if selected else []
        self._scrub(selected.id if selected else "", steps)
        state = state_of(selected) if self.newest.value else selected and (selected.id, selected.label, len(steps) > 0)
        state = (state, self.step.value, self.order.value, self.count.value)
        if state != self._shown:
            self._shown = state
            put(self.body, self._content(selected, steps))

    def _scrub(self, run: str, steps: Sequence[int]) -> None:
        """Follow the run, unless the slider was moved by hand."""
        before, at = self._placed
        if run == before and self.step.value != at:
            self.newest.value = False
        self.step.disabled = not steps
        if steps:
            with self.step.hold_trait_notifications():
                self.step.min, self.step.max = steps[0], steps[-1]
                wanted = steps[-1] if self.newest.value else self.step.value
                self.step.value = min(max(wanted, steps[0]), steps[-1])
        self._placed = run, self.step.value

    def _content(self, selected: OpenRun | None, steps: Sequence[int]) -> str:
        if selected is None:
            return page(note("No run is selected."))
        if not steps:
            why = "its first step is not complete" if selected.experiment.keep_rollouts else "keep_rollouts is 0"
            return page(note(f"No answers of {esc(selected.label)} yet: {why}."))
        step = self.step.value
        found = answers(selected, step)
        if not found:
            return page(note(f"The answers of step {step} are not in the run's folder."))
        chosen = sorted(found, key=_ORDERS[self.order.value])[: self.count.value]
        head = f"<h4>{esc(selected.label)}, step {step}: {len(chosen)} of {len(found)} answers that were kept</h4>"
        return page(_STYLE, head, _legend(), *map(_card, chosen), _worst_tokens(found))


def level(token: Token) -> str:
    """The CSS class of a token; empty where the two sides agree."""
    if not math.isfinite(token.delta):
        return "lk-nan"
    reached = sum(token.size >= limit for limit in LEVELS)
    return f"lk-d{reached}" if reached else ""


def marked(tokens: Sequence[Token]) -> str:
    """The tokens as HTML; neighbours without a mark share no element, which keeps a long answer light."""
    parts = []
    for token in tokens:
        kind = level(token) + (" lk-no" if token.weight == 0 else "")
        text = esc(token.text.replace("\n", "↵\n"))
        parts.append(f"<mark class='{kind.strip()}' title='{_what(token)}'>{text}</mark>" if kind else text)
    return "".join(parts)


def _what(token: Token) -> str:
    return f"Δ {number(token.delta)}, engine {_probability(token.g)}, trainer {_probability(token.p)}"


def _probability(logprob: float) -> str:
    return number(math.exp(logprob) if logprob < 700 else math.inf)


def _card(answer: Answer) -> str:
    verdict = "✓ right" if answer.reward >= 1 else f"✗ {esc(answer.right)} expected"
    facts = [f"reward {number(answer.reward)}", f"advantage {number(answer.advantage, '+.2f')}"]
    facts += [f"{len(answer.tokens)} tokens", f"ΣΔ {number(answer.sum_delta, '+.3g')}"]
    facts += ["cut off at max_new_tokens"] if not answer.finished else []
    facts += ["rejected by the correction"] if answer.rejected else []
    prompt = f"<span class='lk-soft'>{esc(answer.prompt)}</span>"
    return (
        f"<div class='lk-answer'><b>{verdict}</b> <span class='lk-soft'>· {' · '.join(facts)}</span>"
        f"<div class='lk-out'>{prompt}{marked(answer.tokens)}</div></div>"
    )


def _legend() -> str:
    ends = [f"{limit:.2g}" for limit in LEVELS]
    swatches = [f"<mark class='lk-d{i + 1}'>&nbsp;{end} or more&nbsp;</mark>" for i, end in enumerate(ends)]
    others = "<mark class='lk-nan'>&nbsp;no number&nbsp;</mark> <mark class='lk-no'>&nbsp;rejected&nbsp;</mark>"
    return note(f"|Δ| of a token in nats, Δ = trainer's − engine's log-prob: {' '.join(swatches)} {others}")


def _worst_tokens(found: Sequence[Answer]) -> str:
    places = [(answer, at, token) for answer in found for at, token in enumerate(answer.tokens)]
    places.sort(key=lambda place: -place[2].size)
    rows = []
    for answer, at, token in places[:_WORST]:
        before = (answer.prompt + "".join(each.text for each in answer.tokens[:at]))[-14:]
        context = f"<code><span class='lk-soft'>…{esc(before)}</span>{marked([token])}</code>"
        weight = number(token.weight) if token.weight else "0, rejected"
        sides = [_probability(token.g), _probability(token.p), number(token.delta, "+.3g")]
        rows.append([context, str(at + 1), *sides, weight])
    head = ["token, after what", "place", "engine's probability", "trainer's", "Δ, nats", "weight"]
    return table(head, rows, caption="Worst tokens of the step")
