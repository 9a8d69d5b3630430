"""Lines of a report that people read: sentences are folded, figures stay in their columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

#: Blanks between a name and what is said of it.
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
#: The least that a column of words is folded to.
_LEAST = 16


def folded(line: str, width: int) -> list[str]:
    """The line in at most ``width`` columns. What follows stands under the first word after the name, or after the
    dash; options and paths are never broken, and a line of several columns stands as it is."""
    line = line.rstrip()
    gaps = list(_GAP.finditer(line))
    if len(line) <= width or len(gaps) > 1:
        return [line]
    indent = len(line) - len(line.lstrip())
    if gaps and gaps[0].end() <= width // 3:
        # Blanks in the name would be taken for places to break at.
        name, rest = line[: gaps[0].end()], line[gaps[0].end() :]
        first = name
    else:
        first, rest = line[:indent], line[indent:]
        indent += 2
        name = " " * indent
    return textwrap.wrap(
        rest,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(name),
        break_on_hyphens=False,
        break_long_words=False,
    )


def columns(rows: Sequence[Sequence[str]], width: int, words: int) -> list[str]:
    """Rows, the titles first, as lines of columns with two blanks between them: figures to the right, the last column
    and that of ``words`` to the left, which is folded where the lines are longer than ``width``. A column in which no
    row has a figure is left out."""
    kept = [
        index
        for index in range(len(rows[0]))
        if index in (0, words) or any(row[index].strip("-0. ") for row in rows[1:])
    ]
    table = [[row[index] for index in kept] for row in rows]
    words = kept.index(words)
    widths = [max(len(row[column]) for row in table) for column in range(len(kept))]
    over = sum(widths) + 2 * (len(widths) - 1) - width
    widths[words] = max(min(_LEAST, widths[words]), widths[words] - max(0, over))
    left = {words} | ({len(kept) - 1} if kept[-1] == len(rows[0]) - 1 else set())
    lines = []
    for row in table:
        parts = textwrap.wrap(row[words], widths[words], break_on_hyphens=False) or [""]
        for number, part in enumerate(parts):
            cells = [part if column == words else text if not number else "" for column, text in enumerate(row)]
            aligned = (
                cell.ljust(size) if column in left else cell.rjust(size)
                for column, (cell, size) in enumerate(zip(cells, widths, strict=True))
            )
            lines.append("  ".join(aligned).rstrip())
    return lines
