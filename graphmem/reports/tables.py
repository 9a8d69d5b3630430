"""Plain tables for terminals and files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table

from graphmem.estimate import Estimate, Fit
from graphmem.remarks import no_card_named

#: Wide enough for every table graphmem prints; a narrow terminal wraps its own lines.
WIDTH = 140
#: Lines of a page, which no table depends on; where none are named, rich asks ``COLUMNS``, and breaks on what is none.
HEIGHT = 25


def plain_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Aligned columns without lines or colours; a title that ends with ``>`` stands over right-aligned figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in titles:
        right = title.endswith(">")
        table.add_column(title.rstrip(">"), justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    buffer = StringIO()
    Console(file=buffer, width=WIDTH, height=HEIGHT, color_system=None, highlight=False, markup=False).print(table)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def assumed_card(estimate: Estimate | None) -> list[str]:
    """A line for the reader where the card of the estimate was not named but assumed."""
    line = no_card_named(estimate.gpu) if estimate is not None else ""
    return [line] if estimate is not None and line in estimate.assumptions else []


def verdict_words(fit: Fit) -> str:
    """``fits``, ``likely fits (97 %)``, ``does not fit``."""
    likely = "" if fit.is_sure else "likely "
    return f"{likely}{'fits' if fit.fits else 'does not fit'}{f' ({fit.chance})' if fit.chance else ''}"


def wrapped(line: str, indent: str, following: str = "") -> list[str]:
    """The line in at most 80 columns, ``indent`` before the first and ``following`` (by default the same, or two
    blanks) before the others; options and paths are never broken."""
    after = following or indent or "  "
    return textwrap.wrap(
        line, 80, initial_indent=indent, subsequent_indent=after, break_on_hyphens=False, break_long_words=False
    )
