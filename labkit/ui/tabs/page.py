"""The look of the tabs as HTML: notes, tables, headings. Whatever comes from a run is escaped by `esc`.

Text has the notebook theme's own colour, areas are translucent, so one page serves light, dark and a projector.
"""

import html
import math
from collections.abc import Sequence

from labkit.ui import theme

STYLE = f"""<style>
.lk-panel .widget-html-content:has(> .lk-tab) {{ line-height: 1.45; white-space: normal; overflow: visible; }}
.lk-tab {{ font-size: {theme.SIZE}px; line-height: 1.45; color: var(--jp-ui-font-color1, {theme.TEXT}); }}
.lk-tab .lk-soft {{ color: var(--jp-ui-font-color2, {theme.TEXT}); }}
.lk-tab p {{ margin: 3px 0 7px; max-width: 78ch; }}
.lk-tab h4 {{ font-size: {theme.SIZE + 1}px; margin: 9px 0 3px; }}
.lk-tab .lk-scroll {{ overflow-x: auto; }}
.lk-tab table {{ border-collapse: collapse; font-size: {theme.SIZE}px; line-height: 1.4; margin: 2px 0 8px; }}
.lk-tab caption {{ text-align: left; font-weight: bold; padding: 2px 0; }}
.lk-tab th, .lk-tab td {{ padding: 2px 14px 2px 0; text-align: right; vertical-align: top; font-weight: normal;
  border-bottom: 1px solid {theme.GRID}; }}
.lk-tab thead th {{ color: var(--jp-ui-font-color2, {theme.TEXT}); }}
.lk-tab .lk-text {{ text-align: left; }}
.lk-tab code {{ font-size: {theme.SIZE}px; background: none; color: inherit; }}
</style>"""

esc = html.escape


def page(*parts: str) -> str:
    return f"{STYLE}<div class='lk-tab'>{''.join(parts)}</div>"


def note(text: str) -> str:
    return f"<p class='lk-soft'>{text}</p>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[int] = (0,), caption: str = "") -> str:
    """Cells and heads are HTML. `text` are the columns that are not numbers; the first names its row."""

    def cell(index: int, content: str, tag: str, scope: str) -> str:
        kind = " class='lk-text'" if index in text else ""
        return f"<{tag}{scope}{kind}>{content}</{tag}>"

    heads = "".join(cell(index, content, "th", " scope='col'") for index, content in enumerate(head))
    body = ""
    for row in rows:
        cells = "".join(
            cell(index, content, "td" if index else "th", "" if index else " scope='row'")
            for index, content in enumerate(row)
        )
        body += f"<tr>{cells}</tr>"
    title = f"<caption>{caption}</caption>" if caption else ""
    return f"<div class='lk-scroll'><table>{title}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"


def number(value: float, form: str = ".3g") -> str:
    """A number as text: a dash for NaN, a real minus sign."""
    return "–" if math.isnan(value) else format(value, form).replace("-", "−")
