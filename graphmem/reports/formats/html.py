"""A document as one HTML file that needs nothing else: no script, no font, no picture from anywhere.

Of the values of a curve behind one point of the plot the largest is drawn, so no peak is lost. The answer as JSON is
inside, in the element ``graphmem-KIND``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from graphmem.reports import Format
from graphmem.reports.document import (
    UNITS,
    Block,
    Code,
    Curve,
    Curves,
    Document,
    Facts,
    Items,
    Picture,
    Shares,
    Table,
    Text,
    clean,
)

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 300, 80, 24, 12
_POINTS = 960

#: Colours of curves and their widths, from the lowest to the uppermost: where two are equal the one below is seen on
#: both sides. Told apart by readers who see no red or green too.
_CURVES = (("#999999", 1.5), ("#0072b2", 4), ("#e69f00", 1.2))
#: Up to so many times the highest point of the curves their limit is drawn.
_IN_SIGHT = 2

_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#f0e442", "#d55e00", "#7f3c8d", "#11a579",
            "#332288", "#a5aa99", "#666666", "#bbbbbb", "#999999", "#444444")  # fmt: skip

#: Rules of pages and notebooks: of what is below {0}; {1} is ``!important`` where others have rules for tables too.
SHARED = """
{0} .wide {{ overflow-x: auto }} {0} .no {{ color: #b00020; font-weight: 600 }} {0} .yes {{ font-weight: 600 }}
{0} td, {0} th {{ text-align: left{1} }} {0} td.n, {0} th.n {{ text-align: right{1}; white-space: nowrap;
font-variant-numeric: tabular-nums }} {0} svg {{ max-width: 100%; height: auto }}
{0} .swatch {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em }}
""".strip()
_STYLE = """
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }}
h1 {{ overflow-wrap: anywhere }} p, li {{ overflow-wrap: break-word }}
table {{ border-collapse: collapse; margin: .5em 0 1em }} td, th {{ padding: .15em .9em .15em 0; vertical-align: top }}
h2 {{ font-size: 1.1em; margin: 1.6em 0 .3em }} pre {{ background: #f4f4f4; padding: .6em; overflow-x: auto }}
svg text {{ font: 11px system-ui, sans-serif; fill: #555 }}
{0}
@media (max-width: 640px) {{ body {{ margin: 1em auto }} td, th {{ padding-right: .5em }} td.exact {{ display: none }}
svg {{ overflow: visible; margin-top: .6em }} svg text {{ font-size: 28px }}
svg text.level {{ text-anchor: start; transform: translate(10px, -10px) }} }}
""".strip().format(SHARED.format("body", ""))


class _Html(Format):
    name = "html"
    suffixes = (".html", ".htm")

    def render(self, document: Document, width: int | None = None) -> str:
        """The whole page, ending in a newline."""
        title = escape(clean(document.title))
        data = json.dumps(document.data(), indent=2).replace("<", "\\u003c")
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body(document)}\n"
            f'<script type="application/json" id="graphmem-{document.kind}">\n{data}\n</script>\n</body>\n</html>\n'
        )


FORMAT = _Html()


def body(document: Document) -> str:
    """The sections, without a page around them."""
    return "\n".join(
        part
        for section in document.sections
        for part in ([f"<h2>{_words(section.title)}</h2>"] if section.title else []) + list(map(_block, section.blocks))
    )


def _block(block: Block) -> str:
    if isinstance(block, Text):
        kind = f' class="{block.tone}"' if block.tone else ""
        return "\n".join(f"<p{kind}>{_words(line)}</p>" for line in block.lines if line)
    if isinstance(block, Items):
        return "<ul>\n" + "".join(f"<li>{_words(line)}</li>\n" for line in block.lines) + "</ul>"
    if isinstance(block, Facts):
        return _rows([], ["", ""], ([_words(cell) for cell in row] for row in block.rows))
    if isinstance(block, Shares):
        return _shares(block)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Curves):
        return _curves(block)
    if isinstance(block, Picture):
        return block.svg()
    if isinstance(block, Code):
        text = "\n".join(map(clean, block.text.splitlines()))
        return f"<h3>{_words(block.name)}</h3><pre>{escape(text)}</pre>"
    raise TypeError(f"{type(block).__name__} is no block of a document")


def _words(text: object) -> str:
    """Text of users as markup; blanks at its beginning stand further in."""
    words = clean(text)
    inner = words.lstrip(" ")
    return ("&emsp;" if inner != words else "") + escape(inner)


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(table: Table) -> str:
    kinds = _kinds(table)
    return _rows(table.titles, kinds, ([_words(cell) for cell in row] for row in table.words()))


def _kinds(table: Table) -> list[str]:
    """The classes of the columns. What stands there in a shorter way too is left out where there is no room."""
    return ["n exact" if c.unit == "exact" else "n" if c.has_figures else "" for c in table.columns]


def _rows(titles: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are markup."""
    classes = [f' class="{kind}"' if kind else "" for kind in kinds]
    cells = [f"<th{kind}>{_words(title)}</th>" for title, kind in zip(titles, classes, strict=False)]
    lines = [f"<tr>{''.join(cells)}</tr>\n"] if cells else []
    for row in rows:
        lines.append(f"<tr>{''.join(f'<td{k}>{cell}</td>' for cell, k in zip(row, classes, strict=True))}</tr>\n")
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>'


def _shares(block: Shares) -> str:
    """One bar of all parts, and under it a row for each, with its colour."""
    table, whole = block.table(), max(1, block.total[1])
    colours = {part[0]: _COLOURS[index % len(_COLOURS)] for index, part in enumerate(block.parts)}
    bar, left = [], 0.0
    for name, size, _ in block.shown():
        share = 100 * max(0, size) / whole
        bar.append(f'<rect x="{left:.3f}" y="0" width="{share:.3f}" height="6" fill="{colours[name]}"/>')
        left += share
    rows = [[_words(cell) for cell in row] for row in table.words()]
    for row, (name, _, _) in zip(rows, block.shown(), strict=False):  # the sum has no colour
        row[0] = f"{_swatch(colours[name])}{row[0]}"
    svg = f'<svg viewBox="0 0 100 6" width="960" role="img" aria-label="shares">{"".join(bar)}</svg>'
    return svg + _rows((), _kinds(table), rows)


def _swatch(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour}"></span>'


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(block: Curves) -> str:
    """Curves over time; a line at their limit, if that is in sight."""
    count = len(block.curves[0].values)
    highest = max(float(np.max(curve.values)) for curve in block.curves) or 1.0
    limit = None if block.limit is None or block.limit[0] > _IN_SIGHT * highest else block.limit[0]
    highest = max(highest, limit or 0)
    words = UNITS[block.unit]
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="over time">']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(highest * share, highest)
        label = words(int(highest * share) if block.unit == "bytes" else highest * share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text class="level" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
    legend = []
    for curve, (colour, width) in zip(block.curves, _CURVES, strict=False):
        points = " ".join(_points(curve, highest))
        name = escape(curve.name.partition(" ")[0])
        parts.append(f'<polyline id="{name}" fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>')
        legend.append(f"<span>{_swatch(colour)}{_words(curve.name)}</span>")
    parts += _lines(block, count, limit, highest)
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{_words(block.begins)}</text>')
    parts.append(f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">{_words(block.ends)}</text></svg>')
    return "".join(parts) + f"<p>{'; '.join([' '.join(legend), *_legend(block, limit)])}</p>"


def _lines(block: Curves, count: int, limit: float | None, highest: float) -> Iterator[str]:
    if block.at is not None:
        x = _x(max(0, block.at[0]), count)
        yield f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="#b00" stroke-dasharray="4"/>'
    if limit is not None:
        y = _y(limit, highest)
        yield f'<line id="capacity" x1="{_LEFT}" x2="{_WIDTH}" y1="{y}" y2="{y}" stroke="#b00"/>'
    for mark in block.marks:
        x = _x(mark, count)
        yield f'<line x1="{x}" x2="{x}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM + 8}" stroke="#b00020"/>'


def _legend(block: Curves, limit: float | None) -> Iterator[str]:
    if block.at is not None:
        yield f"dashed: {_words(block.at[1])}"
    if block.limit is not None:
        size = UNITS[block.unit](block.limit[0])
        name = _words(block.limit[1])
        yield f"red: {name}, {size}" if limit is not None else f"far above: {name}, {size}"
    if block.marks:
        yield f"red marks below: {_words(block.marked)}"
    if block.caption:
        yield _words(block.caption)


def _points(curve: Curve, highest: float) -> Iterator[str]:
    values = np.asarray(curve.values)
    count = len(values)
    starts = np.unique(np.linspace(0, count, min(count, _POINTS), endpoint=False, dtype=np.int64))
    largest = np.maximum.reduceat(values, starts)
    for start, value in zip(starts.tolist(), largest.tolist(), strict=True):
        yield f"{_x(start, count)},{_y(value, highest)}"


def _x(index: int, count: int) -> float:
    return round(_LEFT + (_WIDTH - _LEFT) * index / max(1, count - 1), 1)


def _y(value: float, highest: float) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / highest, 1)
