"""A document as blocks, written as one HTML page that needs no network, or as Markdown."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Paragraph:
    text: str
    soft: bool = False  # a remark


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table. The first column names the line; `words` are columns of text, aligned left."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()


@dataclass(frozen=True)
class Code:
    text: str
    fold: str = ""  # hidden behind this line


@dataclass(frozen=True)
class Picture:
    figure: go.Figure
    words: str  # for those who read it without


Block = Heading | Paragraph | Bullets | Grid | Code | Picture


def as_html(title: str, blocks: Sequence[Block]) -> str:
    pictures = [block for block in blocks if isinstance(block, Picture)]
    body = "\n".join(_html(block, first=bool(pictures) and block is pictures[0]) for block in blocks)
    return _PAGE.format(title=html.escape(title), body=body)


def as_markdown(title: str, blocks: Sequence[Block]) -> str:
    return "\n\n".join([f"# {_md(title)}", *map(_markdown, blocks)]) + "\n"


def _html(block: Block, first: bool) -> str:
    esc = html.escape
    match block:
        case Heading(text):
            return f"<h2>{esc(text)}</h2>"
        case Paragraph(text, soft):
            return f"<p class='soft'>{esc(text)}</p>" if soft else f"<p>{esc(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{esc(item)}</li>" for item in items) + "</ul>"
        case Grid(head, rows, words):
            kind = ["class='words'" if at == 0 or at in words else "" for at in range(len(head))]
            top = "".join(f"<th scope='col' {kind[at]}>{esc(cell)}</th>" for at, cell in enumerate(head))
            lines = "".join(
                f"<tr><th scope='row' class='words'>{esc(row[0])}</th>"
                + "".join(f"<td {kind[at]}>{esc(cell)}</td>" for at, cell in enumerate(row[1:], start=1))
                + "</tr>"
                for row in rows
            )
            return f"<div class='scroll'><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"
        case Code(text, fold):
            code = f"<pre>{esc(text)}</pre>"
            return f"<details><summary>{esc(fold)}</summary>{code}</details>" if fold else code
        case Picture(figure, words):
            config = {"responsive": True, "displaylogo": False}
            plot = figure.to_html(full_html=False, include_plotlyjs=first, config=config)
            return f"<figure aria-label='{esc(words, quote=True)}'>{plot}<figcaption>{esc(words)}</figcaption></figure>"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {_md(text)}"
        case Paragraph(text):
            return _md(text)
        case Bullets(items):
            return "\n".join(f"- {_md(item)}" for item in items)
        case Grid(head, rows, words):
            rule = ["---" if at == 0 or at in words else "---:" for at in range(len(head))]
            return "\n".join("| " + " | ".join(map(_md, line)) + " |" for line in [head, rule, *rows])
        case Code(text):
            return f"```\n{text.rstrip()}\n```"
        case Picture():
            return "The HTML report has them."


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #222; --soft: #595959; --page: #fff; --line: #ddd; --tint: #f6f6f6; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e4e4e4; --soft: #a6a6a6; --page: #16181c; --line: #3a3d42; --tint: #1f2227; }}
}}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 1280px;
  margin: 1.5rem auto; padding: 0 1.2rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.25; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .6rem; }}
p, li {{ max-width: 62rem; }}
table {{ border-collapse: collapse; font-size: 15px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
thead th {{ border-bottom-width: 2px; vertical-align: bottom; }}
.words {{ text-align: left; }}
td.words {{ min-width: 15rem; }}
td:not(.words) {{ white-space: nowrap; }}
th[scope=row] {{ font-weight: 600; min-width: 10rem; }}
.soft, figcaption, summary {{ color: var(--soft); font-size: 14px; }}
pre {{ background: var(--tint); padding: .7rem 1rem; overflow-x: auto; font-size: 14px; }}
figure {{ margin: 0; }}
.scroll {{ overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
