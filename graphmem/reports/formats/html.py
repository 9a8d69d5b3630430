"""A document as one HTML file that needs nothing else and asks nobody for anything: its policy forbids it to.

What can be looked at (curves, the moments of a run, tables to sort) is data in attributes, which the page's script
(``graphmem/reports/page``, built of ``page/``) draws; all else is readable without. The answer as JSON is inside, in
the element ``graphmem-KIND``.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from graphmem.reports import Format
from graphmem.reports.document import (
    Block,
    Cell,
    Choices,
    Code,
    Column,
    Curves,
    Document,
    Facts,
    HeatMap,
    Items,
    Moments,
    Picture,
    Points,
    Shares,
    Stack,
    Stacks,
    Table,
    Text,
    Value,
    clean,
)
from graphmem.units import format_bytes

#: Colours of parts, in turn: black words can be read on each, and each is seen on white and on black.
COLOURS = ("#5b9bd5", "#4fc3d9", "#5fae5f", "#d98cc0", "#e8953a", "#d5c04a", "#e0705a", "#a58be0", "#3fb59b",
           "#a3adb8", "#c9a36b", "#8796a5", "#c0c0c0", "#b5838d", "#90a959")  # fmt: skip

#: Rules of pages and notebooks: of what is below {0}; {1} is ``!important`` where others have rules for tables too.
SHARED = """
{0} .wide {{ overflow-x: auto }}
{0} td, {0} th {{ text-align: left{1} }} {0} td.n, {0} th.n {{ text-align: right{1}; white-space: nowrap;
font-variant-numeric: tabular-nums }}
{0} .swatch {{ display: inline-block; width: .8em; height: .8em; margin-right: .4em }}
{0} td.bar {{ width: 100%; min-width: 9em; padding: 0 }} {0} td.bar svg {{ display: block; width: 100%; height: 1.3em }}
""".strip()


class _Html(Format):
    name = "html"
    suffixes = (".html", ".htm")

    def render(self, document: Document, width: int | None = None) -> str:
        """The whole page, ending in a newline."""
        title = escape(clean(document.title))
        data = json.dumps(document.data(), indent=2).replace("<", "\\u003c")
        script, style = _page("page.js"), f"{_page('page.css')}{_colours()}\n{SHARED.format('main', '')}\n"
        allowed = b64encode(sha256(script.encode()).digest()).decode()
        policy = f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; base-uri 'none'"
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
            f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body(document, _drawn)}\n</main>\n"
            f'<script type="application/json" id="graphmem-{document.kind}">\n{data}\n</script>\n'
            f"<script>{script}</script>\n</body>\n</html>\n"
        )


FORMAT = _Html()


@cache
def _page(name: str) -> str:
    """A file of the built page."""
    return files("graphmem.reports").joinpath("page", name).read_text(encoding="utf-8")


def _colours() -> str:
    return f":root{{{';'.join(f'--c{number}:{colour}' for number, colour in enumerate(COLOURS))}}}"


def body(document: Document, drawn: Callable[[Curves | Moments], str]) -> str:
    """The sections, without a page around them; ``drawn`` makes what a script draws on a page."""
    return "\n".join(
        part
        for section in document.sections
        for part in (
            "<section>",
            *([f"<h2>{_words(section.title)}</h2>"] if section.title else []),
            *(drawn(one) if isinstance(one, (Curves, Moments)) else _block(one) for one in section.blocks),
            "</section>",
        )
    )


def _block(block: Block) -> str:
    if isinstance(block, Text):
        lines = "\n".join(f"<p>{_words(line)}</p>" for line in block.lines if line)
        return f'<div class="verdict {block.tone}">\n{lines}\n</div>' if block.tone else lines
    if isinstance(block, Items):
        return "<ul>\n" + "".join(f"<li>{_words(line)}</li>\n" for line in block.lines) + "</ul>"
    if isinstance(block, Facts):
        return _rows((), (), ([_cell(_words(cell), _short(cell)) for cell in row] for row in block.rows))
    if isinstance(block, Shares):
        return _shares(block)
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Stacks):
        return _stacks(block)
    if isinstance(block, HeatMap):
        return _heat_map(block)
    if isinstance(block, Points):
        return _points(block)
    if isinstance(block, Choices):
        return _choices(block)
    if isinstance(block, Picture):
        return f'<div class="picture">{block.svg()}</div>'
    if isinstance(block, Code):
        text = "\n".join(map(clean, block.text.splitlines()))
        return f'<h3>{_words(block.name)}</h3><pre tabindex="0">{escape(text)}</pre>'
    raise TypeError(f"{type(block).__name__} is no block of a document")


def _words(text: object) -> str:
    """Text of users as markup; every two blanks at its beginning stand further in."""
    words = clean(text)
    inner = words.lstrip(" ")
    return "&emsp;" * -(-(len(words) - len(inner)) // 2) + escape(inner)


# --- tables -----------------------------------------------------------------------------------------------------------


#: Words that verdicts begin with, and their colours; and characters up to which words are not folded.
_TONES = {"fits": "yes", "likely fits": "yes", "does not fit": "no", "likely does not fit": "no",
          "fails": "no"}  # fmt: skip
_SHORT = 24


def _table(table: Table) -> str:
    """The rows. Figures of a column with bars have one behind them, as long as theirs is beside the largest's."""
    drawn = [(at, column.unit) for at, column in enumerate(table.columns) if column.bars]
    most = [max((_size(row[at]) for row in table.rows for at, unit in drawn if unit == column.unit), default=0)
            if column.bars else 0 for column in table.columns]  # fmt: skip
    kinds = _kinds(table)
    rows = (
        [_cell(_words(text), kinds[at] or _tone(table.columns[at], text), _figure(value, most[at], table.titles))
         for at, (text, value) in enumerate(zip(words, row, strict=True))]
        for words, row in zip(table.words(), table.rows, strict=True)
    )  # fmt: skip
    return _rows(table.titles, kinds, rows)


def _tone(column: Column, text: str) -> str:
    """The classes of a cell of words: whether it is short, and what a verdict says."""
    return " ".join(filter(None, (_short(text), _verdict_tone(text) if column.name == "fits" else "")))


def _verdict_tone(text: str) -> str:
    """The colour of a verdict in words; empty for other words."""
    return next((tone for words, tone in _TONES.items() if text.lower().startswith(words)), "")


def _short(text: str) -> str:
    return "s" if len(text) <= _SHORT else ""


def _size(value: Value) -> float:
    return abs(value) if isinstance(value, (int, float)) else 0


def _figure(value: Value, most: float, titles: Sequence[str]) -> str:
    """Attributes of a figure's cell: the length of its bar, and what it is sorted by."""
    if not isinstance(value, (int, float)):
        return ""
    bar = f' style="--part:{100 * _size(value) / most:.1f}%{";--of:var(--less)" if value < 0 else ""}"' if most else ""
    return bar + (f' data-v="{value}"' if titles else "")


def _kinds(table: Table) -> list[str]:
    """The classes of the columns. What stands there in a shorter way too is left out where there is no room."""
    return [f"n {c.unit}" if c.unit in ("exact", "share") else "n" if c.has_figures else "" for c in table.columns]


def _cell(markup: str, kind: str = "", attributes: str = "") -> str:
    return f"<td{_class(kind)}{attributes}>{markup}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _rows(titles: Sequence[str], kinds: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of rows of cells. With titles it can be sorted."""
    heads = [
        f'<th scope="col"{_class(kind)}>{_words(title)}</th>' if title else "<td></td>"
        for title, kind in zip(titles, kinds, strict=False)
    ]
    lines = [f"<thead><tr>{''.join(heads)}</tr></thead>\n"] if heads else []
    lines += [f"<tr>{''.join(row)}</tr>\n" for row in rows]
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>'


def _shares(block: Shares) -> str:
    """A row for each part with its colour and a bar that begins where the one above ended; the last is of all of them.
    The edge of their room, where there is one, goes through all bars."""
    table, (_, whole) = block.table(), block.total
    colours = {part[0]: _colour(index) for index, part in enumerate(block.parts)}
    room, edge = _scale(block.edge, whole, block.room)
    rows: list[list[str]] = []
    begin = 0
    for (name, size, note), words in zip([*block.shown(), (*block.total, "")], table.words(), strict=True):
        is_total = len(rows) == len(table.rows) - 1
        colour = "currentColor" if is_total else colours[name]
        swatch = "" if is_total else f'<span class="swatch" style="background:{colour}"></span>'
        at, width = (1000 * part / room for part in (0 if is_total else begin, max(0, size)))
        rect = f'<rect x="{at:.2f}" y="1" width="{width:.2f}" height="8" fill="{colour}"/>'
        bar = f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{rect}</svg>{edge}'
        figures = map(_cell, map(_words, words[1:4]), _kinds(table)[1:4])
        rows.append([_cell(swatch + _part(words[0], note), "name"), *figures, _cell(bar, "bar")])
        begin += size
    return _rows((), (), rows) + _used(block)


def _scale(edge: tuple[str, int] | None, *sizes: int) -> tuple[float, str]:
    """The bytes that bars are drawn in, a little more than the largest of ``sizes`` and the edge; the line of that."""
    room = max(1, *sizes, edge[1] if edge else 0) * 1.01
    return room, "" if edge is None else f'<i class="edge" style="left:{100 * edge[1] / room:.2f}%"></i>'


#: The frame of what is gone.
_GONE = 'fill="none" stroke="currentColor" stroke-dasharray="4 3" vector-effect="non-scaling-stroke"'


def _stacks(block: Stacks) -> str:
    """A row for each whole, with its parts one behind the other; what it has less than the first is an empty frame. The
    script tells the parts of the row that is chosen."""
    wholes = [sum(row.sizes) for row in block.rows]
    room, edge = _scale(block.edge, *wholes)
    rows = []
    for row, whole in zip(block.rows, wholes, strict=True):
        begin, bars = 0.0, ""
        for number, size in enumerate((*row.sizes, wholes[0] - whole)):
            width = 1000 * max(0, size) / room
            kind = _GONE if number == len(row.sizes) else f'fill="{_colour(number)}"'
            bars += f'<rect x="{begin:.2f}" y="1" width="{width:.2f}" height="8" {kind}/>' if width else ""
            begin += width
        bar = f'<svg viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>{edge}'
        verdict = f'<small class="{_verdict_tone(row.verdict)}">{_words(row.verdict)}</small>' if row.verdict else ""
        cells = _cell(_words(row.name) + verdict, "name"), _cell(format_bytes(whole), "n"), _cell(bar, "bar")
        rows.append(f'<tr data-said="{_words(_told(block, row, whole - wholes[0]))}">{"".join(cells)}</tr>\n')
    keys = "".join(f'<li class="key"><span class="swatch" style="background:{_colour(number)}"></span>'
                   f"{_words(name)}</li>" for number, name in enumerate(block.parts)
                   if any(row.sizes[number] > 0 for row in block.rows))  # fmt: skip
    ends = "" if block.edge is None else f"<p>{_words(f'The line is where {block.edge[0]} ends.')}</p>"
    return (
        f'<figure class="stacks"><div class="wide"><table>\n{"".join(rows)}</table></div>'
        f'<ul class="legend">{keys}</ul>{ends}</figure>'
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _told(block: Stacks, row: Stack, change: int) -> str:
    """A row in a sentence: its whole, how much that is beside the first, its parts."""
    whole = f"{row.name}: {format_bytes(sum(row.sizes))}"
    beside = f", {format_bytes(abs(change))} {'more' if change > 0 else 'less'} than {block.rows[0].name}"
    parts = [f"{name} {format_bytes(size)}" for name, size in zip(block.parts, row.sizes, strict=True) if size]
    verdict = f" ({row.verdict})" if row.verdict else ""
    return f"{whole}{verdict}{beside if change else ''}; {', '.join(parts)}"


#: Signs of a heat map: of a verdict that is only likely, and of what does not fit.
LIKELY, NO = "\N{ALMOST EQUAL TO}", "\N{MULTIPLICATION X}"

#: Red, green and blue of a cell by its verdict, and how much of it there is of the fullest.
_HEAT, _DARKEST = {"no": "224,112,90", "yes": "91,155,213", "": "91,155,213"}, 0.55


def _heat_map(block: HeatMap) -> str:
    """A table of coloured figures; verdicts are marks too, which are told apart without colours."""
    (down, rows), (across, columns) = block.down, block.across
    heads = "".join(f'<th scope="col" class="n">{_words(value)}</th>' for value in columns)
    lines = (
        f'<tr><th scope="row">{_words(row)}</th>{"".join(_heat(block, row, column) for column in columns)}</tr>\n'
        for row in rows
    )
    caption = f"<caption>{_words(block.caption)}</caption>" if block.caption else ""
    corner = _words(f"{down} \N{DOWNWARDS ARROW} {across} \N{RIGHTWARDS ARROW}")
    head = f"<thead><tr><td>{corner}</td>{heads}</tr></thead>"
    return f'<div class="wide multiple"><table class="heat">{caption}{head}\n{"".join(lines)}</table></div>'


def _heat(block: HeatMap, row: str, column: str) -> str:
    cell = block.cells.get((row, column))
    if cell is None:
        return "<td></td>"
    said = f"{block.down[0]} {row}, {block.across[0]} {column}: {cell.verdict}"
    if cell.size is None:
        return f'<td class="n" title="{_words(said)}">-</td>'
    full, tone = cell.size / max(1, cell.room or block.most), _verdict_tone(cell.verdict)
    share = f" <small>{100 * full:.0f} %</small>" if cell.room else ""
    style = f' style="background:rgba({_HEAT[tone]},{_DARKEST * min(1, full):.2f})"'
    case = f' data-case="{_attribute(cell.case)}" title="{_words(said)}"'
    return f'<td class="n"{style}{case}>{_mark(cell)}{format_bytes(cell.size)}{share}</td>'


def _mark(cell: Cell) -> str:
    """The sign of what is only likely, and that of what does not fit."""
    likely = LIKELY if cell.verdict.startswith("likely") else ""
    found = likely + (NO if _verdict_tone(cell.verdict) == "no" else "")
    return f"{found} " if found else ""


def _part(name: str, note: str) -> str:
    """The name of a part; what is said in parentheses is left out where there is no room, and a note stands below."""
    short, opens, more = name.partition(" (")
    said = f'<span class="more">{_words(opens + more).replace("&emsp;", " ")}</span>' if opens else ""
    return _words(short) + said + (f"<small>{_words(note)}</small>" if note else "")


def _used(block: Shares) -> str:
    """How much of the room is used, where there is an edge."""
    if block.edge is None:
        return ""
    name, room = block.edge
    used = f"{name}: {100 * block.total[1] / max(1, room):.1f} % of {format_bytes(room)}; the line is its edge."
    return f"<p>{_words(used)}</p>"


def _choices(block: Choices) -> str:
    """All cases, of which the first one is seen; the script puts a slider or a list of choices above them."""
    cases = (
        f'<div data-at="{_attribute(values)}"{"" if values == block.first else " hidden"}>'
        + "\n".join(_block(one) for one in blocks)
        + "</div>\n"
        for values, blocks in block.cases.items()
    )
    return f'<div class="choices" data-axes="{_attribute(block.axes)}">\n{"".join(cases)}</div>'


# --- what the script draws --------------------------------------------------------------------------------------------


def _drawn(block: Curves | Moments) -> str:
    return _curves(block) if isinstance(block, Curves) else _moments(block)


def _curves(block: Curves) -> str:
    """Curves with all their values."""
    first, last = block.begins, block.ends
    over, name = (list(map(float, block.over[0])), block.over[1]) if block.over else (None, f"{first} to {last}")
    data = {
        "unit": block.unit,
        "names": [clean(curve.name) for curve in block.curves],
        "values": [np.asarray(curve.values, dtype=float).tolist() for curve in block.curves],
        "over": over,
        "axis": clean(name),
        "limit": (block.limit[0], clean(block.limit[1])) if block.limit else None,
        "marks": list(block.marks),
        "at": block.at,
        "doubling": block.doubling,
    }
    said = [block.caption, f"marked: {block.marked}" if block.marks else "", block.at[1] if block.at else ""]
    words = "; ".join(filter(None, said))
    return f'<figure class="curves" data-curves="{_attribute(data)}"><figcaption>{_words(words)}</figcaption></figure>'


def _points(block: Points) -> str:
    """Points with their names."""
    data = {
        "axes": [{"name": clean(column.title), "unit": column.unit} for column in block.axes],
        "groups": [[clean(name), [[x, y, clean(of)] for x, y, of in points]] for name, points in block.groups],
        "limit": (block.limit[0], clean(block.limit[1])) if block.limit else None,
        "chosen": clean(block.chosen),
    }
    caption = f"<figcaption>{_words(block.caption)}</figcaption>"
    return f'<figure class="points" data-points="{_attribute(data)}">{caption}</figure>'


def _attribute(data: Any) -> str:
    return escape(json.dumps(data, separators=(",", ":")))


def _moments(block: Moments) -> str:
    """The tables of a run: JSON that is deflated (zlib), in base64."""
    text = json.dumps(block.tables(), separators=(",", ":")).encode()
    packed = b64encode(zlib.compress(text, 9)).decode()
    return f'<div id="moments" data-tables="{packed}"><noscript>Drawn by the page\'s script.</noscript></div>'
