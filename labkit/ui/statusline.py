"""The line that says where a run stands: state and news (read out by a screen reader), progress, and what a step costs.

The elements stay and only their text changes: a live region that is replaced is not read out.
"""

import html
from collections.abc import Sequence

import anywidget
import traitlets

from labkit.runs.compare import train_steps
from labkit.runs.record import StepRecord
from labkit.ui import theme

_JS = """
function render({ model, el }) {
  const make = (tag, name, parent) => {
    const made = document.createElement(tag);
    made.className = name;
    parent.append(made);
    return made;
  };
  el.classList.add("lk-status");
  const top = make("div", "lk-status-top", el);
  const bar = make("progress", "", top);
  bar.setAttribute("aria-label", "steps done");
  const detail = make("span", "lk-status-detail", top);
  const live = make("div", "lk-status-live", el);
  live.setAttribute("role", "status");
  live.setAttribute("aria-live", "polite");
  const state = make("b", "lk-state", live);
  const news = make("span", "lk-news", live);
  const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const draw = () => {
    put(state, model.get("state"));
    put(news, model.get("news") ? " \\u00b7 " + model.get("news") : "");
    live.title = live.textContent;
    live.dataset.state = model.get("state").split(" ")[0];
    bar.max = Math.max(1, model.get("steps"));
    bar.value = model.get("step");
    put(detail, model.get("detail"));
  };
  model.on("change", draw);
  draw();
  // plotly looks at the window alone; but the page may give the curves another width after they were made
  let fitted = 0;
  const fit = () => {
    const plot = el.closest(".lk-panel")?.querySelector(".js-plotly-plot");
    const drawn = plot?.querySelector(".main-svg")?.clientWidth;
    if (!drawn || !plot.clientWidth || drawn === plot.clientWidth || fitted === plot.clientWidth) return;
    fitted = plot.clientWidth;
    window.dispatchEvent(new Event("resize"));
  };
  const timer = setInterval(fit, 300);
  return () => clearInterval(timer);
}
export default { render };
"""
_CSS = f"""
.lk-status {{ flex: 1 1 240px; min-width: 0; font-size: {theme.SIZE}px; color: var(--jp-ui-font-color1); }}
.lk-status-top {{ display: flex; gap: 10px; align-items: center; height: 26px; white-space: nowrap; }}
.lk-status progress {{ flex: 1 1 80px; min-width: 60px; height: 12px; accent-color: #0072b2; }}
.lk-status-detail {{ font-variant-numeric: tabular-nums; }}
.lk-status-live {{ height: 40px; line-height: 20px; overflow: hidden; }}
.lk-panel .lk-line {{ height: 44px; }}
.lk-panel .widget-tab > .lm-TabBar .lm-TabBar-tab {{ flex: 0 0 auto; min-width: 0; padding: 0 10px; }}
.lk-state::before {{ content: "\\25cf\\00a0"; color: {theme.TEXT}; }}
.lk-status-live[data-state=running] .lk-state::before {{ color: #009e73; }}
.lk-status-live[data-state=paused] .lk-state::before {{ content: "\\2759\\2759\\00a0"; }}
.lk-status-live[data-state=failed] .lk-state::before {{ content: "\\26a0\\00a0"; color: #d55e00; }}
"""


class StatusLine(anywidget.AnyWidget):
    _esm = _JS
    _css = _CSS
    state = traitlets.Unicode("idle").tag(sync=True)
    news = traitlets.Unicode().tag(sync=True)
    step = traitlets.Int().tag(sync=True)
    steps = traitlets.Int(1).tag(sync=True)
    detail = traitlets.Unicode().tag(sync=True)


_RECENT = 10  # steps whose mean says how long the next ones take
_PHASES = {"generate": "generate", "logprobs": "log-probs", "update": "update", "evaluate": "evaluate"}
_SHADES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#999999")


def remaining(records: Sequence[StepRecord], steps: int) -> str:
    """Time to the end at the pace of the last steps; "" while there is no pace."""
    recent = records[-_RECENT - 1 :]
    if len(recent) < 2 or records[-1].step >= steps:
        return ""
    pace = (recent[-1].elapsed - recent[0].elapsed) / (recent[-1].step - recent[0].step)
    minutes, seconds = divmod(round(pace * (steps - records[-1].step)), 60)
    return f"{minutes}:{seconds:02d} left"


def split(records: Sequence[StepRecord]) -> str:
    """What the seconds of the last steps went into, as words and as a bar. HTML; "" before there was a step."""
    recent = train_steps(records)[-_RECENT:]
    total = sum(sum(record.timings.values()) for record in recent)
    if not total:
        return ""
    parts = {word: sum(record.timings.get(phase, 0.0) for record in recent) for phase, word in _PHASES.items()}
    parts["rest"] = total - sum(parts.values())
    shares = [(word, seconds / total, colour) for (word, seconds), colour in zip(parts.items(), _SHADES, strict=True)]
    bars = "".join(f"<i style='flex:{share:.4f};background:{colour}'></i>" for _, share, colour in shares)
    words = " &nbsp; ".join(
        f"<b style='color:{colour}' aria-hidden='true'>■</b> {html.escape(word)} {share:.0%}"
        for word, share, colour in shares
        if share >= 0.005
    )
    return (
        f"<div style='display:flex;gap:10px;align-items:center;color:{theme.TEXT}'>"
        f"<span style='display:flex;height:8px;width:140px;flex:none' aria-hidden='true'>{bars}</span>"
        f"<span style='overflow:hidden;text-overflow:ellipsis'>{total / len(recent):.2f} s a step: {words}</span></div>"
    )
