"""A document as plain text, in the columns of a terminal; on one, with colours (:data:`TERMINAL`).

Sentences and words are folded, figures never. Names of options and files are broken only where they are longer than
a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, chop_cells
from rich.color import ColorSystem
from rich.style import Style

from graphmem.base.records import dataclass
from graphmem.reports import Format
from graphmem.reports.document import Block, Code, Curves, Document, Facts, Items, Section, Shares, Table, Text, clean
from graphmem.units import format_bytes

#: Narrower than that nothing is folded.
MINIMUM_WIDTH = 60
#: Blanks between two columns, and before what stands under a title.
_GAP, _INDENT = "  ", "  "
#: The least that a column of words is folded to.
_LEAST = 2
#: Parts of a whole that have a bar: no more than can be told apart, and no fewer where a screen is full.
_MOST_BARS, _ENOUGH_BARS, _LEAST_BARS = 9, 6, 3
#: How many times the whole the room is where bars of the parts would be too small to tell apart.
_FAR = 3
#: Colours of verdicts, of titles, and of bars, in turn; readers who see no red or green tell them apart by lightness.
_TONES = {"yes": "bold green", "no": "bold red"}
_TITLE = "bold"
_BARS = ("blue", "cyan", "green", "magenta", "yellow", "bright_blue", "red", "bright_magenta", "bright_cyan")


@dataclass(frozen=True)
class _Ink:
    """How characters are put down. ``sparks``: tenths of a whole; ``full``, ``edge``: a bar and the end of its room;
    ``colours``: whether styles are shown."""

    sparks: str = " .:-=+*#%@"
    full: str = "#"
    edge: str = "|"
    colours: bool = False

    def styled(self, text: str, style: str) -> str:
        """The text in a style of rich, for a terminal of sixteen colours."""
        if not self.colours or not style or not text:
            return text
        return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


class _Text(Format):
    name = "text"
    spellings = ("table",)
    suffixes = (".txt",)
    has_room = False

    def __init__(self, ink: _Ink) -> None:
        self._ink = ink

    def render(self, document: Document, width: int | None = None) -> str:
        """The sections with an empty line between them; a document with a height has fewer parts of wholes, then no
        empty lines, and at last the fewest parts, until there are no more lines than that."""
        room = max(document.width if width is None else width, MINIMUM_WIDTH)
        found = ""
        for least, between in ((_ENOUGH_BARS, "\n\n"), (_LEAST_BARS, "\n")):
            for bars in range(_MOST_BARS, least - 1, -1):
                sections = ["\n".join(_section(one, room, bars, self._ink)) for one in document.sections]
                found = between.join(filter(None, sections)) + "\n"
                if document.height is None or found.count("\n") <= document.height:
                    return found
        return found


#: For files and pipes, and for a terminal that shows colours.
FORMAT, TERMINAL = _Text(_Ink()), _Text(_Ink(" ▁▂▃▄▅▆▇██", "█", "│", colours=True))


def _section(section: Section, width: int, bars: int, ink: _Ink) -> Iterator[str]:
    """The title and what is under it; nothing of a section of which nothing can be shown."""
    indent = _INDENT if section.title else ""
    inner = width - len(indent)
    lines = [(indent + line).rstrip() for block in section.blocks for line in _block(block, inner, bars, ink)]
    if section.title and (lines or not section.blocks):
        yield from (ink.styled(line, _TITLE) for line in folded(clean(section.title), width))
    yield from lines


def _block(block: Block, width: int, bars: int, ink: _Ink) -> Iterator[str]:
    if isinstance(block, Text):
        for number, line in enumerate(block.lines):
            style = "" if number else _TONES.get(block.tone, "")
            yield from (ink.styled(part, style) for part in folded(clean(line), width))
    elif isinstance(block, Items):
        yield from columns([("-", clean(line)) for line in block.lines], (False, False), (False, True), width)
    elif isinstance(block, Facts):
        rows = [(clean(name), clean(value)) for name, value in block.rows]
        yield from columns(rows, (False, False), (False, True), width)
    elif isinstance(block, Shares):
        yield from _bars(block, width, bars, ink) if block.as_bars else _table(block.table(), width)
    elif isinstance(block, Table):
        yield from _table(block, width)
    elif isinstance(block, Curves):
        yield from _curves(block, width, ink) if block.brief else ()
    elif isinstance(block, Code):
        yield from (clean(block.name), *(f"{_INDENT}{clean(line)}" for line in block.text.splitlines()))


def _table(table: Table, width: int) -> list[str]:
    rows = [tuple(map(clean, row)) for row in table.words()]
    if table.titles and rows:
        rows.insert(0, tuple(map(clean, table.titles)))
    figures = [column.has_figures for column in table.columns]
    return columns(rows, figures, [column.wraps and not column.has_figures for column in table.columns], width)


def columns(rows: Sequence[Sequence[str]], figures: Sequence[bool], wraps: Sequence[bool], width: int) -> list[str]:
    """Rows as lines of columns, ``figures`` to the right; those that wrap are folded where that makes the lines fit,
    the widest first. A table whose figures leave no room is wider than ``width``."""
    if not rows:
        return []
    widths = [max(cell_len(row[index]) for row in rows) for index in range(len(figures))]
    longest = [max(_longest_word(row[index]) for row in rows) for index in range(len(figures))]
    room = _narrowed(widths, longest, wraps, width - len(_GAP) * (len(widths) - 1))
    lines = []
    for row in rows:
        cells = [folded(cell, size) if wrap else [cell] for cell, size, wrap in zip(row, room, wraps, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append(_GAP.join(map(_aligned, parts, room, figures)).rstrip())
    return lines


def _longest_word(cell: str) -> int:
    return max(map(cell_len, cell.split()), default=0)


def _narrowed(widths: Sequence[int], longest: Sequence[int], wraps: Sequence[bool], room: int) -> list[int]:
    """The widths made narrower where columns wrap, until they sum to ``room``: no narrower than their ``longest`` words
    while others have more to give; as they are where they never do."""
    found = list(widths)
    for least in (longest, [_LEAST] * len(widths)):
        while sum(found) > room:
            spare = [index for index, wrap in enumerate(wraps) if wrap and found[index] > least[index]]
            if not spare:
                break
            found[max(spare, key=lambda index: found[index])] -= 1
    return found if sum(found) <= room else list(widths)


def _aligned(text: str, width: int, is_figure: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return blanks + text if is_figure else text + blanks


def folded(line: str, width: int) -> list[str]:
    """The line in parts of at most ``width`` columns, broken between words; one that is wider is broken itself."""
    if cell_len(line) <= width:
        return [line]
    parts, current = [], ""
    for word in re.findall(r"\s*\S+\s*", line):
        if cell_len(current + word.rstrip()) <= width:
            current += word
            continue
        if current.strip():
            parts.append(current.rstrip())
        *whole, current = chop_cells(word, width) if cell_len(word.rstrip()) > width else [word]
        parts += whole
    return [*parts, current.rstrip()] if current.strip() or not parts else parts


def _bars(block: Shares, width: int, count: int, ink: _Ink) -> Iterator[str]:
    """The parts under one another: name, bytes, share, and a bar that begins where the one above ended. The last line
    is of all of them, with the share of their room, where they have one; its edge is drawn through all lines. Parts
    that take little of the room are drawn as parts of what they sum to, and the last line alone against the edge."""
    parts, (name, whole) = block.largest(count), block.total
    room = whole if block.edge is None else block.edge[1]
    rows = [(part, format_bytes(size), _percent(size, whole)) for part, size in parts]
    of = "" if block.edge is None else f", of {format_bytes(room)}"
    rows.append((f"{name}{of}", format_bytes(whole), "" if not of else _percent(whole, room)))
    text = columns([tuple(map(clean, row)) for row in rows], (False, True, True), (False,) * 3, width)
    cells = max(map(cell_len, text)) + len(_GAP)
    lines = [f"{line}{' ' * (cells - cell_len(line))}" for line in text]
    scale = (width - cells - 2) / max(whole, room, 1)
    edge = None if block.edge is None else round(room * scale)
    near = None if whole * _FAR < room else edge
    inner = scale if near is not None or edge is None else (width - cells - 2) / max(whole, 1)
    begin = 0
    for number, ((_, size), line) in enumerate(zip(parts, lines, strict=False)):
        colour = _BARS[number % len(_BARS)]
        first, last = (min(round(at * inner), width - cells - 2) for at in (begin, begin + size))  # cut off at the edge
        yield line + _bar(first, last, near, colour, ink)
        begin += size
    yield lines[-1] + _bar(0, round(whole * scale), edge, "", ink)


def _percent(size: int, whole: int) -> str:
    return "<1 %" if 0 < 200 * size < whole else f"{100 * size / max(1, whole):.0f} %"


def _bar(begin: int, end: int, edge: int | None, colour: str, ink: _Ink) -> str:
    """Columns from ``begin`` to ``end``, one at least, and the edge at its column, through the bar too."""
    last = max(end, begin + 1)
    drawn = [" "] * begin + [ink.styled(ink.full, colour)] * (last - begin)
    if edge is not None:
        drawn += [" "] * (edge + 1 - len(drawn))
        drawn[edge] = ink.edge
    return "".join(drawn)


def _curves(block: Curves, width: int, ink: _Ink) -> Iterator[str]:
    """The first curve, in tenths of the whole, the highest of what a character stands for; ``X`` for a mark, and under
    it an arrow to its moment."""
    caption = f" {clean(block.caption)}" if block.caption else ""
    values, count = block.curves[0].values, min(60, width - 2 - cell_len(caption))
    marks = []
    for index in range(count):
        begin, end = (at * len(values) // count for at in (index, index + 1))
        part = values[begin : max(end, begin + 1)]
        is_marked = any(begin <= mark < end for mark in block.marks)
        marks.append("X" if is_marked else ink.sparks[min(9, int(max(part, default=0) * 10))])
    yield f"[{''.join(marks)}]{caption}"
    if block.curves[0].name:
        marked = f"; X: {block.marked}" if block.marks else ""
        words = f"{block.curves[0].name}, from {block.begins} to {block.ends}, in tenths from blank to @{marked}"
        yield from folded(clean(words), width)
