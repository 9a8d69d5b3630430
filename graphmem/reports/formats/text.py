"""A document as plain text: without colour, in the columns of a terminal.

Sentences and words are folded, figures never. Names of options and files are broken only where they are longer than
a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.cells import cell_len, chop_cells

from graphmem.reports import Format
from graphmem.reports.document import Block, Code, Curves, Document, Facts, Items, Section, Shares, Table, Text, clean

#: Narrower than that nothing is folded.
MINIMUM_WIDTH = 60
#: Blanks between two columns, and before what stands under a title.
_GAP, _INDENT = "  ", "  "
#: The least that a column of words is folded to.
_LEAST = 2
#: Tenths of a whole.
_SPARKS = " .:-=+*#%@"


class _Text(Format):
    name = "text"
    spellings = ("table",)
    suffixes = (".txt",)
    has_room = False

    def render(self, document: Document, width: int | None = None) -> str:
        """The sections with an empty line between them."""
        room = max(document.width if width is None else width, MINIMUM_WIDTH)
        sections = ("\n".join(_section(one, room)) for one in document.sections)
        return "\n\n".join(filter(None, sections)) + "\n"


FORMAT = _Text()


def _section(section: Section, width: int) -> Iterator[str]:
    """The title and what is under it; nothing of a section of which nothing can be shown."""
    indent = _INDENT if section.title else ""
    lines = [(indent + line).rstrip() for block in section.blocks for line in _block(block, width - len(indent))]
    if section.title and (lines or not section.blocks):
        yield from folded(clean(section.title), width)
    yield from lines


def _block(block: Block, width: int) -> Iterator[str]:
    if isinstance(block, Text):
        for line in block.lines:
            yield from folded(clean(line), width)
    elif isinstance(block, Items):
        yield from columns([("-", clean(line)) for line in block.lines], (False, False), (False, True), width)
    elif isinstance(block, Facts):
        rows = [(clean(name), clean(value)) for name, value in block.rows]
        yield from columns(rows, (False, False), (False, True), width)
    elif isinstance(block, Shares):
        yield from _table(block.table(), width)
    elif isinstance(block, Table):
        yield from _table(block, width)
    elif isinstance(block, Curves):
        yield from _curves(block, width) if block.brief else ()
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
    room = _narrowed(widths, wraps, width - len(_GAP) * (len(widths) - 1))
    lines = []
    for row in rows:
        cells = [folded(cell, size) if wrap else [cell] for cell, size, wrap in zip(row, room, wraps, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append(_GAP.join(map(_aligned, parts, room, figures)).rstrip())
    return lines


def _narrowed(widths: Sequence[int], wraps: Sequence[bool], room: int) -> list[int]:
    """The widths made narrower where columns wrap, until they sum to ``room``; as they are where they never do."""
    found = list(widths)
    words = [index for index, wrap in enumerate(wraps) if wrap]
    if sum(widths) - sum(max(0, widths[index] - _LEAST) for index in words) > room:
        return found
    while sum(found) > room:
        widest = max(words, key=lambda index: found[index])
        found[widest] -= 1
    return found


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


def _curves(block: Curves, width: int) -> Iterator[str]:
    """The first curve, in tenths of the whole, the highest of what a character stands for; ``X`` for a mark."""
    values, count = block.curves[0].values, min(60, width - 2)
    marks = []
    for index in range(count):
        begin, end = (at * len(values) // count for at in (index, index + 1))
        part = values[begin : max(end, begin + 1)]
        is_marked = any(begin <= mark < end for mark in block.marks)
        marks.append("X" if is_marked else _SPARKS[min(9, int(max(part, default=0) * 10))])
    yield f"[{''.join(marks)}]"
    marked = f"; X: {block.marked}" if block.marks else ""
    words = f"{block.curves[0].name}, from {block.begins} to {block.ends}, in tenths from blank to @{marked}"
    yield from folded(clean(words), width)
