"""How the panel is arranged, after the room it has: a projector, or a notebook beside JupyterLab's file browser.

    wide    top                       narrow    top
            switches │ curves                   switches in two lines: rollout, training
            details  │                          curves
            tabs                                details in two columns
                                                tabs

Narrow is where less than 480 px would be left for the curves. A switch and the curve that it bends stay on one screen
in both: of 1024 x 768, where the notebook is 590 x 650, the first row of curves.
"""

from collections.abc import Sequence

import ipywidgets as widgets

from labkit.ui.fields import WIDTH
from labkit.ui.theme import SMALL

_GAP, _LEAST = 12, 480  # px between switches and curves; that the curves need beside the switches
_CSS = f"""
.lk-lab {{ container-type: inline-size; }}
.lk-lab .lk-main {{ display: grid; gap: 0 {_GAP}px; grid-template: "switches curves" auto "details curves" 1fr
  / {WIDTH}px minmax(0, 1fr); }}
.lk-lab .lk-controls {{ display: contents; }}
.lk-lab .lk-switches {{ grid-area: switches; }}
.lk-lab .lk-details {{ grid-area: details; }}
.lk-lab .lk-curves {{ grid-area: curves; }}
@container (max-width: {WIDTH + _GAP + _LEAST - 1}px) {{
  .lk-lab .lk-main {{ grid-template: "switches" auto "curves" auto "details" auto / minmax(0, 1fr); }}
  .lk-lab .lk-switches {{ display: grid; grid-template-columns: repeat(3, auto) 1fr; gap: 0 8px; }}
  .lk-lab .lk-switches > :first-child {{ grid-column: 1 / -1; }}
  .lk-lab .lk-switches .lk-head {{ border: none; }}
  .lk-lab .lk-switches .lk-head .lk-note {{ display: none; }}
  .lk-lab .lk-switch {{ grid-template-columns: minmax(max-content, 1fr) minmax(74px, auto); }}
  .lk-lab .lk-switch input[type=checkbox] {{ margin: 0 4px 0 0; }}
  .lk-lab .lk-switch > :nth-child(2):not(.lk-why), .lk-lab .lk-switch > .lk-why + * {{ display: none; }}
  .lk-lab .lk-why .widget-html-content {{ white-space: normal; font-size: {SMALL}px; line-height: 13px; }}
  .lk-lab .lk-details {{ display: block; columns: 2; column-gap: 16px; }}
  .lk-lab .lk-details > * {{ break-inside: avoid; }}
}}
"""


def arrange(
    top: Sequence[widgets.Widget],
    controls: widgets.Box,
    curves: Sequence[widgets.Widget],
    tabs: widgets.Widget,
) -> widgets.VBox:
    """`controls` has two children: the switches of the FP8 components, and the details."""
    column = widgets.VBox(list(curves))
    column.add_class("lk-curves")
    main = widgets.GridBox([controls, column], layout={"width": "100%"})
    main.add_class("lk-main")
    style = widgets.HTML(f"<style>{_CSS}</style>", layout={"display": "none"})
    panel = widgets.VBox([style, *top, main, tabs], layout={"width": "100%"})
    panel.add_class("lk-panel").add_class("lk-lab")
    return panel
