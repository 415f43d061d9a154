"""A button that puts a text on the clipboard, and says that it did."""

import anywidget
import traitlets

_JS = """
function render({ model, el }) {
  const button = document.createElement("button");
  button.className = "lm-Widget jupyter-widgets jupyter-button widget-button";
  button.style.width = "100px";
  button.textContent = "Copy";
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  said.style.cssText = "margin-left: 8px; color: var(--jp-ui-font-color1, #7a7a7a); font-size: 14px";
  const byHand = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    button.focus();
    return done;
  };
  button.addEventListener("click", async () => {
    const text = model.get("text");
    let done = true;
    try { await navigator.clipboard.writeText(text); } catch { done = byHand(text); }
    said.textContent = done ? "copied" : "the browser refuses: select the text and press Ctrl-C";
  });
  model.on("change:text", () => { said.textContent = ""; });
  el.append(button, said);
}
export default { render };
"""


class CopyButton(anywidget.AnyWidget):
    _esm = _JS
    text = traitlets.Unicode().tag(sync=True)
