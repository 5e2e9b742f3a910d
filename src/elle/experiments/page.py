"""A report as one HTML file that opens offline: tables and charts, on a phone, a desktop and paper."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from elle.charts.svg import COLOURS, escape
from elle.experiments.figure import Figure, draw_figure, series_names
from elle.files import write_text

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --soft: #59636e;
  --grid: #d8dee4; --axis: #818b98; --bad: #cf222e; --bad-shade: #fff1f0; LIGHT }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #0f1419; --ink: #e6edf3; --soft: #9da7b3;
  --grid: #2b333d; --axis: #6b7683; --bad: #ff7b72; --bad-shade: #2d1719; DARK } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100% }
body { margin: 0; background: var(--paper); color: var(--ink); overflow-wrap: break-word;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
header, main, footer { max-width: 70rem; margin: 0 auto; padding: 0 1.5rem }
header { padding-top: 3rem }
h1 { margin: 0 0 .6rem; font-size: clamp(1.55rem, 1.2rem + 1.6vw, 2.2rem); line-height: 1.2;
  letter-spacing: -.015em; font-weight: 650; text-wrap: balance }
h2 { margin: 0; font-size: 1.05rem; line-height: 1.35; font-weight: 600 }
.lead p { max-width: 44rem; margin: 0 0 .7rem; font-size: 1.06rem; color: var(--soft) }
.charts { display: grid; gap: 2.5rem 3rem; margin: 2.25rem 0; justify-content: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)) }
figure { margin: 0; min-width: 0; max-width: 38rem }
figcaption { margin-bottom: .5rem }
img { display: block; max-width: 100%; height: auto }
.note { margin: .35rem 0 0; font-size: .9rem; line-height: 1.45; color: var(--soft) }
.chart { display: block; width: 100%; height: auto; overflow: visible; font-family: inherit;
  font-variant-numeric: tabular-nums }
.chart text { font-size: 12.5px }
.chart .ink { fill: var(--ink) }
.chart .soft { fill: var(--soft) }
.chart .grid { stroke: var(--grid) }
.chart .axis { stroke: var(--axis) }
.chart path.mark { stroke: var(--bad) }
.chart text.mark { fill: var(--bad); stroke: var(--paper); stroke-width: 5px; paint-order: stroke }
SERIES
.chart polygon.band { stroke: none }
.chart path.ink-line { stroke: var(--ink) }
.chart path.dot[class] { stroke: var(--paper); stroke-width: .8 }
.scroll { margin: 2.25rem 0; overflow-x: auto }
.scroll:focus-visible { outline: 2px solid var(--axis); outline-offset: 4px }
table { border-collapse: collapse; min-width: min(100%, 30rem); font-variant-numeric: tabular-nums }
caption { padding-bottom: .5rem; text-align: left; font-size: 1.05rem; line-height: 1.35; font-weight: 600 }
th, td { padding: .5rem 1rem; text-align: left; vertical-align: baseline; white-space: nowrap }
th:first-child { padding-left: .8rem }
td:last-child, th:last-child { padding-right: .4rem }
thead th { border-bottom: 1.5px solid var(--axis); font-size: .9em; font-weight: 600; color: var(--soft);
  white-space: normal; vertical-align: bottom }
thead span, caption span, h1 span, h2 span { white-space: nowrap }
tbody th { font-weight: 600 }
.long { white-space: normal; overflow-wrap: anywhere; min-width: 14rem }
th:first-child { position: sticky; left: 0; background: var(--paper) }
tbody tr { border-bottom: 1px solid var(--grid) }
.number { text-align: right }
td.collapsed { background: var(--bad-shade); color: var(--bad) }
td u { text-underline-offset: .2em }
.tables-note { margin: -1.6rem 0 2.25rem; font-size: .9rem; color: var(--soft) }
tr.bad, tr.bad th:first-child { background: var(--bad-shade) }
tr.bad th:first-child { box-shadow: inset 3px 0 var(--bad) }
.tag { margin-left: .5em; font-size: .78rem; font-weight: 600; color: var(--bad) }
footer { padding-top: 1rem; padding-bottom: 2.5rem; font-size: .88rem; color: var(--soft) }
footer p { margin: .4rem 0 }
@media (max-width: 34rem) {
  header, main, footer { padding-left: 1rem; padding-right: 1rem }
  header { padding-top: 1.5rem }
  .chart text { font-size: 14.5px }
  th, td { padding: .45rem .4rem }
  table { font-size: .9em }
  .long { min-width: 8rem }
  .tag { display: block; margin: 0 }
  body { font-size: 15px }
}
@media screen and (max-width: 26rem) {
  th, td { padding: .45rem .3rem }
  table { font-size: .8em }
}
@media print {
  @page { margin: 16mm }
  html { font-size: 78% }
  body { font-size: 1rem }
  header, main, footer { max-width: none; padding: 0 }
  .charts { grid-template-columns: 1fr 1fr; gap: 1.5rem 2rem }
  .chart text { font-size: 14px }
  .scroll { overflow: visible }
  th, td { padding: .4rem .5rem }
  th:first-child { position: static; background: none }
  figure, tr { break-inside: avoid }
  h1, h2, caption, thead, tbody tr:first-child { break-after: avoid }
  tbody tr:first-child, tbody tr:last-child, .tables-note { break-before: avoid }
  tr.bad, td.collapsed, .chart rect { -webkit-print-color-adjust: exact; print-color-adjust: exact }
}
"""
# Numbers as tables write them: 45.2 %, 0.031 +- 0.002, 1e-4, 8/255, 3:20, 12 s, or nothing at all.
NUMBER = re.compile(r"[<>~\u2248]?\s*[-+\u2212]?\d[\d\s.,:/e+\-\u00b1\u2212\u00a0\u202f]*(%|s|min|h|x|\u00d7)?")
LONG = 24
"""Characters of a cell that stay on one line, whatever the width of the screen."""
BLANK = {"", "-", "\u2013", "\u2014", "nan", "n/a"}


Mark = Literal["best", "second", "collapsed"]


@dataclass(frozen=True)
class Table:
    """A caption, column names and rows of text; `bad_rows` are the indices of collapsed runs.

    `marks` are (row, column) of single cells: the best number, the runner-up, a collapsed one; `note` explains them.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bad_rows: frozenset[int] = frozenset()
    marks: Mapping[tuple[int, int], Mark] = field(default_factory=dict)
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.caption!r}: {len(self.columns)} columns, {len(row)} cells")


@dataclass(frozen=True)
class Picture:
    """A PNG that is part of the page."""

    title: str
    png: bytes


Part = Table | Figure | Picture


def render(title: str, lead: str, parts: Sequence[Part], footer: str = "") -> str:
    """The whole document; a blank line in `lead` or `footer` starts a paragraph."""
    names = series_names(parts)
    body = []
    for tables, group in groupby(parts, key=lambda part: isinstance(part, Table)):
        blocks = [_table(part) if isinstance(part, Table) else _figure(part, names) for part in group]
        inner = "\n".join(blocks)
        body.append(inner if tables else f'<div class="charts">\n{inner}\n</div>')
    end = f"<footer>\n{_paragraphs(footer)}\n</footer>\n" if footer.strip() else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{escape(title)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        f'<header>\n<h1>{_unbroken(title)}</h1>\n<div class="lead">\n{_paragraphs(lead)}\n</div>\n</header>\n'
        "<main>\n" + "\n".join(body) + f"\n</main>\n{end}</body>\n</html>\n"
    )


def write_page(path: Path, title: str, lead: str, parts: Sequence[Part], footer: str = "") -> None:
    """Write the document in one step: a reader sees the old file or the new one, never half of it."""
    write_text(path, render(title, lead, parts, footer))


def _style() -> str:
    light, dark = (" ".join(f"--c{i}: {pair[k]};" for i, pair in enumerate(COLOURS)) for k in (0, 1))
    series = "\n".join(
        f".chart .c{i} {{ stroke: var(--c{i}) }} .chart .dot.c{i}, .chart .band.c{i} {{ fill: var(--c{i}) }}"
        for i in range(len(COLOURS))
    )
    return STYLE.replace("LIGHT", light).replace("DARK", dark).replace("SERIES", series)


def _paragraphs(text: str) -> str:
    paragraphs = (part.strip() for part in re.split(r"\n\s*\n", text))
    return "\n".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs if paragraph)


def _figure(figure: Figure | Picture, names: Sequence[str]) -> str:
    if isinstance(figure, Picture):
        source = base64.b64encode(figure.png).decode()
        shown = f'<img src="data:image/png;base64,{source}" alt="{escape(figure.title)}">'
    else:
        note = f'\n<p class="note">{escape(figure.note)}</p>' if figure.note else ""
        shown = draw_figure(figure, names) + note
    return f"<figure>\n<figcaption><h2>{_unbroken(figure.title)}</h2></figcaption>\n{shown}\n</figure>"


def _table(table: Table) -> str:
    """A table that scrolls inside itself on a narrow screen; columns of numbers stand to the right."""
    columns = range(len(table.columns))
    numeric = [i > 0 and _is_numeric([row[i] for row in table.rows]) for i in columns]
    kinds = ["number" if number else "" for number in numeric]
    head = "".join(f'<th scope="col"{_classes("", kinds[i])}>{_unbroken(table.columns[i])}</th>' for i in columns)
    rows = []
    for index, row in enumerate(table.rows):
        bad = index in table.bad_rows
        # Colour alone would not tell: say it, unless the table does so itself.
        silent = bad and not any("collapse" in text.lower() for text in (*table.columns, *row))
        tag = '<span class="tag">collapsed</span>' if silent else ""
        cells = [f'<th scope="row"{_classes(cell)}>{escape(cell)}{tag}</th>' for cell in row[:1]]
        cells += [_cell(row[i], kinds[i], table.marks.get((index, i))) for i in columns[1:]]
        rows.append(('<tr class="bad">' if bad else "<tr>") + "".join(cells) + "</tr>")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(table.caption)}">\n<table>\n'
        f"<caption>{_unbroken(table.caption)}</caption>\n<thead>\n<tr>{head}</tr>\n</thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody>\n</table>\n</div>"
        + (f'\n<p class="tables-note">{escape(table.note)}</p>' if table.note else "")
    )


def _cell(text: str, kind: str, mark: Mark | None) -> str:
    """A cell; a collapsed number is red and has a dagger, for those who do not see red."""
    if mark == "collapsed":
        return f'<td{_classes(text, kind, mark)} title="collapsed">{escape(text)}\u2020</td>'
    inner = {"best": f"<b>{escape(text)}</b>", "second": f"<u>{escape(text)}</u>", None: escape(text)}[mark]
    return f"<td{_classes(text, kind)}>{inner}</td>"


def _classes(text: str, *kinds: str) -> str:
    """The attribute of a cell; a long text may break, so that the name of a run leaves room for its numbers."""
    classes = [kind for kind in (*kinds, "long" if len(text) > LONG else "") if kind]
    return f' class="{" ".join(classes)}"' if classes else ""


def _unbroken(text: str) -> str:
    """Text that breaks at spaces only, so that PGD-20 stays in one piece."""
    return re.sub(r"\S*-\S*", r"<span>\g<0></span>", escape(text))


def _is_numeric(cells: Sequence[str]) -> bool:
    texts = [cell.strip() for cell in cells if cell.strip().lower() not in BLANK]
    return bool(texts) and all(NUMBER.fullmatch(text) for text in texts)
