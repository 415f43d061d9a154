"""What is active: what the newest step really ran, component by component, beside what the recipe asks for."""

from collections.abc import Sequence

from labkit.config import Recipe
from labkit.runs.record import Active, StepRecord
from labkit.ui import theme
from labkit.ui.tabs.page import esc, note, page, table
from labkit.ui.tabs.view import OpenRun, TextTab, state_of

_STATES = {
    "fp8": ("native FP8", f"border: 2px solid {theme.COLOURS[2]}"),
    "emulated": ("emulated", f"border: 2px dashed {theme.COLOURS[4]}"),
    "bf16": ("BF16", "border: 1px solid"),
    "off": ("off", "border: 1px dotted"),
    "fault": ("⚠ fault", f"border: 3px double {theme.COLOURS[1]}"),
}


class ActiveTab(TextTab):
    title = "What is active"

    def state(self, views: Sequence[OpenRun], selected: OpenRun | None) -> object:
        return state_of(selected)

    def content(self, views: Sequence[OpenRun], selected: OpenRun | None) -> str:
        return _content(selected)


def _content(selected: OpenRun | None) -> str:
    if selected is None:
        return page(note("No run is selected."))
    if not selected.records:
        return page(note(f"{esc(selected.label)} has no complete step yet, so nothing is known."))
    newest = selected.records[-1]
    recipe = selected.recipe
    rows = [
        [esc(component), asked(recipe, component), _badge(active), _since(selected.records, component), _detail(active)]
        for component, active in newest.active.items()
    ]
    head = ["component", "recipe asks for", "really", "since step", "detail"]
    versions = f"weights of version {newest.engine['weight_version']}, scales of {newest.engine['scale_version']}"
    return page(
        f"<h4>{esc(selected.label)}, step {newest.step}</h4>",
        note(f"As the worker reports it. The engine sampled with {versions}; recipe version {newest.recipe_version}."),
        table(head, rows, text=range(len(head))),
        note(
            "Emulated: the numbers are those of FP8, the arithmetic is not. Its speed says nothing about FP8 hardware."
        ),
    )


def asked(recipe: Recipe, component: str) -> str:
    """What the Recipe wants of a component; a dash where it has no say."""
    group, _, name = component.partition(".")
    switch = getattr(getattr(recipe, group, None), name, None) if group in ("rollout", "train") else None
    return {True: "FP8", False: "BF16"}.get(switch, "–") if isinstance(switch, bool) else "–"


def _badge(active: Active) -> str:
    words, border = _STATES.get(active["state"], (esc(active["state"]), "border: 1px solid"))
    return f"<span style='{border}; border-radius: 9px; padding: 0 8px; white-space: nowrap'>{words}</span>"


def _since(records: Sequence[StepRecord], component: str) -> str:
    """The first of the steps that all ran it as the newest does."""
    state = records[-1].active[component]["state"]
    step = records[-1].step
    for record in reversed(records):
        if component not in record.active or record.active[component]["state"] != state:
            break
        step = record.step
    return str(step)


def _detail(active: Active) -> str:
    return esc(active["detail"]) or "<span class='lk-soft'>–</span>"
